"""Replay an eight-session coding-agent workload against any OpenAI-compatible server, in open loop.

Eight sessions, each with a code prefix of its own, are warmed one after another; then requests arrive at the offered
rate whatever the server does, each with its session's prefix and new input. Reports TTFT (from the scheduled arrival),
TPOT, cached tokens as the server measured them, effective QPS and goodput, for each offered rate.
"""

import argparse
import asyncio
import sys
from datetime import datetime, timezone
from pathlib import Path

from bench.facts import collect_facts
from bench.progress import Progress, say
from bench.replay.client import LevelRun, RawResponse, run_level
from bench.replay.page import html_page
from bench.replay.report import Result, text_report, write_files
from bench.replay.response import RequestRecord, read_response
from bench.replay.server import OPTIONAL_PARAMETERS, Server, ServerError, directory_tokenizer, request_body
from bench.replay.summary import LevelSummary, Slo, summarize_level
from bench.replay.transport import Endpoint
from bench.replay.workload import PlannedRequest, Workload, WorkloadError, make_prefixes, plan_level

MISSING_PARAMETER_NOTES = {
    "stream_options": "the server refuses stream_options: no usage, no cached tokens, tokens counted by pieces of text",
    "ignore_eos": "the server refuses ignore_eos: answers may end early, which is not counted as failure",
    "min_tokens": "the server refuses min_tokens: ignore_eos alone keeps answers from ending early",
    "return_token_ids": "the server refuses return_token_ids: token times are those of pieces of text",
}
QPS_HELP = "offered rates, one load level each (default 1 2 4 8 16 32)"
JSON_HELP = "record to write; requests and page go beside it (default build/replay/TIME.json)"


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 1 when requests failed or timed out, 2 when the replay could not run, 130 when interrupted."""
    arguments = parse_arguments(argv)
    try:
        result = asyncio.run(replay(arguments))
        files = write_files(result, arguments.json, html_page(result))
    except (ServerError, WorkloadError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("replay: interrupted, nothing written", file=sys.stderr)
        return 130
    print(text_report(result))
    print("\n" + "\n".join(f"wrote {path}" for path in files))
    return 1 if result.failures else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    standard, slo = Workload(), Slo()
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0; 1 when a request failed or timed out; 2 when the replay could not run. "
        "A missed SLO is a result, not an error.",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="server, without /v1 (default %(default)s)")
    add("--model", help="model id (default: the first that /v1/models lists)")
    add(
        "--tokenizer",
        metavar="DIR",
        help="model directory whose tokenizer.json to use when the server has no /tokenize",
    )
    add("--qps", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="QPS", help=QPS_HELP)
    add("--prefix-tokens", type=int, default=standard.prefix_tokens, help="tokens of a session's prefix (%(default)s)")
    add("--new-tokens", type=int, default=standard.new_tokens, help="new prompt tokens of each request (%(default)s)")
    add("--output-tokens", type=int, default=standard.output_tokens, help="tokens to generate (%(default)s)")
    add("--requests", type=int, default=standard.requests, help="requests a level, warm-up included (%(default)s)")
    add("--warmup-gap-s", type=float, default=standard.warmup_gap_s, help="time between the 8 warm-ups (%(default)s)")
    add("--seed", type=int, default=standard.seed, help="of the generated source text (%(default)s)")
    add("--slo-ttft-ms", type=positive, default=slo.ttft_ms, help="limit on p99 TTFT (%(default)s)")
    add("--slo-tpot-ms", type=positive, default=slo.tpot_ms, help="limit on p99 TPOT (%(default)s)")
    add("--timeout-s", type=positive, default=300.0, help="a request ends this long after its arrival (%(default)s)")
    add("--flush-cache", action="store_true", help="POST /flush_cache before each level, so that each starts cold")
    add("--json", type=Path, default=Path(f"build/replay/{stamp}.json"), metavar="FILE", help=JSON_HELP)
    arguments = parser.parse_args(argv)
    if len(set(arguments.qps)) < len(arguments.qps):
        parser.error("--qps: the same rate twice would repeat its prompts; run the command again with another --seed")
    return arguments


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


async def replay(arguments: argparse.Namespace) -> Result:
    """Every load level, one after another. Raises ServerError and WorkloadError when it cannot run at all."""
    workload = Workload(
        prefix_tokens=arguments.prefix_tokens,
        new_tokens=arguments.new_tokens,
        output_tokens=arguments.output_tokens,
        requests=arguments.requests,
        warmup_gap_s=arguments.warmup_gap_s,
        seed=arguments.seed,
    )
    slo = Slo(arguments.slo_ttft_ms, arguments.slo_tpot_ms)
    async with Server(arguments.url) as server:
        facts = await server.describe(arguments.model)
        check_lengths(workload, facts.max_model_len)
        say(f"server {server.url}, model {facts.model}")
        tokenize = directory_tokenizer(arguments.tokenizer) if arguments.tokenizer else server.tokenizer(facts.model)
        prefixes = await make_prefixes(workload, tokenize)
        facts.accepted_parameters = await server.accepted_parameters(facts.model, (await tokenize("import os\n"))[:4])
        notes = [MISSING_PARAMETER_NOTES[name] for name in OPTIONAL_PARAMETERS if name not in facts.accepted_parameters]
        for note in notes:
            say(f"note: {note}")
        levels, records = [], []
        for qps in arguments.qps:
            if arguments.flush_cache:
                await server.flush_cache()
            planned = await plan_level(workload, qps, prefixes, tokenize)
            accepted = facts.accepted_parameters
            bodies = [
                request_body(facts.model, request.prompt_token_ids, workload.output_tokens, accepted)
                for request in planned
            ]
            run = await run_with_progress(server.completions, planned, bodies, arguments.timeout_s, f"{qps:g} QPS")
            level, level_records = read_level(qps, planned, run, workload, slo, "ignore_eos" in accepted)
            levels.append(level)
            records.append(level_records)
    return Result(collect_facts(), facts, workload, slo, arguments.flush_cache, levels, records, notes)


def check_lengths(workload: Workload, max_model_len: int | None) -> None:
    needed = workload.prompt_tokens + workload.output_tokens
    if max_model_len is not None and needed > max_model_len:
        raise WorkloadError(
            f"a request needs {needed} tokens, the model holds {max_model_len}; "
            "lower --prefix-tokens, --new-tokens or --output-tokens"
        )


async def run_with_progress(
    endpoint: Endpoint, planned: list[PlannedRequest], bodies: list[bytes], timeout_s: float, title: str
) -> LevelRun:
    counts = {"sent": 0, "ended": 0, "failed": 0}
    with Progress(title, len(planned)) as progress:

        def on_event(event: str, response: RawResponse) -> None:
            counts[event] += 1
            counts["failed"] += event == "ended" and not response.looks_ok
            running = counts["sent"] - counts["ended"]
            progress.update(counts["ended"], f"done, {running} running, {counts['failed']} failed")

        return await run_level(endpoint, planned, bodies, timeout_s, on_event)


def read_level(
    qps: float, planned: list[PlannedRequest], run: LevelRun, workload: Workload, slo: Slo, length_is_forced: bool
) -> tuple[LevelSummary, list[RequestRecord]]:
    records = [
        read_response(request, response, workload.output_tokens, length_is_forced)
        for request, response in zip(planned, run.responses)
    ]
    return summarize_level(qps, records, slo, run.loop_lag_ms, workload), records


if __name__ == "__main__":
    sys.exit(main())
