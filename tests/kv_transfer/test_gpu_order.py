"""What keeps a block from being touched by both sides, with the device's part played by hand: marks that are over when
the test says so."""

import threading
import time

import pytest
import torch

from kv_transfer.channel import ChannelError
from kv_transfer.channels import cuda_ipc, cuda_p2p, nccl
from kv_transfer.channels.block_copier import runs
from kv_transfer.channels.cuda_ipc import WorkOrder
from kv_transfer.channels.gpu_memory import MappedPool, export_pool, make_gpu_pool
from kv_transfer.channels.mark import PAST, mark_work
from kv_transfer.channels.pool_description import describe_blocks
from kv_transfer.handoff import (
    AskBlocks,
    CancelPrefill,
    GrantBlocks,
    Heartbeat,
    PrefillFailed,
    PrefillRequest,
    ReturnBlocks,
)
from tests.kv_transfer.channels import LazyCopier, PullOnCpu, QueueLink
from tests.kv_transfer.joined import LAYOUT, Joined, make_handoff, wait_closed, wait_true

KEY = ("r", 0)


class Work:
    """A mark that is over once `end` was called."""

    def __init__(self):
        self._over = threading.Event()
        self.end = self._over.set

    def wait(self):
        assert self._over.wait(20)


@pytest.fixture
def ipc(monkeypatch):
    """A cuda_ipc channel and a function that gives the device work, which the next messages come behind."""
    under_way: list = [PAST]
    monkeypatch.setattr(cuda_ipc, "mark_work", lambda device: under_way[0])
    monkeypatch.setattr(cuda_ipc, "wait_for_work", lambda device: under_way[0].wait())
    joined = Joined("cuda_ipc-cpu")

    def launch():
        under_way[0] = Work()
        return under_way[0]

    joined.launch, joined.idle = launch, lambda: under_way.__setitem__(0, PAST)
    yield joined
    under_way[0] = PAST
    joined.close()


def test_blocks_are_returned_when_the_step_before_is_over_and_the_engine_does_not_wait(ipc):
    work = ipc.launch()
    ipc.decode.send(ReturnBlocks([3]))
    time.sleep(0.05)
    assert ipc.prefill.poll() == []
    work.end()
    assert ipc.wait_prefill(1) == [ReturnBlocks([3])]


def test_messages_that_give_no_block_away_overtake(ipc):
    work = ipc.launch()
    request = PrefillRequest(make_handoff(KEY).request)
    ipc.decode.send(ReturnBlocks([3]))
    ipc.decode.send(request)
    ipc.decode.send(Heartbeat(1.0))
    assert ipc.wait_prefill(2) == [request, Heartbeat(1.0)]
    work.end()
    assert ipc.wait_prefill(1) == [ReturnBlocks([3])]


def test_an_ask_that_follows_a_return_does_not_overtake_it(ipc):
    """A return of surplus cancels what an earlier ask is owed, so their order counts."""
    work = ipc.launch()
    ipc.decode.send(ReturnBlocks([3]))
    ipc.idle()
    ipc.decode.send(AskBlocks(2))
    time.sleep(0.05)
    assert ipc.prefill.poll() == []
    work.end()
    assert ipc.wait_prefill(2) == [ReturnBlocks([3]), AskBlocks(2)]


@pytest.mark.parametrize("message", [GrantBlocks([1]), make_handoff(KEY)], ids=["grant", "handoff"])
def test_blocks_given_to_decode_leave_when_the_step_before_is_over(ipc, message):
    work = ipc.launch()
    ipc.prefill.send(message)
    ipc.prefill.send(Heartbeat(2.0))
    assert ipc.wait_decode(1) == [Heartbeat(2.0)]
    work.end()
    assert ipc.wait_decode(1) == [message]


def test_a_decode_end_closes_when_its_steps_are_over_and_what_it_returned_has_left(ipc):
    work = ipc.launch()
    ipc.decode.send(ReturnBlocks([3]))
    close = threading.Thread(target=ipc.decode.close)
    close.start()
    close.join(0.05)
    assert close.is_alive() and ipc.prefill.poll() == []
    work.end()
    close.join(10)
    messages, _ = wait_closed(ipc.prefill, ipc.prefill_wake)
    assert messages == [ReturnBlocks([3])]


def test_the_loss_of_a_decode_worker_that_did_not_say_farewell_is_reported_after_its_gpu_work(ipc, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "TEARDOWN_S", 0.3)
    start = time.monotonic()
    ipc.decode._connection.close()  # as the kernel does for a killed process
    wait_closed(ipc.prefill, ipc.prefill_wake)
    assert time.monotonic() - start >= 0.3


