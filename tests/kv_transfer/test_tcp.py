"""The tcp channel under damage: a bad block costs its transfer, a broken connection the channel, never a wrong byte."""

import socket
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
import zmq

from kv_transfer.channel import ChannelError
from kv_transfer.channels import get_channel, tcp_sender
from kv_transfer.channels.block_frame import BlockHeader
from kv_transfer.channels.tcp import TcpDecodeEnd
from kv_transfer.handoff import CancelPrefill, GrantBlocks, Heartbeat, PrefillFailed
from tests.kv_transfer.joined import LAYOUT, Joined, make_handoff, open_fds, wait_closed, wait_for, wait_true

KEY = ("r", 1)
BODY = bytes(range(256)) * (LAYOUT.block_bytes // 256)


@pytest.fixture
def joined():
    joined = Joined("tcp")
    yield joined
    joined.close()


@pytest.fixture
def push(joined):
    """A second sender to the decode end's data address: what it sends arrives as from the prefill side."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(f"tcp://{joined.decode.data_address}")
    yield socket
    context.destroy(linger=0)


def values(body=BODY):
    return torch.frombuffer(bytearray(body), dtype=torch.float32).view(LAYOUT.block_shape)


def frame(key, index, body=BODY):
    return [BlockHeader.of(key, index, body).pack(), body]


def same_bytes(tensor, other):
    return torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


def test_crc_covers_place_and_bytes():
    import zlib

    header = BlockHeader.of(("id", 2), 3, b"block")
    assert header.checksum == zlib.crc32(b"\x00\x00\x00\x02\x00\x00\x00\x03id" + b"block")
    assert BlockHeader.unpack(header.pack()) == header


def test_handoff_waits_for_the_last_block_and_the_wait_is_measured(joined, push):
    joined.decode.expect(KEY, [4, 5])
    joined.prefill.send(make_handoff(KEY, num_blocks=2))
    joined.prefill.send(Heartbeat(1.0))
    push.send_multipart(frame(KEY, 1))
    push.send_multipart(frame(KEY, 1))  # the same again does not stand in for the missing one
    assert joined.wait_decode(1) == [Heartbeat(1.0)]
    time.sleep(0.05)
    assert joined.decode.poll() == []
    push.send_multipart(frame(KEY, 0))
    (handoff,) = joined.wait_decode(1)
    assert handoff.report.transfer_ms >= 50
    assert same_bytes(joined.decode_pool.tensor[4], values())
    assert same_bytes(joined.decode_pool.tensor[5], values())


def test_messages_of_others_overtake_a_held_handoff(joined, push):
    joined.decode.expect(KEY, [4])
    joined.decode.expect(("other", 0), [5])
    joined.prefill.send(make_handoff(KEY, num_blocks=1))
    joined.prefill.send_blocks(("other", 0), 0, [0])
    joined.prefill.send(make_handoff(("other", 0), num_blocks=1))
    assert [handoff.key for handoff in joined.wait_decode(1)] == [("other", 0)]
    push.send_multipart(frame(KEY, 0))
    assert [handoff.key for handoff in joined.wait_decode(1)] == [KEY]


def damaged_bytes():
    header, body = frame(KEY, 0)
    return [header, body[:1000] + b"\x00" + body[1001:]]


def damaged_index():
    header, body = frame(KEY, 0)
    return [header[:11] + b"\x01" + header[12:], body]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (damaged_bytes(), "block 0 has a wrong checksum"),
        (damaged_index(), "block 1 has a wrong checksum"),
        (frame(KEY, 0, BODY[:-1]), f"block 0 has {len(BODY) - 1} bytes instead of {len(BODY)}"),
        (frame(KEY, 0, b""), f"block 0 has 0 bytes instead of {len(BODY)}"),
        (frame(KEY, 0, BODY + b"x"), f"block 0 has {len(BODY) + 1} bytes instead of {len(BODY)}"),
        (frame(KEY, 2), "block 2 has no place among the 2 that were reserved"),
    ],
    ids=["bytes", "index", "truncated", "empty", "too-long", "outside-the-table"],
)
def test_damaged_block_fails_its_transfer_only(joined, push, parts, reason):
    before = joined.decode_pool.tensor.clone()
    joined.decode.expect(KEY, [4, 5])
    push.send_multipart(parts)
    (failed,) = joined.wait_decode(1)
    assert failed == PrefillFailed(KEY, "worker_lost", f"channel 'tcp': {reason}")
    assert joined.wait_prefill(1) == [CancelPrefill(KEY)]  # the prefill side lets go as well
    push.send_multipart(frame(KEY, 1))
    push.send_multipart(frame(KEY, 0))
    joined.prefill.send(make_handoff(KEY, num_blocks=2))
    joined.prefill.send(Heartbeat(1.0))
    assert joined.wait_decode(1) == [Heartbeat(1.0)]  # no second failure, no handoff
    wait_true(lambda: joined.decode.num_frames_dropped == 2)
    assert torch.equal(joined.decode_pool.tensor, before)
    assert joined.barrier(7) == []


def test_damage_after_the_handoff_came_fails_the_transfer(joined, push):
    joined.decode.expect(KEY, [4, 5])
    push.send_multipart(frame(KEY, 1))
    joined.prefill.send(make_handoff(KEY, num_blocks=2))
    joined.prefill.send(Heartbeat(1.0))
    joined.wait_decode(1)
    push.send_multipart(damaged_bytes())
    (failed,) = joined.wait_decode(1)
    assert (failed.key, failed.code) == (KEY, "worker_lost")
    assert joined.barrier(7) == []


@pytest.mark.parametrize(
    "parts",
    [
        frame(("r", 0), 0),
        frame(("r", 2), 0),
        frame(("nobody", 1), 0),
        [b"one part"],
        [b"short", BODY],
        [b"", b""],
        [*frame(KEY, 0), b"third part"],
        [frame(KEY, 0)[0][:12] + b"\xff\xfe", BODY],
    ],
    ids=["stale", "newer", "unknown", "one-part", "short-header", "empty", "three-parts", "not-utf8"],
)
def test_frames_that_nobody_expects_are_dropped_and_counted(joined, push, parts):
    before = joined.decode_pool.tensor.clone()
    joined.decode.expect(KEY, [4])
    push.send_multipart(parts)
    wait_true(lambda: joined.decode.num_frames_dropped == 1)
    assert torch.equal(joined.decode_pool.tensor, before)
    push.send_multipart(frame(KEY, 0))
    joined.prefill.send(make_handoff(KEY, num_blocks=1))
    assert [handoff.key for handoff in joined.wait_decode(1)] == [KEY]
    assert joined.decode.num_frames_dropped == 1


def test_handoff_of_more_blocks_than_were_reserved_fails(joined):
    joined.decode.expect(KEY, [4])
    joined.prefill.send(make_handoff(KEY, num_blocks=3))
    assert joined.wait_decode(1) == [PrefillFailed(KEY, "worker_lost", "channel 'tcp': 3 blocks for 1 places")]


def test_failure_reported_by_prefill_ends_a_held_handoff(joined, push):
    joined.decode.expect(KEY, [4])
    joined.prefill.send(make_handoff(KEY, num_blocks=1))
    joined.prefill.send(PrefillFailed(KEY, "internal", "out of luck"))
    assert joined.wait_decode(1) == [PrefillFailed(KEY, "internal", "out of luck")]
    push.send_multipart(frame(KEY, 0))
    wait_true(lambda: joined.decode.num_frames_dropped == 1)
    assert joined.decode.poll() == []


def test_handoff_of_a_forgotten_transfer_does_not_come_out(joined):
    joined.decode.expect(KEY, [4])
    joined.decode.forget(KEY)
    joined.prefill.send(make_handoff(KEY, num_blocks=1))
    assert joined.barrier(7) == []


def hold_up(receiver, then_each_s=0.0):
    """Stop a receiver from taking frames until the returned event is set; each takes `then_each_s` afterwards."""
    receive, go_on = receiver._receive, threading.Event()

    def slow_receive():
        go_on.wait()
        time.sleep(then_each_s)
        return receive()

    receiver._receive = slow_receive
    return go_on


def test_forget_waits_for_a_block_that_is_being_written(joined, push):
    writing, go_on = threading.Event(), threading.Event()
    view = joined.decode_pool.block_bytes_view

    def slow_view(block_id):
        writing.set()
        go_on.wait(10)
        return view(block_id)

    joined.decode_pool.block_bytes_view = slow_view
    joined.decode.expect(KEY, [4, 5])
    push.send_multipart(frame(KEY, 0))
    assert writing.wait(10)
    forget = threading.Thread(target=joined.decode.forget, args=(KEY,))
    forget.start()
    forget.join(0.1)
    assert forget.is_alive()
    go_on.set()
    forget.join()
    assert same_bytes(joined.decode_pool.tensor[4], values())


def test_block_checked_before_forget_is_not_written_after_it(joined, push):
    receiver = joined.decode._receiver
    damage = receiver._damage

    def check_then_cancel(header, body, incoming):
        joined.decode.forget(KEY)
        return damage(header, body, incoming)

    receiver._damage = check_then_cancel
    joined.decode.expect(KEY, [4])
    push.send_multipart(frame(KEY, 0))
    wait_true(lambda: joined.decode.num_frames_dropped == 1)
    assert not joined.decode_pool.tensor[4].any()


def test_transfer_that_had_arrived_when_the_prefill_side_left_is_delivered(joined):
    written = joined.fill(range(6))
    go_on = hold_up(joined.decode._receiver, then_each_s=0.02)
    joined.decode.expect(KEY, list(range(6)))
    joined.prefill.send_blocks(KEY, 0, list(range(6)))
    joined.prefill.send(make_handoff(KEY, num_blocks=6))
    wait_true(lambda: not joined.prefill.is_moving(KEY))
    joined.prefill.close()
    assert joined.decode._connection.wait_closed(10)
    go_on.set()
    messages, _ = wait_closed(joined.decode, joined.decode_wake)
    assert [handoff.key for handoff in messages] == [KEY]
    assert all(torch.equal(joined.decode_pool.tensor[i], written[i]) for i in range(6))


def test_last_messages_of_a_decode_worker_count_although_its_data_connection_went_first(joined, monkeypatch):
    monkeypatch.setattr(tcp_sender, "_CONTROL_GRACE_S", 10)
    joined.decode._receiver.close()
    wait_true(lambda: joined.prefill.send_blocks(KEY, 0, [1]) == 0)  # the sender has noticed
    joined.decode.send(CancelPrefill(KEY))
    joined.decode.close()
    messages, _ = wait_closed(joined.prefill, joined.prefill_wake)
    assert messages == [CancelPrefill(KEY)]


def test_failing_a_transfer_calls_its_blocks_back(joined):
    go_on = hold_up(joined.decode._receiver)
    try:
        joined.prefill.send_blocks(("other", 0), 0, list(range(64)) * 10)
        joined.prefill.send_blocks(KEY, 0, [1])
        assert joined.prefill.is_moving(KEY)
        joined.prefill.send(PrefillFailed(KEY, "deadline", "too late"))
        assert not joined.prefill.is_moving(KEY)
    finally:
        go_on.set()


def test_sending_to_a_peer_that_takes_nothing_returns_at_once_and_can_be_abandoned(joined):
    """The decode end's receiver is stopped: what ZeroMQ took stays in flight, the rest can be called back."""
    stuck, other = ("stuck", 0), ("other", 0)
    go_on = hold_up(joined.decode._receiver)
    try:
        total = 0
        for _ in range(10):  # 40 MB: more than sockets and queues hold; hangs here if send_blocks waited
            total += joined.prefill.send_blocks(stuck, 0, list(range(64)))
        assert total == 10 * 64 * LAYOUT.block_bytes
        joined.prefill.send_blocks(other, 0, [1])
        assert joined.prefill.is_moving(stuck) and joined.prefill.is_moving(other)
        joined.prefill.abandon(other)
        assert not joined.prefill.is_moving(other)  # was behind the stuck one, ZeroMQ never saw it
        joined.prefill.abandon(stuck)
        joined.prefill.send(GrantBlocks([1]))
        assert joined.wait_decode(1) == [GrantBlocks([1])]  # control is not stuck behind blocks
    finally:
        go_on.set()
    wait_true(lambda: not joined.prefill.is_moving(stuck))
    assert joined.decode.num_frames_dropped < 10 * 64
    assert joined.barrier(7) == []


def test_closing_does_not_wait_for_a_peer_that_takes_nothing(joined):
    go_on = hold_up(joined.decode._receiver)
    try:
        for _ in range(10):
            joined.prefill.send_blocks(KEY, 0, list(range(64)))
        wait_true(lambda: joined.prefill._sender._outgoing[KEY].trackers)  # ZeroMQ has taken some
        close = threading.Thread(target=joined.prefill.close)
        close.start()
        close.join(10)
        assert not close.is_alive()
        assert not joined.prefill.is_moving(KEY)
    finally:
        go_on.set()


class Proxy:
    """Forwards one TCP connection to `address`, and cuts it after `num_bytes`."""

    def __init__(self, address, num_bytes):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._target = address.split(":")
        self._left = num_bytes
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        source, _ = self._server.accept()
        target = socket.create_connection((self._target[0], int(self._target[1])))
        back = threading.Thread(target=self._forward_back, args=(target, source))
        back.start()
        while self._left > 0 and (data := source.recv(min(65536, self._left))):
            target.sendall(data)
            self._left -= len(data)
        for end in (source, target):
            end.shutdown(socket.SHUT_RDWR)
        back.join()
        source.close()
        target.close()
        self._server.close()

    def _forward_back(self, target, source):
        try:
            while data := target.recv(65536):
                source.sendall(data)
        except OSError:
            pass

    def join(self):
        self._thread.join()


def join_through(joined, data_address):
    """One more decode end on the joined server, whose Hello names this data address: (decode end, prefill end)."""
    decode = TcpDecodeEnd(joined.server.address, joined.decode_pool, joined.decode_wake.set)
    address = data_address(decode.data_address)
    decode.send(replace(joined.hello, worker="decode-1", data_address=address))
    (prefill,) = wait_for(joined.server.accept, joined.prefill_wake)
    wait_for(prefill.poll, joined.prefill_wake)
    return decode, prefill


def test_data_connection_lost_in_the_middle_of_a_transfer_closes_the_channel(joined):
    written = joined.fill(range(32))
    proxies = []

    def through_proxy(address):
        proxies.append(Proxy(address, 20 * LAYOUT.block_bytes + 1000))
        return proxies[0].address

    decode, prefill = join_through(joined, through_proxy)
    decode.expect(KEY, list(range(32)))
    prefill.send_blocks(KEY, 0, list(range(32)))
    prefill.send(GrantBlocks([3]))
    prefill.send(make_handoff(KEY, num_blocks=32))
    messages, _ = wait_closed(decode, joined.decode_wake)
    assert messages == [GrantBlocks([3])]  # in particular no handoff
    _, reason = wait_closed(prefill, joined.prefill_wake)
    assert f"decode worker 'decode-1' is cut off: the data connection to {proxies[0].address} broke" in reason
    wait_true(lambda: not prefill.is_moving(KEY))
    for block_id, block in written.items():  # each block came whole or not at all
        there = joined.decode_pool.tensor[block_id]
        assert torch.equal(there, block) or not there.any()
    prefill.close()
    decode.close()
    proxies[0].join()
    joined.barrier(7)  # the other decode worker's channel goes on


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:1"])
def test_data_address_that_cannot_be_reached_closes_the_channel(joined, monkeypatch, address):
    monkeypatch.setattr(tcp_sender, "_CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(tcp_sender, "_CONTROL_GRACE_S", 0.05)
    decode, prefill = join_through(joined, lambda _: address)
    prefill.send_blocks(KEY, 0, [1, 2, 3])
    _, reason = wait_closed(prefill, joined.prefill_wake)
    assert "data" in reason and address in reason
    assert not prefill.is_moving(KEY)
    wait_closed(decode, joined.decode_wake)
    prefill.close()
    decode.close()


def test_decode_worker_vanishing_in_the_middle_of_a_transfer_frees_the_blocks(joined):
    for _ in range(20):
        joined.prefill.send_blocks(KEY, 0, list(range(64)))
    joined.decode.close()
    wait_closed(joined.prefill, joined.prefill_wake)
    wait_true(lambda: not joined.prefill.is_moving(KEY))
    assert joined.prefill.send_blocks(KEY, 0, [1]) == 0


def test_hundred_cycles_leave_no_file_open():
    Joined("tcp", num_blocks=4).close()
    wait_true(lambda: not any(thread.name.startswith(("wire-", "kv-")) for thread in threading.enumerate()))
    files = open_fds()
    for number in range(100):
        joined = Joined("tcp", num_blocks=4)
        if number % 3 == 0:
            joined.barrier(1)
        elif number % 3 == 1:
            joined.prefill.send_blocks(KEY, 0, [0, 1, 2, 3])
        joined.close()
    wait_true(lambda: open_fds() <= files)


def test_without_pyzmq_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "kv_transfer.channels.tcp")
    with pytest.raises(ChannelError) as caught:
        get_channel("tcp")
    assert str(caught.value) == "channel 'tcp' needs pyzmq: pip install 'baton-inference[transfer]'"
    assert get_channel("shm").name == "shm"
