"""What a load level amounts to: latencies by request class, cache hits, effective QPS, goodput, verdict."""

from collections import Counter
from dataclasses import dataclass, field

from bench.replay.response import RequestRecord
from bench.replay.workload import Phase, Workload
from bench.stats import MIN_SAMPLES_P99, Summary, nearest_rank, summarize

SEND_LAG_WARNING_MS = 20.0
LOOP_LAG_WARNING_MS = 20.0


@dataclass(frozen=True)
class Slo:
    """Limits on the 99th percentiles of measured requests, in milliseconds."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 50.0

    def met_by(self, record: RequestRecord) -> bool:
        """A request is good when it completed inside both limits (one token has no TPOT to miss)."""
        if record.outcome != "ok" or record.ttft_ms is None:
            return False
        return record.ttft_ms <= self.ttft_ms and (record.tpot_ms or 0.0) <= self.tpot_ms


@dataclass
class ClassSummary:
    """Requests of one class. Latencies and hits are those of completed requests, the counts are of all.

    gap_ms          between one token and the next, pooled over requests
    cached_tokens   as the server reported them; None when it reported none
    hit_rate        cached / prompt tokens of the requests that report both
    """

    phase: Phase
    requests: int
    ok: int
    failed: int
    timeouts: int
    ttft_ms: Summary
    tpot_ms: Summary
    gap_ms: Summary
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    hit_rate: float | None


@dataclass
class LevelSummary:
    """One load level.

    duration_s      last end of a measured request - scheduled arrival of the first
    effective_qps   measured requests completed / duration_s
    goodput_qps     those of them that met both SLOs / duration_s
    passed          nothing failed (warm-up included) and both p99 are within the SLO
    """

    offered_qps: float
    classes: list[ClassSummary]
    duration_s: float
    effective_qps: float
    goodput_qps: float
    output_tokens_per_s: float
    passed: bool
    failures: int
    errors: dict[str, int] = field(default_factory=dict)
    send_lag_p99_ms: float = 0.0
    loop_lag_p99_ms: float = 0.0
    warnings: list[str] = field(default_factory=list)

    @property
    def measured(self) -> ClassSummary:
        return self.classes[-1]


def summarize_level(
    offered_qps: float, records: list[RequestRecord], slo: Slo, loop_lag_ms: list[float], workload: Workload
) -> LevelSummary:
    measured = [record for record in records if record.phase == "measured"]
    completed = [record for record in measured if record.outcome == "ok"]
    classes = [summarize_class("warmup", records), summarize_class("measured", records)]
    duration = max(record.ended_s for record in measured) - min(record.scheduled_s for record in measured)
    failures = sum(record.outcome != "ok" for record in records)
    p99_ttft, p99_tpot = classes[-1].ttft_ms.p99, classes[-1].tpot_ms.p99
    within = p99_ttft is not None and p99_ttft <= slo.ttft_ms and (p99_tpot or 0.0) <= slo.tpot_ms
    summary = LevelSummary(
        offered_qps=offered_qps,
        classes=classes,
        duration_s=duration,
        effective_qps=len(completed) / duration,
        goodput_qps=sum(slo.met_by(record) for record in measured) / duration,
        output_tokens_per_s=sum(record.output_tokens for record in completed) / duration,
        passed=within and failures == 0,
        failures=failures,
        errors=dict(Counter(record.error for record in records if record.outcome != "ok")),
        send_lag_p99_ms=nearest_rank([record.send_lag_ms for record in records], 99),
        loop_lag_p99_ms=nearest_rank(loop_lag_ms, 99) if loop_lag_ms else 0.0,
    )
    summary.warnings = level_warnings(summary, records, workload)
    return summary


def summarize_class(phase: Phase, records: list[RequestRecord]) -> ClassSummary:
    own = [record for record in records if record.phase == phase]
    ok = [record for record in own if record.outcome == "ok"]
    reporting = [(record.cached_tokens, record.prompt_tokens) for record in ok if record.cached_tokens is not None]
    cached, prompts = sum(pair[0] for pair in reporting), sum(pair[1] for pair in reporting)
    gaps = [
        (after - before) * 1e3 for record in ok for before, after in zip(record.token_times_s, record.token_times_s[1:])
    ]
    return ClassSummary(
        phase=phase,
        requests=len(own),
        ok=len(ok),
        failed=sum(record.outcome == "failed" for record in own),
        timeouts=sum(record.outcome == "timeout" for record in own),
        ttft_ms=summarize([record.ttft_ms for record in ok if record.ttft_ms is not None]),
        tpot_ms=summarize([record.tpot_ms for record in ok if record.tpot_ms is not None]),
        gap_ms=summarize(gaps),
        prompt_tokens=sum(record.prompt_tokens for record in ok),
        output_tokens=sum(record.output_tokens for record in ok),
        cached_tokens=cached if reporting else None,
        hit_rate=cached / prompts if prompts else None,
    )


def level_warnings(summary: LevelSummary, records: list[RequestRecord], workload: Workload) -> list[str]:
    """What a reader must know before trusting the level's numbers."""
    warnings = []
    measured = summary.measured
    if 0 < measured.ok < MIN_SAMPLES_P99:
        warnings.append(
            f"p99 of {measured.ok} samples is close to their maximum; {MIN_SAMPLES_P99} or more make it one"
        )
    if summary.send_lag_p99_ms > SEND_LAG_WARNING_MS:
        warnings.append(f"the client sent late (p99 {summary.send_lag_p99_ms:.0f} ms): offered load was not as planned")
    if summary.loop_lag_p99_ms > LOOP_LAG_WARNING_MS:
        warnings.append(
            f"the client was busy (event loop p99 {summary.loop_lag_p99_ms:.0f} ms late): latencies read high"
        )
    cold = [record for record in records if record.phase == "warmup" and record.cached_tokens]
    if cold:
        warnings.append(f"{len(cold)} warm-up requests hit the cache: the level did not start cold (see --flush-cache)")
    missed = [
        record
        for record in records
        if record.phase == "measured"
        and record.cached_tokens is not None
        and record.cached_tokens < workload.prefix_tokens // 2
    ]
    if missed:
        warnings.append(
            f"{len(missed)} measured requests missed their prefix: not computed yet when they came, or evicted"
        )
    if any((record.cached_tokens or 0) > workload.prefix_tokens + workload.new_tokens // 2 for record in records):
        warnings.append("new input was already cached: these prompts ran before (use --flush-cache or another --seed)")
    if measured.ok and measured.cached_tokens is None:
        warnings.append("the server reports no cached tokens: the hit rate is unknown")
    return warnings
