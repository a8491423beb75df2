"""Measure an OpenAI-compatible server: TPOT of one stream, TTFT of fresh prompts, tokens per second of bursts.

Prompts are arrays of random token ids, and lengths are forced (ignore_eos, min_tokens), so that models with random
weights do as well as any. TTFT counts from before the connection is opened to the first event with a choice; TPOT is
(last token - first token) / (tokens - 1); a burst's tokens per second count from its first request to its last byte.
Answers are kept as bytes with their arrival times, and read when the round is over.
"""

import argparse
import asyncio
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.facts import collect_facts
from bench.load.run import LENGTH_PARAMETERS, Result, run_scenario
from bench.load.scenarios import SCENARIOS, Prompts, Scenario
from bench.progress import Progress, say
from bench.replay.server import Server, ServerError, ServerFacts

UNITS = {"tpot_ms": "ms", "ttft_ms": "ms", "output_tokens_per_s": "tok/s"}


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 1 when requests failed or were cut short, 2 when nothing could be measured, 130 when interrupted."""
    arguments = parse_arguments(argv)
    try:
        facts, results = asyncio.run(measure(arguments))
        print(report(results))
        if arguments.json:
            write_record(arguments, facts, results)
    except (ServerError, OSError) as error:
        print(f"load: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("load: interrupted, nothing written", file=sys.stderr)
        return 130
    return 1 if any(result.failures for result in results) else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="scenarios:\n"
        + "\n".join(f"  {s.name:10s} {s.text}, {s.repeats} times" for s in SCENARIOS.values())
        + "\n\nExit status: 0; 1 when a request failed or was cut short; 2 when nothing could be measured.",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="server, without /v1 (default %(default)s)")
    add("--model", help="model id (default: the first that /v1/models lists)")
    add("--scenario", nargs="+", choices=[*SCENARIOS, "all"], default=["all"], help="(default all)")
    add("--repeats", type=positive, help="counted rounds of each scenario (default: see below)")
    add("--vocab-size", type=positive, default=30000, help="token ids stay below it (default %(default)s)")
    add("--seed", type=int, help="of the prompts; the same seed on the same running server hits its prefix cache")
    add("--timeout-s", type=positive, default=300, help="a request is given up after this long (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every request's figures here")
    arguments = parser.parse_args(argv)
    if arguments.vocab_size < 2 * Prompts.FIRST_ID:
        parser.error(f"--vocab-size {arguments.vocab_size} is too small: at least {2 * Prompts.FIRST_ID}")
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(2**32)
    return arguments


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


async def measure(arguments: argparse.Namespace) -> tuple[ServerFacts, list[Result]]:
    """Every scenario in turn. Raises ServerError when the server cannot be used."""
    prompts = Prompts(arguments.seed, arguments.vocab_size)
    results = []
    async with Server(arguments.url) as server:
        facts = await server.describe(arguments.model)
        facts.accepted_parameters = await server.accepted_parameters(facts.model, prompts.draw(4))
        missing = [name for name in LENGTH_PARAMETERS if name not in facts.accepted_parameters]
        say(f"server {server.url}, model {facts.model}, seed {arguments.seed}")
        if missing:
            say(f"note: the server refuses {', '.join(missing)}; answers may be cut short, which counts as failure")
        for scenario in chosen(arguments):
            check_length(scenario, facts.max_model_len)
            total = scenario.requests * (scenario.warmups + scenario.repeats)
            with Progress(scenario.name, total) as progress:
                result = await run_scenario(
                    server.completions,
                    facts.model,
                    scenario,
                    prompts,
                    facts.accepted_parameters,
                    arguments.timeout_s,
                    progress.update,
                )
            results.append(result)
    return facts, results


def chosen(arguments: argparse.Namespace) -> list[Scenario]:
    names = SCENARIOS if "all" in arguments.scenario else dict.fromkeys(arguments.scenario)
    repeats = {} if arguments.repeats is None else {"repeats": arguments.repeats}
    return [Scenario(**{**asdict(SCENARIOS[name]), **repeats}) for name in names]


def check_length(scenario: Scenario, max_model_len: int | None) -> None:
    needed = scenario.prompt_tokens + scenario.output_tokens
    if max_model_len is not None and needed > max_model_len:
        raise ServerError(f"{scenario.name} needs {needed} tokens, the model holds {max_model_len}; pick --scenario")


def report(results: list[Result]) -> str:
    lines = [f"{'scenario':10s} {'median':>10s} {'min':>10s} {'max':>10s}        n  median TTFT, TPOT ms  failed"]
    for result in results:
        figure, unit = result.figure, UNITS[result.scenario.figure]
        lines.append(
            f"{result.scenario.name:10s} {number(figure.p50)} {number(figure.min)} {number(figure.max)} {unit:6s}"
            f"{figure.n:3d}  {number(result.ttft_ms.p50)} {number(result.tpot_ms.p50)}  {len(result.failures):6d}"
        )
    for result in results:
        lines += [f"note: {result.scenario.name}: {note}" for note in result.notes]
        for failure in dict.fromkeys(result.failures):
            lines.append(f"FAILED: {result.scenario.name}: {result.failures.count(failure)} x {failure}")
    return "\n".join(lines)


def number(value: float | None) -> str:
    return f"{'-':>10s}" if value is None else f"{value:10.2f}"


def write_record(arguments: argparse.Namespace, server: ServerFacts, results: list[Result]) -> None:
    record: dict[str, Any] = {
        "facts": asdict(collect_facts()),
        "server": asdict(server),
        "seed": arguments.seed,
        "vocab_size": arguments.vocab_size,
        "results": [result.record() for result in results],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {arguments.json}")


if __name__ == "__main__":
    sys.exit(main())
