"""The result of a replay as text for the terminal and as files: JSON, one JSON line a request, an HTML page."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.facts import Facts
from bench.replay.response import RequestRecord
from bench.replay.server import ServerFacts
from bench.replay.summary import ClassSummary, LevelSummary, Slo
from bench.replay.workload import Workload
from bench.stats import Summary

CLASS_NAMES = {"warmup": "warm-up", "measured": "measured"}
COLUMNS = ("QPS", "class", "n", "ok", "TTFT p50", "p99", "TPOT p50", "p99", "gap p99", "cached/prompt", "hit")


@dataclass
class Result:
    """A whole replay: every load level, every request."""

    facts: Facts
    server: ServerFacts
    workload: Workload
    slo: Slo
    flushed_between_levels: bool
    levels: list[LevelSummary]
    records: list[list[RequestRecord]]
    notes: list[str]

    @property
    def failures(self) -> int:
        return sum(level.failures for level in self.levels)

    @property
    def best_effective_qps(self) -> float:
        """The largest effective QPS among levels that pass; 0 when none does."""
        return max((level.effective_qps for level in self.levels if level.passed), default=0.0)


def text_report(result: Result) -> str:
    """The table by request class, a line a level, and what to know about them."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for level in result.levels:
        rows += [class_row(level.offered_qps, entry) for entry in level.classes]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines.append("")
    lines += [level_line(level, result.slo) for level in result.levels]
    lines += [f"best effective QPS within the SLO: {result.best_effective_qps:.2f}"]
    lines += [f"note: {note}" for note in result.notes]
    for level in result.levels:
        lines += [f"warning at {level.offered_qps:g} QPS: {warning}" for warning in level.warnings]
        lines += [f"failure at {level.offered_qps:g} QPS, {count} x: {error}" for error, count in level.errors.items()]
    return "\n".join(lines)


def class_row(offered_qps: float, entry: ClassSummary) -> tuple[str, ...]:
    return (
        f"{offered_qps:g}",
        CLASS_NAMES[entry.phase],
        str(entry.requests),
        str(entry.ok),
        *milliseconds(entry.ttft_ms),
        *milliseconds(entry.tpot_ms),
        milliseconds(entry.gap_ms)[1],
        f"{'?' if entry.cached_tokens is None else entry.cached_tokens}/{entry.prompt_tokens}",
        "?" if entry.hit_rate is None else f"{entry.hit_rate:.1%}",
    )


def milliseconds(summary: Summary) -> tuple[str, str]:
    """Median and 99th percentile."""
    if summary.p50 is None or summary.p99 is None:
        return "-", "-"
    return f"{summary.p50:.1f}", f"{summary.p99:.1f}"


def level_line(level: LevelSummary, slo: Slo) -> str:
    verdict = "PASS" if level.passed else "FAIL"
    return (
        f"offered {level.offered_qps:g} QPS: effective {level.effective_qps:.2f}, goodput {level.goodput_qps:.2f}, "
        f"{level.output_tokens_per_s:.0f} output tokens/s, failures {level.failures}; "
        f"SLO p99 TTFT <= {slo.ttft_ms:g} ms and TPOT <= {slo.tpot_ms:g} ms: {verdict}"
    )


def json_record(result: Result) -> dict[str, Any]:
    """Everything but the single requests, which go into the file named in `requests`."""
    return {
        "kind": result.facts.kind,
        "benchmark": "replay",
        "facts": asdict(result.facts),
        "server": asdict(result.server),
        "workload": asdict(result.workload),
        "slo": asdict(result.slo),
        "flushed_between_levels": result.flushed_between_levels,
        "definitions": {
            "ttft_ms": "first token - scheduled arrival (open loop)",
            "tpot_ms": "(last token - first token) / (tokens - 1)",
            "percentiles": "nearest rank",
            "effective_qps": "completed measured requests / (last end - scheduled arrival of the first)",
            "goodput_qps": "completed measured requests inside both SLOs / the same duration",
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
            values = {"offered_qps": level.offered_qps, **asdict(record), "send_lag_ms": record.send_lag_ms}
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
