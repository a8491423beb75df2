"""Supervision of tiny scripts: restart, back-off, output, the first start, and the clean stop."""

import asyncio
import os
import signal
import sys

import pytest

from engine.config import DeploymentConfig
from router.supervisor import Supervisor, WorkerFailed, WorkerSpec, worker_specs
from tests.router.fake_worker import async_test, until

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def spec(code: str, name: str = "d0", **environment: str) -> WorkerSpec:
    return WorkerSpec(name, "decode", [sys.executable, "-S", "-c", code], environment)


class Run:
    """A supervisor and the lines it logged."""

    def __init__(self, *specs: WorkerSpec, **options: float):
        self.lines: list[str] = []
        self.supervisor = Supervisor(list(specs), self.lines.append, **options)
        self.supervisor.start()

    def count(self, text: str) -> int:
        return sum(text in line for line in self.lines)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@async_test
async def test_output_of_both_streams_comes_with_the_workers_name():
    run = Run(
        spec("import sys, time; print('to stdout', flush=True); print('to stderr', file=sys.stderr); time.sleep(60)")
    )
    await until(lambda: len(run.lines) == 2)
    assert sorted(run.lines) == ["[d0] to stderr", "[d0] to stdout"]
    await run.supervisor.stop()


@async_test
async def test_a_worker_that_was_up_once_is_started_again_whatever_kills_it():
    run = Run(spec(SLEEP), min_backoff_s=0.01)
    await until(lambda: run.count("[d0] up") == 1)
    run.supervisor.registered("d0")
    first = run.supervisor.pids()["d0"]
    os.kill(first, signal.SIGKILL)
    await until(lambda: run.count("[d0] up") == 2)
    assert run.supervisor.pids()["d0"] != first
    assert run.count("ended (signal 9)") == 1
    assert run.supervisor.expected() == {"d0": "decode"}
    assert not run.supervisor.failed.done()
    await run.supervisor.stop()


@async_test
async def test_pauses_double_up_to_the_limit():
    run = Run(spec("raise SystemExit(3)"), min_backoff_s=0.01, max_backoff_s=0.04)
    run.supervisor.registered("d0")
    await until(lambda: run.count("starting it again") >= 4)
    await run.supervisor.stop()
    pauses = [line.split(" in ")[1] for line in run.lines if "starting it again" in line]
    assert pauses[:4] == ["0.01 s", "0.02 s", "0.04 s", "0.04 s"]
    assert run.count("exit code 3") == len(pauses)


@async_test
async def test_a_worker_that_ran_steadily_starts_again_with_the_short_pause():
    run = Run(spec("raise SystemExit(3)"), min_backoff_s=0.01, steady_s=0.0)
    run.supervisor.registered("d0")
    await until(lambda: run.count("starting it again in 0.01 s") >= 3)
    await run.supervisor.stop()


@pytest.mark.parametrize(
    ("code", "how", "last_line"),
    [
        (
            "import sys; print('loading'); sys.exit('d0: no tensor lm_head.weight in /m')",
            "exit code 1",
            "no tensor lm_head",
        ),
        ("import os; os.kill(os.getpid(), 9)", "signal 9", "printed nothing"),
        ("pass", "exit code 0", "printed nothing"),
    ],
)
@async_test
async def test_a_worker_that_never_registered_is_not_tried_again_and_its_last_line_tells_why(code, how, last_line):
    run = Run(spec(code), min_backoff_s=0.01)
    with pytest.raises(WorkerFailed) as failed:
        await run.supervisor.failed
    message = str(failed.value)
    assert message.startswith("worker d0 did not start") and how in message and last_line in message
    assert "\n" not in message and "d0: no tensor" not in message
    await run.supervisor.stop()
    assert run.count("starting it again") == 0


@async_test
async def test_a_command_that_cannot_be_executed_fails_at_once():
    run = Run(WorkerSpec("d0", "decode", ["/no/such/program"]))
    with pytest.raises(WorkerFailed, match="/no/such/program"):
        await run.supervisor.failed
    await run.supervisor.stop()


@async_test
async def test_stop_terminates_every_worker_and_starts_none_again():
    run = Run(spec(SLEEP, "d0"), spec(SLEEP, "d1"), min_backoff_s=0.01)
    for name in ("d0", "d1"):
        run.supervisor.registered(name)
    await until(lambda: len(run.lines) == 2)
    pids = run.supervisor.pids()
    await run.supervisor.stop()
    assert all(gone(pid) for pid in pids.values())
    assert run.supervisor.pids() == {} and run.supervisor.expected() == {}
    assert run.count("starting it again") == 0
    await run.supervisor.stop()


@async_test
async def test_stop_ends_the_pause_before_a_restart():
    run = Run(spec("raise SystemExit(3)"), min_backoff_s=1000, max_backoff_s=1000)
    run.supervisor.registered("d0")
    await until(lambda: run.count("starting it again") == 1)
    await asyncio.wait_for(run.supervisor.stop(), 10)


@async_test
async def test_a_worker_that_ignores_sigterm_is_killed():
    run = Run(spec(STUBBORN))
    await until(lambda: len(run.lines) == 1)
    pid = run.supervisor.pids()["d0"]
    await run.supervisor.stop(grace_s=0.1)
    assert gone(pid)


@async_test
async def test_replace_kills_our_own_process_and_no_other():
    run = Run(spec(STUBBORN), min_backoff_s=0.01)
    run.supervisor.registered("d0")
    await until(lambda: run.count("up") == 1)
    pid = run.supervisor.pids()["d0"]
    run.supervisor.replace("d0", pid + 1)
    run.supervisor.replace("d7", pid)
    await asyncio.sleep(0.05)
    assert run.supervisor.pids() == {"d0": pid}
    run.supervisor.replace("d0", pid)
    await until(lambda: run.count("up") == 2)
    await run.supervisor.stop(grace_s=0.1)


def test_every_worker_of_the_topology_gets_a_command_of_its_own():
    topology = {"prefill_workers": 2, "decode_workers": 1, "channel": "tcp", "local_prefill_max_tokens": 0}
    config = DeploymentConfig.model_validate({"threads": 3, "topology": topology})
    specs = worker_specs(config, "/c.yaml", "/models/m", "127.0.0.1:7000")
    assert [(spec.name, spec.role) for spec in specs] == [("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")]
    command = specs[0].command
    assert command[:3] == [sys.executable, "-m", "prefill_worker"]
    assert " ".join(command[3:]) == (
        "--name p0 --router 127.0.0.1:7000 --config /c.yaml --model-dir /models/m --supervised"
    )
    assert all(spec.environment["OMP_NUM_THREADS"] == "3" for spec in specs)
