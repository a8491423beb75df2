"""Takes requests from the HTTP API, gives each to a worker, and carries its tokens back.

    submit -> waiting (oldest first) -> decode worker with room, and a prefill worker if it needs one -> tokens -> end
                 ^                                         |
                 +------ worker lost: resubmitted after the tokens already delivered ------+

Everything runs on the event loop, so no state here needs a lock.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.block_hash import hash_blocks
from engine.config import SHARED_POOL_CHANNELS
from engine.protocol import Abort, Failure, FailureCode, ModelInfo, Outputs, PoolCounts, Role, Submit
from engine.request import Request, TokenDelta
from engine.wire import WireError
from router.admission import CompletionRate
from router.errors import Draining, GenerationError, Overloaded, Unavailable
from router.fleet import Fleet, Worker
from router.flight import Flight
from router.health import check_workers, needs_prefill_worker
from router.reports import FleetSnapshot, HealthReport, WorkerHealth, WorkerSnapshot
from router.routing import Candidate, Policy
from router.token_stream import TokenStream

__all__ = [
    "Dispatcher",
    "Draining",
    "FleetSnapshot",
    "GenerationError",
    "HealthReport",
    "Overloaded",
    "TokenStream",
    "Unavailable",
    "WorkerHealth",
    "WorkerSnapshot",
]

LOOKAHEAD = 0.25
"""Requests a decode worker is given beyond its slots, as a share of them: enough that a free slot never waits for the
router; the others stay here, free to go to whichever worker has room first."""

RETRY_DELAY_S = 0.05
"""Before the first resubmission after a failed attempt, doubling: a dead prefill worker is noticed meanwhile."""

RESTART_RETRY_AFTER_S = 5.0


class Dispatcher:
    """`expected` tells which workers will be up again by themselves (the supervisor's): requests wait for those."""

    def __init__(self, fleet: Fleet, expected: Callable[[], Mapping[str, Role]] = dict):
        self.fleet = fleet
        self.config = fleet.config
        self._expected = expected
        self._flights: dict[str, Flight] = {}
        self._waiting: deque[Flight] = deque()
        self._decode_policy, self._prefill_policy = Policy(), Policy()
        self._rate = CompletionRate()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._was_ready = False
        self._retries_total = 0
        self._stale_deltas_total = 0
        topology = self.config.topology
        self._uses_prefill_workers = (
            topology.prefill_workers > 0 and topology.local_prefill_max_tokens != "unlimited"
        ) or topology.channel in SHARED_POOL_CHANNELS
        self._needs_prefill_worker = needs_prefill_worker(self.config)
        fleet.listeners.append(self)

    # What the API uses

    @property
    def model(self) -> ModelInfo | None:
        """The model served; `max_model_len` is what every worker, up or coming back, can hold. None until one has
        registered."""
        return self.fleet.served_model(self._expected())

    def submit(self, requests: list[Request]) -> list[TokenStream]:
        """Accept all of the requests, or none, without waiting; one stream each. Request ids must be new.

        Raises Draining, Unavailable (nothing that could serve them is up or expected), Overloaded.
        """
        if self._draining:
            raise Draining("the server is shutting down", max(1.0, self.config.router.drain_timeout_s))
        roles: tuple[Role, ...] = ("decode", "prefill") if self._needs_prefill_worker else ("decode",)
        for role in roles:
            if not self.fleet.by_role(role) and role not in self._expected().values():
                raise Unavailable(f"no {role} worker is up, and none is expected", RESTART_RETRY_AFTER_S)
        limit = self._in_flight_limit()
        excess = len(self._flights) + len(requests) - limit
        if excess > 0:
            raise Overloaded(
                f"{len(self._flights)} requests are in flight, {len(requests)} more would exceed the limit of {limit}",
                self._rate.retry_after_s(excess),
            )
        flights = [self._accept(request) for request in requests]
        self._waiting.extend(flights)
        self._place_waiting()
        return [flight.stream for flight in flights]

    async def health(self, timeout_s: float) -> HealthReport:
        """Round trip through every engine loop, at most `timeout_s`."""
        ok, workers = await check_workers(self.fleet, self._expected(), timeout_s)
        self._was_ready = self._was_ready or ok
        return HealthReport(ok and not self._draining, self._draining, workers, starting=not self._was_ready)

    async def flush(self) -> int:
        """Empty every worker's prefix cache; returns blocks dropped. Raises Unavailable when one does not answer."""
        workers = list(self.fleet.workers.values())
        timeout_s = self.config.router.health_timeout_s
        dropped = await asyncio.gather(*(self.fleet.flush(worker, timeout_s) for worker in workers))
        silent = [worker.name for worker, num in zip(workers, dropped, strict=True) if num is None]
        if silent or not workers:
            who = f"worker {', '.join(silent)} did not answer within {timeout_s:g} s" if silent else "no worker is up"
            raise Unavailable(f"the prefix cache was not flushed everywhere: {who}", RESTART_RETRY_AFTER_S)
        return sum(num or 0 for num in dropped)

    def snapshot(self) -> FleetSnapshot:
        """Figures for /metrics, as the workers last sent them."""
        return FleetSnapshot(
            workers=[_snapshot(worker) for worker in self.fleet.workers.values()],
            requests_in_flight=len(self._flights),
            requests_waiting=sum(flight.decode is None for flight in self._flights.values()),
            in_flight_limit=self._in_flight_limit(),
            retries_total=self._retries_total,
            stale_deltas_total=self._stale_deltas_total,
            workers_lost_total=self.fleet.workers_lost_total,
            draining=self._draining,
        )

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, wait for what is in flight; what has not ended after `timeout_s` fails. True: all did."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            return True
        except asyncio.TimeoutError:
            for flight in list(self._flights.values()):
                self._fail(flight, "worker_lost", "the server is shutting down")
            return False

    # What the fleet tells

    def worker_up(self, worker: Worker) -> None:
        self._place_waiting()

    def worker_lost(self, worker: Worker, reason: str, silent: bool) -> None:
        for flight in reversed(list(self._flights.values())):
            prefilling = flight.prefill is worker and flight.backlog is not None
            if flight.decode is worker or prefilling:
                self._retry(flight, f"{worker.role} worker {worker.name} was lost: {reason}", delay_s=0.0)
        self._place_waiting()

    def outputs(self, worker: Worker, outputs: Outputs) -> None:
        for delta in outputs.deltas:
            self._delta(worker, delta)
        for failure in outputs.failures:
            self._failure(worker, failure)

    def _delta(self, worker: Worker, delta: TokenDelta) -> None:
        flight = self._flights.get(delta.request_id)
        if flight is None or flight.decode is not worker or flight.generation != delta.generation:
            self._stale_deltas_total += 1
            return
        self._end_backlog(flight)
        flight.deliver(delta)
        if delta.finish_reason is not None:
            self._rate.count()
            self._end(flight, abort=False)

    def _failure(self, worker: Worker, failure: Failure) -> None:
        flight = self._flights.get(failure.request_id)
        if flight is None or flight.decode is not worker or flight.generation != failure.generation:
            return
        if failure.code != "worker_lost":
            self._fail(flight, failure.code, failure.message, abort=False)
            return
        self._unassign(flight)
        self._retry(flight, failure.message, delay_s=RETRY_DELAY_S * 2 ** (flight.attempts - 1))
        self._place_waiting()

    # Acceptance

    def _in_flight_limit(self) -> int:
        slots = sum(worker.register.max_running for worker in self.fleet.by_role("decode"))
        return slots + self.config.router.max_waiting

    def _accept(self, request: Request) -> Flight:
        assert request.request_id not in self._flights, f"request id {request.request_id} is in flight already"
        now = time.time()
        arrival = request.arrival or now
        deadline = min(request.deadline, arrival + self.config.router.request_timeout_s)
        request = replace(request, arrival=arrival, deadline=deadline)
        flight = Flight(
            request,
            TokenStream(request.request_id, on_close=lambda: self._end(flight, abort=True)),
            generation=request.generation,
            output_token_ids=list(request.output_token_ids),
        )
        loop = asyncio.get_running_loop()
        flight.deadline_timer = loop.call_later(max(0.0, deadline - now), self._overdue, flight)
        self._flights[request.request_id] = flight
        self._idle.clear()
        return flight

    # Placing

    def _place_waiting(self) -> None:
        """Give waiting requests to workers, oldest first, as far as there is room."""
        held = []
        while self._waiting and any(len(worker.assigned) < _room(worker) for worker in self.fleet.by_role("decode")):
            flight = self._waiting.popleft()
            if not flight.ended and not self._place(flight):
                held.append(flight)
        self._waiting.extendleft(reversed(held))

    def _place(self, flight: Flight) -> bool:
        prefills = self.fleet.by_role("prefill") if self._uses_prefill_workers else []
        if self._needs_prefill_worker and not prefills:
            return False
        decodes = [
            worker
            for worker in self.fleet.by_role("decode")
            if (prefills or worker.register.hosts_prefill)
            and len(worker.assigned) < _room(worker)
            and worker.register.model.max_model_len >= flight.num_tokens
        ]
        if not decodes:
            return False
        self._hash(flight, several=len(decodes) > 1 or len(prefills) > 1)
        decode = self._choose(self._decode_policy, decodes, flight)
        if flight.attempts:  # The last attempt may have failed because the two do not reach each other.
            prefills = [worker for worker in prefills if worker.name in decode.prefill_peers] or prefills
        prefill = self._choose(self._prefill_policy, prefills, flight) if prefills else None
        self._assign(flight, decode, prefill)
        return True

    def _hash(self, flight: Flight, several: bool) -> None:
        """Hashes cost time and only matter where there is a choice; a request for prompt logprobs reuses no block."""
        reuses = self.config.kv.prefix_cache and flight.request.sampling.prompt_logprobs is None
        if flight.hashes or not several or not reuses or self.fleet.model is None:
            return
        request = flight.request
        hashes = hash_blocks(request.prompt_token_ids, self.fleet.model.block_size, request.cache_salt)
        flight.hashes = [block.hex() for block in hashes]

    def _choose(self, policy: Policy, workers: list[Worker], flight: Flight) -> Worker:
        """A worker whose engine loop owes an answer for long is left out while others are prompt."""
        patience_s = self.config.router.health_timeout_s
        prompt = [worker for worker in workers if worker.silent_s() <= patience_s] or workers
        candidates = [
            Candidate(
                worker.name,
                cached_blocks=worker.blocks.num_leading(flight.hashes),
                backlog_blocks=worker.backlog_blocks,
                batch=len(worker.assigned) / worker.register.max_running if worker.role == "decode" else 0.0,
            )
            for worker in prompt
        ]
        return self.fleet.workers[policy.choose(candidates).name]

    def _assign(self, flight: Flight, decode: Worker, prefill: Worker | None) -> None:
        flight.decode, flight.prefill, flight.attempts = decode, prefill, flight.attempts + 1
        computes = prefill or decode
        assert self.fleet.model is not None
        num_blocks = math.ceil(len(flight.request.prompt_token_ids) / self.fleet.model.block_size)
        charge = num_blocks - computes.blocks.num_leading(flight.hashes)
        flight.backlog = (computes, charge)
        computes.backlog_blocks += charge
        decode.assigned.add(flight.request_id)
        for worker in self._promise_to(flight):
            worker.blocks.promise(flight.hashes)
        if prefill is not None:
            prefill.assigned.add(flight.request_id)
        try:
            decode.connection.send(Submit(flight.attempt(), prefill.name if prefill is not None else None))
        except WireError as error:
            self._fail(flight, "internal", str(error))

    def _promise_to(self, flight: Flight) -> list[Worker]:
        """Workers that will index this prompt's blocks. A shared pool's index is with its owner, the prefill worker."""
        shares_pool = self.config.topology.channel in SHARED_POOL_CHANNELS
        workers = [flight.prefill] if shares_pool else [flight.decode, flight.prefill]
        return [worker for worker in workers if worker is not None]

    # Ends

    def _unassign(self, flight: Flight, abort: bool = False) -> None:
        """Take a flight off its workers' books. `abort`: the decode worker may still work on it and is told not to; it
        tells its prefill worker. Idempotent."""
        self._end_backlog(flight)
        for worker in self._promise_to(flight):
            worker.blocks.settle(flight.hashes)
        for assignee in (flight.decode, flight.prefill):
            if assignee is not None:
                assignee.assigned.discard(flight.request_id)
        if abort and flight.decode is not None:
            flight.decode.connection.send(Abort(flight.request_id))
        flight.decode = flight.prefill = None

    def _end_backlog(self, flight: Flight) -> None:
        if flight.backlog is not None:
            worker, num_blocks = flight.backlog
            worker.backlog_blocks -= num_blocks
            flight.backlog = None

    def _retry(self, flight: Flight, reason: str, delay_s: float) -> None:
        """An attempt was lost: queue the next one, which goes on after the tokens already delivered."""
        self._unassign(flight, abort=True)
        if flight.attempts > self.config.router.max_retries:
            self._fail(flight, "worker_lost", f"given up after {flight.attempts} attempts; the last: {reason}")
            return
        flight.generation += 1
        self._retries_total += 1
        if delay_s:
            loop = asyncio.get_running_loop()
            flight.retry_timer = loop.call_later(delay_s, self._queue_again, flight)
        else:
            self._queue_again(flight)

    def _queue_again(self, flight: Flight) -> None:
        self._waiting.appendleft(flight)
        asyncio.get_running_loop().call_soon(self._place_waiting)

    def _overdue(self, flight: Flight) -> None:
        allowed_s = flight.request.deadline - flight.request.arrival
        self._fail(
            flight, "deadline", f"the request did not end within {allowed_s:g} s; it was {self._whereabouts(flight)}"
        )

    def _whereabouts(self, flight: Flight) -> str:
        if flight.decode is not None:
            return f"with worker {flight.decode.name}"
        if not self.fleet.by_role("decode"):
            return "waiting for a decode worker"
        if self._needs_prefill_worker and not self.fleet.by_role("prefill"):
            return "waiting for a prefill worker"
        return "waiting for a free slot"

    def _fail(self, flight: Flight, code: FailureCode, message: str, abort: bool = True) -> None:
        flight.stream.fail(GenerationError(code, message))
        self._end(flight, abort)

    def _end(self, flight: Flight, abort: bool) -> None:
        """The one way out, for a finished, aborted or failed request. Idempotent."""
        if flight.ended:
            return
        flight.ended = True
        for timer in (flight.deadline_timer, flight.retry_timer):
            if timer is not None:
                timer.cancel()
        if flight in self._waiting:  # while no worker has room nobody else would take it out
            self._waiting.remove(flight)
        self._unassign(flight, abort)
        del self._flights[flight.request_id]
        if not self._flights:
            self._idle.set()
        self._place_waiting()


def _room(worker: Worker) -> int:
    slots = worker.register.max_running
    return slots + math.ceil(slots * LOOKAHEAD)


def _snapshot(worker: Worker) -> WorkerSnapshot:
    stats = worker.stats
    total = worker.register.num_blocks
    return WorkerSnapshot(
        name=worker.name,
        role=worker.role,
        running=stats.running if stats else 0,
        waiting=stats.waiting if stats else 0,
        pool=stats.pool if stats else PoolCounts(total, total, 0, 0, 0),
        counters=dict(stats.counters) if stats else {},
        assigned=len(worker.assigned),
        device=worker.register.device,
    )
