"""The replay's charts, drawn by matplotlib as SVG data URIs (no file or script is loaded by the page)."""

import base64
import io
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.replay.report import CLASS_NAMES, Result
from bench.replay.response import RequestRecord
from bench.replay.summary import ClassSummary, LevelSummary
from bench.stats import Summary

MEASURED, WARMUP, LIMIT, IDEAL = "#1f6feb", "#d97706", "#b91c1c", "#888"
COLORS = {"measured": MEASURED, "warmup": WARMUP}


def draw_charts(result: Result) -> list[tuple[str, str]]:
    """(caption, data URI) of every chart. Raises ImportError without matplotlib."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}):
        return [(caption, draw()) for caption, draw in charts_of(result)]


def charts_of(result: Result) -> list[tuple[str, Callable[[], str]]]:
    charts: list[tuple[str, Callable[[], str]]] = [
        ("TTFT by load", partial(draw_latency, result, "TTFT (ms)", "ttft_ms", result.slo.ttft_ms)),
        ("TPOT by load", partial(draw_latency, result, "TPOT (ms)", "tpot_ms", result.slo.tpot_ms)),
        ("Effective QPS and goodput by load", partial(draw_rates, result)),
        ("Prompt tokens found in the cache, as the server measured", partial(draw_hits, result)),
        ("Hit rate by turn of the session", partial(draw_turns, result)),
    ]
    for level, records in zip(result.levels, result.records):
        charts.append((f"Timeline at {level.label}", partial(draw_timeline, records)))
    return charts


def classes_of(level: LevelSummary) -> dict[str, ClassSummary]:
    return {entry.phase: entry for entry in level.classes}


def draw_latency(result: Result, label: str, latency: str, limit: float) -> str:
    """Median and p99 of a ClassSummary's `latency` at each load level."""
    figure, axes = new_figure()
    for phase in CLASS_NAMES:
        entries = [(load, classes_of(level).get(phase)) for load, level in enumerate(result.levels)]
        summaries: list[tuple[int, Summary]] = [(load, getattr(entry, latency)) for load, entry in entries if entry]
        for name, style in (("p50", "o--"), ("p99", "o-")):
            points = [(load, getattr(summary, name)) for load, summary in summaries if summary.n]
            if points:
                axes.plot(*zip(*points), style, color=COLORS[phase], label=f"{CLASS_NAMES[phase]} {name}")
    axes.axhline(limit, color=LIMIT, linewidth=1, label=f"SLO {limit:g} ms")
    axes.set_yscale("log")
    return finish(figure, axes, mark_loads(result, axes), label)


def draw_rates(result: Result) -> str:
    figure, axes = new_figure()
    loads = range(len(result.levels))
    offered = [(load, level.offered_qps) for load, level in enumerate(result.levels) if level.offered_qps is not None]
    if offered:
        axes.plot(*zip(*offered), ":", color=IDEAL, label="offered")
    axes.plot(loads, [level.effective_qps for level in result.levels], "o-", color=MEASURED, label="effective")
    axes.plot(loads, [level.goodput_qps for level in result.levels], "s--", color=WARMUP, label="goodput")
    return finish(figure, axes, mark_loads(result, axes), "requests/s")


def draw_hits(result: Result) -> str:
    figure, axes = new_figure()
    for position, phase in enumerate(CLASS_NAMES):
        entries = [(load, classes_of(level).get(phase)) for load, level in enumerate(result.levels)]
        places = [load + 0.4 * position - 0.2 for load, entry in entries if entry]
        rates = [(entry.hit_rate or 0.0) * 100 for _, entry in entries if entry]
        ideals = [(entry.oracle_tokens or 0) * 100 / max(1, entry.prompt_tokens) for _, entry in entries if entry]
        if places:
            axes.bar(places, rates, 0.38, color=COLORS[phase], label=CLASS_NAMES[phase])
            axes.plot(places, ideals, "_", color="black", markersize=14, label="ideal" if position else None)
    axes.set_ylim(0, 105)
    return finish(figure, axes, mark_loads(result, axes), "hit rate (%)")


def draw_turns(result: Result) -> str:
    """A line a load level; the ideal, which is about the same for all, once."""
    figure, axes = new_figure()
    for number, level in enumerate(result.levels):
        turns = [hits.turn for hits in level.hits_by_turn]
        rates = [100 * hits.cached_tokens / max(1, hits.prompt_tokens) for hits in level.hits_by_turn]
        axes.plot(turns, rates, ".-", linewidth=1, label=level.label)
        if number == 0:
            ideals = [100 * hits.oracle_tokens / max(1, hits.prompt_tokens) for hits in level.hits_by_turn]
            axes.plot(turns, ideals, ":", color=IDEAL, label="ideal")
    axes.set_ylim(-3, 105)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return finish(figure, axes, "turn", "hit rate (%)")


def draw_timeline(records: list[RequestRecord]) -> str:
    """A row a request: thin from scheduled arrival to first token, thick to the last; failures in red."""
    figure, axes = new_figure(height=min(40.0, 1.2 + 0.045 * len(records)))
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


def mark_loads(result: Result, axes: Any) -> str:
    """Load levels stand side by side on the x axis, whatever their distance; returns what the axis shows."""
    labels = [level.label for level in result.levels]
    rates = all(label.endswith(" QPS") for label in labels)
    axes.set_xticks(range(len(labels)), [label.removesuffix(" QPS") for label in labels] if rates else labels)
    return "offered QPS" if rates else "load"


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
