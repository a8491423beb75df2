"""What every KVChannel promises (kv_transfer/channel.py). A new channel joins by its name in channels.py."""

import gc
import random
import threading

import pytest
import torch

from kv_transfer.channel import ChannelClosed, ChannelError
from kv_transfer.channels import get_channel
from kv_transfer.handoff import (
    AskBlocks,
    CancelPrefill,
    GrantBlocks,
    Handoff,
    Heartbeat,
    PrefillFailed,
    PrefillRequest,
    Reclaimed,
    ReturnBlocks,
    TransferDone,
    Welcome,
)
from tests.kv_transfer.channels import EVERYWHERE
from tests.kv_transfer.joined import Joined, make_handoff, open_fds, wait_closed, wait_for, wait_true

CHANNELS = ["local", *EVERYWHERE]
TWO_PROCESS = EVERYWHERE


@pytest.fixture(params=CHANNELS)
def joined(request):
    joined = Joined(request.param)
    yield joined
    joined.close()


def assert_moved(joined, written, block_ids, table, first=0):
    for offset, block_id in enumerate(block_ids):
        assert torch.equal(joined.decode_pool.tensor[table[first + offset]].cpu(), written[block_id])


def test_handoff_comes_after_its_blocks_and_they_are_equal(joined):
    for number in range(12):
        key = (f"request-{number}", 0)
        block_ids = random.Random(number).sample(range(30), 6)
        written = joined.fill(block_ids, seed=number)
        table = joined.destination(block_ids)
        joined.decode.expect(key, table)
        for first in range(0, 6, 2):
            joined.prefill.send_blocks(key, first, block_ids[first : first + 2])
        joined.prefill.send(make_handoff(key, num_blocks=6))
        (handoff,) = joined.wait_decode(1)
        assert handoff.key == key
        assert_moved(joined, written, block_ids, table)
        wait_true(lambda key=key: not joined.prefill.is_moving(key))


def test_handoff_without_blocks_needs_none(joined):
    joined.decode.expect(("short", 0), [])
    joined.prefill.send(make_handoff(("short", 0), num_blocks=0))
    (handoff,) = joined.wait_decode(1)
    assert handoff.key == ("short", 0)
    assert handoff.report.num_blocks_sent == 0


def test_held_blocks_do_not_travel_and_the_report_counts_what_did(joined):
    key, block_ids = ("r", 0), list(range(5))
    written = joined.fill(block_ids)
    table = joined.destination(block_ids)
    before = joined.decode_pool.tensor[table[0]].clone(), joined.decode_pool.tensor[table[1]].clone()
    joined.decode.expect(key, table)
    num_bytes = joined.prefill.send_blocks(key, 2, block_ids[2:])
    joined.prefill.send(make_handoff(key, num_blocks=5, num_held=2))
    (handoff,) = joined.wait_decode(1)
    assert_moved(joined, written, block_ids[2:], table, first=2)
    assert torch.equal(joined.decode_pool.tensor[table[0]], before[0])
    assert torch.equal(joined.decode_pool.tensor[table[1]], before[1])
    sent = 0 if joined.channel.shares_pool else 3
    assert num_bytes == sent * joined.prefill_pool.layout.block_bytes
    assert handoff.report.num_blocks_sent == sent
    assert handoff.report.num_bytes_sent == num_bytes
    assert handoff.report.transfer_ms >= 0


def test_all_blocks_held_moves_nothing(joined):
    key = ("r", 0)
    joined.decode.expect(key, joined.destination([3, 4]))
    joined.prefill.send(make_handoff(key, num_blocks=2, num_held=2))
    (handoff,) = joined.wait_decode(1)
    assert (handoff.key, handoff.report.num_bytes_sent) == (key, 0)
    assert not joined.prefill.is_moving(key)


def test_a_handoff_arrives_as_it_was_sent(joined):
    key = ("é-1", 3)
    joined.decode.expect(key, [])
    sent = make_handoff(key)
    sent.prompt_logprobs = [None, sent.first_token.logprobs]
    sent.request.deadline = float("inf")
    joined.prefill.send(sent)
    assert joined.wait_decode(1) == [sent]


def test_control_messages_keep_their_order_to_prefill(joined):
    request = make_handoff(("r", 0)).request
    sent = [
        PrefillRequest(request, num_held_blocks=1),
        Heartbeat(1.5),
        AskBlocks(4),
        CancelPrefill(("r", 0)),
        TransferDone(("q", 1)),
        ReturnBlocks([1, 2], token_ids=[5, 6], num_computed=2),
    ] * 20
    for message in sent:
        joined.decode.send(message)
    assert joined.wait_prefill(len(sent)) == sent


