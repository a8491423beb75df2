"""The queueing model against values worked out by hand, and against a second model in exact fractions."""

from fractions import Fraction
from itertools import product
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.exercise.workload import (
    BASELINE,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    PUBLIC,
    ConfigError,
    Costs,
    Instance,
    evaluate,
    generate,
    private_instance,
    simulate,
)

COLOCATED = {"mode": "colocated", "prefix_cache": True}
DISAGGREGATED = {"mode": "disaggregated", "prefix_cache": True}


def request(index: int, arrival_ms: float, cached_tokens: int = 3968, output_tokens: int = 128) -> dict[str, Any]:
    return {
        "id": index,
        "arrival_ms": arrival_ms,
        "session": index % 8,
        "input_tokens": 4096,
        "cached_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


# d = 1000 / 2048 = 0.48828125, p = 128 / 4096 * 1000 = 31.25, 127 d = 62.01171875
@pytest.mark.parametrize(
    ("config", "first", "finish"),
    [(COLOCATED, 31.73828125, 93.75), (DISAGGREGATED, 39.73828125, 101.75)],
)
def test_the_isolated_example_is_reproduced_to_the_last_digit(config: dict[str, Any], first: float, finish: float):
    (timing,) = simulate([request(8, 0.0)], config)
    assert (timing.first, timing.finish) == (first, finish)
    assert (timing.ttft, timing.tpot) == (first, 0.48828125)


@pytest.mark.parametrize(
    ("config", "ttft", "finish"),
    [
        (COLOCATED, 115.48828125, 187.5),  # starts when the first has finished, at 93.75
        (DISAGGREGATED, 92.23828125, 164.25),  # prefilled by 62.5, there by 70.5, decoded from 101.75 on
    ],
)
def test_a_second_request_waits_as_computed_by_hand(config: dict[str, Any], ttft: float, finish: float):
    _, second = simulate([request(8, 0.0), request(9, 10.0)], config)
    assert (second.ttft, second.finish, second.tpot) == (ttft, finish, 0.48828125)


def test_equal_arrivals_are_served_by_increasing_id():
    first, second = simulate([request(9, 5.0, output_tokens=64), request(8, 5.0)], COLOCATED)
    assert (first.output_tokens, second.output_tokens) == (128, 64)
    assert second.first == 5.0 + 93.75 + 31.25 + 0.48828125


def test_variable_output_lengths_replace_127_by_one_less_than_their_own():
    (timing,) = simulate([request(8, 0.0, output_tokens=64)], COLOCATED)
    assert timing.finish == 31.73828125 + 63 * 0.48828125
    assert timing.tpot == 0.48828125


def test_without_cache_every_input_token_is_prefilled():
    (timing,) = simulate([request(8, 0.0)], COLOCATED | {"prefix_cache": False})
    assert (timing.first, timing.cached_tokens) == (1000.48828125, 0)


def test_requests_are_those_of_the_statement():
    requests = generate(4.0)
    assert len(requests) == 128
    assert requests[8] == {
        "id": 8,
        "arrival_ms": 16000.0,
        "session": 0,
        "input_tokens": 4096,
        "cached_tokens": 3968,
        "output_tokens": 128,
    }
    assert [entry["arrival_ms"] for entry in requests[:3]] == [0.0, 2000.0, 4000.0]
    assert [entry["arrival_ms"] for entry in requests[9:11]] == [16250.0, 16500.0]
    assert [entry["cached_tokens"] for entry in requests[:9]] == [0] * 8 + [3968]


def test_public_scores_are_those_computed_by_hand():
    baseline, candidate = evaluate(BASELINE), evaluate(DISAGGREGATED)
    # at 8 QPS the last arrives 119 * 125 ms after request 8 and takes 93.75 ms; at 16 QPS 119 * 62.5 and 101.75 ms
    assert baseline["objective"] == 120 / 14.96875
    assert candidate["objective"] == 120 / 7.53925
    assert [level["passed"] for level in baseline["levels"]] == [True] * 4 + [False] * 2
    assert [level["passed"] for level in candidate["levels"]] == [True] * 5 + [False]
    assert {level["hit_rate"] for level in baseline["levels"]} == {0.96875}
    # above 10.67 QPS the one queue grows by 93.75 - 62.5 ms a request; nearest rank takes the 119th of 120
    assert baseline["levels"][4]["p99_ttft_ms"] == 31.73828125 + 118 * 31.25


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"mode": "colocated"},
        {"mode": "both", "prefix_cache": True},
        {"mode": "colocated", "prefix_cache": 1},
        {"mode": "colocated", "prefix_cache": True, "gpus": 2},
        {"mode": ["colocated"], "prefix_cache": True},
    ],
)
def test_an_invalid_configuration_is_refused(config: Any):
    with pytest.raises(ConfigError):
        evaluate(config)


