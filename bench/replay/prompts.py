"""Token ids for a recorded trace: equal block ids become equal tokens, different ones differ from their first token on.

Blocks are slices of tokenized source code. A block's first token is a tag that no sibling (another block after the same
beginning) has, so two prompts share exactly the blocks they share in the trace, and no part of the next.
"""

import random
from collections.abc import Hashable, Iterator, Sequence

from bench.replay.plan import Level, PlannedRequest, Tokenize, WorkloadError
from bench.replay.trace import Trace, TraceRequest

CORPUS_TOKENS = 16384


async def code_corpus(texts: Sequence[Iterator[str]], tokenize: Tokenize) -> list[int]:
    """About CORPUS_TOKENS ids of source code, an equal share of each text."""
    corpus: list[int] = []
    for number, text in enumerate(texts, 1):
        while len(corpus) < CORPUS_TOKENS * number // len(texts):
            corpus += await tokenize(next(text))
    return corpus


class PromptBuilder:
    """Builds prompts along a tree of blocks. The same trace, corpus and seed give the same prompts."""

    def __init__(self, corpus: list[int], block_tokens: int, seed: int):
        if len(corpus) < 2 * block_tokens or len(set(corpus)) < 2:
            raise WorkloadError(f"{len(corpus)} tokens of source code are too few for blocks of {block_tokens}")
        self.corpus, self.block_tokens, self.seed = corpus, block_tokens, seed
        self.tags = sorted(set(corpus))
        self._children: list[dict[Hashable, int]] = [{}]
        self._tokens: list[list[int]] = [[]]

    def prompt(self, request: TraceRequest) -> list[int]:
        node, token_ids = 0, []
        for block in request.blocks:
            node = self._child(node, block, self.block_tokens)
            token_ids += self._tokens[node]
        if request.tail_tokens:
            token_ids += self._tokens[self._child(node, ("tail", request.tail), request.tail_tokens)]
        return token_ids

    def _child(self, parent: int, key: Hashable, num_tokens: int) -> int:
        siblings = self._children[parent]
        if key not in siblings:
            siblings[key] = len(self._tokens)
            self._tokens.append(self._slice(parent, len(siblings) - 1, num_tokens))
            self._children.append({})
        return siblings[key]

    def _slice(self, parent: int, ordinal: int, num_tokens: int) -> list[int]:
        rng = random.Random(f"block/{self.seed}/{parent}/{ordinal}")
        start = rng.randrange(len(self.corpus) - num_tokens)
        token_ids = self.corpus[start : start + num_tokens]
        quotient, token_ids[0] = ordinal // len(self.tags), self.tags[ordinal % len(self.tags)]
        if quotient and num_tokens > 1:  # more siblings than tags: two tokens tell them apart
            token_ids[1] = self.tags[quotient % len(self.tags)]
        return token_ids


def trace_level(
    trace: Trace,
    prompts: list[list[int]],
    *,
    speed: float | None = None,
    concurrency: int | None = None,
    think_scale: float = 1.0,
    session_gap_s: float = 0.0,
) -> Level:
    """A load level of a trace, in open loop at `speed` times the recorded rate, or with `concurrency` sessions at once.

    In open loop session s starts `session_gap_s` * s later than recorded. In closed loop a request goes out when what
    it waits for has ended and the recorded pause times `think_scale` is over; each session begins when the session
    `concurrency` places before it has ended.
    """
    due = [request.arrival_s + request.session * session_gap_s for request in trace.requests]
    order = sorted(range(len(due)), key=lambda position: (due[position], position))
    place = {old: new for new, old in enumerate(order)}
    ends: dict[int, list[int]] = {}
    for position, request in enumerate(trace.requests):
        ends.setdefault(request.session, []).append(position)
    sessions = list(ends)
    if concurrency is not None:  # one session after another, so that nobody waits for a later index
        order = [p for round_ in batches(sessions, concurrency) for p in sorted(p for s in round_ for p in ends[s])]
        place = {old: new for new, old in enumerate(order)}
    planned = []
    for index, position in enumerate(order):
        request = trace.requests[position]
        after = request.after
        if concurrency is not None and not after:
            rank = sessions.index(request.session)
            after = tuple(ends[sessions[rank - concurrency]]) if rank >= concurrency else ()
        planned.append(
            PlannedRequest(
                index=index,
                session=request.session,
                phase="measured",
                arrival_s=due[position] / speed if speed is not None else 0.0,
                prompt_token_ids=prompts[position],
                output_tokens=request.output_tokens,
                turn=request.turn,
                after=tuple(place[earlier] for earlier in after) if concurrency is not None else (),
                think_s=request.think_s * think_scale if concurrency is not None and request.after else 0.0,
            )
        )
    if concurrency is not None:
        return Level(f"{concurrency} sessions at once", planned, concurrency=concurrency)
    assert speed is not None
    span = planned[-1].arrival_s - planned[0].arrival_s
    return Level(f"{speed:g} x speed", planned, offered_qps=(len(planned) - 1) / span if span > 0 else None)


def batches(sessions: list[int], size: int) -> list[list[int]]:
    return [sessions[start : start + size] for start in range(0, len(sessions), size)]
