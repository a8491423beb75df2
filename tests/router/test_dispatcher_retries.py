"""Requests outlive their workers: nothing is delivered twice, nothing is left out, and giving up is bounded."""

import asyncio
import random

import pytest

from engine.protocol import Abort, Submit
from engine.request import PrefillReport
from router.dispatcher import GenerationError
from tests.router.fake_worker import TCP, FakeWorker, async_test, until
from tests.router.test_dispatcher import Deployment, read


@async_test
async def test_a_stream_goes_on_at_another_worker_after_the_tokens_already_delivered():
    deployment = Deployment()
    first, second = await deployment.start("d0", "d1")
    stream = deployment.submit("r1", [4, 4, 4])
    submit = await first.next(Submit)
    first.emit(submit, 10, prefill=PrefillReport(num_prompt_tokens=3, num_cached_tokens=1))
    first.emit(submit, 11)
    delta = await anext(stream)
    assert delta.token_ids == [10] and delta.prefill.num_cached_tokens == 1
    assert (await anext(stream)).token_ids == [11]
    await first.leave()
    again = (await second.next(Submit)).request
    assert again.output_token_ids == [10, 11]
    assert again.generation == 1
    assert (again.prompt_token_ids, again.sampling, again.deadline) == (
        submit.request.prompt_token_ids,
        submit.request.sampling,
        submit.request.deadline,
    )
    second.emit(submit, 99)  # the lost attempt's generation
    submit.request.generation = 1
    second.emit(submit, 12, prefill=PrefillReport(num_prompt_tokens=5, num_cached_tokens=0))
    second.emit(submit, 13, finish="stop")
    rest = [delta async for delta in stream]
    assert [delta.token_ids for delta in rest] == [[12], [13]]
    assert all(delta.prefill is None for delta in rest), "cached tokens are counted once"
    snapshot = deployment.dispatcher.snapshot()
    assert (snapshot.retries_total, snapshot.stale_deltas_total, snapshot.workers_lost_total) == (1, 1, 1)
    await deployment.fleet.close()


@async_test
async def test_requests_of_other_workers_are_not_touched_by_a_loss():
    deployment = Deployment()
    first, second = await deployment.start("d0", "d1")
    lost, survivor = deployment.submit("r1"), deployment.submit("r2")
    await first.next(Submit)
    kept = await second.next(Submit)
    await first.leave()
    assert (await second.next(Submit)).request.request_id == "r1"
    second.emit(kept, 1, finish="stop")
    assert await read(survivor) == [1]
    lost.close()
    assert (await second.next(Abort)).request_id == "r1"
    await deployment.fleet.close()


@async_test
async def test_the_only_worker_may_be_replaced_by_one_that_starts_later():
    deployment = Deployment(expected={"d0": "decode"})
    [worker] = await deployment.start("d0")
    stream, waiting = deployment.submit("r1"), deployment.submit("r2")
    worker.emit(await worker.next(Submit), 7)
    assert (await anext(stream)).token_ids == [7]
    await worker.leave()
    await until(lambda: deployment.dispatcher.snapshot().requests_waiting == 2)
    replacement = await deployment.join("d0", epoch="another life")
    first, second = await replacement.next(Submit), await replacement.next(Submit)
    assert [first.request.request_id, second.request.request_id] == ["r1", "r2"], "the oldest goes first"
    replacement.emit(first, 8, finish="stop")
    assert await read(stream) == [8]
    waiting.close()
    await deployment.fleet.close()


@async_test
async def test_a_failure_worker_lost_is_submitted_again_and_late_news_of_the_old_attempt_is_ignored():
    deployment = Deployment()
    [worker] = await deployment.start("d0")
    stream = deployment.submit("r1")
    submit = await worker.next(Submit)
    worker.emit(submit, 1)
    worker.fail(submit, "worker_lost")
    again = await worker.next(Submit)  # not an Abort: the worker has let go of it already
    assert again.request.generation == 1 and again.request.output_token_ids == [1]
    worker.fail(submit, "internal")
    worker.emit(again, 2, finish="stop")
    assert await read(stream) == [1, 2]
    await deployment.fleet.close()


