"""The optimization loop of the exercise, in four evaluations. Needs nothing but the standard library and its caller.

    1  baseline                                        diagnosed: what makes it miss the SLO
    2  the same with prefill and decode in queues of their own
    3  the leader of those two without prefix cache    an ablation: what the cache alone is worth
    4  the winner again                                verification

Diagnosis: at the first load level that misses an SLO (or the highest one) the largest share of p99 TTFT names the
bottleneck; in one shared queue, waiting is charged to the stage that occupies the server longer.
Selection: of the eligible configurations the one with the largest objective; ties go to the earlier, so to the baseline
(the model is deterministic: any difference is real).
Regression: a configuration is eligible only if it passes every load level that the baseline passes, and is kept only if
its repetition gives the same levels again. Otherwise the baseline stays.
"""

from typing import Any


def optimize(baseline: dict[str, Any], evaluate: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(selected configuration, every result in call order)."""
    log = [evaluate(baseline), evaluate(baseline | {"mode": "disaggregated"})]
    leader = select(log)
    log.append(evaluate(leader["config"] | {"prefix_cache": False}))
    winner = select(log)
    log.append(evaluate(winner["config"]))
    return decide(log)["config"], log


def select(log: list[dict[str, Any]]) -> dict[str, Any]:
    """The eligible result with the largest objective, the earliest of equals."""
    best = log[0]
    for metrics in log[1:]:
        if not regressions(log[0], metrics) and metrics["objective"] > best["objective"]:
            best = metrics
    return best


def decide(log: list[dict[str, Any]]) -> dict[str, Any]:
    """The result that stands after verification: the last of the log repeats the winner, or the baseline stays."""
    winner, again = select(log[:-1]), log[-1]
    return winner if repeats(winner, again) else log[0]


def repeats(winner: dict[str, Any], again: dict[str, Any]) -> bool:
    return winner["config"] == again["config"] and winner["levels"] == again["levels"]


def regressions(before: dict[str, Any], after: dict[str, Any]) -> list[float]:
    """Offered rates that `before` serves within the SLOs and `after` does not."""
    return [
        old["offered_qps"] for old, new in zip(before["levels"], after["levels"]) if old["passed"] and not new["passed"]
    ]


def diagnose(metrics: dict[str, Any]) -> str:
    """The bottleneck of a configuration, in one sentence."""
    levels = metrics["levels"]
    level = next((level for level in levels if not level["passed"]), levels[-1])
    prefill, decode = level["mean_prefill_ms"], level["mean_decode_ms"]
    rate = f"at {level['offered_qps']:g} QPS"
    state = "misses its SLO" if not level["passed"] else "meets its SLO"
    waits = {"prefill": level["p99_prefill_wait_ms"], "decode": level["p99_decode_wait_ms"]}
    wait, transfer = sum(waits.values()), level["mean_transfer_ms"]
    if wait <= max(prefill, transfer):
        part = f"prefill itself ({prefill:.1f}" if prefill >= transfer else f"the handoff ({transfer:.1f}"
        return f"{rate} it {state}; TTFT is {part} ms a request), requests hardly wait"
    if metrics["config"]["mode"] == "colocated":
        longer = "decode" if decode > prefill else "prefill"
        return (
            f"{rate} it {state}; TTFT is waiting ({wait:.1f} ms at p99) in the one queue, which {longer} holds longest "
            f"(prefill {prefill:.1f} + decode {decode:.1f} ms a request: at most {1000 / (prefill + decode):.2f} QPS); "
            f"apart, the slower stage would allow {1000 / max(prefill, decode):.2f} QPS"
        )
    stage = max(waits, key=lambda stage: waits[stage])
    limit = 1000 / (prefill if stage == "prefill" else decode)
    return f"{rate} it {state}; TTFT is waiting ({wait:.1f} ms at p99) for {stage}, which allows {limit:.2f} QPS"


def explain(log: list[dict[str, Any]]) -> list[str]:
    """The reasons of the decision, from the log alone."""
    baseline, candidate, ablation, again = log
    chosen = decide(log)
    lines = [f"diagnosis of {name(baseline)}: {diagnose(baseline)}"]
    lines.append(f"candidate {name(candidate)}: {verdict(baseline, candidate)}; {diagnose(candidate)}")
    partner = next(entry for entry in log[:2] if entry["config"]["mode"] == ablation["config"]["mode"])
    lines.append(
        f"ablation {name(ablation)}: the cache is worth {partner['objective'] - ablation['objective']:.4f} QPS; "
        f"{diagnose(ablation)}"
    )
    repeated = "repeats exactly" if repeats(select(log[:-1]), again) else "does not repeat: the baseline stays"
    lines.append(f"verification of {name(again)}: {repeated}")
    lines.append(f"selected {name(chosen)}: objective {baseline['objective']:.4f} -> {chosen['objective']:.4f} QPS")
    return lines


def verdict(baseline: dict[str, Any], metrics: dict[str, Any]) -> str:
    if lost := regressions(baseline, metrics):
        return f"rejected, it misses the SLO at {', '.join(f'{qps:g}' for qps in lost)} QPS where the baseline meets it"
    if metrics["objective"] <= baseline["objective"]:
        return f"not better than the baseline ({metrics['objective']:.4f} against {baseline['objective']:.4f} QPS)"
    return f"better than the baseline ({metrics['objective']:.4f} against {baseline['objective']:.4f} QPS)"


def name(metrics: dict[str, Any]) -> str:
    config = metrics["config"]
    return f"{config['mode']} with{'' if config['prefix_cache'] else 'out'} cache"
