"""From measurements to values, speedups and one score."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from bench.speedrun.client import Measurement
from bench.speedrun.scenarios import Scenario

Outcome = Literal["SCORED", "INCORRECT", "FAIL", "TIMEOUT"]

SHORT_SHARE = 0.9
"""A candidate whose answers to a scenario hold less than this share of the baseline's tokens did not do the work."""
TIME_LIMIT_FACTOR = 2.0


@dataclass
class ScenarioValue:
    """Medians over repeats. `value` in the scenario's metric; wall_s is what the candidate's limit is made from;
    client_lag_ms is the worst of all repeats."""

    scenario: str
    value: float
    least: float
    most: float
    wall_s: float
    tokens: int
    usage_tokens: int | None
    repeats: int
    client_lag_ms: float = 0.0


class NoValue(ValueError):
    """The measurements have no value; the message says why."""


def value_of(scenario: Scenario, measurement: Measurement) -> float:
    """In the scenario's metric. Raises NoValue.

    chat   all decode time over all tokens after the first pieces, so that long answers count for what they are
    long   the median of the requests' TTFT
    burst  tokens of whole answers over the time from the first request sent to the last answer's end
    """
    answers = [answer for answer in measurement.answers if not answer.error]
    if not answers:
        raise NoValue("no request was answered")
    if scenario.name == "burst":
        first, last = min(answer.sent_s for answer in measurement.answers), max(a.ended_s for a in measurement.answers)
        return measurement.tokens / (last - first)
    if scenario.name == "long":
        return median(answer.ttft_ms for answer in answers if answer.ttft_ms is not None)
    streamed = [answer for answer in answers if answer.tpot_ms is not None]
    if len(streamed) < len(answers):
        raise NoValue("an answer came in one piece; it must be streamed token by token")
    seconds = sum((answer.last_s or 0.0) - (answer.first_s or 0.0) for answer in streamed)
    return seconds * 1e3 / sum(answer.decode_tokens for answer in streamed)


def summarize(scenario: Scenario, measurements: Sequence[Measurement]) -> ScenarioValue:
    """Raises NoValue."""
    values = [value_of(scenario, measurement) for measurement in measurements]
    answers = [answer for measurement in measurements for answer in measurement.answers if not answer.error]
    usages = [answer.usage_tokens for answer in answers if answer.usage_tokens is not None]
    return ScenarioValue(
        scenario=scenario.name,
        value=median(values),
        least=min(values),
        most=max(values),
        wall_s=median(measurement.wall_s for measurement in measurements),
        tokens=sum(answer.tokens for answer in answers),
        usage_tokens=sum(usages) if len(usages) == len(answers) else None,
        repeats=len(measurements),
        client_lag_ms=max(measurement.client_lag_ms for measurement in measurements),
    )


def judge(scenario: Scenario, measurement: Measurement, baseline_tokens: int | None) -> tuple[Outcome, str]:
    """Whether one run of a scenario may score, and why not. `baseline_tokens`: of the baseline's same run."""
    if measurement.timed_out:
        return "TIMEOUT", f"{scenario.title} took longer than its limit"
    if measurement.errors:
        failed = len(measurement.errors)
        return "FAIL", f"{scenario.title}: {failed} of {scenario.requests} requests failed: {measurement.errors[0]}"
    if baseline_tokens is not None and measurement.tokens < SHORT_SHARE * baseline_tokens:
        return (
            "FAIL",
            f"{scenario.title}: short answers, {measurement.tokens} tokens where the baseline gave {baseline_tokens}",
        )
    try:
        value = value_of(scenario, measurement)
    except NoValue as error:
        return "FAIL", f"{scenario.title}: {error}"
    if not value > 0:
        lag = f"; the client woke up to {measurement.client_lag_ms:.0f} ms late"
        return "FAIL", f"{scenario.title}: all pieces came at the same time{lag}"
    return "SCORED", ""


def speedup(scenario: Scenario, baseline: float, candidate: float) -> float:
    return candidate / baseline if scenario.higher_is_better else baseline / candidate


def geometric_mean(values: Sequence[float]) -> float:
    """Raises ValueError without values or with one that is not above 0."""
    if not values or min(values) <= 0:
        raise ValueError(f"no geometric mean of {list(values)}")
    return math.exp(sum(map(math.log, values)) / len(values))