@pytest.mark.parametrize("code", ["internal", "too_long", "deadline"])
@async_test
async def test_other_failures_end_the_request_with_their_code_and_message(code):
    deployment = Deployment()
    [worker] = await deployment.start("d0")
    stream = deployment.submit("r1")
    worker.fail(await worker.next(Submit), code, "the engine's own words")
    with pytest.raises(GenerationError) as failed:
        await anext(stream)
    assert (failed.value.code, failed.value.message) == (code, "the engine's own words")
    deployment.submit("r2")
    assert (await worker.next(Submit)).request.request_id == "r2"
    await deployment.fleet.close()


@async_test
async def test_giving_up_after_max_retries():
    deployment = Deployment(router={"max_retries": 2})
    [worker] = await deployment.start("d0")
    stream = deployment.submit("r1")
    for generation in range(3):
        submit = await worker.next(Submit)
        assert submit.request.generation == generation
        worker.fail(submit, "worker_lost", f"cause {generation}")
    with pytest.raises(GenerationError) as failed:
        await anext(stream)
    assert failed.value.code == "worker_lost" and "cause 2" in failed.value.message
    assert deployment.dispatcher.snapshot().requests_in_flight == 0
    await deployment.fleet.close()


@async_test
async def test_losing_a_prefill_worker_moves_only_prompts_it_was_computing():
    deployment = Deployment(**{**TCP, "prefill_workers": 2})
    decode, p0, p1 = await deployment.start("d0", "p0", "p1")
    workers = {"p0": p0, "p1": p1}
    running, stuck = deployment.submit("running", [1] * 40), deployment.submit("stuck", [2] * 40)
    first, second = await decode.next(Submit), await decode.next(Submit)
    assert {first.prefill_worker, second.prefill_worker} == {"p0", "p1"}
    decode.emit(first, 5)
    assert (await anext(running)).token_ids == [5]
    await workers[first.prefill_worker].leave()
    await until(lambda: len(deployment.fleet.workers) == 2)
    decode.emit(first, 6, finish="stop")
    assert await read(running) == [6], "it was prefilled already"
    await workers[second.prefill_worker].leave()
    assert (await decode.next(Abort)).request_id == "stuck"
    await deployment.join("p2")
    again = await decode.next(Submit)
    assert (again.prefill_worker, again.request.request_id, again.request.generation) == ("p2", "stuck", 1)
    decode.emit(again, 9, finish="stop")
    assert await read(stuck) == [9]
    await deployment.fleet.close()


@async_test
async def test_the_next_attempt_uses_a_prefill_worker_that_the_decode_worker_hears():
    deployment = Deployment(**{**TCP, "prefill_workers": 2})
    decode, _, _ = await deployment.start("d0", "p0", "p1")
    await until(lambda: len(deployment.fleet.workers["d0"].prefill_peers) == 2)
    deployment.submit("r1")
    submit = await decode.next(Submit)
    assert decode.peers is not None
    decode.peers.prefill = [peer for peer in decode.peers.prefill if peer.name != submit.prefill_worker]
    await until(lambda: len(deployment.fleet.workers["d0"].prefill_peers) == 1)
    for _ in range(3):  # in turn it would be the silent one's every other time
        decode.fail(submit, "worker_lost")
        again = await decode.next(Submit)
        assert again.prefill_worker not in (None, "p0" if decode.peers.prefill[0].name == "p1" else "p1")
        submit = again
    await deployment.fleet.close()


@async_test
async def test_a_request_on_a_worker_that_froze_is_moved_once_the_worker_is_given_up():
    deployment = Deployment(transfer={"lease_s": 0.3, "heartbeat_s": 0.1})
    frozen, healthy = await deployment.start("d0", "d1")
    frozen.frozen = True
    stream = deployment.submit("r1")
    frozen.emit(await frozen.next(Submit), 1)
    again = await healthy.next(Submit)
    assert again.request.output_token_ids == [1]
    healthy.emit(again, 2, finish="stop")
    assert await read(stream) == [1, 2]
    await deployment.fleet.close()


