"""Makes a recorded trace small enough for a model's context, in ways that keep where its cache hits are.

Blocks are dropped by their place, the same places in every request of a session that begins alike, so that two prompts
agree after it exactly as far as before. What is never dropped is a prompt's end: the part that is new.

    shared   from the middle of what all of those requests begin with; what that does not yield, evenly from the rest.
             New input stays as recorded, so the hit rate falls with the prompts' length.
    thin     evenly from the whole length. New input shrinks with the prompts, so the hit rate stays.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal

from bench.replay.plan import WorkloadError
from bench.replay.trace import Trace, TraceRequest, common_length

Fit = Literal["shared", "thin"]


@dataclass(frozen=True)
class FitReport:
    """How a trace was changed; hit rates are those of an infinite cache with the trace's own blocks."""

    recorded_prompt_tokens: int
    prompt_tokens: int
    recorded_hit_rate: float
    hit_rate: float
    block_tokens: int
    context: int | None


def fit_trace(
    trace: Trace, context: int | None, output_tokens: int, fit: Fit, block_tokens: int | None = None
) -> tuple[Trace, FitReport]:
    """A trace whose prompts, with at most `output_tokens` of output, fit `context` tokens (None: whatever they need).

    With `block_tokens`, every recorded block first becomes that many tokens, and tails in proportion. Raises
    WorkloadError when even one block and the tails do not fit.
    """
    fitted = limit_outputs(trace, output_tokens)
    if block_tokens is not None:
        fitted = resize_blocks(fitted, block_tokens)
    if context is not None:
        fitted = drop_blocks(fitted, context, fit)
    report = FitReport(
        recorded_prompt_tokens=sum(map(trace.prompt_tokens, trace.requests)),
        prompt_tokens=sum(map(fitted.prompt_tokens, fitted.requests)),
        recorded_hit_rate=trace.ideal_hit_rate,
        hit_rate=fitted.ideal_hit_rate,
        block_tokens=fitted.block_tokens,
        context=context,
    )
    return fitted, report


def limit_outputs(trace: Trace, most: int) -> Trace:
    return replace(
        trace,
        requests=[replace(request, output_tokens=min(request.output_tokens, most)) for request in trace.requests],
    )


def resize_blocks(trace: Trace, block_tokens: int) -> Trace:
    def tail(request: TraceRequest) -> int:
        scaled = request.tail_tokens * block_tokens // trace.block_tokens
        return max(scaled, min(1, request.tail_tokens))

    return Trace(trace.name, block_tokens, [replace(request, tail_tokens=tail(request)) for request in trace.requests])


def drop_blocks(trace: Trace, context: int, fit: Fit) -> Trace:
    trees: dict[Hashable, list[int]] = {}
    for position, request in enumerate(trace.requests):
        trees.setdefault((request.session, request.blocks[:1]), []).append(position)
    # what several sessions begin with stays whole, or they would no longer share it
    keep = common_length([list(request.blocks) for request in trace.requests]) if len(trees) > 1 else 0
    requests = list(trace.requests)
    for positions in trees.values():
        members = [requests[position] for position in positions]
        room = min(context - request.output_tokens - request.tail_tokens for request in members)
        dropped = places_to_drop(members, room // trace.block_tokens, keep, fit)
        if dropped is None:
            need = trace.block_tokens * (keep + 1) + max(
                request.tail_tokens + request.output_tokens for request in members
            )
            raise WorkloadError(
                f"a context of {context} tokens is too small for {trace.name}: it needs {need} or more; lower "
                "--output-tokens or --block-tokens"
            )
        for position in positions:
            blocks = requests[position].blocks
            kept = tuple(block for place, block in enumerate(blocks) if place not in dropped)
            requests[position] = replace(requests[position], blocks=kept)
    return replace(trace, requests=requests)


def places_to_drop(members: list[TraceRequest], most_blocks: int, keep: int, fit: Fit) -> set[int] | None:
    """Which places go so that no member has more than `most_blocks`; the first `keep` stay. None: it cannot be done."""
    longest = max(len(request.blocks) for request in members)
    excess = longest - most_blocks
    if excess <= 0:
        return set()
    if most_blocks < keep + 1:
        return None
    if fit == "thin":
        return evenly(keep, longest, excess)
    shared = common_length([list(request.blocks) for request in members])
    first, last = keep + 1, shared - 1  # the head and the last shared block stay
    from_shared = max(0, min(excess, last - first))
    start = first + (last - first - from_shared) // 2
    dropped = set(range(start, start + from_shared))
    rest = excess - from_shared
    if rest and rest > longest - shared:
        return evenly(keep, longest, excess)
    return dropped | evenly(shared, longest, rest)


def evenly(begin: int, end: int, count: int) -> set[int]:
    """`count` places spread over begin .. end - 1."""
    return {begin + (2 * i + 1) * (end - begin) // (2 * count) for i in range(count)}
