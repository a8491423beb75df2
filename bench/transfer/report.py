"""A transfer measurement as a table, a plot and a record."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.stats import Summary
from bench.transfer.measure import Measured


@dataclass
class Result:
    """`measured` is None when the channel does not work here; `reason` says why."""

    channel: str
    measured: Measured | None = None
    reason: str = ""
    raw_link: str = ""
    raw_gb_per_s: float = 0.0

    def record(self) -> dict[str, Any]:
        values = asdict(self)
        if self.measured is not None:
            for point, entry in zip(self.measured.points, values["measured"]["points"]):
                entry["gb_per_s"] = point.gb_per_s
        return values


def table(results: list[Result]) -> str:
    head = f"{'channel':10s} {'blocks':>6s} {'MB':>8s}   {'handoff ms':>22s} {'GB/s':>8s} {'of link':>8s}   "
    lines = [head + f"{'exposed ms':>22s}"]
    for result in results:
        if result.measured is None:
            lines.append(f"{result.channel:10s} not measured: {result.reason}")
            continue
        for point in result.measured.points:
            rate = point.gb_per_s
            lines.append(
                f"{result.channel:10s} {point.num_blocks:6d} {point.num_bytes / 1e6:8.1f}   {spread(point.handoff_ms)} "
                f"{'-' if rate is None else f'{rate:.2f}':>8s} "
                f"{'-' if rate is None else f'{rate / result.raw_gb_per_s:.0%}':>8s}   {spread(point.exposed_ms)}"
            )
    for result in results:
        if result.measured is not None:
            lines.append(
                f"{result.channel}: link {result.raw_gb_per_s:.1f} GB/s ({result.raw_link}); a message there and back "
                f"{result.measured.round_trip_ms.p50:.3f} ms"
            )
    return "\n".join(lines)


def spread(summary: Summary) -> str:
    """Median and range."""
    return f"{summary.p50:7.3f} ({summary.min:5.2f} -{summary.max:6.2f})"


def draw(results: list[Result], file: Path) -> None:
    """Latency and bandwidth by size, as the file's suffix says (.svg, .png). Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    latency, bandwidth = figure.subplots(1, 2)
    for result in results:
        if result.measured is None:
            continue
        points = result.measured.points
        sizes = [point.num_blocks for point in points]
        (line,) = latency.plot(sizes, [point.handoff_ms.p50 for point in points], marker="o", label=result.channel)
        latency.plot(sizes, [point.exposed_ms.p50 for point in points], linestyle=":", color=line.get_color())
        if all(point.num_bytes for point in points):
            rates = [point.gb_per_s for point in points]
            bandwidth.plot(sizes, rates, marker="o", color=line.get_color(), label=result.channel)
            bandwidth.axhline(result.raw_gb_per_s, linestyle="--", color=line.get_color(), linewidth=0.8)
    latency.set(xlabel="blocks", ylabel="ms (dotted: exposed at handoff)", xscale="log", yscale="log", title="Handoff")
    bandwidth.set(xlabel="blocks", ylabel="GB/s (dashed: raw link)", xscale="log", yscale="log", title="Bandwidth")
    latency.legend()
    figure.savefig(file)
