"""What the two kinds of worker process have in common: arguments, the link to the router, the engine loop."""

import argparse
import logging
import os
import signal
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import ConfigError, DeploymentConfig, load_config
from engine.inbox import Inbox
from engine.models.config import ModelError
from engine.protocol import (
    Flush,
    Flushed,
    Outputs,
    Ping,
    Pong,
    Refused,
    Register,
    ToRouter,
    ToWorker,
    WorkerStats,
)
from engine.quantize.floor import choose_precision
from engine.runner import ModelRunner
from engine.wire import Codec, Connection, WireError, connect

log = logging.getLogger("worker")

ROUTER_CODEC = Codec(ToRouter | ToWorker)
STATS_PERIOD_S = 0.1
IDLE_WAIT_S = 0.25
RECONNECT_S = 0.5


@dataclass
class WorkerArguments:
    name: str
    router: str
    config: DeploymentConfig
    model_dir: str
    supervised: bool
    host: str


class _RouterLost:
    """Inbox item: the connection to the router closed."""

    def __init__(self, reason: str):
        self.reason = reason


def parse_arguments(role: str, default_name: str) -> WorkerArguments:
    """Command line of a worker. Exits with one line when the configuration cannot be used."""
    parser = argparse.ArgumentParser(
        prog=f"python3 -m {role}_worker",
        description=f"A {role} worker. It loads the model, registers with the router by address, and serves until "
        "SIGTERM. start_server.sh starts the workers of one host; start more anywhere with this command.",
    )
    parser.add_argument("--name", default=default_name, help="unique among the router's workers (%(default)s)")
    parser.add_argument("--router", required=True, metavar="HOST:PORT", help="the router's control address")
    parser.add_argument("--config", default="auto", help="name in configs/ or path of a YAML file (%(default)s)")
    parser.add_argument("--model-dir", default=os.environ.get("MODEL_DIR"), help="default: $MODEL_DIR")
    parser.add_argument("--supervised", action="store_true", help="exit when the router's connection is lost")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of this host that other workers can reach (%(default)s)"
    )
    given = parser.parse_args()
    try:
        config = load_config(given.config)
    except ConfigError as error:
        sys.exit(f"{given.name}: {error}")
    model_dir = given.model_dir or config.model.dir
    if not model_dir:
        sys.exit(f"{given.name}: no model: give --model-dir, set MODEL_DIR, or model.dir in the configuration")
    return WorkerArguments(given.name, given.router, config, model_dir, given.supervised, given.host)


def load_runner(arguments: WorkerArguments, decodes: bool) -> ModelRunner:
    """The model on its device, without a pool. `decodes`: it will run a batch, not only prefill."""
    config = arguments.config
    torch.set_num_threads(config.worker_threads)
    device = config.choose_device(torch.cuda.is_available())
    log.info("loading %s on %s (%d CPU threads)", arguments.model_dir, device, config.worker_threads)
    start = time.monotonic()
    options: dict[str, Any] = {
        "weights": config.model.weights,
        "dtype": config.model.dtype,
        "device": device,
        "block_size": config.kv.block_size,
        "max_model_len": config.model.max_model_len,
        "precision": choose_precision(arguments.model_dir, config.model, device),
    }
    if device == "cpu":
        runner = ModelRunner.load(arguments.model_dir, **options)
    else:
        from engine.gpu_runner import load_gpu_runner  # its kernels need Triton, which a CPU does without

        runner = load_gpu_runner(arguments.model_dir, config, decodes, options)
    log.info("model ready after %.1f s", time.monotonic() - start)
    return runner


