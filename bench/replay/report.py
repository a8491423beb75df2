"""The result of a replay as text for the terminal and as files: JSON, one JSON line a request, an HTML page."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.facts import Facts
from bench.replay.agreement import Agreement
from bench.replay.fit import FitReport
from bench.replay.response import RequestRecord
from bench.replay.server import ServerFacts
from bench.replay.summary import ClassSummary, LevelSummary, Slo
from bench.replay.workload import Workload
from bench.stats import Summary

CLASS_NAMES = {"warmup": "warm-up", "measured": "measured"}
COLUMNS = ("load", "class", "n", "ok", "TTFT p50", "p99", "TPOT p50", "p99", "gap p99", "cached/prompt", "hit", "ideal")
MISS_COLUMNS = ("load", "why", "requests", "tokens lost")
TEXT_LIMIT = 100


@dataclass
class Result:
    """A whole replay: every load level that ended, every request of them. `workload` or `trace` says what was sent."""

    slo: Slo
    flushed_between_levels: bool
    facts: Facts | None = None
    server: ServerFacts | None = None
    workload: Workload | None = None
    trace: FitReport | None = None
    levels: list[LevelSummary] = field(default_factory=list)
    records: list[list[RequestRecord]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> int:
        return sum(level.failures for level in self.levels)

    @property
    def best_effective_qps(self) -> float:
        """The largest effective QPS among levels that pass; 0 when none does."""
        return max((level.effective_qps for level in self.levels if level.passed), default=0.0)


def text_report(result: Result) -> str:
    """The table by request class, a line a level, where prompts missed, and what to know about it all."""
    rows = [class_row(level.label, entry) for level in result.levels for entry in level.classes]
    lines = [*table(COLUMNS, rows), ""]
    lines += [level_line(level, result.slo) for level in result.levels]
    lines += [agreement_line(level.label, level.agreement) for level in result.levels if level.agreement]
    lines += [f"best effective QPS within the SLO: {result.best_effective_qps:.2f}"]
    if misses := [row for level in result.levels for row in miss_rows(level)]:
        lines += ["", *table(MISS_COLUMNS, misses)]
        lines += [line for level in result.levels for line in examples(level)]
    lines += [f"note: {note}" for note in result.notes]
    for level in result.levels:
        lines += [f"warning at {level.label}: {warning}" for warning in level.warnings]
        lines += [f"failure at {level.label}, {count} x: {error}" for error, count in level.errors.items()]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in [head, *rows]]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def class_row(label: str, entry: ClassSummary) -> tuple[str, ...]:
    return (
        label,
        CLASS_NAMES[entry.phase],
        str(entry.requests),
        str(entry.ok),
        *milliseconds(entry.ttft_ms),
        *milliseconds(entry.tpot_ms),
        milliseconds(entry.gap_ms)[1],
        f"{'?' if entry.cached_tokens is None else entry.cached_tokens}/{entry.prompt_tokens}",
        "?" if entry.hit_rate is None else f"{entry.hit_rate:.1%}",
        "?" if entry.oracle_tokens is None else f"{entry.oracle_tokens / max(1, entry.prompt_tokens):.1%}",
    )


def milliseconds(summary: Summary) -> tuple[str, str]:
    """Median and 99th percentile."""
    if summary.p50 is None or summary.p99 is None:
        return "-", "-"
    return f"{summary.p50:.1f}", f"{summary.p99:.1f}"


def level_line(level: LevelSummary, slo: Slo) -> str:
    verdict = "PASS" if level.passed else "FAIL"
    return (
        f"{level.label}: effective {level.effective_qps:.2f} QPS, goodput {level.goodput_qps:.2f}, "
        f"{level.output_tokens_per_s:.0f} output tokens/s, failures {level.failures}; "
        f"SLO p99 TTFT <= {slo.ttft_ms:g} ms and TPOT <= {slo.tpot_ms:g} ms: {verdict}"
    )


def agreement_line(label: str, agreement: Agreement) -> str:
    line = f"{label}: {agreement.identical} of {agreement.compared} answers equal the reference"
    if agreement.median_divergence is None:
        return line
    return (
        f"{line}; the others part at token {agreement.earliest_divergence} or later, "
        f"half of them by token {agreement.median_divergence:g}"
    )


def miss_rows(level: LevelSummary) -> list[tuple[str, ...]]:
    return [(level.label, cause.description, str(cause.requests), str(cause.lost_tokens)) for cause in level.misses]


def examples(level: LevelSummary) -> list[str]:
    """Of each cause that lost tokens, the request that lost most, and the text where its prompt left the cache."""
    lines = []
    for cause in level.misses:
        if cause.lost_tokens:
            example = cause.example
            after = f" after a prompt with {shown(example.other_text)}" if example.other_text else ""
            lines.append(
                f"{level.label}, {cause.description}: at token {example.position}, {shown(example.text)}{after}"
            )
    return lines


def shown(text: str) -> str:
    text = repr(text)
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 4] + "..." + text[0]


def json_record(result: Result) -> dict[str, Any]:
    """Everything but the single requests, which go into the file named in `requests`."""
    assert result.facts is not None and result.server is not None
    return {
        "kind": result.facts.kind,
        "benchmark": "replay",
        "facts": asdict(result.facts),
        "server": asdict(result.server),
        "workload": asdict(result.workload) if result.workload else None,
        "trace": asdict(result.trace) if result.trace else None,
        "slo": asdict(result.slo),
        "flushed_between_levels": result.flushed_between_levels,
        "definitions": {
            "ttft_ms": "first token - scheduled arrival (closed loop: when the request was due)",
            "tpot_ms": "(last token - first token) / (tokens - 1)",
            "percentiles": "nearest rank",
            "effective_qps": "completed measured requests / (last end - scheduled arrival of the first)",
            "goodput_qps": "completed measured requests inside both SLOs / the same duration",
            "cached_tokens": "as the server counted them; oracle_tokens: contiguous leading blocks seen before",
        },
        "best_effective_qps": result.best_effective_qps,
        "failures": result.failures,
        "notes": result.notes,
        "levels": [asdict(level) for level in result.levels],
    }


def request_lines(result: Result) -> str:
    """One JSON object a request, in order of level and index."""
    lines = []
    for level, records in zip(result.levels, result.records):
        for record in records:
            load = {"load": level.label, "offered_qps": level.offered_qps, "concurrency": level.concurrency}
            values = {**load, **asdict(record), "send_lag_ms": record.send_lag_ms}
            values["token_times_s"] = [round(time_s, 6) for time_s in record.token_times_s]
            lines.append(json.dumps(values))
    return "".join(f"{line}\n" for line in lines)


def write_files(result: Result, path: Path, page: str) -> list[Path]:
    """Write `path` (JSON), and beside it the requests (.requests.jsonl) and the page (.html)."""
    requests, html = path.with_suffix(".requests.jsonl"), path.with_suffix(".html")
    path.parent.mkdir(parents=True, exist_ok=True)
    record = json_record(result) | {"requests": requests.name, "page": html.name}
    path.write_text(json.dumps(record, indent=1) + "\n")
    requests.write_text(request_lines(result))
    html.write_text(page)
    return [path, requests, html]
