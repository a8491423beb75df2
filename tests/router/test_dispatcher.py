"""The dispatcher over real wire connections to scripted workers: delivery, admission, deadlines, drain, health."""

import asyncio
import time

import pytest

from engine.block_hash import hash_blocks
from engine.protocol import Abort, Role, Submit
from engine.request import PrefillReport, TokenDelta
from router.admission import CompletionRate
from router.dispatcher import Dispatcher, Draining, GenerationError, Overloaded, Unavailable
from router.fleet import Fleet
from router.token_stream import TokenStream
from tests.router.fake_worker import BLOCK_SIZE, TCP, FakeWorker, async_test, make_config, make_request, until


class Deployment:
    """A fleet and its dispatcher. `expected` stands in for the supervisor."""

    def __init__(self, expected: dict | None = None, **config):
        self.fleet = Fleet(make_config(**config))
        self.expected = expected or {}
        self.dispatcher = Dispatcher(self.fleet, lambda: self.expected)
        self.channel = self.fleet.config.topology.channel

    async def start(self, *names: str, **options) -> list[FakeWorker]:
        """Listen, and let workers join: names that start with p are prefill workers."""
        self.address = await self.fleet.start()
        return [await self.join(name, **options) for name in names]

    async def join(self, name: str, **options) -> FakeWorker:
        role: Role = "prefill" if name.startswith("p") else "decode"
        worker = await FakeWorker(name, role, channel=self.channel, **options).join(self.address)
        await until(lambda: name in self.fleet.workers)
        return worker

    def submit(self, request_id: str, *args, **fields) -> TokenStream:
        return self.dispatcher.submit([make_request(request_id, *args, **fields)])[0]


async def read(stream: TokenStream, num_tokens: int | None = None) -> list[int]:
    """Tokens of a stream: all, or as they come until there are `num_tokens`."""
    token_ids: list[int] = []
    async for delta in stream:
        token_ids += delta.token_ids
        if num_tokens is not None and len(token_ids) >= num_tokens:
            break
    return token_ids


# delivery


@async_test
async def test_a_request_reaches_a_worker_unchanged_and_its_tokens_come_back():
    deployment = Deployment()
    [worker] = await deployment.start("d0")
    request = make_request("r1", [9, 8, 7], cache_salt="tenant", deadline=time.time() + 50)
    [stream] = deployment.dispatcher.submit([request])
    submit = await worker.next(Submit)
    sent = submit.request
    assert (sent.request_id, sent.prompt_token_ids, sent.sampling, sent.cache_salt, sent.deadline) == (
        "r1",
        [9, 8, 7],
        request.sampling,
        "tenant",
        request.deadline,
    )
    assert submit.prefill_worker is None and sent.generation == 0 and sent.output_token_ids == []
    report = PrefillReport(num_prompt_tokens=3, num_cached_tokens=2)
    worker.emit(submit, 100, prefill=report)
    first = await anext(stream)
    assert first.token_ids == [100]
    assert first.prefill == PrefillReport(num_prompt_tokens=3, num_cached_tokens=2, worker="d0")
    worker.emit(submit, 101, 102)
    worker.emit(submit, 103, finish="stop", stop_token_id=103)
    rest = [delta async for delta in stream]
    assert [delta.token_ids for delta in rest] == [[101, 102], [103]]
    assert rest[-1].finish_reason == "stop" and rest[-1].stop_token_id == 103
    assert deployment.dispatcher.snapshot().requests_in_flight == 0
    await deployment.fleet.close()


@async_test
async def test_tokens_arrive_before_the_request_ends():
    deployment = Deployment()
    [worker] = await deployment.start("d0")
    stream = deployment.submit("r1")
    submit = await worker.next(Submit)
    for token_id in range(5):
        worker.emit(submit, token_id)
        assert (await anext(stream)).token_ids == [token_id]
    await deployment.fleet.close()


@async_test
async def test_deltas_with_a_stale_generation_or_unknown_id_are_dropped_and_counted():
    deployment = Deployment()
    worker, other = await deployment.start("d0", "d1")
    stream = deployment.submit("r1")
    submit = await worker.next(Submit)
    other.emit(submit, 66)  # a worker that does not have the request
    await until(lambda: deployment.dispatcher.snapshot().stale_deltas_total == 1)
    submit.request.generation = 7
    worker.emit(submit, 66)
    submit.request.generation, submit.request.request_id = 0, "nobody"
    worker.emit(submit, 66)
    submit.request.request_id = "r1"
    worker.emit(submit, 1, finish="length")
    assert await read(stream) == [1]
    assert deployment.dispatcher.snapshot().stale_deltas_total == 3
    await deployment.fleet.close()


