"""Starts the disaggregated service on the CPU, replays a small coding-agent workload against it, stops it.

Needs the embedded model (`make model`); `make demo` makes it first.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.facts import ROOT
from bench.progress import say
from bench.replay.__main__ import main as replay

MODEL_DIR = ROOT / "models" / "smollm2-135m-instruct"
OUTPUT_DIR = ROOT / "build" / "demo"
CONFIG = "disagg-cpu-shm"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 40.0
REPORT_EVERY_S = 3.0

WORKLOAD = (
    "--prefix-tokens 448 --new-tokens 64 --output-tokens 32 --requests 24 --warmup-gap-s 4 --qps 0.5 1 "
    "--slo-ttft-ms 2000 --slo-tpot-ms 400 --flush-cache"
).split()
"""Sized for two CPU cores: seven cached blocks of 64 tokens and one new one a request."""


class DemoError(RuntimeError):
    """The service did not come up; the message says what happened and where its log is."""


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 when the service did not start or a request failed."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.demo", description=__doc__.partition("\n")[0])
    parser.parse_args(argv)
    if not (MODEL_DIR / "config.json").is_file():
        print(f"demo: no model in {MODEL_DIR.relative_to(ROOT)}; run: make model", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped on the way out
    port, record = free_port(), OUTPUT_DIR / "replay.json"
    try:
        with running_server(port, OUTPUT_DIR / "server.log") as url:
            say("replay: eight coding-agent sessions, each a 448-token prefix; cache flushed before each load level")
            status = replay(["--url", url, "--json", str(record), *WORKLOAD])
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    if status in (0, 1):
        say(f"report: {record.with_suffix('.html').relative_to(ROOT)}")
    if status:
        print(f"demo: the replay failed (exit status {status}); server log: build/demo/server.log", file=sys.stderr)
    return 1 if status else 0


@contextmanager
def running_server(port: int, log: Path) -> Iterator[str]:
    """The service's URL, once it is healthy. Stopped on the way out, whatever happens. Raises DemoError."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "MODEL_DIR": str(MODEL_DIR),
        "PORT": str(port),
        "CONFIG": CONFIG,
        "PYTHON": sys.executable,
    }
    say(f"service: CONFIG={CONFIG} MODEL_DIR={MODEL_DIR.relative_to(ROOT)} PORT={port} sh start_server.sh")
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["sh", str(ROOT / "start_server.sh")],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(process, url, log)
            yield url
        finally:
            stop(process)


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    started = reported = time.monotonic()
    while True:
        elapsed = time.monotonic() - started
        if process.poll() is not None:
            raise DemoError(f"the server ended with status {process.returncode} before it was healthy; {tail(log)}")
        status = health(url)
        if status == 200:
            say(f"service: healthy after {elapsed:.0f} s at {url}")
            return
        if elapsed > START_TIMEOUT_S:
            raise DemoError(f"the server was not healthy after {START_TIMEOUT_S:.0f} s; {tail(log)}")
        if time.monotonic() - reported >= REPORT_EVERY_S:
            reported = time.monotonic()
            state = f"/health answers {status}" if status else "not listening yet"
            print(f"    waiting for the workers: {state} ({elapsed:.0f} s)", file=sys.stderr, flush=True)
        time.sleep(0.2)


def health(url: str) -> int | None:
    """HTTP status of /health, None while nobody answers."""
    try:
        return httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code
    except httpx.HTTPError:
        return None


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, which drains and stops its workers; what is left of its process group is killed."""
    if process.poll() is None:
        say("service: stopping")
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"    it did not stop within {STOP_TIMEOUT_S:.0f} s and is killed", file=sys.stderr)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def tail(log: Path, lines: int = 15) -> str:
    last = log.read_text(errors="replace").splitlines()[-lines:]
    return f"last lines of {log.relative_to(ROOT)}:\n" + "\n".join(f"    {line}" for line in last)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
