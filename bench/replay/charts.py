"""The replay's charts, drawn by matplotlib as SVG data URIs (no file or script is loaded by the page)."""

import base64
import io
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.replay.report import CLASS_NAMES, Result
from bench.replay.response import RequestRecord
from bench.stats import Summary

MEASURED, WARMUP, LIMIT = "#1f6feb", "#d97706", "#b91c1c"
COLORS = {"measured": MEASURED, "warmup": WARMUP}


def draw_charts(result: Result) -> list[tuple[str, str]]:
    """(caption, data URI) of every chart. Raises ImportError without matplotlib."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}):
        return [(caption, draw()) for caption, draw in charts_of(result)]


def charts_of(result: Result) -> list[tuple[str, Callable[[], str]]]:
    charts: list[tuple[str, Callable[[], str]]] = [
        ("TTFT by offered load", partial(draw_latency, result, "TTFT (ms)", "ttft_ms", result.slo.ttft_ms)),
        ("TPOT by offered load", partial(draw_latency, result, "TPOT (ms)", "tpot_ms", result.slo.tpot_ms)),
        ("Effective QPS and goodput by offered load", partial(draw_rates, result)),
        ("Prompt tokens found in the cache, as the server measured", partial(draw_hits, result)),
    ]
    for level, records in zip(result.levels, result.records):
        charts.append((f"Timeline at {level.offered_qps:g} QPS", partial(draw_timeline, records)))
    return charts


def draw_latency(result: Result, label: str, latency: str, limit: float) -> str:
    """Median and p99 of a ClassSummary's `latency` at each load level."""
    figure, axes = new_figure()
    for position, phase in enumerate(("warmup", "measured")):
        summaries: list[Summary] = [getattr(level.classes[position], latency) for level in result.levels]
        for name, style in (("p50", "o--"), ("p99", "o-")):
            points = [(load, getattr(entry, name)) for load, entry in enumerate(summaries) if entry.n]
            if points:
                axes.plot(*zip(*points), style, color=COLORS[phase], label=f"{CLASS_NAMES[phase]} {name}")
    axes.axhline(limit, color=LIMIT, linewidth=1, label=f"SLO {limit:g} ms")
    axes.set_yscale("log")
    mark_loads(result, axes)
    return finish(figure, axes, "offered QPS", label)


def draw_rates(result: Result) -> str:
    figure, axes = new_figure()
    loads = range(len(result.levels))
    axes.plot(loads, [level.offered_qps for level in result.levels], ":", color="#888", label="offered")
    axes.plot(loads, [level.effective_qps for level in result.levels], "o-", color=MEASURED, label="effective")
    axes.plot(loads, [level.goodput_qps for level in result.levels], "s--", color=WARMUP, label="goodput")
    mark_loads(result, axes)
    return finish(figure, axes, "offered QPS", "requests/s")


def draw_hits(result: Result) -> str:
    figure, axes = new_figure()
    places = range(len(result.levels))
    for position, phase in enumerate(("warmup", "measured")):
        rates = [(level.classes[position].hit_rate or 0.0) * 100 for level in result.levels]
        axes.bar([x + 0.4 * position - 0.2 for x in places], rates, 0.38, color=COLORS[phase], label=CLASS_NAMES[phase])
    ideal = 100 * result.workload.prefix_tokens / result.workload.prompt_tokens
    axes.axhline(ideal, color="#888", linewidth=1, linestyle=":", label=f"prefix share {ideal:.1f} %")
    mark_loads(result, axes)
    axes.set_ylim(0, 105)
    return finish(figure, axes, "offered QPS", "hit rate (%)")


def draw_timeline(records: list[RequestRecord]) -> str:
    """A row a request: thin from scheduled arrival to first token, thick to the last; failures in red."""
    figure, axes = new_figure(height=1.2 + 0.045 * len(records))
    for record in records:
        if record.outcome != "ok" or not record.token_times_s:
            axes.plot([record.scheduled_s, record.ended_s], [record.index] * 2, color=LIMIT, linewidth=2)
            continue
        first, last = record.token_times_s[0], record.token_times_s[-1]
        color = COLORS[record.phase]
        axes.plot([record.scheduled_s, first], [record.index] * 2, color=color, linewidth=0.8)
        axes.plot([first, last], [record.index] * 2, color=color, linewidth=2.6, solid_capstyle="butt")
    axes.invert_yaxis()
    return finish(figure, axes, "seconds from the start of the level", "request", legend=False)


def mark_loads(result: Result, axes: Any) -> None:
    """Load levels stand side by side on the x axis, whatever their distance."""
    axes.set_xticks(range(len(result.levels)), [f"{level.offered_qps:g}" for level in result.levels])


def new_figure(height: float = 3.0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, height), layout="constrained")
    return figure, figure.add_subplot()


def finish(figure: Any, axes: Any, x_label: str, y_label: str, legend: bool = True) -> str:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=7, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