class Worker(ABC):
    """An engine loop. Everything but message arrival happens on the thread that calls `run`."""

    def __init__(self, arguments: WorkerArguments):
        self.arguments = arguments
        self.config = arguments.config
        self.name = arguments.name
        self.epoch = uuid.uuid4().hex
        self.pid = os.getpid()
        self.inbox = Inbox()
        self.router: Connection | None = None
        self._stopping = False
        self._next_stats = 0.0
        self._next_connect = 0.0

    @abstractmethod
    def registration(self) -> Register: ...

    @abstractmethod
    def handle(self, message: Any) -> None:
        """A message of the router that is this kind of worker's own business, or an inbox item of its own."""

    @abstractmethod
    def turn(self) -> bool:
        """One round of the engine loop. Returns whether anything was computed or moved."""

    @abstractmethod
    def stats(self, with_index: bool) -> WorkerStats:
        """Figures for the router. `with_index`: the router is new, tell it the whole prefix index, not only its
        changes."""

    @abstractmethod
    def flush(self) -> int:
        """Empty the prefix cache; returns blocks dropped."""

    @abstractmethod
    def router_lost(self) -> None:
        """Requests of a router that is gone have nobody waiting for them."""

    @abstractmethod
    def close(self) -> None: ...

    def take_outputs(self) -> Outputs | None:
        return None

    def prefill_peers(self) -> list[str]:
        return []

    def run(self) -> None:
        """Serve until SIGTERM (or the router is lost, when supervised)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        busy = False
        try:
            while not self._stopping:
                self._connect()
                for item in self.inbox.take(0.0 if busy else IDLE_WAIT_S):
                    self._dispatch(item)
                busy = self.turn()
                self._publish()
        finally:
            self.close()
            if self.router is not None:
                self.router.close()
                self.router.wait_closed()

    def _stop(self, *_: object) -> None:
        self._stopping = True
        self.inbox.wake()

    def _connect(self) -> None:
        if self.router is not None or time.monotonic() < self._next_connect:
            return
        self._next_connect = time.monotonic() + RECONNECT_S
        try:
            self.router = connect(
                self.arguments.router,
                ROUTER_CODEC,
                self.inbox.put,
                lambda reason: self.inbox.put(_RouterLost(reason)),
            )
        except WireError as error:
            if self.arguments.supervised:
                sys.exit(f"{self.name}: {error}")
            log.info("%s; trying again", error)
            return
        self.router.send(self.registration())
        self.router.send(self.stats(with_index=True))

    def _dispatch(self, item: Any) -> None:
        match item:
            case Ping(nonce):
                self._send(Pong(nonce, self.prefill_peers()))
            case Flush(nonce):
                self._send(Flushed(nonce, self.flush()))
            case Refused(reason):
                sys.exit(f"{self.name}: the router refused this worker: {reason}")
            case _RouterLost(reason=reason):
                log.info("router connection lost: %s", reason)
                self.router = None
                self.router_lost()
                if self.arguments.supervised:
                    self._stopping = True
            case _:
                self.handle(item)

    def _publish(self) -> None:
        outputs = self.take_outputs()
        if outputs is not None:
            self._send(outputs)
        now = time.monotonic()
        if self.router is None or now < self._next_stats:
            return
        self._send(self.stats(with_index=False))
        self._next_stats = now + STATS_PERIOD_S

    def _send(self, message: ToRouter) -> None:
        if self.router is not None:
            self.router.send(message)


def run_worker(
    make_worker: Callable[[WorkerArguments], Worker], role: str, default_name: str, channel_error: type[Exception]
) -> None:
    """Entry point of both worker processes. Problems with the configuration, the model, an address or a channel end the
    process with one line and exit code 1."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    arguments = parse_arguments(role, default_name)
    try:
        worker = make_worker(arguments)
        worker.run()
    except (ConfigError, ModelError, WireError, channel_error) as error:
        sys.exit(f"{arguments.name}: {error}")
    except torch.OutOfMemoryError as error:
        used = " ".join(str(error).split())[:160]
        sys.exit(
            f"{arguments.name}: GPU memory is short: {used}; lower kv.gpu_memory_share, kv.pool_tokens, "
            "prefill.chunk_tokens or decode.max_running"
        )
