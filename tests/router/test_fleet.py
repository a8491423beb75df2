"""Registration, compatibility, peers, pings and loss of workers, over real connections."""

import asyncio
import socket

import pytest

from engine.protocol import Peer, Pong, Refused
from engine.wire import WireError
from router.dispatcher import Dispatcher
from router.fleet import Fleet
from tests.router.fake_worker import TCP, FakeWorker, async_test, make_config, until


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.silent: list[str] = []

    def worker_up(self, worker) -> None:
        self.events.append(("up", worker.name))

    def worker_lost(self, worker, reason, silent) -> None:
        self.events.append(("lost", worker.name))
        if silent:
            self.silent.append(worker.name)

    def outputs(self, worker, outputs) -> None:
        self.events.append(("outputs", worker.name))


async def start(**config) -> tuple[Fleet, str, Recorder]:
    fleet, recorder = Fleet(make_config(**config)), Recorder()
    fleet.listeners.append(recorder)
    return fleet, await fleet.start(), recorder


@async_test
async def test_any_number_of_workers_may_join_and_leave():
    fleet, address, recorder = await start(**TCP)
    workers = [await FakeWorker(f"d{i}", channel="tcp").join(address) for i in range(3)]
    workers += [await FakeWorker(f"p{i}", "prefill", channel="tcp").join(address) for i in range(2)]
    await until(lambda: len(fleet.workers) == 5)
    assert sorted(worker.name for worker in fleet.by_role("prefill")) == ["p0", "p1"]
    await workers[1].leave()
    await until(lambda: "d1" not in fleet.workers)
    assert recorder.events[-1] == ("lost", "d1")
    assert fleet.workers_lost_total == 1
    await FakeWorker("d1", channel="tcp").join(address)
    await until(lambda: "d1" in fleet.workers)
    await fleet.close()


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [
        ("block_size", 4, 8),
        ("fingerprint", "f00d", "beef"),
        ("dtype", "float32", "float16"),
        ("block_bytes", 1024, 2048),
    ],
)
@async_test
async def test_a_worker_with_another_model_is_refused_with_field_and_values(field, ours, theirs):
    fleet, address, _ = await start()
    await FakeWorker("d0").join(address)
    await until(lambda: len(fleet.workers) == 1)
    stranger = await FakeWorker("d1", **{field: theirs}).join(address)
    refused = await stranger.next(Refused)
    assert field in refused.reason and repr(ours) in refused.reason and repr(theirs) in refused.reason
    await until(lambda: stranger.closed is not None)
    assert list(fleet.workers) == ["d0"]
    await fleet.close()


@async_test
async def test_a_wrong_first_worker_does_not_keep_the_right_ones_out_after_it_left():
    fleet, address, _ = await start()
    wrong = await FakeWorker("d0", vocab_size=7).join(address)
    await until(lambda: len(fleet.workers) == 1)
    await wrong.leave()
    await until(lambda: not fleet.workers)
    await FakeWorker("d0").join(address)
    await until(lambda: len(fleet.workers) == 1)
    assert fleet.model.vocab_size != 7
    await fleet.close()


@async_test
async def test_directory_name_and_pool_room_may_differ():
    fleet, address, _ = await start()
    await FakeWorker("d0").join(address)
    await until(lambda: len(fleet.workers) == 1)
    other = FakeWorker("d1", max_model_len=300)
    other.register.model.name = "another directory"
    await other.join(address)
    await until(lambda: len(fleet.workers) == 2)
    await fleet.close()


@async_test
async def test_the_served_length_is_what_every_worker_can_hold_also_while_one_restarts():
    fleet, address, _ = await start()
    dispatcher = Dispatcher(fleet, expected=lambda: {"d0": "decode", "d1": "decode"})
    assert dispatcher.model is None
    await FakeWorker("d0", max_model_len=1000).join(address)
    await until(lambda: dispatcher.model is not None)
    assert dispatcher.model.max_model_len == 1000
    small = await FakeWorker("d1", max_model_len=300).join(address)
    await until(lambda: dispatcher.model.max_model_len == 300)
    await small.leave()
    await until(lambda: len(fleet.workers) == 1)
    assert dispatcher.model.max_model_len == 300
    await fleet.close()


@async_test
async def test_a_worker_of_another_channel_is_refused():
    fleet, address, _ = await start(**TCP)
    stranger = await FakeWorker("d0", channel="local").join(address)
    refused = await stranger.next(Refused)
    assert "channel" in refused.reason and "'tcp'" in refused.reason and "'local'" in refused.reason
    await fleet.close()


@async_test
async def test_a_taken_name_is_refused_and_the_first_worker_stays():
    fleet, address, recorder = await start()
    await FakeWorker("d0", epoch="one").join(address)
    await until(lambda: len(fleet.workers) == 1)
    second = await FakeWorker("d0", epoch="two").join(address)
    refused = await second.next(Refused)
    assert "'d0'" in refused.reason and "--name" in refused.reason
    assert fleet.workers["d0"].register.epoch == "one"
    assert recorder.events == [("up", "d0")]
    await fleet.close()


@async_test
async def test_a_process_that_connects_again_replaces_its_own_stale_connection():
    fleet, address, recorder = await start()
    first = await FakeWorker("d0", epoch="one").join(address)
    await until(lambda: len(fleet.workers) == 1)
    await FakeWorker("d0", epoch="one").join(address)
    await until(lambda: first.closed is not None)
    await until(lambda: recorder.events == [("up", "d0"), ("lost", "d0"), ("up", "d0")])
    assert list(fleet.workers) == ["d0"]
    await fleet.close()


@async_test
async def test_decode_workers_hear_of_every_change_among_prefill_workers():
    fleet, address, _ = await start(**TCP)
    decode = await FakeWorker("d0", channel="tcp").join(address)
    await until(lambda: decode.peers is not None)
    assert decode.peers.prefill == []
    prefill = await FakeWorker("p0", "prefill", channel="tcp", epoch="e").join(address)
    await until(lambda: decode.peers.prefill == [Peer("p0", "p0.example:1", "e")])
    late = await FakeWorker("d1", channel="tcp").join(address)
    await until(lambda: late.peers is not None and late.peers.prefill == [Peer("p0", "p0.example:1", "e")])
    await prefill.leave()
    await until(lambda: decode.peers.prefill == [] and late.peers.prefill == [])
    assert prefill.peers is None
    await fleet.close()


@async_test
async def test_a_stranger_that_does_not_speak_the_protocol_is_hung_up_on():
    fleet, address, recorder = await start()
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert await reader.read() == b""
    writer.close()
    eager = FakeWorker("d0")
    eager.register = Pong(1)  # anything but a Register
    await eager.join(address)
    await until(lambda: eager.closed is not None)
    assert recorder.events == []
    await FakeWorker("d0").join(address)
    await until(lambda: recorder.events == [("up", "d0")])
    await fleet.close()


@async_test
async def test_a_worker_whose_loop_stays_silent_is_given_up():
    fleet, address, recorder = await start(transfer={"lease_s": 0.3, "heartbeat_s": 0.1})
    frozen, lively = FakeWorker("d0"), FakeWorker("d1")
    frozen.frozen = True
    await frozen.join(address)
    await lively.join(address)
    await until(lambda: recorder.silent == ["d0"])
    assert list(fleet.workers) == ["d1"]
    await until(lambda: frozen.closed is not None)
    await fleet.close()


@async_test
async def test_a_port_in_use_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(WireError, match=f"127.0.0.1:{port}"):
            await Fleet(make_config()).start("127.0.0.1", port)
