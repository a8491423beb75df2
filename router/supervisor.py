"""Starts this host's worker processes, keeps them running, and stops them."""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engine.config import DeploymentConfig
from engine.protocol import Role
from kv_transfer.choose import find_gpus

ROOT = Path(__file__).resolve().parent.parent
MIN_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
STEADY_S = 30.0
STOP_GRACE_S = 5.0

Log = Callable[[str], None]


class WorkerFailed(RuntimeError):
    """A worker ended before it ever registered: trying again would not help. One line, the worker's own last one."""


@dataclass(frozen=True)
class WorkerSpec:
    """How one worker is started. `environment` is added to the router's own."""

    name: str
    role: Role
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def worker_specs(config: DeploymentConfig, config_file: str, model_dir: str, router: str) -> list[WorkerSpec]:
    """The workers of a deployment: p0, p1, ... and d0, d1, ..."""
    topology = config.topology
    roles: list[tuple[Role, int]] = [("prefill", topology.prefill_workers), ("decode", topology.decode_workers)]
    environment = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(config.worker_threads),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),  # see engine/__init__.py
    }
    specs: list[WorkerSpec] = []
    gpus = _visible_gpus(config)
    for role, count in roles:
        for index in range(count):
            name = f"{role[0]}{index}"
            command = [sys.executable, "-m", f"{role}_worker", "--name", name, "--router", router]
            command += ["--config", config_file, "--model-dir", model_dir, "--supervised"]
            specs.append(WorkerSpec(name, role, command, environment | gpus[len(specs)]))
    return specs


def _visible_gpus(config: DeploymentConfig) -> list[dict[str, str]]:
    """Environment by which each worker finds the GPU it is to use first, and the others behind it. Empty on a host
    without GPUs, and for a single worker, which uses the first unless the configuration says otherwise."""
    none: list[dict[str, str]] = [{}] * config.num_workers
    if config.device == "cpu" or (config.num_workers == 1 and config.topology.gpus is None):
        return none
    num_gpus = find_gpus().number
    if num_gpus == 0:
        return none
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = names or [str(index) for index in range(num_gpus)]
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join([names[gpu], *(name for name in names if name != names[gpu])])}
        for gpu in config.worker_gpus(num_gpus)
    ]


@dataclass(eq=False)
class _Child:
    spec: WorkerSpec
    process: asyncio.subprocess.Process | None = None
    registered: bool = False
    last_line: str = ""

    @property
    def running(self) -> asyncio.subprocess.Process | None:
        return self.process if self.process is not None and self.process.returncode is None else None


class Supervisor:
    """One task a worker: start it, pass its output on, wait, start it again after a pause that doubles from 0.5 s to
    10 s (and is 0.5 s again once it ran for 30 s).

    failed   set to WorkerFailed when a worker ends before its first registration
    log      gets the workers' output, a line at a time, with their names in front
    """

    def __init__(
        self,
        specs: list[WorkerSpec],
        log: Log,
        min_backoff_s: float = MIN_BACKOFF_S,
        max_backoff_s: float = MAX_BACKOFF_S,
        steady_s: float = STEADY_S,
    ):
        self._children = {spec.name: _Child(spec) for spec in specs}
        self._log = log
        self._min_backoff_s, self._max_backoff_s, self._steady_s = min_backoff_s, max_backoff_s, steady_s
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(child)) for child in self._children.values()]

    def expected(self) -> dict[str, Role]:
        """Workers that are up or will be again."""
        if self._stopping.is_set():
            return {}
        return {name: child.spec.role for name, child in self._children.items()}

    def pids(self) -> dict[str, int]:
        """Process ids of the workers that run now."""
        return {name: child.running.pid for name, child in self._children.items() if child.running}

    def registered(self, name: str) -> None:
        """The worker works: from now on it is started again whatever happens."""
        if name in self._children:
            self._children[name].registered = True

    def replace(self, name: str, pid: int) -> None:
        """Kill a worker that no longer answers, so that it is started again. Nothing happens if `pid` is not ours."""
        child = self._children.get(name)
        if child is not None and child.running is not None and child.running.pid == pid:
            child.running.kill()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM to every worker, SIGKILL to those still there after `grace_s`. Idempotent."""
        self._stopping.set()
        for child in self._children.values():
            if child.running is not None:
                child.running.terminate()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        self.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """SIGKILL to every worker, now."""
        self._stopping.set()
        for child in self._children.values():
            if child.running is not None:
                child.running.kill()

    async def _keep(self, child: _Child) -> None:
        name, backoff_s = child.spec.name, self._min_backoff_s
        while not self._stopping.is_set():
            start = time.monotonic()
            ended = await self._run(child)
            if self._stopping.is_set():
                return
            if not child.registered:
                line = child.last_line.removeprefix(f"{name}: ") or "it printed nothing"
                if not self.failed.done():
                    self.failed.set_exception(WorkerFailed(f"worker {name} did not start ({ended}): {line}"))
                return
            if time.monotonic() - start >= self._steady_s:
                backoff_s = self._min_backoff_s
            self._log(f"worker {name} ended ({ended}); starting it again in {backoff_s:g} s")
            try:
                await asyncio.wait_for(self._stopping.wait(), backoff_s)
            except asyncio.TimeoutError:
                pass
            backoff_s = min(2 * backoff_s, self._max_backoff_s)

    async def _run(self, child: _Child) -> str:
        """One life of a worker; says how it ended."""
        child.last_line = ""
        try:
            child.process = await asyncio.create_subprocess_exec(
                *child.spec.command,
                cwd=ROOT,
                env={**os.environ, **child.spec.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in a terminal is for the router, which drains first.
            )
        except OSError as error:
            child.last_line = f"{child.spec.command[0]}: {error.strerror or error}"
            return "not executable"
        process = child.process
        if self._stopping.is_set():
            process.terminate()
        pipes = [asyncio.create_task(self._pass_on(child, pipe)) for pipe in (process.stdout, process.stderr) if pipe]
        code = await process.wait()
        # What a grandchild holds open is not waited for.
        _, unfinished = await asyncio.wait(pipes, timeout=1.0)
        for pipe in unfinished:
            pipe.cancel()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def _pass_on(self, child: _Child, pipe: asyncio.StreamReader) -> None:
        rest = b""
        while data := await pipe.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._pass_on_line(child, line)
        self._pass_on_line(child, rest)

    def _pass_on_line(self, child: _Child, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            child.last_line = text
            self._log(f"[{child.spec.name}] {text}")
