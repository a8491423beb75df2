"""The replay's HTML page: one file that needs nothing else."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from bench.replay.charts import draw_charts
from bench.replay.report import COLUMNS, Result, class_row, level_line

TEMPLATES = Path(__file__).resolve().parent


def html_page(result: Result) -> str:
    rows, remarks = [], list(result.notes)
    for level in result.levels:
        rows += [class_row(level.offered_qps, entry) for entry in level.classes]
        remarks += [f"{level.offered_qps:g} QPS: {warning}" for warning in level.warnings]
        remarks += [f"{level.offered_qps:g} QPS: {count} failed: {error}" for error, count in level.errors.items()]
    try:
        charts = draw_charts(result)
    except ImportError:
        charts = []
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html.jinja").render(
        result=result,
        columns=COLUMNS,
        rows=rows,
        verdicts=[(level_line(level, result.slo), level.passed) for level in result.levels],
        remarks=remarks,
        charts=charts,
        facts=flatten(
            {"run": asdict(result.facts), "server": asdict(result.server), "workload": asdict(result.workload)}
        ),
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