@async_test
async def test_closing_a_stream_aborts_the_request_at_once_and_only_once():
    deployment = Deployment()
    [worker] = await deployment.start("d0")
    stream = deployment.submit("r1")
    await worker.next(Submit)
    stream.close()
    stream.close()
    assert (await worker.next(Abort)).request_id == "r1"
    assert await read(stream) == []
    assert deployment.dispatcher.snapshot().requests_in_flight == 0
    done = deployment.submit("r2")
    submit = await worker.next(Submit)
    worker.emit(submit, 1, finish="stop")
    assert await read(done) == [1]
    done.close()
    deployment.submit("r3")
    await worker.next(Submit)  # and no second Abort in between
    await deployment.fleet.close()


@async_test
async def test_a_request_closed_while_it_waits_never_reaches_a_worker():
    deployment = Deployment(expected={"d0": "decode"})
    await deployment.start()
    deployment.submit("r1").close()
    deployment.submit("r2")
    worker = await deployment.join("d0")
    assert (await worker.next(Submit)).request.request_id == "r2"
    await deployment.fleet.close()


# admission


@async_test
async def test_in_flight_limit_is_the_decode_slots_plus_max_waiting_and_acceptance_is_all_or_none():
    deployment = Deployment(router={"max_waiting": 3}, decode_workers=2)
    workers = await deployment.start("d0", "d1", max_running=2)
    for index in range(5):
        deployment.submit(f"r{index}")
    with pytest.raises(Overloaded) as refused:
        deployment.dispatcher.submit([make_request("n0"), make_request("n1"), make_request("n2")])
    assert refused.value.retry_after_s >= 1
    assert deployment.dispatcher.snapshot().requests_in_flight == 5
    deployment.dispatcher.submit([make_request("n0"), make_request("n1")])
    with pytest.raises(Overloaded):
        deployment.submit("one too many")
    submit = await workers[0].next(Submit)
    workers[0].emit(submit, 1, finish="stop")
    await until(lambda: deployment.dispatcher.snapshot().requests_in_flight == 6)
    deployment.submit("fits again")
    await deployment.fleet.close()


def test_retry_after_follows_the_rate_at_which_requests_end():
    rate = CompletionRate()
    assert rate.retry_after_s(1, now=0) == 5
    for second in range(10):  # ten in ten seconds
        rate.count(now=100.0 + second)
    assert rate.retry_after_s(1, now=110) == 1
    assert rate.retry_after_s(7, now=110) == 7
    assert rate.retry_after_s(10_000, now=110) == 60
    assert rate.retry_after_s(1, now=1000) == 5, "what ended long ago says nothing"


@async_test
async def test_unavailable_only_when_no_worker_is_up_or_expected():
    deployment = Deployment()
    await deployment.start()
    with pytest.raises(Unavailable) as refused:
        deployment.submit("r1")
    assert "decode" in refused.value.message and refused.value.retry_after_s >= 1
    deployment.expected = {"d0": "decode"}
    stream = deployment.submit("r1")
    worker = await deployment.join("d0")
    worker.emit(await worker.next(Submit), 5, finish="stop")
    assert await read(stream) == [5]
    await deployment.fleet.close()


@async_test
async def test_requests_wait_in_order_for_a_worker_that_starts():
    deployment = Deployment(expected={"d0": "decode"})
    await deployment.start()
    for index in range(4):
        deployment.submit(f"r{index}")
    assert deployment.dispatcher.snapshot().requests_waiting == 4
    worker = await deployment.join("d0")
    assert [(await worker.next(Submit)).request.request_id for _ in range(4)] == ["r0", "r1", "r2", "r3"]
    await deployment.fleet.close()


