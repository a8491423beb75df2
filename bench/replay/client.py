"""The client: sends every request when it is due and notes when each piece of the answer came.

Answers are kept as received, with their times, and read after the level (response.py): while requests run, the client
does nothing but send and receive.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.replay.plan import PlannedRequest, check_order
from bench.replay.transport import Endpoint, exchange

START_DELAY_S = 0.1
LAG_PROBE_S = 0.005


@dataclass
class RawResponse:
    """One request as it went over the wire. Times in seconds from the start of the level.

    chunks    (arrival time, bytes) of the connection
    failure   why the transfer ended early, "" otherwise; timed_out: the client gave up
    """

    index: int
    scheduled: float
    sent: float = 0.0
    ended: float = 0.0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str = ""
    timed_out: bool = False

    @property
    def looks_ok(self) -> bool:
        """For the progress display, before the answer is read."""
        return not self.failure and bool(self.chunks) and self.chunks[0][1].split(b" ", 2)[1:2] == [b"200"]


@dataclass
class LevelRun:
    """responses by request index; loop_lag_ms: how late the client's event loop woke, sampled every 5 ms; client_cpu:
    the share of one core that this process used."""

    responses: list[RawResponse]
    started_unix: float
    loop_lag_ms: list[float]
    client_cpu: float = 0.0


OnEvent = Callable[[str, RawResponse], None]
"""Called with "sent" and "ended"."""


async def run_level(
    endpoint: Endpoint, planned: list[PlannedRequest], bodies: list[bytes], timeout_s: float, on_event: OnEvent
) -> LevelRun:
    """Send every request when it is due, and wait for all to end.

    One that waits for nothing goes out at its arrival time, whatever the server does. A request that has not ended
    `timeout_s` after it was due is given up; what waits for it goes on all the same.
    """
    check_order(planned)
    started_unix = time.time() + START_DELAY_S
    start = time.perf_counter() + START_DELAY_S
    lags: list[float] = []
    used = time.process_time()
    ended = [asyncio.Event() for _ in planned]
    probe = asyncio.create_task(probe_loop_lag(lags))
    try:
        responses = await asyncio.gather(
            *(
                send_one(endpoint, request, body, start, timeout_s, ended, on_event)
                for request, body in zip(planned, bodies)
            )
        )
    finally:
        probe.cancel()
    wall = time.perf_counter() - start
    return LevelRun(responses, started_unix, lags, (time.process_time() - used) / wall)


async def send_one(
    endpoint: Endpoint,
    planned: PlannedRequest,
    body: bytes,
    start: float,
    timeout_s: float,
    ended: list[asyncio.Event],
    on_event: OnEvent,
) -> RawResponse:
    """Wait until it is due, send, receive. Never raises for what the server or the network does."""
    request = endpoint.request(body)
    response = RawResponse(planned.index, planned.arrival_s)
    if planned.after:
        for earlier in planned.after:
            await ended[earlier].wait()
        response.scheduled = max(planned.arrival_s, time.perf_counter() - start + planned.think_s)
    await asyncio.sleep(start + response.scheduled - time.perf_counter())
    response.sent = time.perf_counter() - start
    on_event("sent", response)
    try:
        limit = response.scheduled + timeout_s - response.sent
        await asyncio.wait_for(exchange(endpoint, request, start, response.chunks), limit)
    except asyncio.TimeoutError:
        response.timed_out = True
        response.failure = f"no end within {timeout_s:g} s"
    except OSError as error:
        response.failure = f"connection: {error or type(error).__name__}"
    response.ended = time.perf_counter() - start
    ended[planned.index].set()
    on_event("ended", response)
    return response


async def probe_loop_lag(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_PROBE_S)
        lags.append((time.perf_counter() - before - LAG_PROBE_S) * 1e3)
