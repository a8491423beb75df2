"""Frames between processes: what arrives is what was sent, in order, and a bad peer never reaches the engine."""

import json
import os
import socket
import struct
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import wire
from engine.protocol import Outputs, Ping, Pong, Refused, Submit, ToRouter, ToWorker
from engine.request import PrefillReport, Request, SamplingParams, TokenDelta, TokenLogprobs
from engine.wire import CLOSED_BY_PEER, CLOSED_HERE, Codec, Connection, Listener, WireError, connect, parse_address

CODEC = Codec(ToRouter | ToWorker)
WAIT_S = 10


class Peer:
    """Records what a connection delivers."""

    def __init__(self):
        self.messages = []
        self.reasons = []
        self.changed = threading.Condition()

    def on_message(self, message):
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def on_close(self, reason):
        with self.changed:
            self.reasons.append(reason)
            self.changed.notify_all()

    def wait_messages(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.messages) >= count, WAIT_S)
        return self.messages

    def wait_reason(self):
        with self.changed:
            assert self.changed.wait_for(lambda: self.reasons, WAIT_S)
        return self.reasons[0]


@pytest.fixture
def raw_pair():
    """(connection, its Peer, plain socket at the other end)"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        raw = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    peer = Peer()
    connection = Connection(accepted, CODEC, peer.on_message, peer.on_close)
    connection.start()
    yield connection, peer, raw
    raw.close()
    connection.close()
    assert connection.wait_closed(WAIT_S)


@pytest.fixture
def pair():
    """(connection, its Peer, connection, its Peer), joined through a Listener."""
    there = Peer()
    accepted = []
    ready = threading.Event()

    def on_connection(connection):
        connection.on_message, connection.on_close = there.on_message, there.on_close
        accepted.append(connection)
        ready.set()

    listener = Listener("127.0.0.1", 0, CODEC, on_connection)
    here = Peer()
    connection = connect(listener.address, CODEC, here.on_message, here.on_close)
    assert ready.wait(WAIT_S)
    yield connection, here, accepted[0], there
    connection.close()
    accepted[0].close()
    assert connection.wait_closed(WAIT_S) and accepted[0].wait_closed(WAIT_S)
    listener.close()


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def read_exactly(sock, num_bytes):
    data = bytearray()
    while len(data) < num_bytes:
        piece = sock.recv(min(1 << 20, num_bytes - len(data)))
        assert piece, "stream ended early"
        data += piece
    return bytes(data)


def open_fds():
    return len(os.listdir("/proc/self/fd"))


def test_every_field_survives_including_infinite_floats_and_integer_keys():
    sampling = SamplingParams(
        max_tokens=3,
        seed=2**64 - 1,
        logit_bias={7: float("-inf"), 50256: 1.5},
        stop_token_ids=[1, 2],
    )
    submit = Submit(Request("r-1", [5, 6], sampling, generation=2, cache_salt="é\u0000"), prefill_worker="prefill-0")
    assert submit.request.deadline == float("inf")
    assert CODEC.decode(CODEC.encode(submit)) == submit
    logprobs = TokenLogprobs(9, -1e-9, [(9, -1e-9), (8, float("-inf"))])
    outputs = Outputs([TokenDelta("r-1", 0, [9], [logprobs], "stop", 9, prompt_logprobs=[None, logprobs])])
    back = CODEC.decode(CODEC.encode(outputs))
    assert back == outputs
    assert isinstance(back.deltas[0].logprobs[0].top[0], tuple)


def test_tokens_travel_in_columns_and_everything_else_as_it_is():
    plain = [TokenDelta("a", 0, [1]), TokenDelta("b", 2, [3, 4])]
    assert json.loads(CODEC.encode(Outputs(plain))) == {
        "request_ids": ["a", "b"],
        "generations": [0, 2],
        "token_ids": [[1], [3, 4]],
        "rich": [],
        "rich_at": [],
        "failures": [],
        "kind": "outputs",
    }


RICH_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.just([TokenLogprobs(9, -0.5, [(9, -0.5)])]),
        "finish_reason": st.sampled_from(["stop", "length"]),
        "stop_token_id": st.just(9),
        "prefill": st.just(PrefillReport(num_cached_tokens=4)),
        "prompt_logprobs": st.just([None]),
    },
)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.lists(st.integers(0, 9)), RICH_FIELDS)))
def test_deltas_keep_their_order_and_fields_whatever_they_hold(rows):
    outputs = Outputs([TokenDelta(name, generation, ids, **fields) for name, generation, ids, fields in rows])
    assert CODEC.decode(CODEC.encode(outputs)) == outputs


@pytest.mark.parametrize(
    "columns",
    [
        {"request_ids": ["a"], "generations": [0], "token_ids": []},
        {"rich_at": [0]},
        {"rich_at": [1], "rich": [{"request_id": "a", "generation": 0, "token_ids": [1]}]},
        {"request_ids": [1], "generations": [0], "token_ids": [[1]]},
    ],
)
def test_columns_that_do_not_fit_together_are_malformed(columns):
    with pytest.raises(WireError, match="malformed"):
        CODEC.decode(json.dumps({"kind": "outputs", **columns}).encode())


def test_frame_is_big_endian_length_and_json(raw_pair):
    connection, peer, raw = raw_pair
    connection.send(Ping(7))
    assert read_exactly(raw, 4 + 25) == b"\x00\x00\x00\x19" + b'{"nonce":7,"kind":"ping"}'
    raw.sendall(b"\x00\x00\x00\x19" + b'{"kind":"ping","nonce":8}')
    assert peer.wait_messages(1) == [Ping(8)]


def test_unknown_keys_of_a_newer_peer_are_ignored():
    assert CODEC.decode(b'{"kind":"ping","nonce":1,"extra":[1]}') == Ping(1)


@pytest.mark.parametrize("wrong", [Ping("x"), Refused("\ud800"), object(), Outputs([TokenDelta("r", 0, [1.5])])])
def test_unencodable_message_is_refused_and_the_connection_lives_on(pair, wrong):
    connection, _, _, there = pair
    with pytest.raises(WireError, match="cannot encode"):
        connection.send(wrong)
    connection.send(Ping(1))
    assert there.wait_messages(1) == [Ping(1)]


def test_messages_keep_their_order_in_both_directions(pair):
    connection, here, other, there = pair
    for i in range(2000):
        connection.send(Ping(i))
        other.send(Pong(i))
    assert there.wait_messages(2000) == [Ping(i) for i in range(2000)]
    assert here.wait_messages(2000) == [Pong(i) for i in range(2000)]


def test_fifty_megabyte_message_arrives_whole_between_small_ones(pair):
    connection, _, _, there = pair
    text = "0123456789abcdef" * (50 * 2**20 // 16)
    connection.send(Ping(1))
    connection.send(Refused(text))
    connection.send(Ping(2))
    first, large, last = there.wait_messages(3)
    assert (first, last) == (Ping(1), Ping(2))
    assert large.reason == text


def test_concurrent_senders_interleave_whole_messages_each_in_order(pair):
    connection, _, _, there = pair
    padding = "x" * 20_000  # several frames fill the socket's buffer, so the backlog is in play

    def send(sender):
        for i in range(200):
            connection.send(Refused(f"{sender} {i} {padding}"))

    threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = [message.reason.split(" ") for message in there.wait_messages(800)]
    assert all(part[2] == padding for part in got)
    for sender in range(4):
        assert [int(part[1]) for part in got if part[0] == str(sender)] == list(range(200))


def test_send_to_a_peer_that_does_not_read_queues_and_everything_arrives_later(raw_pair):
    connection, _, raw = raw_pair
    messages = [Refused(f"{i} " + "y" * 100_000) for i in range(300)]
    for message in messages:  # would hang here if send waited: nobody reads yet
        connection.send(message)
    assert connection.backlog_bytes > 10_000_000
    for message in messages:
        (length,) = struct.unpack(">I", read_exactly(raw, 4))
        assert CODEC.decode(read_exactly(raw, length)) == message
    assert connection.backlog_bytes == 0


def test_peer_that_never_reads_is_dropped_before_memory_runs_out(raw_pair, monkeypatch):
    monkeypatch.setattr(wire, "MAX_BACKLOG_BYTES", 5_000_000)
    connection, peer, _ = raw_pair
    for _ in range(300):
        connection.send(Refused("y" * 100_000))
    assert "too slowly" in peer.wait_reason()
    assert connection.backlog_bytes == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (frame(b"not json"), "malformed message: message: Invalid JSON"),
        (frame(b""), "malformed message: message: Invalid JSON"),
        (frame(b'{"nonce":1}'), "malformed message"),
        (frame(b'{"kind":"nope"}'), "malformed message"),
        (frame(b'{"kind":"ping","nonce":"many"}'), "malformed message: ping.nonce"),
        (frame(b"[" * 100_000), "malformed message"),
        (frame(b"\xff\xfe"), "malformed message"),
        (b"GET / HTTP/1.1\r\n\r\n", "over the limit"),
        (struct.pack(">I", wire.MAX_FRAME_BYTES + 1), "over the limit"),
        (b"\x00\x00", "inside a frame"),
        (frame(b'{"kind":"ping","nonce":1}')[:-1], "inside a frame"),
    ],
)
def test_bad_frame_closes_with_a_reason_after_the_good_ones(raw_pair, data, reason):
    connection, peer, raw = raw_pair
    raw.sendall(frame(CODEC.encode(Ping(1))) + data)
    raw.shutdown(socket.SHUT_WR)
    assert reason in peer.wait_reason()
    assert peer.messages == [Ping(1)]
    assert raw.recv(1) == b""
    connection.send(Ping(2))  # dropped, not raised
    assert connection.closed


def test_frame_over_the_limit_is_not_sent(pair, monkeypatch):
    connection, _, _, there = pair
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(WireError, match="over the frame limit 1000"):
        connection.send(Refused("z" * 1000))
    connection.send(Ping(3))
    assert there.wait_messages(1) == [Ping(3)]


def test_half_closed_peer_counts_as_gone_after_its_last_message(raw_pair):
    connection, peer, raw = raw_pair
    raw.sendall(frame(CODEC.encode(Ping(1))))
    raw.shutdown(socket.SHUT_WR)
    assert peer.wait_reason() == CLOSED_BY_PEER
    assert peer.messages == [Ping(1)]
    assert connection.wait_closed(WAIT_S)


def test_what_was_sent_before_close_arrives_even_when_the_other_side_was_sending_too(pair):
    connection, here, other, there = pair
    for _ in range(100):
        other.send(Refused("unread " + "x" * 50_000))
    for i in range(100):
        connection.send(Refused(f"{i} " + "x" * 50_000))
    connection.close()
    assert there.wait_reason() == CLOSED_BY_PEER
    assert [message.reason.split()[0] for message in there.messages] == [str(i) for i in range(100)]
    assert here.wait_reason() == CLOSED_HERE


def test_backlog_still_leaves_after_close(raw_pair, monkeypatch):
    monkeypatch.setattr(wire, "_LINGER_S", WAIT_S)
    connection, _, raw = raw_pair
    messages = [Refused(f"{i} " + "x" * 200_000) for i in range(100)]
    for message in messages:
        connection.send(message)
    connection.close()
    connection.send(Ping(1))  # too late
    for message in messages:
        (length,) = struct.unpack(">I", read_exactly(raw, 4))
        assert CODEC.decode(read_exactly(raw, length)) == message
    assert raw.recv(1) == b""


def test_closing_side_hears_its_peer_out_so_that_nothing_sent_is_lost(raw_pair, monkeypatch):
    """A socket closed under incoming data is reset, and a reset takes what was still on its way with it."""
    monkeypatch.setattr(wire, "_LINGER_S", WAIT_S)
    connection, _, raw = raw_pair
    text = "x" * 1_000_000
    connection.send(Refused(text))
    connection.close()
    connection.wait_closed(0.2)
    raw.sendall(frame(CODEC.encode(Ping(1))) * 1000)
    (length,) = struct.unpack(">I", read_exactly(raw, 4))
    assert CODEC.decode(read_exactly(raw, length)) == Refused(text)
    assert raw.recv(1) == b""


def test_close_is_idempotent_and_reported_once_on_each_side(pair):
    connection, here, other, there = pair
    for _ in range(3):
        connection.close()
    assert connection.wait_closed(WAIT_S) and other.wait_closed(WAIT_S)
    connection.close()
    other.close()
    assert here.reasons == [CLOSED_HERE]
    assert there.reasons == [CLOSED_BY_PEER]


def test_close_from_a_callback_works_and_stops_delivery(raw_pair):
    connection, peer, raw = raw_pair

    def on_message(message):
        peer.on_message(message)
        connection.close()

    connection.on_message = on_message
    raw.sendall(frame(CODEC.encode(Ping(1))) + frame(CODEC.encode(Ping(2))))
    raw.shutdown(socket.SHUT_WR)
    assert peer.wait_reason() == CLOSED_HERE
    assert peer.messages == [Ping(1)]


def test_close_ends_although_the_peer_is_frozen(raw_pair):
    connection, peer, raw = raw_pair
    for _ in range(100):
        connection.send(Refused("y" * 100_000))
    connection.close()  # the peer neither reads nor closes
    assert connection.wait_closed(WAIT_S)
    assert peer.reasons == [CLOSED_HERE]


def test_failing_callback_closes_its_connection_only(pair):
    connection, here, other, there = pair

    def fail(message):
        raise KeyError("bug")

    other.on_message = fail
    connection.send(Ping(1))
    assert "handling Ping failed" in there.wait_reason()
    assert here.wait_reason() == CLOSED_BY_PEER


def test_reset_by_the_peer_is_a_close_with_a_reason(raw_pair):
    _, peer, raw = raw_pair
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()
    assert "connection lost" in peer.wait_reason()


def test_small_messages_are_not_delayed_and_dead_hosts_are_noticed(raw_pair):
    connection, _, _ = raw_pair
    assert connection._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_listener_refuses_a_connection_by_closing_it_and_goes_on():
    peers = []

    def on_connection(connection):
        peers.append(connection)
        if len(peers) == 1:
            raise ValueError("bug in the handler")
        if len(peers) == 2:
            connection.send(Refused("not you"))
            connection.close()
            return
        connection.on_message, connection.on_close = lambda message: connection.send(message), lambda reason: None

    listener = Listener("127.0.0.1", 0, CODEC, on_connection)
    try:
        for expected in ([], [Refused("not you")]):
            peer = Peer()
            connect(listener.address, CODEC, peer.on_message, peer.on_close)
            peer.wait_reason()
            assert peer.messages == expected
        peer = Peer()
        connection = connect(listener.address, CODEC, peer.on_message, peer.on_close)
        connection.send(Ping(5))
        assert peer.wait_messages(1) == [Ping(5)]
        connection.close()
    finally:
        listener.close()
        listener.close()
    with pytest.raises(WireError, match="cannot connect to 127.0.0.1:"):
        connect(listener.address, CODEC, peer.on_message, peer.on_close, timeout_s=1)


def test_port_in_use_is_named():
    listener = Listener("127.0.0.1", 0, CODEC, lambda connection: None)
    host, port = parse_address(listener.address)
    try:
        with pytest.raises(WireError, match=f"cannot listen on 127.0.0.1:{port}"):
            Listener(host, port, CODEC, lambda connection: None)
    finally:
        listener.close()


@pytest.mark.parametrize("address", ["", "8000", ":8000", "host:", "host:port", "host:70000", "host:-1"])
def test_bad_address_is_refused_with_its_value(address):
    with pytest.raises(WireError, match="write host:port") as caught:
        parse_address(address)
    assert repr(address) in str(caught.value)


def test_address_forms():
    assert parse_address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert parse_address("[::1]:8000") == ("::1", 8000)


def test_connections_leave_no_file_or_thread_behind():
    before = open_fds()
    accepted = []

    def on_connection(connection):
        connection.on_message, connection.on_close = lambda message: None, lambda reason: None
        accepted.append(connection)

    for _ in range(30):
        listener = Listener("127.0.0.1", 0, CODEC, on_connection)
        peer = Peer()
        connection = connect(listener.address, CODEC, peer.on_message, peer.on_close)
        connection.send(Ping(1))
        connection.close()
        assert connection.wait_closed(WAIT_S)
        listener.close()
    assert all(connection.wait_closed(WAIT_S) for connection in accepted)
    assert open_fds() == before
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and any(t.name.startswith("wire-") for t in threading.enumerate()):
        time.sleep(0.01)
    assert not any(thread.name.startswith("wire-") for thread in threading.enumerate())
