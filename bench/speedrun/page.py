"""The run's HTML page: one file that needs nothing else."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from bench.replay.charts import LIMIT, MEASURED, WARMUP, finish, new_figure
from bench.replay.page import flatten
from bench.speedrun.client import Measurement
from bench.speedrun.report import COLUMNS, DEFINITIONS, all_notes, gate_lines, json_record, scenario_row, verdict
from bench.speedrun.runner import Result

TEMPLATES = Path(__file__).resolve().parent
COLORS = {"baseline": WARMUP, "candidate": MEASURED}


def html_page(result: Result) -> str:
    try:
        charts = draw_charts(result)
    except ImportError:
        charts = []
    record = json_record(result)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html.jinja").render(
        result=result,
        verdict=verdict(result),
        gate_lines=gate_lines(result),
        columns=COLUMNS,
        rows=[scenario_row(result, scenario) for scenario in result.settings.scenarios],
        notes=all_notes(result),
        charts=charts,
        definitions=DEFINITIONS,
        facts=flatten(
            {"run": asdict(result.facts), "settings": record["settings"], "model": {"hash": result.model_hash}}
        ),
    )


def draw_charts(result: Result) -> list[tuple[str, str]]:
    """(caption, data URI) of every chart. Raises ImportError without matplotlib."""
    import matplotlib

    draws: list[tuple[str, Any]] = [("Timeline of the run", partial(draw_timeline, result))]
    if result.speedups:
        draws.insert(0, ("Speedup over the baseline", partial(draw_speedups, result)))
    for scenario in result.settings.scenarios:
        last = [measurement for measurement in result.measurements if measurement.scenario == scenario.name][-1:]
        if last:
            draws.append((f"{scenario.title}: the candidate's requests, last repeat", partial(draw_requests, last[0])))
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}):
        return [(caption, draw()) for caption, draw in draws]


def draw_speedups(result: Result) -> str:
    figure, axes = new_figure()
    titles = [scenario.title for scenario in result.settings.scenarios if scenario.name in result.speedups]
    axes.bar(titles, list(result.speedups.values()), 0.5, color=MEASURED)
    axes.axhline(1.0, color="#888", linewidth=1, linestyle=":", label="baseline")
    if result.score:
        axes.axhline(result.score, color=WARMUP, linewidth=1, label=f"score {result.score:.2f} x")
    return finish(figure, axes, "", "times the baseline")


def draw_timeline(result: Result) -> str:
    phases = result.timeline.phases
    figure, axes = new_figure(height=0.8 + 0.25 * len(phases))
    names = [f"{phase.server}: {phase.name}" for phase in phases]
    for place, phase in enumerate(phases):
        width = (phase.end_s or phase.start_s) - phase.start_s
        axes.barh(place, width, left=phase.start_s, height=0.6, color=COLORS.get(phase.server, "#888"))
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    return finish(figure, axes, "seconds from the start of the run", "", legend=False)


def draw_requests(measurement: Measurement) -> str:
    """A row a request: thin until its first piece, thick until its last; failures in red."""
    figure, axes = new_figure(height=1.2 + 0.06 * len(measurement.answers))
    for answer in measurement.answers:
        if answer.error or answer.first_s is None or answer.last_s is None:
            axes.plot([answer.sent_s, answer.ended_s], [answer.index] * 2, color=LIMIT, linewidth=2)
            continue
        axes.plot([answer.sent_s, answer.first_s], [answer.index] * 2, color=MEASURED, linewidth=0.8)
        axes.plot(
            [answer.first_s, answer.last_s], [answer.index] * 2, color=MEASURED, linewidth=3, solid_capstyle="butt"
        )
    axes.invert_yaxis()
    axes.yaxis.get_major_locator().set_params(integer=True)
    return finish(figure, axes, "seconds", "request", legend=False)
