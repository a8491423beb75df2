"""What the server tells its operator: what was chosen and why, and which workers come and go."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.config import DeploymentConfig
from engine.protocol import Outputs
from router.fleet import Worker
from router.supervisor import Supervisor
from router.version import VERSION


@dataclass(frozen=True)
class ServerOptions:
    """control: (host, port) where workers register, port 0 for a free one. starts_workers: False leaves that to others.
    drafter_dir: a speculative drafter's directory, which this build does not use."""

    config: DeploymentConfig
    config_file: str
    model_dir: Path
    port: int
    control: tuple[str, int] = ("127.0.0.1", 0)
    starts_workers: bool = True
    drafter_dir: str = ""


def start_up_lines(options: ServerOptions, control_address: str, worker_names: list[str]) -> list[str]:
    """One line for each choice."""
    config = options.config
    device = "each worker takes a GPU if it finds one, else the CPU" if config.device == "auto" else "as configured"
    cores = f"{os.cpu_count()} cores / {config.num_workers} workers"
    lines = [
        f"Baton {VERSION}, configuration {options.config_file}: {' '.join(config.description.split()) or '-'}",
        f"model {options.model_dir}, {'random weights' if config.model.weights == 'random' else 'its own weights'}",
        f"topology: {_topology(config)}",
        f"device {config.device}: {device}; {config.worker_threads} CPU threads a worker "
        f"({'as configured' if config.threads else cores})",
    ]
    if options.drafter_dir:
        lines.append(f"DRAFTER_BYO_DIR={options.drafter_dir} is ignored: this build has no speculative decoding")
    started = f"started here: {', '.join(worker_names)}" if worker_names else "none is started here (--no-workers)"
    lines.append(f"workers register at {control_address}; {started}")
    lines.append(f"API at http://{config.router.host}:{options.port}/v1; /health answers 503 until the workers are up")
    return lines


def _topology(config: DeploymentConfig) -> str:
    topology = config.topology
    if topology.prefill_workers == 0:
        return f"colocated, decode workers with both engines: {topology.decode_workers}; no KV block is moved"
    limit = topology.local_prefill_max_tokens
    rule = {
        0: "every prompt goes to a prefill worker",
        "unlimited": "decode workers prefill their own prompts",
    }.get(limit, f"prompts with more than {limit} uncached tokens go to a prefill worker")
    return (
        f"disaggregated, {topology.prefill_workers} prefill and {topology.decode_workers} decode workers joined by "
        f"channel {topology.channel}; {rule} (local_prefill_max_tokens: {limit})"
    )


class Announcer:
    """A fleet listener that logs workers' comings and goings and tells the supervisor of them."""

    def __init__(self, supervisor: Supervisor, log: Callable[[str], None]):
        self._supervisor = supervisor
        self._log = log
        self._start = time.monotonic()
        self._missing = set(supervisor.expected())

    def worker_up(self, worker: Worker) -> None:
        self._supervisor.registered(worker.name)
        register, model = worker.register, worker.register.model
        pool = f"{register.num_blocks} KV blocks of {model.block_size} tokens"
        if not register.num_blocks:
            pool = "no KV pool of its own"
        self._log(
            f"{worker.role} worker {worker.name} is up: process {register.pid}, {register.device}, {model.dtype}, "
            f"{pool}, requests of up to {model.max_model_len} tokens, {register.max_running} at once"
        )
        if worker.name in self._missing:
            self._missing.discard(worker.name)
            if not self._missing:
                self._log(f"all workers are up after {time.monotonic() - self._start:.1f} s")

    def worker_lost(self, worker: Worker, reason: str, silent: bool) -> None:
        self._log(f"{worker.role} worker {worker.name} was lost: {reason}")
        if silent:
            self._supervisor.replace(worker.name, worker.register.pid)

    def outputs(self, worker: Worker, outputs: Outputs) -> None:
        """Tokens are not its business."""