def test_control_messages_keep_their_order_to_decode(joined):
    sent = [
        GrantBlocks([1, 2]),
        Heartbeat(2.5),
        PrefillFailed(("x", 0), "deadline", "too late"),
        make_handoff(("y", 0)),
        Reclaimed(),
    ] * 20
    for message in sent:
        joined.prefill.send(message)
    assert joined.wait_decode(len(sent)) == sent


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_interleaved_transfers_with_some_forgotten(joined, seed):
    """Blocks of 16 transfers in random order; a quarter is forgotten on the way. The others get exactly their blocks,
    and no block that a forgotten one reserved changes after it was forgotten."""
    rng = random.Random(seed)
    keys = [(f"request-{number // 2}", number % 2) for number in range(16)]
    blocks = dict(zip(keys, [rng.sample(range(i * 3, i * 3 + 3), rng.randint(1, 3)) for i in range(16)], strict=True))
    written = {key: joined.fill(blocks[key], seed=seed * 100 + i) for i, key in enumerate(keys)}
    tables = {key: joined.destination(blocks[key]) for key in keys}
    for key in keys:
        joined.decode.expect(key, tables[key])
    forgotten = set(rng.sample(keys, 4))
    steps = [(key, index) for key in keys for index in range(len(blocks[key]))]
    order = sorted(steps, key=lambda step: (step[1], rng.random()))
    snapshots = {}
    for key, index in order:
        joined.prefill.send_blocks(key, index, blocks[key][index : index + 1])
        if key in forgotten and key not in snapshots:
            joined.decode.forget(key)
            snapshots[key] = [joined.decode_pool.tensor[block_id].clone() for block_id in tables[key]]
        if index == len(blocks[key]) - 1 and key not in forgotten:
            joined.prefill.send(make_handoff(key, num_blocks=len(blocks[key])))
    handoffs = joined.wait_decode(12)
    assert sorted(handoff.key for handoff in handoffs) == sorted(set(keys) - forgotten)
    for key in set(keys) - forgotten:
        assert_moved(joined, written[key], blocks[key], tables[key])
    assert joined.barrier(60) == []
    for key, blocks_then in snapshots.items():
        for block_id, block_then in zip(tables[key], blocks_then, strict=True):
            assert torch.equal(joined.decode_pool.tensor[block_id], block_then)


def test_blocks_arriving_after_forget_are_dropped(joined):
    key, block_ids = ("r", 0), list(range(8))
    joined.fill(block_ids)
    table = joined.destination(block_ids)
    joined.decode.expect(key, table)
    joined.prefill.send_blocks(key, 0, block_ids[:4])
    joined.decode.forget(key)
    joined.decode.send(CancelPrefill(key))
    then = joined.decode_pool.tensor[table].clone()
    joined.prefill.send_blocks(key, 4, block_ids[4:])
    assert joined.wait_prefill(1) == [CancelPrefill(key)]
    joined.prefill.abandon(key)
    assert joined.barrier(60) == []
    assert torch.equal(joined.decode_pool.tensor[table], then)
    wait_true(lambda: not joined.prefill.is_moving(key))


def test_blocks_reserved_again_by_another_request_are_safe_from_the_first(joined):
    """The case behind every generation check: cancel, reuse the same blocks at once, and late bytes come in."""
    old, new = ("r", 0), ("r", 1)
    joined.fill(range(8))
    table = joined.destination(list(range(8)))
    joined.decode.expect(old, table)
    joined.prefill.send_blocks(old, 0, list(range(8)))
    joined.decode.forget(old)
    joined.decode.expect(new, table[:4])
    joined.prefill.abandon(old)
    wait_true(lambda: not joined.prefill.is_moving(old))
    written = joined.fill(range(4), seed=9)
    joined.prefill.send_blocks(new, 0, list(range(4)))
    joined.prefill.send(make_handoff(new, num_blocks=4))
    (handoff,) = joined.wait_decode(1)
    assert handoff.key == new
    assert_moved(joined, written, list(range(4)), table)
    joined.barrier(60)
    assert_moved(joined, written, list(range(4)), table)


