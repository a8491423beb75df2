"""What the dispatcher tells about itself: for /health and for /metrics."""

from dataclasses import dataclass, field

from engine.protocol import PoolCounts, Role


@dataclass
class WorkerHealth:
    """round_trip_ms: a ping through the worker's engine loop; None when it did not answer in time (or is not there).
    detail: one line, "" when there is nothing to say."""

    name: str
    role: Role
    ok: bool
    round_trip_ms: float | None
    detail: str = ""


@dataclass
class HealthReport:
    """ok: a request submitted now can be served. starting: no complete set of workers has been up yet."""

    ok: bool
    draining: bool
    workers: list[WorkerHealth]
    starting: bool = False

    @property
    def status(self) -> str:
        """One word: ok, draining, starting or unavailable."""
        if self.draining:
            return "draining"
        if self.ok:
            return "ok"
        return "starting" if self.starting else "unavailable"


@dataclass
class WorkerSnapshot:
    """A registered worker as its last stats message described it. `assigned`: requests the router has on it."""

    name: str
    role: Role
    running: int
    waiting: int
    pool: PoolCounts
    counters: dict[str, float] = field(default_factory=dict)
    assigned: int = 0
    device: str = ""


@dataclass
class FleetSnapshot:
    """requests_in_flight counts every accepted, unended request, requests_waiting those of them not with a worker now;
    in_flight_limit is where 429 begins. The *_total numbers only rise."""

    workers: list[WorkerSnapshot]
    requests_in_flight: int
    requests_waiting: int
    in_flight_limit: int
    retries_total: int = 0
    stale_deltas_total: int = 0
    workers_lost_total: int = 0
    draining: bool = False
