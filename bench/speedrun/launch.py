"""Starts a server as its own process group, waits until it is healthy, and stops it with everything it started."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.demo import free_port, health, stop
from bench.progress import say
from bench.speedrun.isolation import can_cut_network, without_network

START_LIMIT_S = 300.0
SETUP_LIMIT_S = 600.0
REPORT_EVERY_S = 5.0


class LaunchError(RuntimeError):
    """A server or its build step did not do its part; `timed_out` tells a limit from a failure."""

    def __init__(self, message: str, timed_out: bool = False):
        super().__init__(message)
        self.timed_out = timed_out


@dataclass
class Launch:
    """How to start a server. The variable PORT is added to `environment` (on top of this process' own)."""

    name: str
    command: Sequence[str]
    directory: Path
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def running(launch: Launch, start_limit_s: float = START_LIMIT_S) -> Iterator[str]:
    """The server's URL, once /health answers 200. Raises LaunchError."""
    port = free_port()
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    with launch.log.open("ab") as output:
        process = subprocess.Popen(
            launch.command,
            cwd=launch.directory,
            env=os.environ | launch.environment | {"PORT": str(port)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(launch, process, url, start_limit_s)
            yield url
        finally:
            stop(process)


def wait_until_healthy(launch: Launch, process: subprocess.Popen[bytes], url: str, limit_s: float) -> None:
    started = reported = time.monotonic()
    while health(url) != 200:
        elapsed = time.monotonic() - started
        if process.poll() is not None:
            message = f"{launch.name} ended with status {process.returncode} before it was healthy"
            raise LaunchError(f"{message}; {last_lines(launch.log)}")
        if elapsed > limit_s:
            message = f"{launch.name} was not healthy after {limit_s:g} s"
            raise LaunchError(f"{message}; {last_lines(launch.log)}", timed_out=True)
        if time.monotonic() - reported >= REPORT_EVERY_S:
            reported = time.monotonic()
            print(f"    {launch.name}: not healthy yet ({elapsed:.0f} s)", file=sys.stderr, flush=True)
        time.sleep(0.1)


def run_setup(launch: Launch, limit_s: float = SETUP_LIMIT_S) -> bool:
    """Run setup.sh of the launch's directory, without network; False when there is none. Raises LaunchError."""
    if not (launch.directory / "setup.sh").is_file():
        return False
    cut = "no network" if can_cut_network() else "this system cannot cut the network off"
    say(f"{launch.name}: sh setup.sh, at most {limit_s:g} s, {cut}")
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    with launch.log.open("ab") as output:
        process = subprocess.Popen(
            without_network(["sh", "setup.sh"]),
            cwd=launch.directory,
            env=os.environ | launch.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            message = f"{launch.name}: setup.sh did not end within {limit_s:g} s"
            raise LaunchError(f"{message}; {last_lines(launch.log)}", timed_out=True) from None
        finally:
            stop(process)
    if status:
        raise LaunchError(f"{launch.name}: setup.sh ended with status {status}; {last_lines(launch.log)}")
    return True


def last_lines(log: Path, count: int = 8) -> str:
    lines = log.read_text(errors="replace").splitlines()[-count:]
    return f"last lines of {log}:\n" + "\n".join(f"    {line}" for line in lines)
