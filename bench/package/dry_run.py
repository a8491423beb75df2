"""Starts an unpacked submission the way a grader does and asks it for a few tokens; prints what happened as JSON.

Runs as a process of its own, so that it can run where there is no network: in a namespace that holds only a loopback
device, which it switches on.
"""

import argparse
import fcntl
import json
import os
import socket
import struct
import sys
from pathlib import Path

import httpx

from bench.package.validate import Check
from bench.speedrun.launch import Launch, LaunchError, run_setup, running

SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1
OUTSIDE = ("192.0.2.1", 443)
"""Reserved for documentation (RFC 5737): nothing answers there, and without a network nothing is even sent."""
MAX_TOKENS = 8
BODY = {"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": MAX_TOKENS, "temperature": 0}


def dry_run(submission: Path, model_dir: Path, python: Path, log: Path, start_limit_s: float) -> list[Check]:
    """Every check in order, up to the first that failed."""
    checks: list[Check] = []
    environment = {
        "MODEL_DIR": str(model_dir),
        "PYTHON": str(python),
        "HOME": str(log.parent),
        "XDG_CACHE_HOME": str(log.parent / "cache"),
    }
    launch = Launch("submission", ["sh", "start_server.sh"], submission, log, environment)
    before = listing(model_dir)
    try:
        if run_setup(launch):
            checks.append(Check("setup.sh", True, "ended with status 0"))
        with running(launch, start_limit_s) as url:
            checks.append(Check("starts, /health answers 200", True, "it does"))
            checks += [whole_answer(url), streamed_answer(url)]
    except (LaunchError, httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        checks.append(Check("starts and answers", False, f"{type(error).__name__}: {error}"))
    checks.append(Check("MODEL_DIR is left as it was", listing(model_dir) == before, "compared by name, size and time"))
    return checks


def whole_answer(url: str) -> Check:
    answer = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=120, trust_env=False)
    answer.raise_for_status()
    tokens = answer.json()["usage"]["completion_tokens"]
    return Check("answers /v1/chat/completions", 0 < tokens <= MAX_TOKENS, f"{tokens} tokens, max_tokens {MAX_TOKENS}")


def streamed_answer(url: str) -> Check:
    answer = httpx.post(f"{url}/v1/chat/completions", json={**BODY, "stream": True}, timeout=120, trust_env=False)
    answer.raise_for_status()
    events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    complete = len(events) > 1 and events[-1] == "data: [DONE]"
    return Check("streams /v1/chat/completions", complete, f"{len(events)} events")


def listing(directory: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in directory.rglob("*"))


def raise_loopback() -> None:
    """In a new namespace the loopback device is down. Where this process may not change it, it is up already."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
        except OSError:
            pass


def network_check() -> Check:
    """Whether anything outside can be reached from here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(OUTSIDE)
        except OSError as error:
            return Check("no network", True, f"a route outside: {error.strerror}")
    return Check("no network", True, "NOT CUT: this system lets no ordinary user make a network namespace")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m bench.package.dry_run", description=__doc__.partition("\n")[0])
    parser.add_argument("--submission", type=Path, required=True, metavar="DIR", help="unpacked")
    parser.add_argument("--model-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the pinned stack")
    parser.add_argument("--log", type=Path, required=True, metavar="FILE", help="the server's output")
    parser.add_argument("--start-limit-s", type=float, default=300.0, help="(%(default)s)")
    arguments = parser.parse_args()
    raise_loopback()
    checks = [network_check()]
    os.environ["HF_HUB_OFFLINE"] = "1"
    checks += dry_run(
        arguments.submission, arguments.model_dir, arguments.python, arguments.log, arguments.start_limit_s
    )
    print(json.dumps([[check.name, check.passed, check.found] for check in checks]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
