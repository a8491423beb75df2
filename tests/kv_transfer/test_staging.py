"""The tcp channel's way through pinned memory, with pools and pinned blocks that are both the CPU's."""

import threading
import time

import pytest
import torch

from engine.kv_pool import KVPool
from kv_transfer.channels import tcp_receiver, tcp_sender
from kv_transfer.channels.incoming import Incoming
from kv_transfer.channels.staging import StagedBlockReader, StagedBlockWriter, block_bytes
from tests.kv_transfer.joined import LAYOUT, Joined, make_handoff, wait_true

KEY = ("r", 0)


@pytest.fixture
def pool():
    pool = KVPool.allocate(LAYOUT, 8)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(3)))
    return pool


def test_staged_bytes_are_the_block_and_stay_so_while_lent(pool):
    reader, sent = StagedBlockReader(pool, 3), threading.Event()
    blocks = [(KEY, index, index) for index in range(4)]
    views = []
    for index in range(3):
        view = reader.bytes_of(blocks[index], blocks[index + 1])
        expected = bytes(pool.block_bytes_view(index))
        assert bytes(view) == expected
        views.append((view, expected))
        reader.lend(blocks[index], sent.is_set)
    pool.tensor.zero_()
    assert reader.bytes_of(blocks[3], None) is None, "all three pinned blocks are lent"
    assert all(bytes(view) == expected for view, expected in views)
    sent.set()
    assert bytes(reader.bytes_of(blocks[3], None)) == bytes(LAYOUT.block_bytes)


def test_a_block_staged_ahead_and_not_asked_for_gives_its_place_back(pool):
    reader = StagedBlockReader(pool, 2)
    for index in range(0, 6, 2):  # the next block is staged, and called back each time
        assert reader.bytes_of((KEY, index, index), (KEY, index + 1, index + 1)) is not None
        reader.lend((KEY, index, index), lambda: True)


def test_staged_writes_land_in_their_blocks_by_settle_at_the_latest(pool):
    completed = []
    incoming = Incoming(completed.append, lambda key, why: pytest.fail(why))
    target = KVPool.allocate(LAYOUT, 8)
    writer = StagedBlockWriter(target, incoming)
    incoming.expect(KEY, [6, 1, 4, 0, 2])
    incoming.hold(make_handoff(KEY, num_blocks=5))
    for index in range(5):
        writer.write(incoming.begin(KEY, index, 1), pool.block_bytes_view(index))
    assert not completed, "the last copy may be under way"
    writer.settle()
    assert [handoff.key for handoff in completed] == [KEY]
    for index, place in enumerate([6, 1, 4, 0, 2]):
        assert torch.equal(target.tensor[place], pool.tensor[index])


def test_transfers_through_pinned_blocks_arrive_whole(monkeypatch):
    """More blocks than there are pinned ones, in several transfers at a time."""
    monkeypatch.setattr(tcp_sender, "reader_of", lambda pool, number: StagedBlockReader(pool, number))
    monkeypatch.setattr(tcp_receiver, "writer_of", StagedBlockWriter)
    joined = Joined("tcp")
    try:
        keys = [(f"r{number}", 0) for number in range(3)]
        written = joined.fill(range(60))
        for number, key in enumerate(keys):
            ids = list(range(20 * number, 20 * number + 20))
            joined.decode.expect(key, joined.destination(ids))
            joined.prefill.send_blocks(key, 0, ids)
            joined.prefill.send(make_handoff(key, num_blocks=20))
        assert sorted(handoff.key for handoff in joined.wait_decode(3)) == keys
        for block_id, values in written.items():
            (place,) = joined.destination([block_id])
            assert torch.equal(joined.decode_pool.tensor[place], values)
        wait_true(lambda: not any(joined.prefill.is_moving(key) for key in keys))
    finally:
        joined.close()


def test_a_single_block_does_not_wait_for_a_second_one(monkeypatch):
    monkeypatch.setattr(tcp_receiver, "writer_of", StagedBlockWriter)
    joined = Joined("tcp")
    try:
        written = joined.fill([5])
        joined.decode.expect(KEY, [2])
        joined.prefill.send_blocks(KEY, 0, [5])
        time.sleep(0.05)
        joined.prefill.send(make_handoff(KEY, num_blocks=1))
        joined.wait_decode(1)
        assert torch.equal(joined.decode_pool.tensor[2], written[5])
    finally:
        joined.close()


def test_block_bytes_are_the_pools_memory(pool):
    block_bytes(pool, 3).zero_()
    assert not pool.tensor[3].any() and pool.tensor[2].any()