@async_test
async def test_what_exceeds_slots_and_lookahead_waits_here_for_whichever_worker_has_room_first():
    deployment = Deployment()
    first, second = await deployment.start("d0", "d1", max_running=4)
    for index in range(12):
        deployment.submit(f"r{index}")
    await until(lambda: first.num_submits + second.num_submits == 10)
    assert (first.num_submits, second.num_submits) == (5, 5)
    assert deployment.dispatcher.snapshot().requests_waiting == 2
    second.emit(await second.next(Submit), 1, finish="stop")
    await until(lambda: second.num_submits == 6)
    assert first.num_submits == 5
    await deployment.fleet.close()


@async_test
async def test_requests_that_end_while_no_worker_has_room_leave_nothing_behind():
    deployment = Deployment(expected={"d0": "decode"})
    await deployment.fleet.start()
    kept = deployment.submit("kept")
    for index in range(20):
        deployment.submit(f"r{index}").close()
    assert [flight.request_id for flight in deployment.dispatcher._waiting] == ["kept"]
    kept.close()
    assert not deployment.dispatcher._waiting
    await deployment.fleet.close()


# deadlines


@async_test
async def test_the_deadline_is_kept_although_the_worker_is_silent():
    deployment = Deployment(router={"request_timeout_s": 0.2})
    [worker] = await deployment.start("d0")
    stream = deployment.submit("r1")
    submit = await worker.next(Submit)
    assert submit.request.deadline == pytest.approx(submit.request.arrival + 0.2)
    worker.emit(submit, 3)
    tokens = []
    with pytest.raises(GenerationError) as failed:
        async for delta in stream:
            tokens += delta.token_ids
    assert failed.value.code == "deadline" and "d0" in failed.value.message
    assert tokens == [3]
    assert (await worker.next(Abort)).request_id == "r1"
    await deployment.fleet.close()


@async_test
async def test_the_deadline_holds_for_a_request_that_never_found_a_worker():
    deployment = Deployment(expected={"d0": "decode"})
    await deployment.start()
    stream = deployment.submit("r1", deadline=time.time() + 0.1)
    with pytest.raises(GenerationError) as failed:
        await anext(stream)
    assert failed.value.code == "deadline" and "decode worker" in failed.value.message
    worker = await deployment.join("d0")
    deployment.submit("r2")
    assert (await worker.next(Submit)).request.request_id == "r2"
    await deployment.fleet.close()


# prefill workers


@async_test
async def test_a_request_waits_for_a_prefill_worker_where_nothing_else_can_prefill_it():
    deployment = Deployment(expected={"p0": "prefill"}, **TCP)
    [decode] = await deployment.start("d0")
    deployment.submit("r1")
    await asyncio.sleep(0.05)
    assert decode.num_submits == 0
    await deployment.join("p0")
    assert (await decode.next(Submit)).prefill_worker == "p0"
    await deployment.fleet.close()


@async_test
async def test_requests_held_for_a_prefill_worker_keep_their_order():
    deployment = Deployment(expected={"p0": "prefill"}, **TCP)
    [decode] = await deployment.start("d0")
    for index in range(4):
        deployment.submit(f"r{index}")
    await deployment.join("p0")
    assert [(await decode.next(Submit)).request.request_id for _ in range(4)] == ["r0", "r1", "r2", "r3"]
    await deployment.fleet.close()


@async_test
async def test_without_any_prefill_worker_a_conditional_decode_worker_prefills_by_itself():
    deployment = Deployment(**{**TCP, "local_prefill_max_tokens": 8})
    [decode] = await deployment.start("d0")
    deployment.submit("r1")
    assert (await decode.next(Submit)).prefill_worker is None
    await deployment.join("p0")
    deployment.submit("r2", list(range(100)))
    assert (await decode.next(Submit)).prefill_worker == "p0"
    await deployment.fleet.close()


@async_test
async def test_prompts_are_shared_out_among_prefill_workers_by_their_backlog():
    deployment = Deployment(**{**TCP, "prefill_workers": 2})
    decode, *_ = await deployment.start("d0", "p0", "p1")
    chosen = []
    for index in range(4):  # one long prompt, three short ones
        deployment.submit(f"r{index}", [100 + index] * (400 if index == 0 else 40))
        chosen.append((await decode.next(Submit)).prefill_worker)
    assert len(set(chosen[1:])) == 1 and chosen[0] != chosen[1]
    await deployment.fleet.close()


# routing, end to end


