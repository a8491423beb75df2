"""The workers that are up. They connect to the control address, from anywhere, and register; they live as long as their
connection.

    worker                        Fleet                              listeners (dispatcher, supervisor)
      | --- Register -------------> | compatible? name free? -------> worker_up
      | <-- Refused, close -------- | no
      | <-- Peers ----------------- | (decode workers: now and whenever a prefill worker comes or goes)
      | --- Outputs --------------> | ------------------------------> outputs
      | --- WorkerStats ----------> | kept; block reports feed routing
      | <-- Ping, --- Pong -------> | once a second, and for /health
      | connection lost, or silent  | ------------------------------> worker_lost

Everything here runs on the event loop; what the connections' threads receive is passed to it in order.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from engine import wire
from engine.config import DeploymentConfig
from engine.protocol import (
    Flush,
    Flushed,
    ModelInfo,
    Outputs,
    Peer,
    Peers,
    Ping,
    Pong,
    Refused,
    Register,
    Role,
    ToRouter,
    ToWorker,
    WorkerStats,
)
from router.routing import WorkerBlocks

PER_WORKER_FIELDS = ("name", "max_model_len")
"""What may differ between compatible workers: a directory's name, and the room of a pool."""

REGISTER_TIMEOUT_S = 30.0


@dataclass(eq=False)
class Worker:
    """A registered worker. `assigned` (request ids) and `backlog_blocks` (blocks left to prefill for them) are the
    dispatcher's books; `prefill_peers` is what the last Pong said; `asked_at` is when the first open question left."""

    register: Register
    connection: wire.Connection
    stats: WorkerStats | None = None
    blocks: WorkerBlocks = field(default_factory=WorkerBlocks)
    assigned: set[str] = field(default_factory=set)
    backlog_blocks: int = 0
    prefill_peers: list[str] = field(default_factory=list)
    asked_at: float | None = None

    @property
    def name(self) -> str:
        return self.register.name

    @property
    def role(self) -> Role:
        return self.register.role

    def silent_s(self) -> float:
        """Seconds for which the worker's engine loop has owed an answer."""
        return 0.0 if self.asked_at is None else time.monotonic() - self.asked_at


class FleetListener(Protocol):
    """Told about the workers, on the event loop."""

    def worker_up(self, worker: Worker) -> None: ...

    def worker_lost(self, worker: Worker, reason: str, silent: bool) -> None:
        """`silent`: its process may still be there, but its engine loop stopped answering."""

    def outputs(self, worker: Worker, outputs: Outputs) -> None: ...


