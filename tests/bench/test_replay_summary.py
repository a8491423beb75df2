from typing import Any

import pytest

from bench.replay.client import LevelRun
from bench.replay.plan import Level
from bench.replay.response import RequestRecord
from bench.replay.summary import Slo, summarize_level
from bench.replay.workload import phase_of

BLOCK = 16


def record(index: int, **values: Any) -> RequestRecord:
    """Completed in 0.5 s with tokens at +0.1, +0.3 and +0.5 s: TTFT 100 ms, TPOT 200 ms."""
    scheduled = float(index)
    standard: dict[str, Any] = {
        "session": index % 8,
        "phase": phase_of(index),
        "outcome": "ok",
        "error": "",
        "scheduled_s": scheduled,
        "sent_s": scheduled,
        "ended_s": scheduled + 0.5,
        "ttft_ms": 100.0,
        "tpot_ms": 200.0,
        "prompt_tokens": 80,
        "cached_tokens": 0 if index < 8 else 64,
        "output_tokens": 3,
        "token_times_s": [scheduled + 0.1, scheduled + 0.3, scheduled + 0.5],
        "oracle_tokens": 0 if index < 8 else 64,
        "turn": index // 8,
    }
    return RequestRecord(index=index, **(standard | values))


def level(
    changed: dict[int, dict[str, Any]] | None = None,
    slo: Slo | None = None,
    loop_lag_ms: float = 0.0,
    client_cpu: float = 0.0,
):
    records = [record(index, **(changed or {}).get(index, {})) for index in range(16)]
    run = LevelRun([], 0.0, [loop_lag_ms], client_cpu)
    return summarize_level(Level("1 QPS", [], offered_qps=1.0), records, slo or Slo(500.0, 250.0), run, BLOCK)


FAILED = {"outcome": "failed", "error": "HTTP 503: full", "ttft_ms": None, "tpot_ms": None, "token_times_s": []}


def test_effective_qps_spans_first_measured_arrival_to_last_completion():
    summary = level()
    assert summary.duration_s == pytest.approx(7.5)  # 15.5 - 8.0
    assert summary.effective_qps == pytest.approx(8 / 7.5)
    assert summary.output_tokens_per_s == pytest.approx(24 / 7.5)
    assert summary.passed and summary.failures == 0


def test_warm_up_is_left_out_of_the_measured_class():
    summary = level({0: {"ttft_ms": 9000.0}})
    warmup, measured = summary.classes
    assert (warmup.phase, warmup.requests, warmup.ttft_ms.max) == ("warmup", 8, 9000.0)
    assert (measured.phase, measured.requests, measured.ttft_ms.max) == ("measured", 8, 100.0)
    assert summary.passed


def test_hit_rate_is_cached_over_prompt_tokens_of_each_class():
    warmup, measured = level().classes
    assert (warmup.cached_tokens, warmup.hit_rate) == (0, 0.0)
    assert (measured.cached_tokens, measured.prompt_tokens, measured.hit_rate) == (512, 640, 0.8)


def test_goodput_counts_only_requests_inside_both_limits():
    summary = level({10: {"ttft_ms": 501.0}, 11: {"tpot_ms": 251.0}})
    assert summary.goodput_qps == pytest.approx(6 / 7.5)
    assert not summary.passed


def test_a_value_equal_to_its_limit_passes():
    assert level(slo=Slo(100.0, 200.0)).passed
    assert not level(slo=Slo(99.9, 200.0)).passed
    assert not level(slo=Slo(100.0, 199.9)).passed


def test_failures_and_timeouts_are_counted_and_fail_the_level():
    summary = level({9: FAILED, 12: {**FAILED, "outcome": "timeout", "error": "no end within 5 s"}})
    assert (summary.measured.requests, summary.measured.ok) == (8, 6)
    assert (summary.measured.failed, summary.measured.timeouts, summary.failures) == (1, 1, 2)
    assert summary.errors == {"HTTP 503: full": 1, "no end within 5 s": 1}
    assert summary.effective_qps == pytest.approx(6 / 7.5)
    assert not summary.passed


def test_a_failed_warm_up_fails_the_level_too():
    summary = level({3: FAILED})
    assert summary.failures == 1 and not summary.passed


def test_a_level_where_everything_failed_has_no_latencies_and_does_not_pass():
    summary = level(dict.fromkeys(range(16), FAILED))
    assert summary.measured.ttft_ms.p99 is None
    assert (summary.effective_qps, summary.goodput_qps, summary.passed) == (0.0, 0.0, False)


def test_gaps_are_pooled_over_requests():
    gaps = level({15: {"token_times_s": [15.1, 15.2, 15.5]}}).measured.gap_ms
    assert gaps.n == 16
    assert gaps.max == pytest.approx(300.0)
    assert gaps.p50 == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("changed", "loop_lag_ms", "words"),
    [
        ({}, 0.0, "p99 of 8 samples"),
        ({9: {"sent_s": 9.2}}, 0.0, "sent late (p99 200 ms)"),
        ({}, 35.0, "client was busy"),
        ({0: {"cached_tokens": 64}}, 0.0, "1 requests found more in the cache"),
        ({0: {"cached_tokens": 64, "oracle_tokens": 64}}, 0.0, "1 warm-up requests hit the cache"),
        ({9: {"cached_tokens": 16}, 12: {"cached_tokens": 0}}, 0.0, "2 requests found less in the cache"),
        ({index: {"cached_tokens": 0} for index in range(16)}, 0.0, "is its prefix cache on"),
        ({9: {"cached_tokens": 80}}, 0.0, "1 requests found more in the cache"),
        ({index: {"token_ids": [7] * 9} for index in range(16)}, 0.0, "16 of 16 answers repeat one token"),
        ({index: {"cached_tokens": None} for index in range(16)}, 0.0, "hit rate is unknown"),
    ],
)
def test_a_reader_is_warned(changed: dict[int, dict[str, Any]], loop_lag_ms: float, words: str):
    assert any(words in warning for warning in level(changed, loop_lag_ms=loop_lag_ms).warnings)


def test_a_clean_level_warns_of_its_sample_count_alone():
    assert [warning[:6] for warning in level().warnings] == ["p99 of"]


def test_a_client_that_used_its_core_is_named_as_the_bottleneck():
    assert any("the client used 93% of its core" in warning for warning in level(client_cpu=0.93).warnings)


def test_hits_are_summed_by_turn_beside_the_ideal():
    turns = level({9: {"cached_tokens": 32}, 10: FAILED}).hits_by_turn
    assert [(hits.turn, hits.requests, hits.cached_tokens, hits.oracle_tokens) for hits in turns] == [
        (0, 8, 0, 0),
        (1, 7, 6 * 64 + 32, 7 * 64),
    ]


def test_a_level_without_warm_up_has_one_class():
    records = [record(index, phase="measured") for index in range(16)]
    summary = summarize_level(Level("x", []), records, Slo(), LevelRun([], 0.0, []), BLOCK)
    assert [entry.phase for entry in summary.classes] == ["measured"]
    assert summary.measured.requests == 16


def test_equal_outputs_have_equal_digests_and_others_do_not():
    answers = {index: {"token_ids": [index, 1, 2]} for index in range(16)}
    changed = answers | {15: {"token_ids": [15, 1, 3]}}
    assert level(answers).outputs_sha256 == level(answers).outputs_sha256 != level(changed).outputs_sha256
    assert level().outputs_sha256 == ""
