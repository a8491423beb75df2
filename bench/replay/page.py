"""The replay's HTML page: one file that needs nothing else."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from bench.replay.charts import draw_charts
from bench.replay.report import COLUMNS, Result, agreement_line, class_row, level_line, miss_rows, shown

TEMPLATES = Path(__file__).resolve().parent


def html_page(result: Result) -> str:
    assert result.facts is not None and result.server is not None
    rows, remarks = [], list(result.notes)
    for level in result.levels:
        rows += [class_row(level.label, entry) for entry in level.classes]
        remarks += [f"{level.label}: {warning}" for warning in level.warnings]
        remarks += [f"{level.label}: {count} failed: {error}" for error, count in level.errors.items()]
    try:
        charts = draw_charts(result)
    except ImportError:
        charts = []
    misses = [
        (*row, str(cause.example.position), shown(cause.example.text), shown(cause.example.other_text))
        for level in result.levels
        for row, cause in zip(miss_rows(level), level.misses)
    ]
    facts = {
        "run": asdict(result.facts),
        "server": asdict(result.server),
        "workload": asdict(result.workload) if result.workload else {},
        "trace": asdict(result.trace) if result.trace else {},
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html.jinja").render(
        result=result,
        columns=COLUMNS,
        rows=rows,
        agreements=[agreement_line(level.label, level.agreement) for level in result.levels if level.agreement],
        verdicts=[(level_line(level, result.slo), level.passed) for level in result.levels],
        misses=misses,
        remarks=remarks,
        charts=charts,
        facts=flatten(facts),
    )


def flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested dictionaries as (dotted name, text), empty ones left out."""
    flat = []
    for key, value in values.items():
        if isinstance(value, dict):
            flat += flatten(value, f"{prefix}{key}.")
        elif value not in (None, "", []):
            flat.append((f"{prefix}{key}", str(value)))
    return flat