def test_a_farewell_is_taken_at_its_word(ipc, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "TEARDOWN_S", 60.0)
    ipc.decode.close()
    wait_closed(ipc.prefill, ipc.prefill_wake)


def test_work_order_sends_at_once_when_the_device_is_idle():
    sent = []
    order = WorkOrder(torch.device("cpu"), sent.append)
    for number in range(5):
        order.send(number)
    assert sent == [0, 1, 2, 3, 4]
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-work-order"]
    order.close()


class GatedCopier(LazyCopier):
    """Copies are over when the test opens the gate."""

    def __init__(self, source, pool):
        super().__init__(source, pool)
        self.started, self.gate = threading.Event(), threading.Event()
        self.fails = False

    def copy(self, sources, targets, ready):
        (copy,) = super().copy(sources, targets, ready)
        self.started.set()
        return [_Gated(self, copy)]


class _Gated:
    def __init__(self, copier, copy):
        self.copier, self.copy = copier, copy

    def wait(self):
        assert self.copier.gate.wait(20)
        if self.copier.fails:
            raise RuntimeError("unspecified launch failure")
        self.copy.wait()


@pytest.fixture
def pull(monkeypatch):
    """A cuda_p2p channel whose copies wait for `joined.copier.gate`."""
    copiers = []

    def make_copier(self, description, pool):
        from kv_transfer.channels.shm import open_pool

        copiers.append(GatedCopier(open_pool(description), pool))
        return copiers[-1]

    monkeypatch.setattr(PullOnCpu, "make_copier", make_copier)
    joined = Joined("cuda_p2p-cpu")
    (joined.copier,) = copiers
    yield joined
    joined.copier.gate.set()
    joined.close()


def offer(joined, num_blocks=4):
    block_ids = list(range(num_blocks))
    written = joined.fill(block_ids)
    table = joined.destination(block_ids)
    joined.decode.expect(KEY, table)
    joined.prefill.send_blocks(KEY, 0, block_ids)
    joined.prefill.send(make_handoff(KEY, num_blocks=num_blocks))
    assert joined.copier.started.wait(10)
    return written, table


def test_blocks_count_as_moving_until_they_were_read(pull):
    offer(pull)
    time.sleep(0.05)
    assert pull.prefill.is_moving(KEY) and pull.decode.poll() == []
    pull.copier.gate.set()
    assert pull.wait_decode(1)[0].key == KEY
    wait_true(lambda: not pull.prefill.is_moving(KEY))


def test_forget_waits_for_the_copy_under_way(pull):
    written, table = offer(pull)
    forget = threading.Thread(target=pull.decode.forget, args=(KEY,))
    forget.start()
    forget.join(0.05)
    assert forget.is_alive()
    pull.copier.gate.set()
    forget.join(10)
    pull.decode_pool.tensor[table] = 5.0
    assert pull.barrier(60) == []
    assert bool((pull.decode_pool.tensor[table] == 5.0).all())


def test_a_copy_that_fails_fails_its_transfer_only(pull):
    offer(pull)
    pull.copier.fails = True
    pull.copier.gate.set()
    (failed,) = pull.wait_decode(1)
    assert failed == PrefillFailed(KEY, "worker_lost", "channel 'cuda_p2p': copying failed: unspecified launch failure")
    assert pull.wait_prefill(1) == [CancelPrefill(KEY)]
    wait_true(lambda: not pull.prefill.is_moving(KEY))
    pull.copier.fails = False
    pull.decode.forget(KEY)
    assert pull.barrier(60) == []


def test_a_transfer_whose_prefill_worker_left_before_the_copies_were_over_is_not_delivered(pull):
    offer(pull)
    pull.prefill.close()
    assert pull.prefill.is_moving(KEY)  # until the other side can be expected to have noticed
    wait_true(lambda: pull.decode._puller._pipeline.stopping)
    pull.copier.gate.set()
    messages, _ = wait_closed(pull.decode, pull.decode_wake)
    assert [type(message) for message in messages] in ([], [PrefillFailed])
    wait_true(lambda: not pull.prefill.is_moving(KEY))