def exact_metrics(instance: Instance, qps: float, config: dict[str, Any], transfer_ms: float) -> dict[str, Fraction]:
    """A level computed once more: by recurrence over exact numbers, without the classes under test."""
    rate, d = Fraction(qps), Fraction(1000, 2048)
    free = {"server": Fraction(0), "prefill": Fraction(0), "decode": Fraction(0)}
    ttft, ends, first_arrival = [], [], Fraction(16000)
    for index, output_tokens in enumerate(instance.output_tokens):
        warm = index < 8
        arrival = Fraction(2000 * index) if warm else 16000 + Fraction(index - 8) * 1000 / rate
        tokens = instance.input_tokens[index % 8]
        uncached = 128 if config["prefix_cache"] and not warm else tokens
        p = Fraction(uncached * 1000, 4096)
        if config["mode"] == "colocated":
            first = max(arrival, free["server"]) + p + d
            free["server"] = end = first + (output_tokens - 1) * d
        else:
            free["prefill"] = max(arrival, free["prefill"]) + p
            first = max(free["prefill"] + Fraction(transfer_ms), free["decode"]) + d
            free["decode"] = end = first + (output_tokens - 1) * d
        if not warm:
            ttft.append(first - arrival)
            ends.append(end)
    rank = ceil(Fraction(99, 100) * len(ttft))
    return {
        "p99_ttft_ms": sorted(ttft)[rank - 1],
        "effective_qps": len(ttft) / ((max(ends) - first_arrival) / 1000),
    }


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["colocated", "disaggregated"]),
    st.booleans(),
    st.sampled_from([0.0, 8.0, 250.0]),
)
def test_private_instances_agree_with_an_exact_second_model(seed: int, mode: str, cache: bool, transfer_ms: float):
    instance, config = private_instance(seed), {"mode": mode, "prefix_cache": cache}
    metrics = evaluate(config, instance, Costs(transfer_ms=transfer_ms))
    for qps, level in zip(instance.offered_qps, metrics["levels"]):
        expected = exact_metrics(instance, qps, config, transfer_ms)
        assert level["p99_ttft_ms"] == pytest.approx(float(expected["p99_ttft_ms"]), rel=1e-9)
        assert level["effective_qps"] == pytest.approx(float(expected["effective_qps"]), rel=1e-9)
        assert level["p99_tpot_ms"] == pytest.approx(1000 / 2048, rel=1e-6)


@given(st.integers(0, 10**6))
def test_private_instances_stay_within_the_statement(seed: int):
    instance = private_instance(seed)
    assert 96 <= instance.requests <= 192
    assert set(instance.input_tokens) <= set(INPUT_TOKENS) and len(instance.input_tokens) == 8
    assert set(instance.output_tokens) <= set(OUTPUT_TOKENS)
    assert all(1 <= qps <= 32 for qps in instance.offered_qps)
    for entry in generate(instance.offered_qps[0], instance)[8:]:
        assert entry["input_tokens"] - entry["cached_tokens"] == 128
    assert private_instance(seed) == instance


def test_instances_differ_from_each_other_and_from_the_public_one():
    instances = [PUBLIC, *(private_instance(seed) for seed in range(20))]
    assert all(a != b for (i, a), (j, b) in product(enumerate(instances), repeat=2) if i != j)
