"""Control connections: only peers that speak the protocol reach the engine."""

import socket
import threading

import pytest

from engine.wire import connect
from kv_transfer.channels import get_channel
from kv_transfer.channels.control import CODEC
from kv_transfer.handoff import GrantBlocks, Heartbeat, Hello, Welcome
from tests.kv_transfer.joined import LAYOUT, Joined, model_info, wait_closed, wait_true


@pytest.fixture
def server():
    channel = get_channel("shm")
    pool = channel.make_pool(LAYOUT, 2)
    server = channel.serve(pool, Welcome("prefill-0", "e"), lambda: None)
    yield server
    server.close()


@pytest.mark.parametrize("first", [Heartbeat(1.0), GrantBlocks([1])], ids=["before-hello", "wrong-direction"])
def test_a_peer_that_does_not_begin_with_hello_is_dropped_unseen(server, first):
    closed = threading.Event()
    connection = connect(server.address, CODEC, lambda message: None, lambda reason: closed.set())
    connection.send(first)
    assert closed.wait(10)
    assert server.accept() == []
    wait_true(lambda: not server._ends)


def test_a_stray_connection_is_dropped_unseen(server):
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port))) as stray:
        stray.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        stray.settimeout(10)
        assert stray.recv(10) == b""
    assert server.accept() == []
    wait_true(lambda: not server._ends)


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_second_hello_closes_the_channel(name):
    joined = Joined(name)
    try:
        joined.decode.send(Hello("decode-7", "e", model_info(LAYOUT)))
        messages, _ = wait_closed(joined.prefill, joined.prefill_wake)
        assert messages == []
        assert joined.prefill.peer == "decode-0"
    finally:
        joined.close()


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_message_against_the_direction_closes_the_channel(name):
    joined = Joined(name)
    try:
        joined.decode._connection.send(GrantBlocks([1]))
        assert wait_closed(joined.prefill, joined.prefill_wake)[0] == []
        joined.prefill.close()
    finally:
        joined.close()