@pytest.mark.parametrize("sent", [("r", 0), ("unknown", 1), ("r", 2)], ids=["stale", "unknown", "newer"])
def test_blocks_under_another_key_do_not_count(joined, sent):
    expected, block_ids = ("r", 1), [1, 2]
    written = joined.fill(block_ids)
    table = joined.destination(block_ids)
    joined.decode.expect(expected, table)
    then = joined.decode_pool.tensor[table].clone()
    joined.prefill.send_blocks(sent, 0, block_ids)
    assert joined.barrier(60) == []
    assert torch.equal(joined.decode_pool.tensor[table], then)
    joined.prefill.send_blocks(expected, 0, block_ids)
    joined.prefill.send(make_handoff(expected, num_blocks=2))
    (handoff,) = joined.wait_decode(1)
    assert handoff.key == expected
    assert_moved(joined, written, block_ids, table)


def test_cancel_twice_and_of_nothing_is_harmless(joined):
    key = ("r", 0)
    joined.fill([0])
    joined.decode.expect(key, joined.destination([0]))
    joined.prefill.send_blocks(key, 0, [0])
    for _ in range(2):
        joined.decode.forget(key)
        joined.decode.send(CancelPrefill(key))
        joined.prefill.abandon(key)
    joined.decode.forget(("never", 0))
    joined.prefill.abandon(("never", 0))
    assert joined.wait_prefill(2) == [CancelPrefill(key)] * 2
    assert not joined.prefill.is_moving(("never", 0))
    joined.barrier(1)


def test_blocks_may_be_written_again_once_moving_is_over(joined):
    """Overwriting after is_moving turned False must not reach the destination."""
    block_ids = list(range(20))
    written = joined.fill(block_ids)
    table = joined.destination(block_ids)
    key = ("r", 0)
    joined.decode.expect(key, table)
    joined.prefill.send_blocks(key, 0, block_ids)
    wait_true(lambda: not joined.prefill.is_moving(key))
    if not joined.channel.shares_pool:
        joined.fill(block_ids, seed=77)
    joined.prefill.send(make_handoff(key, num_blocks=20))
    joined.wait_decode(1)
    assert_moved(joined, written, block_ids, table)


def test_prefill_side_closing_is_noticed_after_its_last_messages(joined):
    sent = [GrantBlocks([number]) for number in range(50)]
    for message in sent:
        joined.prefill.send(message)
    joined.prefill.close()
    messages, reason = wait_closed(joined.decode, joined.decode_wake)
    assert messages == sent
    assert reason
    with pytest.raises(ChannelClosed):
        joined.decode.poll()


def test_decode_side_closing_is_noticed_after_its_last_messages(joined):
    sent = [TransferDone((str(number), 0)) for number in range(50)]
    for message in sent:
        joined.decode.send(message)
    joined.decode.close()
    messages, reason = wait_closed(joined.prefill, joined.prefill_wake)
    assert messages == sent
    assert reason
    joined.prefill.send(Heartbeat(1.0))
    joined.prefill.send_blocks(("r", 0), 0, [1, 2])
    wait_true(lambda: not joined.prefill.is_moving(("r", 0)))


def test_close_is_idempotent_and_ends_everything(joined):
    joined.fill(range(30))
    joined.decode.expect(("r", 0), joined.destination(list(range(30))))
    joined.prefill.send_blocks(("r", 0), 0, list(range(30)))
    for _ in range(2):
        joined.prefill.close()
        joined.decode.close()
    wait_true(lambda: not joined.prefill.is_moving(("r", 0)))
    joined.prefill.abandon(("r", 0))
    joined.decode.forget(("r", 0))
    joined.decode.send(Heartbeat(1.0))
    with pytest.raises(ChannelClosed):
        wait_closed(joined.decode, joined.decode_wake)
        joined.decode.poll()


def test_nothing_is_written_after_the_decode_end_closed(joined):
    joined.fill(range(30))
    table = joined.destination(list(range(30)))
    joined.decode.expect(("r", 0), table)
    joined.prefill.send_blocks(("r", 0), 0, list(range(30)))
    joined.decode.close()
    then = joined.decode_pool.tensor[table].clone()
    wait_closed(joined.prefill, joined.prefill_wake)
    joined.prefill.close()
    assert torch.equal(joined.decode_pool.tensor[table], then)


def test_each_side_is_woken_by_what_arrives(joined):
    joined.decode_wake.clear()
    joined.prefill_wake.clear()
    joined.prefill.send(Heartbeat(1.0))
    assert joined.decode_wake.wait(10)
    joined.decode.send(Heartbeat(2.0))
    assert joined.prefill_wake.wait(10)
    assert joined.decode.poll() == [Heartbeat(1.0)]
    assert joined.prefill.poll() == [Heartbeat(2.0)]
    assert joined.decode.poll() == [] and joined.prefill.poll() == []


