"""Run an optimization submission against the exercise's queueing model, and check what it returns.

The submission's `optimize(baseline, evaluate)` may evaluate at most four configurations. Its log must be every result,
unchanged and in call order, and its selection must have been evaluated. The selected configuration and the baseline are
then replayed here, independently. Everything is simulated: no number is a measurement of a service.
"""

import argparse
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # started as bench/exercise/run.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.exercise.child import SubmissionError, call_submission
from bench.exercise.workload import (
    BASELINE,
    PUBLIC,
    SLO_TPOT_MS,
    SLO_TTFT_MS,
    ConfigError,
    Costs,
    Instance,
    evaluate,
    private_instance,
)

BUDGET = 4
TIMEOUT_S = 300.0
OWN_SUBMISSION = Path(__file__).resolve().parent / "submission.py"


class CheckError(Exception):
    """The submission broke a rule of the exercise; the message says which."""


class Evaluator:
    """What a submission's `evaluate` reaches: the model, the log of what it was asked, and the rules broken so far.

    A broken rule stays broken, whatever the submission makes of the refusal.
    """

    def __init__(self, instance: Instance, costs: Costs):
        self.instance, self.costs = instance, costs
        self.calls = 0
        self.log: list[dict[str, Any]] = []
        self.violation = ""

    def __call__(self, config: Any) -> dict[str, Any]:
        self.calls += 1
        if self.calls > BUDGET:
            raise self._broken(f"evaluation {self.calls} exceeds the budget of {BUDGET}")
        try:
            metrics = evaluate(config, self.instance, self.costs)
        except ConfigError as error:
            raise self._broken(f"invalid configuration: {error}") from None
        self.log.append(metrics)
        return metrics

    def _broken(self, text: str) -> CheckError:
        self.violation = self.violation or text
        return CheckError(text)


def run_exercise(
    submission: Path, instance: Instance = PUBLIC, costs: Costs | None = None, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """The result of a submission; `passed` is false and `error` says why when it broke a rule or did not end."""
    costs = costs or Costs()
    evaluator = Evaluator(instance, costs)
    result: dict[str, Any] = {
        "kind": "simulation_only",
        "passed": False,
        "error": "",
        "submission": str(submission),
        "python": platform.python_version(),
        "instance": asdict(instance),
        "costs": asdict(costs),
        "slo": {"p99_ttft_ms": SLO_TTFT_MS, "p99_tpot_ms": SLO_TPOT_MS},
        "baseline": None,
        "candidate": None,
        "experiments": [],
        "explanation": [],
    }
    try:
        answer = call_submission(submission, BASELINE, evaluator, timeout_s)
        best_config, log = answer["done"]
        check(evaluator, best_config, log)
        result["baseline"] = evaluate(BASELINE, instance, costs)
        result["candidate"] = replay(best_config, evaluator)
        result["explanation"] = answer["explanation"]
        result["passed"] = True
    except (CheckError, SubmissionError) as error:
        result["error"] = evaluator.violation or str(error)
    result["experiments"] = evaluator.log
    return result


def check(evaluator: Evaluator, best_config: Any, log: Any) -> None:
    """Raises CheckError when a rule was broken, the log is not the driver's own, or the selection is not in it."""
    if evaluator.violation:
        raise CheckError(evaluator.violation)
    if not isinstance(log, list) or len(log) != len(evaluator.log):
        length = len(log) if isinstance(log, list) else type(log).__name__
        raise CheckError(f"the log holds {length} results, {len(evaluator.log)} were given")
    for number, (claimed, given) in enumerate(zip(log, evaluator.log), 1):
        if exact(claimed) != exact(given):
            raise CheckError(f"result {number} of the log is not the one that was given")
    if exact(best_config) not in [exact(metrics["config"]) for metrics in evaluator.log]:
        raise CheckError(f"the selected configuration {best_config!r} was never evaluated")


def replay(best_config: dict[str, Any], evaluator: Evaluator) -> dict[str, Any]:
    """A fresh run of the selected configuration. Raises CheckError when it differs from what the log says of it."""
    again = evaluate(best_config, evaluator.instance, evaluator.costs)
    if exact(again) not in [exact(metrics) for metrics in evaluator.log]:
        raise CheckError("the replay of the selected configuration differs from its evaluation")
    return again


def exact(value: Any) -> str:
    """Text that is equal for equal values of equal types: 1, 1.0 and true differ, and floats to their last digit."""
    return json.dumps(value, sort_keys=True)


def text_report(result: dict[str, Any]) -> str:
    """Objective of each experiment, and every load level of baseline and selection."""
    lines = ["simulation only: no number here is a measurement of a service", ""]
    for number, metrics in enumerate(result["experiments"], 1):
        config = metrics["config"]
        cache = "on" if config["prefix_cache"] else "off"
        lines.append(f"{number}. {config['mode']:13} cache {cache:3}  objective {metrics['objective']:.4f} QPS")
    if result["passed"]:
        lines += ["", *level_table(result["baseline"], result["candidate"]), "", *result["explanation"]]
    return "\n".join(lines)


def level_table(baseline: dict[str, Any], candidate: dict[str, Any]) -> list[str]:
    head = ("offered QPS", "config", "effective QPS", "p99 TTFT ms", "p99 TPOT ms", "hit rate", "SLO")
    rows = [head]
    for name, before_and_after in (("baseline", baseline), ("selected", candidate)):
        rows += [
            (
                f"{level['offered_qps']:g}",
                name,
                f"{level['effective_qps']:.4f}",
                f"{level['p99_ttft_ms']:.3f}",
                f"{level['p99_tpot_ms']:.3f}",
                f"{level['hit_rate']:.3%}",
                "PASS" if level["passed"] else "FAIL",
            )
            for level in before_and_after["levels"]
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 1 when the submission broke a rule or failed, 2 when it could not be run."""
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.exercise.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 when interface and log checks passed; 1 when the submission broke a rule, raised or did "
        "not end; 2 when it could not be run. The output file is written in the first two cases.",
    )
    add = parser.add_argument
    add("--submission", type=Path, default=OWN_SUBMISSION, metavar="FILE", help="file with optimize (default: ours)")
    add("--output", type=Path, required=True, metavar="FILE", help="JSON result to write")
    add("--private", type=int, metavar="SEED", help="a random instance instead of the public one")
    add("--transfer-ms", type=float, default=Costs.transfer_ms, help="what-if: cost of a handoff (default %(default)s)")
    add("--timeout-s", type=float, default=TIMEOUT_S, help="limit on the whole of optimize (default %(default)s)")
    arguments = parser.parse_args(argv)
    if not arguments.submission.is_file():
        print(f"exercise: no submission at {arguments.submission}; give --submission FILE", file=sys.stderr)
        return 2
    instance = PUBLIC if arguments.private is None else private_instance(arguments.private)
    costs = Costs(transfer_ms=arguments.transfer_ms)
    result = run_exercise(arguments.submission.resolve(), instance, costs, arguments.timeout_s)
    try:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        print(f"exercise: cannot write {arguments.output}: {error}", file=sys.stderr)
        return 2
    print(text_report(result))
    if not result["passed"]:
        print(f"exercise: {result['error']}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