class Fleet:
    """Registration, the model all workers must agree on, pings, and loss of workers."""

    def __init__(self, config: DeploymentConfig):
        self.config = config
        self.workers: dict[str, Worker] = {}
        self.model: ModelInfo | None = None
        self.listeners: list[FleetListener] = []
        self.workers_lost_total = 0
        self._max_model_lens: dict[str, int] = {}
        self._connections: dict[wire.Connection, Worker | None] = {}
        self._answers: dict[int, tuple[Worker, asyncio.Future[Pong | Flushed | None]]] = {}
        self._nonce = 0
        self._listener: wire.Listener | None = None
        self._pinger: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen for workers (port 0: a free one) and return the address. Raises wire.WireError."""
        self._loop = asyncio.get_running_loop()
        self._listener = wire.Listener(host, port, wire.Codec(ToRouter | ToWorker), self._accept)
        self._pinger = asyncio.create_task(self._ping_for_ever())
        return self._listener.address

    async def close(self) -> None:
        """Stop listening and drop every worker. Idempotent."""
        if self._pinger is not None:
            self._pinger.cancel()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.close()
        for worker in list(self.workers.values()):
            self._lose(worker, "the router stops")

    def by_role(self, role: Role) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.role == role]

    def served_model(self, expected: Collection[str] = ()) -> ModelInfo | None:
        """The fleet's model, with the longest request that every worker can hold: those up, and those of the names
        `expected` that were up before. None before the first worker."""
        lengths = [length for name, length in self._max_model_lens.items() if name in self.workers or name in expected]
        return replace(self.model, max_model_len=min(lengths)) if self.model and lengths else self.model

    async def ping(self, worker: Worker, timeout_s: float) -> tuple[float, Pong] | None:
        """Round trip through the worker's engine loop: milliseconds and its answer, or None when it took too long."""
        start = time.monotonic()
        pong = await self._ask(worker, Ping, timeout_s)
        return ((time.monotonic() - start) * 1000, pong) if isinstance(pong, Pong) else None

    async def flush(self, worker: Worker, timeout_s: float) -> int | None:
        """Empty the worker's prefix cache; blocks dropped, or None when it did not answer in time."""
        flushed = await self._ask(worker, Flush, timeout_s)
        return flushed.num_blocks if isinstance(flushed, Flushed) else None

    async def _ask(
        self, worker: Worker, question: Callable[[int], Ping | Flush], timeout_s: float
    ) -> Pong | Flushed | None:
        if self.workers.get(worker.name) is not worker:
            return None
        self._nonce += 1
        nonce, answer = self._nonce, self._loop.create_future()
        self._answers[nonce] = (worker, answer)
        if worker.asked_at is None:
            worker.asked_at = time.monotonic()
        worker.connection.send(question(nonce))
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            return None
        finally:
            self._answers.pop(nonce, None)

    async def _ping_for_ever(self) -> None:
        """Keeps `prefill_peers` and `silent_s` fresh, gives up on a worker that is silent for `transfer.lease_s`."""
        transfer = self.config.transfer
        while True:
            await asyncio.sleep(transfer.heartbeat_s)
            for worker in list(self.workers.values()):
                if worker.silent_s() > transfer.lease_s:
                    self._lose(worker, f"its engine loop did not answer for {transfer.lease_s:g} s", silent=True)
                elif worker.asked_at is None:
                    self._nonce += 1
                    worker.asked_at = time.monotonic()
                    worker.connection.send(Ping(self._nonce))

    # From the connections' threads to the loop

    def _accept(self, connection: wire.Connection) -> None:
        connection.on_message = lambda message: self._post(self._received, connection, message)
        connection.on_close = lambda reason: self._post(self._closed, connection, reason)
        self._post(self._opened, connection)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            pass  # The loop is closed: the router is gone, nobody is left to tell.

    # On the loop

    def _opened(self, connection: wire.Connection) -> None:
        self._connections[connection] = None
        self._loop.call_later(REGISTER_TIMEOUT_S, self._close_stranger, connection)

    def _close_stranger(self, connection: wire.Connection) -> None:
        if connection in self._connections and self._connections[connection] is None:
            connection.close()

    def _closed(self, connection: wire.Connection, reason: str) -> None:
        worker = self._connections.pop(connection, None)
        if worker is not None:
            self._lose(worker, reason)

    def _received(self, connection: wire.Connection, message: ToRouter) -> None:
        if connection not in self._connections:
            return
        worker = self._connections[connection]
        if worker is None:
            if isinstance(message, Register):
                self._register(connection, message)
            else:
                connection.close()
        elif self.workers.get(worker.name) is not worker:
            return
        elif isinstance(message, Outputs):
            for listener in self.listeners:
                listener.outputs(worker, message)
        elif isinstance(message, WorkerStats):
            worker.stats = message
            worker.blocks.report(message.blocks_added, message.blocks_removed)
        elif isinstance(message, (Pong, Flushed)):
            self._answered(worker, message)

    def _answered(self, worker: Worker, answer: Pong | Flushed) -> None:
        worker.asked_at = None
        if isinstance(answer, Pong):
            worker.prefill_peers = answer.prefill_peers
        asker, future = self._answers.get(answer.nonce, (None, None))
        if asker is worker and future is not None and not future.done():
            future.set_result(answer)

    def _register(self, connection: wire.Connection, register: Register) -> None:
        known = self.workers.get(register.name)
        if known is not None and known.register.epoch == register.epoch:
            self._lose(known, "it connected again")
        reason = self._why_not(register)
        if reason is not None:
            connection.send(Refused(reason))
            connection.close()
            return
        if not self.workers:
            self.model = register.model  # the first one sets it for those that join
        self._max_model_lens[register.name] = register.model.max_model_len
        worker = Worker(register, connection)
        self._connections[connection] = self.workers[register.name] = worker
        if worker.role == "prefill":
            self._announce_peers()
        else:
            worker.connection.send(self._peers())
        for listener in self.listeners:
            listener.worker_up(worker)

    def _why_not(self, register: Register) -> str | None:
        """Why a worker cannot join, in one line that names the field and both values; None when it can."""
        known = self.workers.get(register.name)
        if known is not None:
            return (
                f"name {register.name!r} is taken by process {known.register.pid} at {known.connection.peer_address}; "
                f"give this worker another --name"
            )
        channel = self.config.topology.channel
        if register.channel != channel:
            return f"channel differs: the fleet has {channel!r}, worker {register.name} has {register.channel!r}"
        if register.role == "prefill" and not register.channel_address:
            return f"channel_address is empty: decode workers cannot reach prefill worker {register.name}"
        if self.model is not None and self.workers:
            theirs = asdict(register.model)
            for key, ours in asdict(self.model).items():
                if key not in PER_WORKER_FIELDS and theirs[key] != ours:
                    return f"{key} differs: the fleet has {ours!r}, worker {register.name} has {theirs[key]!r}"
        return None

    def _lose(self, worker: Worker, reason: str, silent: bool = False) -> None:
        """The one way out of the fleet. Idempotent."""
        if self.workers.get(worker.name) is not worker:
            return
        del self.workers[worker.name]
        self.workers_lost_total += 1
        worker.connection.close()
        for asked, future in list(self._answers.values()):
            if asked is worker and not future.done():
                future.set_result(None)
        if worker.role == "prefill":
            self._announce_peers()
        for listener in self.listeners:
            listener.worker_lost(worker, reason, silent)

    def _peers(self) -> Peers:
        prefill = self.by_role("prefill")
        return Peers([Peer(w.name, w.register.channel_address, w.register.epoch) for w in prefill])

    def _announce_peers(self) -> None:
        for worker in self.by_role("decode"):
            worker.connection.send(self._peers())
