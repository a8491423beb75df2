"""The stock of append blocks that a decode worker is granted from a shared pool."""

import pytest

from decode_worker.blocks import GrantedBlocks
from kv_transfer.handoff import AskBlocks, ReturnBlocks

KEY = ("r", 1)


class Sent:
    """A decode end that only keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list = []

    def send(self, message) -> None:
        self.messages.append(message)


@pytest.fixture
def source():
    return GrantedBlocks(Sent())


def test_an_empty_answer_means_that_something_must_be_preempted(source):
    source.restock(2)
    source.granted([])
    assert source.short
    assert source.grow(KEY, []) is False
    assert source.grow(KEY, []) is None  # one refusal is good for one preemption


def test_an_empty_answer_that_a_return_overtook_preempts_nothing(source):
    source.restock(2)
    source.release(("other", 2), [7], [1, 2, 3], 3, "")
    source.granted([])
    assert source.grow(KEY, []) is None and not source.short
    source.restock(1)
    assert source.end.messages[-1] == AskBlocks(2)  # asked again
    source.granted([])
    assert source.grow(KEY, []) is False


def test_a_surplus_given_back_ends_the_shortage(source):
    source.granted([1, 2, 3, 4, 5])
    source.restock(8)
    source.granted([])
    assert source.short
    source.restock(1)
    assert source.end.messages[-1] == ReturnBlocks([3, 4, 5])
    assert not source.short  # else nothing new would be prefilled until the last sequence used its blocks up


def test_everything_goes_back_when_nothing_runs(source):
    source.granted([1, 2])
    source.restock(0)
    source.restock(0)
    assert source.end.messages == [ReturnBlocks([1, 2])]
