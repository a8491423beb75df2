"""Check that this machine can run the exercise, run its baseline, and save an environment report.

No package, model, data set, key or GPU is needed: Python 3.10 or newer is all.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # started as bench/exercise/preflight.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.exercise.run import run_exercise
from bench.exercise.workload import BASELINE, COLOCATED, DISAGGREGATED, evaluate, simulate

LEAST_PYTHON = (3, 10)
ISOLATED_REQUEST = {
    "id": 0,
    "arrival_ms": 0.0,
    "session": 0,
    "input_tokens": 4096,
    "cached_tokens": 3968,
    "output_tokens": 128,
}
EXAMPLE_MS = {COLOCATED: (31.73828125, 93.75), DISAGGREGATED: (39.73828125, 101.75)}
"""First token and end of ISOLATED_REQUEST, worked out by hand from the equations in workload.py."""
BASELINE_ONLY = "def optimize(baseline, evaluate):\n    metrics = evaluate(baseline)\n    return baseline, [metrics]\n"


def check_python() -> str:
    if sys.version_info < LEAST_PYTHON:
        raise RuntimeError(f"Python {platform.python_version()} is too old; 3.10 or newer is needed")
    return platform.python_version()


def check_example() -> str:
    for mode, expected in EXAMPLE_MS.items():
        (timing,) = simulate([ISOLATED_REQUEST], {"mode": mode, "prefix_cache": True})
        if (timing.first, timing.finish) != expected:
            raise RuntimeError(f"{mode}: first token and end at {timing.first} and {timing.finish} ms, not {expected}")
    return "the isolated request's times agree with the hand-computed ones in both modes"


def check_determinism() -> str:
    if evaluate(BASELINE) != evaluate(BASELINE):
        raise RuntimeError("two runs of the baseline differ")
    return "two runs of the baseline are equal"


def check_baseline() -> str:
    """The packaged baseline, through the driver and its child process."""
    with tempfile.TemporaryDirectory() as directory:
        submission = Path(directory) / "baseline.py"
        submission.write_text(BASELINE_ONLY)
        result = run_exercise(submission)
    if not result["passed"]:
        raise RuntimeError(result["error"])
    return f"objective {result['baseline']['objective']} QPS"


CHECKS: dict[str, Callable[[], str]] = {
    "python": check_python,
    "example": check_example,
    "determinism": check_determinism,
    "baseline": check_baseline,
}


def environment_report() -> dict[str, Any]:
    checks = {}
    for name, check in CHECKS.items():
        try:
            checks[name] = {"passed": True, "detail": check()}
        except Exception as error:
            checks[name] = {"passed": False, "detail": str(error)}
    return {
        "kind": "simulation_only",
        "target": "cpu",
        "passed": all(check["passed"] for check in checks.values()),
        "checks": checks,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 1 when a check failed, 2 when the report could not be written."""
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.exercise.preflight",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 when every check passed, 1 when one failed, 2 when the report could not be written.",
    )
    parser.add_argument("--target", choices=["cpu"], default="cpu", help="what to check for (default %(default)s)")
    default = Path("build/exercise/environment.json")
    parser.add_argument("--output", type=Path, default=default, metavar="FILE", help="report (default %(default)s)")
    arguments = parser.parse_args(argv)
    report = environment_report()
    for name, check in report["checks"].items():
        print(f"{'ok  ' if check['passed'] else 'FAIL'} {name}: {check['detail']}")
    try:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        print(f"preflight: cannot write {arguments.output}: {error}", file=sys.stderr)
        return 2
    print(f"wrote {arguments.output}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
