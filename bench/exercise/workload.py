"""The exercise's requests and its queueing model: deterministic, standard library only.

    arrival of request i    i * 2000 ms                        for the 8 cold warm-ups, one a session
                            16000 + (i - 8) * 1000 / qps ms    for those measured

With arrival a, p = uncached input tokens / 4096 * 1000 and d = 1000 / 2048 (ms, one token), requests in order of
arrival, then id:

    colocated       first = max(a, busy) + p + d
                    finish = busy = first + (output_tokens - 1) * d

    disaggregated   prefill_end = max(a, prefill_end) + p
                    first = max(prefill_end + 8, decode_end) + d
                    finish = decode_end = first + (output_tokens - 1) * d

    TTFT = first - a        TPOT = (finish - first) / (output_tokens - 1)

There is no continuous batching here, and the two modes have different resources: their ratio says nothing about
performance at equal GPU cost.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.stats import nearest_rank

NUM_SESSIONS = 8
WARMUP_GAP_MS = 2000.0
NEW_TOKENS = 128
INPUT_TOKENS = (4096, 6144, 8192)
OUTPUT_TOKENS = (64, 128, 256)
PUBLIC_QPS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
SLO_TTFT_MS = 2000.0
SLO_TPOT_MS = 50.0

COLOCATED, DISAGGREGATED = "colocated", "disaggregated"
BASELINE: dict[str, Any] = {"mode": COLOCATED, "prefix_cache": True}


class ConfigError(ValueError):
    """A configuration that the model cannot run; the message names the key and its value."""


@dataclass(frozen=True)
class Costs:
    """What the simulated hardware does. The defaults are the exercise's; others are for what-if runs."""

    prefill_tokens_per_s: float = 4096.0
    decode_tokens_per_s: float = 2048.0
    transfer_ms: float = 8.0


@dataclass(frozen=True)
class Instance:
    """The input of one exercise. `input_tokens` by session (a session's prefix has one length), `output_tokens` by
    request, `offered_qps` one load level each. `seed` None: the public instance."""

    seed: int | None
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    offered_qps: tuple[float, ...]

    @property
    def requests(self) -> int:
        return len(self.output_tokens)


PUBLIC = Instance(None, (4096,) * NUM_SESSIONS, (128,) * 128, PUBLIC_QPS)


def private_instance(seed: int) -> Instance:
    """A random instance: 96 to 192 requests, lengths from INPUT_TOKENS and OUTPUT_TOKENS, six rates within 1 to 32."""
    rng = random.Random(f"exercise/{seed}")
    requests = rng.randint(96, 192)
    return Instance(
        seed=seed,
        input_tokens=tuple(rng.choice(INPUT_TOKENS) for _ in range(NUM_SESSIONS)),
        output_tokens=tuple(rng.choice(OUTPUT_TOKENS) for _ in range(requests)),
        offered_qps=tuple(sorted(rng.uniform(1.0, 32.0) for _ in range(len(PUBLIC_QPS)))),
    )


def generate(offered_qps: float, instance: Instance = PUBLIC) -> list[dict[str, Any]]:
    """Every request of a load level, in order of arrival."""
    requests = []
    for index in range(instance.requests):
        session = index % NUM_SESSIONS
        warms = index < NUM_SESSIONS
        start = NUM_SESSIONS * WARMUP_GAP_MS
        requests.append(
            {
                "id": index,
                "arrival_ms": index * WARMUP_GAP_MS if warms else start + (index - NUM_SESSIONS) * 1000 / offered_qps,
                "session": session,
                "input_tokens": instance.input_tokens[session],
                "cached_tokens": 0 if warms else instance.input_tokens[session] - NEW_TOKENS,
                "output_tokens": instance.output_tokens[index],
            }
        )
    return requests


def check_config(config: Any) -> None:
    """Raises ConfigError unless `config` is {"mode": "colocated" or "disaggregated", "prefix_cache": true or false}."""
    if not isinstance(config, dict):
        raise ConfigError(f"a configuration is an object with mode and prefix_cache, got {config!r}")
    if missing := BASELINE.keys() - config.keys():
        raise ConfigError(f"{sorted(missing)[0]} is missing in {config!r}")
    if unknown := config.keys() - BASELINE.keys():
        raise ConfigError(f"unknown key {sorted(map(str, unknown))[0]!r}; there are mode and prefix_cache")
    if config["mode"] not in (COLOCATED, DISAGGREGATED):
        raise ConfigError(f"mode must be {COLOCATED!r} or {DISAGGREGATED!r}, got {config['mode']!r}")
    if not isinstance(config["prefix_cache"], bool):
        raise ConfigError(f"prefix_cache must be true or false, got {config['prefix_cache']!r}")


