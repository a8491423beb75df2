"""The driver accepts what the statement allows and nothing else; our submission chooses as a full search would."""

import copy
import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench.exercise import submission
from bench.exercise.preflight import BASELINE_ONLY
from bench.exercise.preflight import main as preflight
from bench.exercise.run import OWN_SUBMISSION, main, run_exercise
from bench.exercise.workload import BASELINE, PUBLIC, Costs, evaluate, private_instance

ROOT = Path(__file__).resolve().parents[2]
OTHER = '{"mode": "disaggregated", "prefix_cache": True}'


def run(tmp_path: Path, body: str, *options: str) -> tuple[int, dict[str, Any]]:
    """(exit status, result) of a submission whose optimize has this body."""
    path = tmp_path / "candidate.py"
    path.write_text("def optimize(baseline, evaluate):\n" + "".join(f"    {line}\n" for line in body.splitlines()))
    output = tmp_path / "result.json"
    status = main(["--submission", str(path), "--output", str(output), *options])
    return status, json.loads(output.read_text())


def test_our_submission_passes_on_the_public_instance_and_selects_the_better_mode(tmp_path: Path):
    output = tmp_path / "results.json"
    assert main(["--submission", str(OWN_SUBMISSION), "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["kind"] == "simulation_only" and result["passed"]
    assert result["baseline"]["objective"] == 120 / 14.96875
    assert result["candidate"]["objective"] == 120 / 7.53925
    assert result["candidate"]["config"] == {"mode": "disaggregated", "prefix_cache": True}
    configs = [(entry["config"]["mode"], entry["config"]["prefix_cache"]) for entry in result["experiments"]]
    assert configs == [("colocated", True), ("disaggregated", True), ("disaggregated", False), ("disaggregated", True)]
    assert result["experiments"][1] == result["experiments"][3] == result["candidate"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_our_submission_passes_on_private_instances(seed: int):
    result = run_exercise(OWN_SUBMISSION, private_instance(seed))
    assert result["passed"], result["error"]
    assert result["candidate"]["objective"] >= result["baseline"]["objective"]


def test_the_starter_that_evaluates_only_the_baseline_passes_the_checks(tmp_path: Path):
    path = tmp_path / "starter.py"
    path.write_text(BASELINE_ONLY)
    result = run_exercise(path)
    assert result["passed"] and result["candidate"] == result["baseline"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('log = [evaluate(baseline)]\nlog[0]["objective"] += 1e-9\nreturn baseline, log', "result 1 of the log"),
        ('log = [evaluate(baseline)]\nlog[0]["note"] = "fast"\nreturn baseline, log', "result 1 of the log"),
        (f"log = [evaluate(baseline), evaluate({OTHER})]\nreturn baseline, log[::-1]", "result 1 of the log"),
        ("log = [evaluate(baseline)]\nreturn baseline, log * 2", "the log holds 2 results, 1 were given"),
        (f"evaluate({OTHER})\nreturn baseline, [evaluate(baseline)]", "the log holds 1 results, 2 were given"),
        ("return baseline, []", "was never evaluated"),
        ("evaluate(baseline)\nreturn baseline, None", "the log holds NoneType"),
        (f"return {OTHER}, [evaluate(baseline)]", "was never evaluated"),
        ("return baseline, [evaluate(baseline) for _ in range(5)]", "evaluation 5 exceeds the budget of 4"),
        (
            "log = [evaluate(baseline) for _ in range(4)]\ntry:\n    evaluate(baseline)\nexcept Exception:\n    pass\n"
            "return baseline, log",
            "evaluation 5 exceeds the budget of 4",
        ),
        ('return baseline, [evaluate({"mode": "magic", "prefix_cache": True})]', "mode must be"),
        (
            "log = [evaluate(baseline)]\ntry:\n    evaluate({})\nexcept Exception:\n    pass\nreturn baseline, log",
            "invalid configuration",
        ),
        ("raise KeyError('levels')", "optimize raised KeyError"),
        ("return None", "optimize raised TypeError"),
        ("return baseline, [evaluate(baseline), {1, 2}]", "optimize raised TypeError"),
        ("import sys\nsys.exit(0)", "optimize raised SystemExit"),
        ("import os\nos._exit(0)", "ended its process before optimize returned"),
        (
            "import bench.exercise.workload as w\nlog = [evaluate(baseline)]\nw.evaluate = lambda *_: log[0]\n"
            'log[0]["objective"] = 99.0\nreturn baseline, log',
            "result 1 of the log",
        ),
    ],
)
def test_a_broken_rule_fails_the_run_with_status_1_and_says_which(tmp_path: Path, capsys, body: str, words: str):
    status, result = run(tmp_path, body)
    assert status == 1
    assert words in result["error"]
    assert not result["passed"] and result["candidate"] is None
    errors = capsys.readouterr().err.splitlines()
    assert [line for line in errors if line.startswith("exercise:")] == errors and words in errors[0]


def test_a_submission_that_does_not_end_fails(tmp_path: Path):
    status, result = run(tmp_path, "while True:\n    pass", "--timeout-s", "0.5")
    assert (status, result["error"]) == (1, "optimize did not end within 0.5 s")


def test_a_submission_that_is_no_python_fails(tmp_path: Path):
    path = tmp_path / "broken.py"
    path.write_text("def optimize(:\n")
    assert "SyntaxError" in run_exercise(path)["error"]


def test_changing_a_configuration_after_its_evaluation_does_not_change_the_log(tmp_path: Path):
    body = 'config = dict(baseline)\nlog = [evaluate(config)]\nconfig["mode"] = "disaggregated"\nreturn baseline, log'
    status, result = run(tmp_path, body)
    assert status == 0 and result["experiments"][0]["config"]["mode"] == "colocated"


def test_a_missing_submission_and_an_unwritable_output_are_status_2(tmp_path: Path, capsys):
    assert main(["--submission", str(tmp_path / "none.py"), "--output", str(tmp_path / "out.json")]) == 2
    (tmp_path / "file").write_text("")
    assert main(["--output", str(tmp_path / "file" / "out.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("script", ["run.py", "preflight.py"])
def test_the_scripts_run_from_anywhere_without_any_installed_package(tmp_path: Path, script: str):
    command = [sys.executable, "-I", "-S", str(ROOT / "bench" / "exercise" / script), "--output", "out.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["passed"]


def choose(instance, costs: Costs) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return submission.optimize(dict(BASELINE), lambda config: copy.deepcopy(evaluate(config, instance, costs)))


@pytest.mark.parametrize("transfer_ms", [0.0, 8.0, 500.0, 1900.0, 3000.0])
@pytest.mark.parametrize("seed", [None, 11, 12, 13, 14, 15])
def test_the_choice_is_that_of_a_full_search_whatever_the_costs(seed: int | None, transfer_ms: float):
    instance = PUBLIC if seed is None else private_instance(seed)
    costs = Costs(transfer_ms=transfer_ms)
    config, log = choose(instance, costs)
    results = [
        evaluate({"mode": mode, "prefix_cache": cache}, instance, costs)
        for mode, cache in product(("colocated", "disaggregated"), (True, False))
    ]
    needed = {level["offered_qps"] for level in results[0]["levels"] if level["passed"]}
    allowed = [
        entry for entry in results if needed <= {level["offered_qps"] for level in entry["levels"] if level["passed"]}
    ]
    assert evaluate(config, instance, costs)["objective"] == max(entry["objective"] for entry in allowed)
    assert len(log) == 4


def test_colocated_wins_when_the_handoff_costs_more_than_the_slo():
    config, log = choose(PUBLIC, Costs(transfer_ms=3000.0))
    assert config == BASELINE
    assert [entry["config"]["mode"] for entry in log] == ["colocated", "disaggregated", "colocated", "colocated"]
    assert "rejected, it misses the SLO at 1, 2, 4, 8 QPS" in submission.explain(log)[1]


def test_a_winner_that_does_not_repeat_is_dropped_for_the_baseline():
    calls = []

    def unsteady(config: dict[str, Any]) -> dict[str, Any]:
        metrics = evaluate(config)
        calls.append(config)
        if len(calls) == 4:
            metrics["levels"][4]["passed"] = False
        return metrics

    config, log = submission.optimize(dict(BASELINE), unsteady)
    assert config == BASELINE
    assert "does not repeat" in submission.explain(log)[3]


@pytest.mark.parametrize(
    ("config", "costs", "words"),
    [
        ({"mode": "colocated", "prefix_cache": True}, Costs(), "at 16 QPS it misses .* one queue, which decode holds"),
        ({"mode": "colocated", "prefix_cache": False}, Costs(), "one queue, which prefill holds"),
        ({"mode": "disaggregated", "prefix_cache": True}, Costs(), "at 32 QPS .* for decode, which allows 16.00 QPS"),
        ({"mode": "disaggregated", "prefix_cache": False}, Costs(), "for prefill, which allows 1.00 QPS"),
        ({"mode": "disaggregated", "prefix_cache": True}, Costs(transfer_ms=3000.0), "the handoff .3000.0 ms"),
        (
            {"mode": "disaggregated", "prefix_cache": True},
            Costs(prefill_tokens_per_s=8192.0, decode_tokens_per_s=65536.0),
            "at 32 QPS it meets its SLO; TTFT is prefill itself .15.6 ms",
        ),
    ],
)
def test_the_diagnosis_names_the_bottleneck(config: dict[str, Any], costs: Costs, words: str):
    assert re.search(words, submission.diagnose(evaluate(config, PUBLIC, costs)))


def test_preflight_saves_an_environment_report(tmp_path: Path, capsys):
    output = tmp_path / "environment.json"
    assert preflight(["--target", "cpu", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert report["kind"] == "simulation_only" and report["python"]
    assert set(report["checks"]) == {"python", "example", "determinism", "baseline"}


def test_preflight_fails_when_the_model_is_wrong(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("bench.exercise.preflight.EXAMPLE_MS", {"colocated": (31.7, 93.75)})
    assert preflight(["--output", str(tmp_path / "environment.json")]) == 1
    assert "FAIL example" in capsys.readouterr().out
