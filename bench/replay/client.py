"""The open-loop client: sends every request at its scheduled time and notes when each piece of the answer came.

Answers are kept as received, with their times, and read after the level (response.py): while requests run, the client
does nothing but send and receive.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.replay.transport import Endpoint, exchange
from bench.replay.workload import PlannedRequest

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
    """responses by request index; loop_lag_ms: how late the client's event loop woke, sampled every 5 ms."""

    responses: list[RawResponse]
    started_unix: float
    loop_lag_ms: list[float]


OnEvent = Callable[[str, RawResponse], None]
"""Called with "sent" and "ended"."""


async def run_level(
    endpoint: Endpoint, planned: list[PlannedRequest], bodies: list[bytes], timeout_s: float, on_event: OnEvent
) -> LevelRun:
    """Send every request at its arrival time, whatever the server does, and wait for all to end.

    A request that has not ended `timeout_s` after its scheduled arrival is given up.
    """
    started_unix = time.time() + START_DELAY_S
    start = time.perf_counter() + START_DELAY_S
    lags: list[float] = []
    probe = asyncio.create_task(probe_loop_lag(lags))
    try:
        responses = await asyncio.gather(
            *(
                send_one(endpoint, RawResponse(request.index, request.arrival_s), body, start, timeout_s, on_event)
                for request, body in zip(planned, bodies)
            )
        )
    finally:
        probe.cancel()
    return LevelRun(responses, started_unix, lags)


async def send_one(
    endpoint: Endpoint, response: RawResponse, body: bytes, start: float, timeout_s: float, on_event: OnEvent
) -> RawResponse:
    """Wait for the scheduled time, send, receive. Never raises for what the server or the network does."""
    request = endpoint.request(body)
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
    on_event("ended", response)
    return response


async def probe_loop_lag(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_PROBE_S)
        lags.append((time.perf_counter() - before - LAG_PROBE_S) * 1e3)