@dataclass
class Timing:
    """One simulated request, in milliseconds. The two waits are time spent in a queue before prefill and decode."""

    arrival: float
    prefill: float
    transfer: float
    decode: float
    prefill_wait: float
    decode_wait: float
    first: float
    finish: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        return (self.finish - self.first) / (self.output_tokens - 1)


def simulate(requests: Sequence[dict[str, Any]], config: dict[str, Any], costs: Costs | None = None) -> list[Timing]:
    """The timing of every request under `config`, by order of arrival, then id. Raises ConfigError."""
    check_config(config)
    costs = costs or Costs()
    d = 1000 / costs.decode_tokens_per_s
    prefill_free = decode_free = 0.0
    timings = []
    for request in sorted(requests, key=lambda request: (request["arrival_ms"], request["id"])):
        a, output_tokens = request["arrival_ms"], request["output_tokens"]
        cached = request["cached_tokens"] if config["prefix_cache"] else 0
        p = (request["input_tokens"] - cached) / costs.prefill_tokens_per_s * 1000
        start = max(a, prefill_free)
        if config["mode"] == COLOCATED:
            ready = begin = start + p
        else:
            prefill_free = start + p
            ready = prefill_free + costs.transfer_ms
            begin = max(ready, decode_free)
        first = begin + d
        finish = first + (output_tokens - 1) * d
        decode_free = finish
        if config["mode"] == COLOCATED:
            prefill_free = finish  # one queue: the next prefill waits for this decode
        timings.append(
            Timing(
                arrival=a,
                prefill=p,
                transfer=costs.transfer_ms if config["mode"] == DISAGGREGATED else 0.0,
                decode=output_tokens * d,
                prefill_wait=start - a,
                decode_wait=begin - ready,
                first=first,
                finish=finish,
                input_tokens=request["input_tokens"],
                cached_tokens=cached,
                output_tokens=output_tokens,
            )
        )
    return timings


def evaluate(config: dict[str, Any], instance: Instance = PUBLIC, costs: Costs | None = None) -> dict[str, Any]:
    """Metrics of a configuration over all load levels. Raises ConfigError.

    `objective` is the largest effective QPS among levels that pass, 0 when none does.
    """
    check_config(config)
    levels = [level_metrics(qps, simulate(generate(qps, instance), config, costs)) for qps in instance.offered_qps]
    return {
        "config": dict(config),
        "objective": max((level["effective_qps"] for level in levels if level["passed"]), default=0.0),
        "levels": levels,
    }


def level_metrics(offered_qps: float, timings: list[Timing]) -> dict[str, Any]:
    """One load level. Warm-ups are left out of every number, but not out of the queues that the others find.

    The utilizations are work asked for over the time it took: near 1 the stage is the limit. In colocated mode both
    stages share one server, so their sum is its utilization.
    """
    measured = timings[NUM_SESSIONS:]
    span = max(timing.finish for timing in measured) - measured[0].arrival
    p99_ttft = nearest_rank([timing.ttft for timing in measured], 99)
    p99_tpot = nearest_rank([timing.tpot for timing in measured], 99)
    return {
        "offered_qps": offered_qps,
        "effective_qps": len(measured) / (span / 1000),
        "p99_ttft_ms": p99_ttft,
        "p99_tpot_ms": p99_tpot,
        "passed": p99_ttft <= SLO_TTFT_MS and p99_tpot <= SLO_TPOT_MS,
        "hit_rate": sum(t.cached_tokens for t in measured) / sum(t.input_tokens for t in measured),
        "p99_prefill_wait_ms": nearest_rank([timing.prefill_wait for timing in measured], 99),
        "p99_decode_wait_ms": nearest_rank([timing.decode_wait for timing in measured], 99),
        "mean_transfer_ms": sum(timing.transfer for timing in measured) / len(measured),
        "mean_prefill_ms": sum(timing.prefill for timing in measured) / len(measured),
        "mean_decode_ms": sum(timing.decode for timing in measured) / len(measured),
        "prefill_utilization": sum(timing.prefill for timing in measured) / span,
        "decode_utilization": sum(timing.decode for timing in measured) / span,
    }
