"""A counter and a histogram for what happens with every token: adding costs a tenth of prometheus_client's, which has
locks and labels. They belong to the event loop; a registry of prometheus_client reads them through `collect`."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any


class Counter:
    def __init__(self, name: str, text: str):
        self._name, self._text = name, text
        self.value = 0

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        yield CounterMetricFamily(self._name, self._text, value=self.value)


class Histogram:
    """`bounds`: upper ends of the buckets, ascending; a value on a bound counts below it."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]):
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        bounds = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
