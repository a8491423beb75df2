"""A worker without an engine: a real wire connection to a fleet, and a test that decides what it says."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from engine.config import DeploymentConfig
from engine.protocol import (
    Failure,
    Flush,
    Flushed,
    ModelInfo,
    Outputs,
    Peers,
    Ping,
    Pong,
    PoolCounts,
    Register,
    Role,
    Submit,
    ToRouter,
    ToWorker,
    WorkerStats,
)
from engine.request import Request, SamplingParams, TokenDelta
from engine.wire import Codec, Connection, connect

WAIT_S = 10.0
BLOCK_SIZE = 4
CODEC = Codec(ToRouter | ToWorker)


def async_test(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test on a loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 120))

    return run


def make_config(router: dict[str, Any] | None = None, transfer: dict[str, Any] | None = None, **topology: Any):
    sections = {"topology": topology, "router": router or {}, "transfer": {"heartbeat_s": 0.05, **(transfer or {})}}
    return DeploymentConfig.model_validate(sections)


TCP = {"prefill_workers": 1, "channel": "tcp", "local_prefill_max_tokens": 0}


def make_model(**differences: Any) -> ModelInfo:
    values = {
        "name": "tiny",
        "fingerprint": "f00d",
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "block_bytes": 1024,
        "layout": "layers=1,kv=2,heads=1,block=4,dim=32,dtype=float32",
        "vocab_size": 512,
        "max_model_len": 1000,
        "eos_token_ids": [2],
    }
    return ModelInfo(**{**values, **differences})


def make_request(request_id: str, prompt: list[int] | None = None, max_tokens: int = 8, **fields: Any) -> Request:
    return Request(request_id, prompt or [5, 6, 7], SamplingParams(max_tokens=max_tokens, seed=11), **fields)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other threads bring about."""
    end = asyncio.get_running_loop().time() + WAIT_S
    while not condition():
        assert asyncio.get_running_loop().time() < end, "waited in vain"
        await asyncio.sleep(0.002)


class FakeWorker:
    """Answers pings and flushes by itself unless `frozen`; everything else the router sends piles up in `received`."""

    def __init__(self, name: str, role: Role = "decode", *, epoch: str = "", channel: str = "local", **options: Any):
        """options: max_running, and differences of the model from `make_model()`."""
        self.name = name
        self.register = Register(
            name=name,
            role=role,
            epoch=epoch or f"epoch of {name}",
            pid=4242,
            max_running=options.pop("max_running", 4),
            hosts_prefill=options.pop("hosts_prefill", True) and role == "decode",
            model=make_model(**options),
            num_blocks=100,
            channel=channel,
            channel_address=f"{name}.example:1" if role == "prefill" else "",
        )
        self.frozen = False
        self.flushes = 0
        self.peers: Peers | None = None
        self.received: list[Any] = []
        self.closed: str | None = None
        self._taken = 0
        self._connection: Connection | None = None

    async def join(self, address: str) -> "FakeWorker":
        """Connect and register, without waiting for what comes of it."""
        loop = asyncio.get_running_loop()
        self._connection = connect(
            address,
            CODEC,
            lambda message: _post(loop, self._on_message, message),
            lambda reason: _post(loop, self._on_close, reason),
        )
        self.send(self.register)
        return self

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Ping):
            if not self.frozen:
                self.send(Pong(message.nonce, [peer.name for peer in self.peers.prefill] if self.peers else []))
        elif isinstance(message, Flush):
            if not self.frozen:
                self.flushes += 1
                self.send(Flushed(message.nonce, 10))
        elif isinstance(message, Peers):
            self.peers = message
        else:
            self.received.append(message)

    def _on_close(self, reason: str) -> None:
        self.closed = reason

    async def next(self, kind: type) -> Any:
        """The next message of the router, which must be of this kind."""
        await until(lambda: len(self.received) > self._taken)
        message = self.received[self._taken]
        self._taken += 1
        assert isinstance(message, kind), message
        return message

    @property
    def num_submits(self) -> int:
        return sum(isinstance(message, Submit) for message in self.received)

    def send(self, message: ToRouter) -> None:
        assert self._connection is not None
        self._connection.send(message)

    def emit(self, submit: Submit, *token_ids: int, **fields: Any) -> None:
        """Tokens of one submitted request; finish="stop" ends it."""
        finish = fields.pop("finish", None)
        request = submit.request
        delta = TokenDelta(request.request_id, request.generation, list(token_ids), finish_reason=finish, **fields)
        self.send(Outputs([delta]))

    def fail(self, submit: Submit, code: Any, message: str = "made up by the test") -> None:
        self.send(Outputs([], [Failure(submit.request.request_id, submit.request.generation, code, message)]))

    def report(self, added: list[str] = [], removed: list[str] = []) -> None:  # noqa: B006
        self.send(WorkerStats(0, 0, PoolCounts(100, 100, 0, 0, 0), {}, added, removed))

    async def leave(self) -> None:
        """The connection breaks, as when the process is killed."""
        assert self._connection is not None
        self._connection.close()
        await until(lambda: self.closed is not None)


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        pass  # the test is over