def test_blocks_fetched_long_after_they_were_offered_are_lost(pull):
    """A decode worker that was frozen: the prefill worker may have given the blocks to somebody else."""
    pull.decode._puller._max_age_s = 0.01
    offer(pull)
    time.sleep(0.05)
    pull.copier.gate.set()
    (failed,) = pull.wait_decode(1)
    assert (failed.key, failed.code) == (KEY, "worker_lost")
    assert "after they were offered" in failed.message


def test_blocks_of_a_lost_connection_are_free_again_soon(pull, monkeypatch):
    monkeypatch.setattr(cuda_p2p, "NOTICE_S", 0.1)
    offer(pull)
    pull.decode._connection.close()
    wait_closed(pull.prefill, pull.prefill_wake)
    wait_true(lambda: not pull.prefill.is_moving(KEY))
    assert pull.prefill.send_blocks(KEY, 0, [1]) == 0


def test_nccl_blocks_that_were_announced_and_do_not_come_cost_the_channel_not_the_engine(monkeypatch):
    """The prefill worker froze between the announcement and the send."""
    monkeypatch.setattr(nccl, "STUCK_S", 0.1)
    monkeypatch.setattr(QueueLink, "send", lambda self, block_ids, ready=PAST: [])
    joined = Joined("nccl-cpu")
    try:
        joined.decode.expect(KEY, [5])
        joined.prefill.send_blocks(KEY, 0, [1])
        wait_true(lambda: joined.decode._incoming._transfers[KEY].num_writing == 1)
        joined.decode.forget(KEY)
        _, reason = wait_closed(joined.decode, joined.decode_wake)
        assert "blocks announced for ('r', 0) did not come within 0.1 s" in reason
        assert not joined.decode_pool.tensor[5].any()
    finally:
        joined.close()


def test_a_broken_nccl_link_closes_the_channel_on_both_sides(monkeypatch):
    def fails(self, block_ids, ready=PAST):
        raise RuntimeError("ncclSend failed: unhandled system error")

    monkeypatch.setattr(QueueLink, "send", fails)
    joined = Joined("nccl-cpu")
    try:
        joined.decode.expect(KEY, [5])
        joined.prefill.send_blocks(KEY, 0, [1])
        _, reason = wait_closed(joined.prefill, joined.prefill_wake)
        assert "sending blocks failed: ncclSend failed: unhandled system error" in reason
        wait_closed(joined.decode, joined.decode_wake)
        assert not joined.prefill.is_moving(KEY)
    finally:
        joined.close()


def test_large_transfers_are_fetched_in_pieces(pull, monkeypatch):
    pull.decode._puller._piece_blocks = 3
    written, table = offer(pull, num_blocks=8)
    pull.copier.gate.set()
    pull.wait_decode(1)
    assert all(torch.equal(pull.decode_pool.tensor[table[i]], written[i]) for i in range(8))


def test_neighbours_on_both_sides_are_one_copy():
    assert list(runs([4, 5, 6, 9, 10, 2], [0, 1, 2, 3, 4, 5])) == [(4, 0, 3), (9, 3, 2), (2, 5, 1)]
    assert list(runs([1, 2, 3], [7, 8, 20])) == [(1, 7, 2), (3, 20, 1)]
    assert list(runs([5, 4], [5, 4])) == [(5, 5, 1), (4, 4, 1)]
    assert list(runs([], [])) == []


def test_work_of_a_cpu_is_over_when_it_was_asked_for():
    assert mark_work(torch.device("cpu")) is PAST


def test_pools_of_the_cpu_are_refused():
    message = "channel 'nccl' moves blocks of GPU pools, the pool is on cpu; use shm or tcp"
    with pytest.raises(ChannelError, match=message):
        make_gpu_pool("nccl", LAYOUT, 2, "cpu")
    with pytest.raises(ChannelError, match="can only serve a pool on a GPU, this one is on cpu"):
        export_pool("cuda_p2p", Joined("local").prefill_pool)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"handle": "zz"}, "description is not usable"),
        ({"gpu": None}, "description is not usable: KeyError('gpu')"),
        ({"dtype": "float8"}, "description is not usable: KeyError('float8')"),
        ({"bytes": 5}, "5 bytes are not 64 blocks of that layout"),
    ],
)
def test_wrong_description_is_refused_with_the_reason(change, message):
    pool = Joined("local").prefill_pool
    description = {"process": "p", "handle": "00" * 64, "offset": 0, "gpu": "0", **describe_blocks(pool), **change}
    with pytest.raises(ChannelError) as caught:
        MappedPool("cuda_p2p", {key: value for key, value in description.items() if value is not None}, 0)
    assert message in str(caught.value)
