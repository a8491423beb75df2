"""Percentiles for measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_SAMPLES_P99 = 100


def nearest_rank(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: of n sorted values the one at ceil(percent / 100 * n), counting from one.

    It is always a value that was measured. Raises ValueError without values or with a percentage outside (0, 100].
    """
    if not values:
        raise ValueError("a percentile of no values")
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be in (0, 100], got {percent}")
    # percent * n first: 99 * 100 / 100 is exact, 0.99 * 100 is not.
    return sorted(values)[math.ceil(percent * len(values) / 100) - 1]


@dataclass
class Summary:
    """Of `n` values; all None when there are none."""

    n: int
    min: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None
    mean: float | None = None


def summarize(values: Sequence[float]) -> Summary:
    if not values:
        return Summary(0)
    return Summary(
        n=len(values),
        min=min(values),
        p50=nearest_rank(values, 50),
        p90=nearest_rank(values, 90),
        p99=nearest_rank(values, 99),
        max=max(values),
        mean=sum(values) / len(values),
    )
