"""What a load level amounts to: latencies by request class, cache hits, effective QPS, goodput, verdict."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from bench.replay.agreement import Agreement
from bench.replay.client import LevelRun
from bench.replay.misses import CauseSummary, summarize_misses
from bench.replay.plan import Level, Phase
from bench.replay.response import RequestRecord
from bench.stats import MIN_SAMPLES_P99, Summary, nearest_rank, summarize

SEND_LAG_WARNING_MS = 20.0
LOOP_LAG_WARNING_MS = 20.0
CLIENT_CPU_WARNING = 0.8


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
    oracle_tokens   what an infinite cache would have held of the same prompts
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
    oracle_tokens: int | None
    hit_rate: float | None


@dataclass
class TurnHits:
    """Completed requests that are the same turn of their sessions (0: the first)."""

    turn: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    oracle_tokens: int


@dataclass
class LevelSummary:
    """One load level.

    classes         warm-up (where there is one) and measured
    duration_s      last end of a measured request - scheduled arrival of the first
    effective_qps   measured requests completed / duration_s
    goodput_qps     those of them that met both SLOs / duration_s
    passed          nothing failed (warm-up included) and both p99 are within the SLO
    counters        what the server's own counters (/metrics) rose by
    outputs_sha256  of every answer's token ids in order; "" where the server sends none
    agreement       with the answers of a reference run, when there is one
    """

    label: str
    offered_qps: float | None
    concurrency: int | None
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
    client_cpu: float = 0.0
    warnings: list[str] = field(default_factory=list)
    hits_by_turn: list[TurnHits] = field(default_factory=list)
    misses: list[CauseSummary] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    prompts_sha256: str = ""
    outputs_sha256: str = ""
    agreement: Agreement | None = None

    @property
    def measured(self) -> ClassSummary:
        return self.classes[-1]


def summarize_level(
    level: Level, records: list[RequestRecord], slo: Slo, run: LevelRun, block_size: int = 64
) -> LevelSummary:
    """`block_size`: that of the records' oracle counts."""
    measured = [record for record in records if record.phase == "measured"]
    completed = [record for record in measured if record.outcome == "ok"]
    phases: list[Phase] = ["warmup", "measured"] if len(measured) < len(records) else ["measured"]
    classes = [summarize_class(phase, records) for phase in phases]
    duration = max(record.ended_s for record in measured) - min(record.scheduled_s for record in measured)
    failures = sum(record.outcome != "ok" for record in records)
    p99_ttft, p99_tpot = classes[-1].ttft_ms.p99, classes[-1].tpot_ms.p99
    within = p99_ttft is not None and p99_ttft <= slo.ttft_ms and (p99_tpot or 0.0) <= slo.tpot_ms
    summary = LevelSummary(
        label=level.label,
        offered_qps=level.offered_qps,
        concurrency=level.concurrency,
        classes=classes,
        duration_s=duration,
        effective_qps=len(completed) / duration,
        goodput_qps=sum(slo.met_by(record) for record in measured) / duration,
        output_tokens_per_s=sum(record.output_tokens for record in completed) / duration,
        passed=within and failures == 0,
        failures=failures,
        errors=dict(Counter(record.error for record in records if record.outcome != "ok")),
        send_lag_p99_ms=nearest_rank([record.send_lag_ms for record in records], 99),
        loop_lag_p99_ms=nearest_rank(run.loop_lag_ms, 99) if run.loop_lag_ms else 0.0,
        client_cpu=run.client_cpu,
        hits_by_turn=hits_by_turn(records),
        misses=summarize_misses(record.miss for record in records if record.miss is not None),
        prompts_sha256=level.prompts_sha256,
        outputs_sha256=outputs_sha256(records),
    )
    summary.warnings = level_warnings(summary, records, block_size)
    return summary


def summarize_class(phase: Phase, records: list[RequestRecord]) -> ClassSummary:
    own = [record for record in records if record.phase == phase]
    ok = [record for record in own if record.outcome == "ok"]
    reporting = [record for record in ok if record.cached_tokens is not None]
    cached = sum(record.cached_tokens or 0 for record in reporting)
    prompts = sum(record.prompt_tokens for record in reporting)
    ideal = [record.oracle_tokens for record in ok if record.oracle_tokens is not None]
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
        oracle_tokens=sum(ideal) if ideal else None,
        hit_rate=cached / prompts if prompts else None,
    )


def hits_by_turn(records: list[RequestRecord]) -> list[TurnHits]:
    turns: dict[int, TurnHits] = {}
    for record in records:
        if record.outcome == "ok" and record.cached_tokens is not None:
            hits = turns.setdefault(record.turn, TurnHits(record.turn, 0, 0, 0, 0))
            hits.requests += 1
            hits.prompt_tokens += record.prompt_tokens
            hits.cached_tokens += record.cached_tokens
            hits.oracle_tokens += record.oracle_tokens or 0
    return [turns[turn] for turn in sorted(turns)]


def outputs_sha256(records: list[RequestRecord]) -> str:
    if not any(record.token_ids for record in records):
        return ""
    return hashlib.sha256(repr([record.token_ids for record in records]).encode()).hexdigest()


def level_warnings(summary: LevelSummary, records: list[RequestRecord], block_size: int) -> list[str]:
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
    if summary.client_cpu > CLIENT_CPU_WARNING:
        warnings.append(
            f"the client used {summary.client_cpu:.0%} of its core: it, not the server, may have set the pace"
        )
    cold = [record for record in records if record.phase == "warmup" and record.cached_tokens]
    if cold:
        warnings.append(f"{len(cold)} warm-up requests hit the cache: the level did not start cold (see --flush-cache)")
    known = [record for record in records if record.cached_tokens is not None and record.oracle_tokens is not None]
    warm = [record for record in known if (record.cached_tokens or 0) - (record.oracle_tokens or 0) >= block_size]
    if warm:
        warnings.append(
            f"{len(warm)} requests found more in the cache than this replay had put there: an earlier run left it "
            "(use --flush-cache, or another --seed)"
        )
    missed = [
        record
        for record in known
        if record.oracle_tokens and (record.cached_tokens or 0) < record.oracle_tokens - block_size
    ]
    if missed and not any(record.cached_tokens for record in known):
        warnings.append("the server found nothing in its cache, ever: is its prefix cache on, and large enough?")
    elif missed:
        warnings.append(
            f"{len(missed)} requests found less in the cache than an infinite one would hold; see where prompts missed"
        )
    if measured.ok and measured.cached_tokens is None:
        warnings.append("the server reports no cached tokens: the hit rate is unknown")
    answers = [record.token_ids for record in records if len(record.token_ids) > 8]
    stuck = sum(len(set(token_ids)) == 1 for token_ids in answers)
    if stuck > len(answers) / 2:
        warnings.append(f"{stuck} of {len(answers)} answers repeat one token: is the model loaded as it should be?")
    return warnings