@pytest.mark.parametrize("name", TWO_PROCESS)
def test_hello_and_welcome_open_the_channel(name):
    joined = Joined(name)
    try:
        assert joined.hello.worker == joined.prefill.peer == "decode-0"
        assert joined.hello.epoch == "epoch-d"
        assert joined.channel.shares_pool == (joined.decode.pool is not None)
        if joined.decode.pool is not None:
            assert joined.decode.pool.layout == joined.prefill_pool.layout
            assert joined.decode.pool.num_blocks == joined.prefill_pool.num_blocks
    finally:
        joined.close()


@pytest.mark.parametrize("name", TWO_PROCESS)
def test_one_server_serves_several_decode_workers_apart(name):
    joined = Joined(name)
    device = str(joined.decode_pool.tensor.device)
    second_pool = (
        None if joined.channel.shares_pool else joined.channel.make_pool(joined.prefill_pool.layout, 8, device)
    )
    second, second_prefill, _ = joined.join(second_pool, joined.decode_wake.set, worker="decode-1")
    try:
        assert (joined.prefill.peer, second_prefill.peer) == ("decode-0", "decode-1")
        written = joined.fill([3])
        second.expect(("r", 0), [3])
        second_prefill.send_blocks(("r", 0), 0, [3])
        second_prefill.send(make_handoff(("r", 0), num_blocks=1))
        (handoff,) = wait_for(second.poll, joined.decode_wake)
        assert handoff.key == ("r", 0)
        assert torch.equal((second_pool or second.pool).tensor[3].cpu(), written[3])
        assert joined.decode.poll() == []
        second.close()
        wait_closed(second_prefill, joined.prefill_wake)
        second_prefill.close()
        joined.barrier(5)
    finally:
        second.close()
        joined.close()


@pytest.mark.parametrize("name", TWO_PROCESS)
def test_refused_hello_says_why(name):
    joined = Joined(name)
    own_pool = None if joined.channel.shares_pool else joined.decode_pool
    wake = threading.Event()
    decode = joined.channel.connect(joined.server.address, own_pool, joined.hello, wake.set)
    try:
        (prefill,) = wait_for(joined.server.accept, joined.prefill_wake)
        refusal = Welcome("prefill-0", "epoch-p", refusal="block_size: 32 here, 64 there")
        prefill.send(refusal)
        prefill.close()
        messages, _ = wait_closed(decode, wake)
        assert messages == [refusal]
        assert decode.pool is None
    finally:
        decode.close()
        joined.close()


@pytest.mark.parametrize("name", TWO_PROCESS)
def test_closing_the_server_closes_every_end(name):
    joined = Joined(name)
    joined.server.close()
    joined.server.close()
    wait_closed(joined.decode, joined.decode_wake)
    with pytest.raises(ChannelClosed):
        joined.prefill.poll()
    joined.decode.close()


@pytest.mark.parametrize("name", TWO_PROCESS)
def test_nobody_listening_is_a_clear_error(name):
    joined = Joined(name)
    address, hello, pool = joined.server.address, joined.hello, joined.decode_pool
    joined.close()
    message = f"channel '{joined.channel.name}' found no prefill worker: cannot connect to {address}"
    with pytest.raises(ChannelError, match=message):
        joined.channel.connect(address, pool, hello, lambda: None)


@pytest.mark.parametrize("name", CHANNELS)
def test_opening_and_closing_leaves_no_file_or_thread(name):
    first = Joined(name)  # what a library opens once for the process
    first.barrier(1)
    first.close()
    del first
    threads = threading.active_count()
    wait_true(lambda: not any(thread.name.startswith(("wire-", "kv-")) for thread in threading.enumerate()))
    files = open_fds()
    for _ in range(10):
        joined = Joined(name, num_blocks=4)
        joined.barrier(1)
        joined.close()
        del joined
    gc.collect()
    wait_true(lambda: open_fds() <= files)
    wait_true(lambda: threading.active_count() <= threads)


def test_names_lead_to_channels():
    for name in ["local", "shm", "tcp", "cuda_ipc", "cuda_p2p", "nccl"]:
        assert get_channel(name).name == name


def test_unknown_channel_lists_the_known_ones():
    with pytest.raises(ChannelError) as caught:
        get_channel("carrier-pigeon")
    known = "local, shm, cuda_ipc, cuda_p2p, nccl, tcp, nixl"
    assert str(caught.value) == f"no channel 'carrier-pigeon'; use one of: {known}"


def test_handoffs_key_names_the_attempt():
    assert make_handoff(("r", 4)).key == ("r", 4)
    assert isinstance(make_handoff(("r", 4)), Handoff)