@async_test
async def test_the_deadline_ends_a_request_that_waits_for_its_next_attempt():
    deployment = Deployment(expected={"d0": "decode"}, router={"request_timeout_s": 0.3})
    [worker] = await deployment.start("d0")
    stream = deployment.submit("r1")
    await worker.next(Submit)
    await worker.leave()
    with pytest.raises(GenerationError) as failed:
        await anext(stream)
    assert failed.value.code == "deadline"
    await deployment.fleet.close()


class Engine:
    """Plays a decode worker: token n of a request is a function of the prompt and n alone, as a seeded engine's is."""

    def __init__(self, worker: FakeWorker, rng: random.Random):
        self.worker, self.rng = worker, rng
        self.task = asyncio.create_task(self.run())
        self.active: dict[str, Submit] = {}

    async def run(self) -> None:
        taken = 0
        while self.worker.closed is None:
            for message in self.worker.received[taken:]:
                if isinstance(message, Submit):
                    self.active[message.request.request_id] = message
                else:
                    self.active.pop(message.request_id, None)
            taken = len(self.worker.received)
            for request_id, submit in list(self.active.items()):
                self.step(request_id, submit)
            self.worker.report()
            await asyncio.sleep(0.001)

    def step(self, request_id: str, submit: Submit) -> None:
        request = submit.request
        luck = self.rng.random()
        if luck < 0.3:
            return
        if luck < 0.32:
            self.worker.fail(submit, "worker_lost")
            del self.active[request_id]
            return
        request.output_token_ids.append(token(request.prompt_token_ids[0], len(request.output_token_ids)))
        done = len(request.output_token_ids) >= request.sampling.max_tokens
        self.worker.emit(submit, request.output_token_ids[-1], finish="length" if done else None)
        if done:
            del self.active[request_id]


def token(prompt: int, position: int) -> int:
    return prompt * 1000 + position


@pytest.mark.parametrize("seed", range(3))
@async_test
async def test_tokens_are_complete_and_books_are_even_after_a_storm_of_losses_and_aborts(seed):
    rng = random.Random(seed)
    deployment = Deployment(
        expected={"d0": "decode"}, router={"max_retries": 1000, "max_waiting": 1000}, **{**TCP, "prefill_workers": 2}
    )
    await deployment.start("p0", "p1")
    engines = {name: Engine(await deployment.join(name), rng) for name in ("d0", "d1")}
    aborted: set[int] = set()

    async def client(number: int) -> tuple[list[int], int]:
        await asyncio.sleep(rng.random() * 0.2)
        prompt = [number] + [7] * rng.randrange(40)
        max_tokens = rng.randrange(1, 20)
        stream = deployment.submit(f"r{number}", prompt, max_tokens=max_tokens)
        patience = rng.randrange(1, 10) if rng.random() < 0.2 else 100
        token_ids = []
        async for delta in stream:
            token_ids += delta.token_ids
            if len(token_ids) >= patience:
                aborted.add(number)
                stream.close()
                break
        return token_ids, max_tokens

    clients = [asyncio.create_task(client(number)) for number in range(60)]
    for _ in range(6):
        await asyncio.sleep(0.03)
        name = rng.choice(sorted(engines))
        await engines[name].worker.leave()
        await until(lambda name=name: name not in deployment.fleet.workers)
        engines[name] = Engine(await deployment.join(name, epoch=f"life {rng.random()}"), rng)
    for number, task in enumerate(clients):
        token_ids, max_tokens = await task
        assert token_ids == [token(number, position) for position in range(len(token_ids))]
        assert number in aborted or len(token_ids) == max_tokens
    await until(lambda: all(not engine.active for engine in engines.values()))
    snapshot = deployment.dispatcher.snapshot()
    assert snapshot.requests_in_flight == snapshot.requests_waiting == 0
    assert snapshot.retries_total > 0
    for worker in deployment.fleet.workers.values():
        assert (worker.assigned, worker.backlog_blocks) == (set(), 0), worker.name
    await deployment.fleet.close()
    await asyncio.gather(*(engine.task for engine in engines.values()))
