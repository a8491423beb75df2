"""PrefillEngine on its own: chunk budget, sharing a step, cancellation between chunks, what it answers."""

import random
import time
from collections.abc import Sequence as SequenceOf

import pytest

from engine.kv_cache import KVCache
from engine.kv_pool import KVPool
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from kv_transfer.channel import PrefillEnd
from kv_transfer.handoff import Handoff, PrefillFailed, PrefillRequest
from prefill_worker.engine import PrefillEngine

BLOCK = 4
RNG = random.Random(3)


class RecordingEnd(PrefillEnd):
    """A prefill end whose transfers last until the test says so."""

    def __init__(self) -> None:
        self.peer = "d0"
        self.sent: list = []
        self.blocks: list[tuple[int, list[int]]] = []
        self.moving: set = set()
        self.abandoned: list = []

    def poll(self):
        return []

    def send(self, message) -> None:
        self.sent.append(message)

    def send_blocks(self, key, first: int, block_ids: SequenceOf[int]) -> int:
        self.blocks.append((first, list(block_ids)))
        self.moving.add(key)
        return len(block_ids)

    def is_moving(self, key) -> bool:
        return key in self.moving

    def abandon(self, key) -> None:
        self.abandoned.append(key)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def runner(tiny_model):
    runner = ModelRunner.load(str(tiny_model("llama")), dtype="float32", block_size=BLOCK, max_model_len=256)
    runner.pool = KVPool.allocate(runner.layout, 64)
    return runner


@pytest.fixture
def engine(runner):
    return PrefillEngine(runner, KVCache(64, BLOCK), chunk_tokens=16, max_sequences=3)


@pytest.fixture
def end():
    return RecordingEnd()


def ask(name: str, length: int, held: int = 0, deadline: float = float("inf"), **sampling) -> PrefillRequest:
    prompt = [RNG.randrange(4, 500) for _ in range(length)]
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return PrefillRequest(Request(name, prompt, params, deadline=deadline), num_held_blocks=held)


def test_a_long_prompt_takes_as_many_steps_as_its_chunks(engine, end):
    engine.add(ask("a", 50), end)
    steps = 0
    while not end.sent:
        engine.step()
        steps += 1
    assert steps == 4  # 16 + 16 + 16 + 2
    assert engine.counters["prefill_tokens_total"] == 50


def test_several_prompts_share_a_step(engine, end):
    for name in "abc":
        engine.add(ask(name, 5), end)
    engine.step()
    assert [message.request.request_id for message in end.sent] == ["a", "b", "c"]
    assert engine.counters["prefill_steps_total"] == 1


def test_blocks_leave_as_soon_as_their_chunk_is_done(engine, end):
    engine.add(ask("a", 38), end)
    engine.step()
    assert [(first, len(blocks)) for first, blocks in end.blocks] == [(0, 4)]
    assert not end.sent
    engine.step()
    engine.step()
    assert [(first, len(blocks)) for first, blocks in end.blocks] == [(0, 4), (4, 4), (8, 2)]
    assert isinstance(end.sent[0], Handoff) and end.sent[0].num_blocks == 10


def test_cached_blocks_leave_before_anything_is_computed_and_held_ones_never(engine, end):
    first = ask("a", 38)
    engine.add(first, end)
    while not end.sent:
        engine.step()
    end.blocks.clear()
    engine.add(
        PrefillRequest(Request("b", first.request.prompt_token_ids, first.request.sampling), num_held_blocks=5), end
    )
    engine.step()
    assert [(first, len(blocks)) for first, blocks in end.blocks] == [(5, 4), (9, 1)]
    assert end.sent[-1].report.num_cached_tokens == 36


def test_blocks_in_transfer_stay_leased_after_the_request_let_go(engine, end):
    message = ask("a", 16)
    engine.add(message, end)
    engine.step()
    assert engine.cache.counts().leased == 4 and engine.cache.counts().in_use == 0
    engine.transfer_done("d0", message.key)
    assert engine.cache.counts().leased == 4  # done, but the sender still reads them
    end.moving.clear()
    engine.step()
    assert engine.cache.counts().leased == 0
    engine.cache.check()


def test_a_cancel_between_chunks_stops_the_prompt_and_frees_its_blocks(engine, end):
    message = ask("a", 60)
    engine.add(message, end)
    engine.step()
    engine.cancel("d0", message.key)
    engine.cancel("d0", message.key)
    assert set(end.abandoned) == {message.key}
    end.moving.clear()
    assert not engine.step()
    assert engine.counters["prefill_tokens_total"] == 16
    assert not end.sent
    counts = engine.cache.counts()
    assert counts.in_use == counts.leased == 0


def test_a_cancelled_prompt_in_the_queue_never_runs(engine, end):
    messages = [ask(name, 30) for name in "abcde"]
    for message in messages:
        engine.add(message, end)
    engine.step()
    engine.cancel("d0", messages[3].key)
    while len(end.sent) < 4:
        engine.step()
    assert [message.request.request_id for message in end.sent] == ["a", "b", "c", "e"]


def test_prompts_wait_when_the_pool_is_full_and_run_when_it_is_not(engine, end):
    messages = [ask(name, 100) for name in "abc"]
    for message in messages:
        engine.add(message, end)
    while len(end.sent) < 2:
        engine.step()
    for _ in range(3):
        engine.step()
    assert len(end.sent) == 2 and len(engine.waiting) == 1  # 2 x 25 of 64 blocks are leased
    engine.transfer_done("d0", messages[0].key)
    end.moving.discard(messages[0].key)
    while len(end.sent) < 3:
        engine.step()


def test_a_prompt_larger_than_the_pool_is_refused_and_the_next_one_served(engine, end):
    engine.add(ask("big", 300), end)
    engine.add(ask("small", 5), end)
    engine.step()
    assert isinstance(end.sent[0], PrefillFailed) and end.sent[0].code == "too_long"
    assert "75" in end.sent[0].message and "64" in end.sent[0].message
    assert end.sent[1].request.request_id == "small"


def test_a_prompt_past_its_deadline_is_dropped_between_chunks(engine, end):
    engine.add(ask("a", 60, deadline=time.time() + 0.05), end)
    engine.step()
    time.sleep(0.06)
    engine.step()
    assert isinstance(end.sent[0], PrefillFailed) and end.sent[0].code == "deadline"


def test_a_lost_peer_takes_its_prompts_and_leases_with_it(engine, end):
    done, running = ask("a", 12), ask("b", 60)
    engine.add(done, end)
    engine.add(running, end)
    engine.step()
    engine.drop_peer("d0")
    end.moving.clear()
    engine.step()
    counts = engine.cache.counts()
    assert counts.in_use == counts.leased == 0
    assert not engine.tasks and not engine.running and not engine.waiting


def test_a_request_for_one_token_moves_no_block(engine, end):
    engine.add(ask("a", 20, max_tokens=1), end)
    engine.step()
    engine.step()
    assert end.blocks == [] and end.sent[0].num_blocks == 0
    assert engine.cache.counts().leased == 0