@async_test
async def test_a_session_stays_with_its_worker_and_is_free_when_that_is_lost():
    deployment = Deployment()
    workers = {worker.name: worker for worker in await deployment.start("d0", "d1", "d2", max_running=32)}
    prompt = list(range(40))
    deployment.submit("turn0", prompt)
    await until(lambda: sum(worker.num_submits for worker in workers.values()) == 1)
    home = next(worker for worker in workers.values() if worker.num_submits)
    submit = await home.next(Submit)
    for turn in range(1, 5):
        home.report(added=[block.hex() for block in hash_blocks(prompt, BLOCK_SIZE)])
        home.emit(submit, 1, finish="stop")
        await until(lambda: deployment.dispatcher.snapshot().requests_in_flight == 0)
        prompt = prompt + [1, 50, 51, 52]
        deployment.submit(f"turn{turn}", prompt)
        submit = await home.next(Submit)
    assert sum(worker.num_submits for worker in workers.values()) == 5
    await home.leave()
    await until(lambda: sum(w.num_submits for w in workers.values() if w is not home) == 1)
    await deployment.fleet.close()


@async_test
async def test_a_burst_of_one_session_lands_on_one_worker_before_any_block_is_reported():
    deployment = Deployment()
    workers = await deployment.start("d0", "d1", max_running=32)
    for index in range(6):
        deployment.submit(f"r{index}", list(range(80)) + [index])
    await until(lambda: sum(worker.num_submits for worker in workers) == 6)
    assert sorted(worker.num_submits for worker in workers) == [0, 6]
    await deployment.fleet.close()


@async_test
async def test_blocks_that_a_worker_did_not_keep_pull_nobody():
    """An ended request's promise is replaced by what the worker reports, here: nothing."""
    deployment = Deployment()
    workers = await deployment.start("d0", "d1")
    homes = []
    for index in range(2):
        deployment.submit(f"r{index}", list(range(80)))
        await until(lambda: sum(worker.num_submits for worker in workers) == len(homes) + 1)
        home = next(worker for worker in workers if worker.num_submits and worker not in homes)
        homes.append(home)
        home.emit(await home.next(Submit), 1, finish="stop")
        home.report()
        await until(lambda home=home: deployment.fleet.workers[home.name].stats is not None)
    assert homes[0] is not homes[1]
    await deployment.fleet.close()


@async_test
async def test_a_request_goes_only_to_a_worker_that_can_hold_it():
    deployment = Deployment()
    [large] = await deployment.start("d0")
    long_prompt = [3] * 600
    deployment.submit("r0", long_prompt)
    small = await deployment.join("d1", max_model_len=300)
    deployment.submit("r1", long_prompt)
    assert [(await large.next(Submit)).request.request_id for _ in range(2)] == ["r0", "r1"]
    assert small.num_submits == 0
    await deployment.fleet.close()


@async_test
async def test_a_worker_that_owes_an_answer_for_long_gets_nothing_new_while_others_are_prompt():
    deployment = Deployment(router={"health_timeout_s": 0.1})
    frozen, lively = await deployment.start("d0", "d1")
    frozen.frozen = True
    await until(lambda: deployment.fleet.workers["d0"].silent_s() > 0.1)
    for index in range(3):
        deployment.submit(f"r{index}")
    await until(lambda: lively.num_submits == 3)
    assert frozen.num_submits == 0
    await deployment.fleet.close()


# drain


@async_test
async def test_draining_refuses_new_requests_and_waits_for_running_ones():
    deployment = Deployment()
    [worker] = await deployment.start("d0")
    stream = deployment.submit("r1")
    submit = await worker.next(Submit)
    drain = asyncio.create_task(deployment.dispatcher.drain(10))
    await asyncio.sleep(0)
    with pytest.raises(Draining) as refused:
        deployment.submit("r2")
    assert refused.value.retry_after_s >= 1
    report = await deployment.dispatcher.health(5)
    assert report.draining and not report.ok and report.status == "draining"
    assert not drain.done()
    worker.emit(submit, 1, finish="stop")
    assert await drain is True
    assert await read(stream) == [1]
    await deployment.fleet.close()


@async_test
async def test_what_does_not_end_in_time_fails_and_is_aborted():
    deployment = Deployment()
    [worker] = await deployment.start("d0")
    stream = deployment.submit("r1")
    await worker.next(Submit)
    assert await deployment.dispatcher.drain(0.05) is False
    with pytest.raises(GenerationError) as failed:
        await anext(stream)
    assert failed.value.code == "worker_lost" and "shutting down" in failed.value.message
    await worker.next(Abort)
    await deployment.fleet.close()


