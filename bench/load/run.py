"""Runs a scenario: sends, waits, and only then reads what came."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.load.answer import Answer, read_answer
from bench.load.scenarios import Prompts, Scenario
from bench.replay.server import optional_parameters, plain_body
from bench.replay.transport import Endpoint, exchange
from bench.stats import Summary, summarize

BUSY_CLIENT = 0.7
"""Share of one core from which on the client's own speed shows in what it measures."""

LENGTH_PARAMETERS = ("stream_options", "ignore_eos", "min_tokens")


@dataclass
class Round:
    """Requests sent at once. wall_s: first request sent -> last byte; client_cpu: this process's share of one core."""

    answers: list[Answer]
    wall_s: float
    client_cpu: float

    @property
    def failures(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error]

    def figures(self, scenario: Scenario) -> list[float]:
        """What the scenario asks for; only of rounds without a failure."""
        if self.failures:
            return []
        if scenario.figure == "output_tokens_per_s":
            return [sum(answer.output_tokens for answer in self.answers) / self.wall_s]
        return [getattr(answer, scenario.figure) for answer in self.answers]


@dataclass
class Result:
    """figure: summary over the counted rounds. ttft_ms, tpot_ms: of all their requests, whatever the figure is."""

    scenario: Scenario
    figure: Summary
    ttft_ms: Summary
    tpot_ms: Summary
    failures: list[str]
    notes: list[str]
    rounds: list[Round] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return asdict(self)


async def run_round(
    endpoint: Endpoint, bodies: list[bytes], output_tokens: int, timeout_s: float, on_end: Callable[[], None]
) -> Round:
    """Send all bodies at once; read the answers when the last has ended. Never raises for what a server does."""
    requests = [endpoint.request(body) for body in bodies]
    chunks: list[list[tuple[float, bytes]]] = [[] for _ in bodies]
    sent = [0.0] * len(bodies)
    failures = [""] * len(bodies)
    start, used = time.perf_counter(), time.process_time()

    async def one(index: int) -> None:
        sent[index] = time.perf_counter() - start
        try:
            await asyncio.wait_for(exchange(endpoint, requests[index], start, chunks[index]), timeout_s)
        except asyncio.TimeoutError:
            failures[index] = f"no end within {timeout_s:g} s"
        except OSError as error:
            failures[index] = f"connection: {error or type(error).__name__}"
        on_end()

    await asyncio.gather(*(one(index) for index in range(len(bodies))))
    used, elapsed = time.process_time() - used, time.perf_counter() - start
    answers = [read_answer(*each, output_tokens) for each in zip(chunks, sent, failures)]
    ends = [received[-1][0] for received in chunks if received]
    return Round(answers, max(ends, default=elapsed), used / elapsed)


async def run_scenario(
    endpoint: Endpoint,
    model: str,
    scenario: Scenario,
    prompts: Prompts,
    accepted: list[str],
    timeout_s: float,
    on_progress: Callable[[int, str], None],
) -> Result:
    """All rounds, one after another; a failure in a warm-up counts too. `on_progress(requests ended, text)`."""
    optional = optional_parameters(scenario.output_tokens)
    extra = {name: optional[name] for name in LENGTH_PARAMETERS if name in accepted}
    ended, rounds = 0, []

    def on_end() -> None:
        nonlocal ended
        ended += 1
        on_progress(ended, "requests ended")

    for _ in range(scenario.warmups + scenario.repeats):
        bodies = [
            json.dumps(plain_body(model, prompts.draw(scenario.prompt_tokens), scenario.output_tokens) | extra).encode()
            for _ in range(scenario.requests)
        ]
        rounds.append(await run_round(endpoint, bodies, scenario.output_tokens, timeout_s, on_end))
    return summarize_rounds(scenario, rounds)


def summarize_rounds(scenario: Scenario, rounds: list[Round]) -> Result:
    counted = rounds[scenario.warmups :]
    answers = [answer for one in counted for answer in one.answers if not answer.error]
    tpots = [answer.tpot_ms for answer in answers if answer.output_tokens > 1]
    return Result(
        scenario,
        summarize([figure for one in counted for figure in one.figures(scenario)]),
        summarize([answer.ttft_ms for answer in answers]),
        summarize(tpots),
        [failure for one in rounds for failure in one.failures],
        notes_on(counted, answers),
        counted,
    )


def notes_on(rounds: list[Round], answers: list[Answer]) -> list[str]:
    """What a reader must know before trusting the figures."""
    notes = []
    busiest = max(one.client_cpu for one in rounds)
    if busiest >= BUSY_CLIENT:
        notes.append(f"the client used {busiest:.0%} of a core: it may have been the bottleneck")
    tokens, events = sum(a.output_tokens for a in answers), sum(a.events for a in answers)
    if events < 0.98 * tokens:
        notes.append(f"{tokens} tokens came in {events} events: several at a time")
    cached = max((answer.cached_tokens or 0 for answer in answers), default=0)
    if cached:
        notes.append(f"up to {cached} prompt tokens were cached: use another --seed, or restart the server")
    return notes
