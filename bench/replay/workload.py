"""The eight-session coding-agent workload: which prompt arrives when.

    request    0 .. 7                              8 .. n-1
    class      warm-up: the session's first,       measured: the same prefix, new input
               cold prefix
    arrival    i * warmup_gap_s                    8 * warmup_gap_s + (i - 8) / qps          (seconds)

Request i belongs to session i % 8. A prompt is the session's prefix (tokenized once, cut to exactly `prefix_tokens`
ids) followed by exactly `new_tokens` ids of its own. Arrivals are fixed beforehand: a slow server does not slow them
down.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from bench.replay.codegen import session_text, turn_text

NUM_SESSIONS = 8
TOKENIZE_CONCURRENCY = 8

Phase = Literal["warmup", "measured"]
Tokenize = Callable[[str], Awaitable[list[int]]]


class WorkloadError(ValueError):
    """The sizes asked for make no workload; the message names the option."""


@dataclass(frozen=True)
class Workload:
    """Sizes of one load level, in tokens, requests and seconds."""

    prefix_tokens: int = 3968
    new_tokens: int = 128
    output_tokens: int = 128
    requests: int = 128
    warmup_gap_s: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("prefix_tokens", 1), ("new_tokens", 1), ("output_tokens", 2), ("warmup_gap_s", 0)):
            if getattr(self, name) < least:
                raise WorkloadError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.requests <= NUM_SESSIONS:
            raise WorkloadError(f"requests must be above {NUM_SESSIONS} (those warm the sessions), got {self.requests}")

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + self.new_tokens


@dataclass(frozen=True)
class PlannedRequest:
    """`arrival_s` counts from the start of the load level."""

    index: int
    session: int
    phase: Phase
    arrival_s: float
    prompt_token_ids: list[int]


def phase_of(index: int) -> Phase:
    return "warmup" if index < NUM_SESSIONS else "measured"


def arrival_s(workload: Workload, qps: float, index: int) -> float:
    """Seconds from the start of the level to the scheduled arrival of request `index`."""
    if index < NUM_SESSIONS:
        return index * workload.warmup_gap_s
    return NUM_SESSIONS * workload.warmup_gap_s + (index - NUM_SESSIONS) / qps


async def make_prefixes(workload: Workload, tokenize: Tokenize) -> list[list[int]]:
    """The prefix of each session, exactly `prefix_tokens` ids."""
    texts = (session_text(workload.seed, session) for session in range(NUM_SESSIONS))
    return await gather_bounded(take_tokens(text, workload.prefix_tokens, tokenize) for text in texts)


async def plan_level(
    workload: Workload, qps: float, prefixes: list[list[int]], tokenize: Tokenize
) -> list[PlannedRequest]:
    """Every request of a load level, by index. New input depends on (seed, qps, index) alone, so a level is the same
    whichever others run before it, and repeats nothing of them but the prefixes."""
    turns = await gather_bounded(
        take_tokens(turn_text(workload.seed, f"{qps:g}", index, index % NUM_SESSIONS), workload.new_tokens, tokenize)
        for index in range(workload.requests)
    )
    return [
        PlannedRequest(
            index=index,
            session=index % NUM_SESSIONS,
            phase=phase_of(index),
            arrival_s=arrival_s(workload, qps, index),
            prompt_token_ids=prefixes[index % NUM_SESSIONS] + turn,
        )
        for index, turn in enumerate(turns)
    ]


async def take_tokens(texts: Iterator[str], num_tokens: int, tokenize: Tokenize) -> list[int]:
    """The first `num_tokens` ids of an endless text, tokenized piece by piece."""
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        piece = await tokenize(next(texts))
        if not piece:
            raise WorkloadError("the tokenizer gave no tokens for a piece of source text")
        token_ids += piece
    return token_ids[:num_tokens]


async def gather_bounded(jobs: Iterator[Awaitable[list[int]]]) -> list[list[int]]:
    """Results in order, TOKENIZE_CONCURRENCY jobs at a time."""
    gate = asyncio.Semaphore(TOKENIZE_CONCURRENCY)

    async def one(job: Awaitable[list[int]]) -> list[int]:
        async with gate:
            return await job

    return await asyncio.gather(*(one(job) for job in jobs))