# health, flush, metrics


@async_test
async def test_health_is_a_round_trip_and_says_who_is_missing_or_frozen():
    deployment = Deployment(expected={"d0": "decode", "p0": "prefill"}, **TCP)
    await deployment.start()
    report = await deployment.dispatcher.health(1)
    assert not report.ok and report.status == "starting"
    assert [(worker.name, worker.ok) for worker in report.workers] == [("d0", False), ("p0", False)]
    decode, prefill = await deployment.join("d0"), await deployment.join("p0")
    await until(lambda: decode.peers is not None and decode.peers.prefill != [])
    report = await deployment.dispatcher.health(1)
    assert report.ok and report.status == "ok" and all(worker.round_trip_ms is not None for worker in report.workers)
    prefill.frozen = True
    report = await deployment.dispatcher.health(0.1)
    by_name = {worker.name: worker for worker in report.workers}
    assert not report.ok and report.status == "unavailable"
    assert by_name["d0"].ok and not by_name["p0"].ok and "did not answer" in by_name["p0"].detail
    await prefill.leave()
    report = await deployment.dispatcher.health(1)
    by_name = {worker.name: worker for worker in report.workers}
    assert not report.ok, "no prompt can be prefilled"
    assert by_name["d0"].ok and "no prefill worker" in by_name["d0"].detail, "the decode worker itself is fine"
    await deployment.join("p0")
    await until(lambda: decode.peers.prefill != [])
    assert (await deployment.dispatcher.health(1)).ok
    await deployment.fleet.close()


@async_test
async def test_one_frozen_worker_of_several_makes_health_fail_for_requests_may_be_stuck_there():
    deployment = Deployment()
    _, frozen = await deployment.start("d0", "d1")
    assert (await deployment.dispatcher.health(1)).ok
    frozen.frozen = True
    report = await deployment.dispatcher.health(0.1)
    assert not report.ok
    assert [(worker.name, worker.ok) for worker in report.workers] == [("d0", True), ("d1", False)]
    await deployment.fleet.close()


@async_test
async def test_health_stays_ok_without_a_prefill_worker_that_is_not_needed():
    deployment = Deployment(expected={"d0": "decode", "p0": "prefill"}, **{**TCP, "local_prefill_max_tokens": 64})
    await deployment.start("d0")
    report = await deployment.dispatcher.health(1)
    assert report.ok
    assert [(worker.name, worker.ok) for worker in report.workers] == [("d0", True), ("p0", False)]
    await deployment.fleet.close()


@async_test
async def test_flush_reaches_every_worker_and_reports_the_sum():
    deployment = Deployment()
    first, second = await deployment.start("d0", "d1")
    assert await deployment.dispatcher.flush() == 20
    assert (first.flushes, second.flushes) == (1, 1)
    await deployment.fleet.close()


@async_test
async def test_flush_fails_when_a_worker_does_not_answer():
    deployment = Deployment(router={"health_timeout_s": 0.1})
    _, frozen = await deployment.start("d0", "d1")
    frozen.frozen = True
    with pytest.raises(Unavailable, match="d1"):
        await deployment.dispatcher.flush()
    await deployment.fleet.close()


@async_test
async def test_snapshot_shows_the_workers_own_figures():
    deployment = Deployment(router={"max_waiting": 7})
    [worker] = await deployment.start("d0", max_running=4)
    worker.report(added=["aa"])
    deployment.submit("r1")
    await until(lambda: deployment.fleet.workers["d0"].stats is not None)
    snapshot = deployment.dispatcher.snapshot()
    assert snapshot.in_flight_limit == 11 and snapshot.requests_in_flight == 1
    [figures] = snapshot.workers
    assert (figures.name, figures.role, figures.assigned, figures.pool.total) == ("d0", "decode", 1, 100)
    await deployment.fleet.close()


@async_test
async def test_a_stream_delivers_what_came_before_a_failure():
    stream = TokenStream("r", on_close=lambda: None)
    stream.put(TokenDelta("r", 0, [1]))
    stream.fail(GenerationError("internal", "broken"))
    stream.put(TokenDelta("r", 0, [2]))
    assert (await anext(stream)).token_ids == [1]
    with pytest.raises(GenerationError, match="broken"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
