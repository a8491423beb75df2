"""The eight-session coding-agent workload: which prompt arrives when.

    request    0 .. 7                              8 .. n-1
    class      warm-up: the session's first,       measured: the same prefix, new input
               cold prefix
    open loop  i * warmup_gap_s                    8 * warmup_gap_s + (i - 8) / qps          (seconds)
    closed     the same                            when request i - concurrency has ended, think_s later; the first of
                                                   them when all warm-ups have ended

Request i belongs to session i % 8. A prompt is the session's prefix (tokenized once, cut to exactly `prefix_tokens`
ids) followed by exactly `new_tokens` ids of its own. In open loop arrivals are fixed beforehand: a slow server does not
slow them down.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from bench.replay.codegen import turn_text
from bench.replay.plan import Level, Phase, PlannedRequest, Tokenize, WorkloadError
from bench.replay.source_code import NUM_SESSIONS, STDLIB, session_source

TOKENIZE_CONCURRENCY = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Workload:
    """Sizes of one load level, in tokens, requests and seconds. `code`: where the prefixes' text comes from
    (source_code.py)."""

    prefix_tokens: int = 3968
    new_tokens: int = 128
    output_tokens: int = 128
    requests: int = 128
    warmup_gap_s: float = 2.0
    seed: int = 0
    code: str = STDLIB

    def __post_init__(self) -> None:
        for name, least in (("prefix_tokens", 1), ("new_tokens", 1), ("output_tokens", 2), ("warmup_gap_s", 0)):
            if getattr(self, name) < least:
                raise WorkloadError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.requests <= NUM_SESSIONS:
            raise WorkloadError(f"requests must be above {NUM_SESSIONS} (those warm the sessions), got {self.requests}")

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + self.new_tokens


def phase_of(index: int) -> Phase:
    return "warmup" if index < NUM_SESSIONS else "measured"


def arrival_s(workload: Workload, qps: float, index: int) -> float:
    """Seconds from the start of the level to the scheduled arrival of request `index` in open loop."""
    if index < NUM_SESSIONS:
        return index * workload.warmup_gap_s
    return NUM_SESSIONS * workload.warmup_gap_s + (index - NUM_SESSIONS) / qps


async def make_prefixes(workload: Workload, tokenize: Tokenize) -> list[list[int]]:
    """The prefix of each session, exactly `prefix_tokens` ids."""
    texts = (session_source(workload.code, workload.seed, session) for session in range(NUM_SESSIONS))
    return await gather_bounded(take_tokens(text, workload.prefix_tokens, tokenize) for text in texts)


async def plan_level(workload: Workload, qps: float, prefixes: list[list[int]], tokenize: Tokenize) -> Level:
    """The open loop at `qps`."""
    prompts = await level_prompts(workload, f"{qps:g}", prefixes, tokenize)
    planned = [
        planned_request(workload, index, prompt, arrival_s(workload, qps, index))
        for index, prompt in enumerate(prompts)
    ]
    return Level(f"{qps:g} QPS", planned, offered_qps=qps)


async def plan_closed_level(
    workload: Workload, concurrency: int, think_s: float, prefixes: list[list[int]], tokenize: Tokenize
) -> Level:
    """The closed loop with `concurrency` requests at once."""
    prompts = await level_prompts(workload, f"closed {concurrency}", prefixes, tokenize)
    planned = []
    for index, prompt in enumerate(prompts):
        if index < NUM_SESSIONS:
            planned.append(planned_request(workload, index, prompt, index * workload.warmup_gap_s))
            continue
        first = index - NUM_SESSIONS < concurrency
        after = tuple(range(NUM_SESSIONS)) if first else (index - concurrency,)
        planned.append(planned_request(workload, index, prompt, 0.0, after, 0.0 if first else think_s))
    return Level(f"{concurrency} at once", planned, concurrency=concurrency)


def planned_request(
    workload: Workload,
    index: int,
    prompt_token_ids: list[int],
    arrival: float,
    after: tuple[int, ...] = (),
    think_s: float = 0.0,
) -> PlannedRequest:
    return PlannedRequest(
        index=index,
        session=index % NUM_SESSIONS,
        phase=phase_of(index),
        arrival_s=arrival,
        prompt_token_ids=prompt_token_ids,
        output_tokens=workload.output_tokens,
        turn=index // NUM_SESSIONS,
        after=after,
        think_s=think_s,
    )


async def level_prompts(
    workload: Workload, label: str, prefixes: list[list[int]], tokenize: Tokenize
) -> list[list[int]]:
    """Every prompt of a load level, by index. New input depends on (seed, label, index) alone, so a level is the same
    whichever others run before it, and repeats nothing of them but the prefixes."""
    turns = await gather_bounded(
        take_tokens(turn_text(workload.seed, label, index, index % NUM_SESSIONS), workload.new_tokens, tokenize)
        for index in range(workload.requests)
    )
    return [prefixes[index % NUM_SESSIONS] + turn for index, turn in enumerate(turns)]


async def take_tokens(texts: Iterator[str], num_tokens: int, tokenize: Tokenize) -> list[int]:
    """The first `num_tokens` ids of an endless text, tokenized piece by piece."""
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        piece = await tokenize(next(texts))
        if not piece:
            raise WorkloadError("the tokenizer gave no tokens for a piece of source text")
        token_ids += piece
    return token_ids[:num_tokens]


async def gather_bounded(jobs: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order, TOKENIZE_CONCURRENCY jobs at a time."""
    gate = asyncio.Semaphore(TOKENIZE_CONCURRENCY)

    async def one(job: Awaitable[T]) -> T:
        async with gate:
            return await job

    return await asyncio.gather(*(one(job) for job in jobs))
