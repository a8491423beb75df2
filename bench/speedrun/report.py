"""The result of a run as text for the terminal and as a JSON record."""

from dataclasses import asdict
from typing import Any

from bench.speedrun.runner import Result
from bench.speedrun.scenarios import Scenario
from bench.speedrun.score import SHORT_SHARE, TIME_LIMIT_FACTOR, ScenarioValue
from bench.speedrun.timeline import Timeline

COLUMNS = ("scenario", "metric", "baseline", "candidate", "speedup", "tokens", "by usage")
BAR_WIDTH = 48
CLIENT_LAG_LIMIT_MS = 20.0
DEFINITIONS = {
    "clock": "starts when a request is sent, is read when a piece of its answer arrives",
    "chat": "ms per output token: sum of (last piece - first piece) / sum of tokens after the first piece",
    "long": "median over requests of (first piece - sent), ms",
    "burst": "output tokens of all answers / (last end - first sent)",
    "values": "median over repeats, with the least and the most",
    "score": "geometric mean of the three speedups",
    "time_limit": f"{TIME_LIMIT_FACTOR:g} x the baseline's median wall-clock time of the scenario",
    "short": f"a candidate's answers hold at least {SHORT_SHARE:.0%} of the baseline's tokens, or it fails",
}


def text_report(result: Result) -> str:
    rows = [COLUMNS, *(scenario_row(result, scenario) for scenario in result.settings.scenarios)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += ["", *gate_lines(result), verdict(result), "", *timeline_lines(result.timeline)]
    return "\n".join([*lines, *(f"note: {note}" for note in all_notes(result))])


def scenario_row(result: Result, scenario: Scenario) -> tuple[str, ...]:
    value = result.values.get(scenario.name)
    return (
        scenario.title,
        scenario.metric,
        spread(result.baseline.values.get(scenario.name)),
        spread(value),
        f"{result.speedups[scenario.name]:.2f} x" if scenario.name in result.speedups else "-",
        str(value.tokens) if value else "-",
        "-" if value is None or value.usage_tokens is None else str(value.usage_tokens),
    )


def spread(value: ScenarioValue | None) -> str:
    return "-" if value is None else f"{value.value:.4g} ({value.least:.4g} - {value.most:.4g})"


def gate_lines(result: Result) -> list[str]:
    if result.gate is None:
        return ["gate: none"]
    gate = result.gate
    made = (
        f"gate of {gate.model}: {len(gate.questions)} questions, mean gap between best and second choice "
        f"{gate.mean_gap:.2f} logits, a constant answer reaches {gate.constant_share:.0%}"
    )
    return [made, f"gate: {result.gate_result.line() if result.gate_result else 'not reached'}"]


def verdict(result: Result) -> str:
    if result.score is None:
        return f"{result.outcome}, no score: {result.reason}"
    ungated = "" if result.gate else " (no gate: random weights)"
    return f"score: {result.score:.3f} x the baseline{ungated}"


def timeline_lines(timeline: Timeline) -> list[str]:
    """A bar a phase."""
    total = timeline.phases[-1].end_s or timeline.now_s if timeline.phases else 1.0
    lines = []
    for phase in timeline.phases:
        end_s = phase.end_s or timeline.now_s
        begin, end = round(phase.start_s / total * BAR_WIDTH), round(end_s / total * BAR_WIDTH)
        bar = " " * begin + "#" * max(1, end - begin)
        lines.append(
            f"{phase.start_s:7.1f} s {bar:{BAR_WIDTH + 1}} {phase.server}: {phase.name} ({end_s - phase.start_s:.1f} s)"
        )
    return lines


def all_notes(result: Result) -> list[str]:
    notes = list(result.notes)
    if result.baseline_is_cached:
        notes.append(f"the baseline was measured on this device at {result.baseline.made}, not in this run")
    for scenario in result.settings.scenarios:
        value = result.values.get(scenario.name)
        if value and value.usage_tokens and abs(value.tokens / value.usage_tokens - 1) > 0.05:
            notes.append(
                f"{scenario.title}: the returned text tokenizes to {value.tokens} tokens, "
                f"the server counted {value.usage_tokens}"
            )
        for server, values in (("baseline", result.baseline.values), ("candidate", result.values)):
            measured = values.get(scenario.name)
            if measured and measured.client_lag_ms > CLIENT_LAG_LIMIT_MS:
                notes.append(
                    f"{scenario.title}, {server}: the client itself woke up to {measured.client_lag_ms:.0f} ms late; "
                    "this machine is short of CPU, and times are upper bounds"
                )
    return notes


def json_record(result: Result) -> dict[str, Any]:
    settings = asdict(result.settings) | {"count": result.settings.count}
    return {
        "kind": result.facts.kind,
        "benchmark": "speedrun",
        "outcome": result.outcome,
        "reason": result.reason,
        "score": result.score,
        "speedups": result.speedups,
        "facts": asdict(result.facts),
        "settings": {name: str(value) if name in PATHS else value for name, value in settings.items()},
        "scenarios": [asdict(scenario) for scenario in result.settings.scenarios],
        "model_hash": result.model_hash,
        "definitions": DEFINITIONS,
        "baseline": asdict(result.baseline) | {"cached": result.baseline_is_cached},
        "candidate": {name: asdict(value) for name, value in result.values.items()},
        "limits_s": result.limits_s,
        "gate": None if result.gate is None else gate_record(result),
        "timeline": [asdict(phase) for phase in result.timeline.phases],
        "notes": all_notes(result),
        "measurements": [asdict(measurement) for measurement in result.measurements],
    }


PATHS = ("model_dir", "candidate", "candidate_model_dir")


def gate_record(result: Result) -> dict[str, Any]:
    assert result.gate is not None
    summary: dict[str, Any] = {**result.gate.summary(), "model": result.gate.model, "dtype": result.gate.dtype}
    if result.gate_result:
        summary |= asdict(result.gate_result) | {"passed": result.gate_result.passed}
    return summary
