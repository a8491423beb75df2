"""The command line of `python3 -m bench.replay`."""

import argparse
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from bench.replay.run import ReplayOptions
from bench.replay.summary import Slo
from bench.replay.workload import Workload

PUBLIC_QPS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
REQUESTS = 128


def parse_arguments(argv: list[str] | None, description: str | None) -> tuple[ReplayOptions, Path]:
    """What to replay, and the JSON record to write. Ends the program with status 2 on options that make no sense."""
    parser = make_parser(description)
    arguments = parser.parse_args(argv)
    loads = [name for name in ("qps", "concurrency", "speed") if getattr(arguments, name)]
    if arguments.trace and arguments.qps:
        parser.error("--qps: a trace has its own arrivals; scale them with --speed")
    if arguments.speed and not arguments.trace:
        parser.error("--speed: it scales the arrivals of a --trace; the eight sessions take --qps")
    if len(loads) > 1:
        parser.error(f"--{loads[0]} and --{loads[1]}: give one; open and closed loop are separate runs")
    for name in loads:
        values = getattr(arguments, name)
        if len(set(values)) < len(values):
            parser.error(
                f"--{name}: the same load twice would repeat its prompts; run the command again with another --seed"
            )
    if not loads:
        setattr(arguments, *(("speed", [1.0]) if arguments.trace else ("qps", PUBLIC_QPS)))
    return to_options(arguments), arguments.json


def to_options(arguments: argparse.Namespace) -> ReplayOptions:
    return ReplayOptions(
        url=arguments.url,
        workload=Workload(
            prefix_tokens=arguments.prefix_tokens,
            new_tokens=arguments.new_tokens,
            output_tokens=arguments.output_tokens,
            requests=REQUESTS if arguments.requests is None or arguments.trace else arguments.requests,
            warmup_gap_s=arguments.warmup_gap_s,
            seed=arguments.seed,
            code=arguments.code,
        ),
        slo=Slo(arguments.slo_ttft_ms, arguments.slo_tpot_ms),
        model=arguments.model,
        tokenizer=arguments.tokenizer,
        qps=arguments.qps or [],
        concurrency=arguments.concurrency or [],
        speed=arguments.speed or [],
        think_s=arguments.think_s,
        think_scale=arguments.think_scale,
        session_gap_s=arguments.session_gap_s,
        trace=arguments.trace or [],
        max_requests=arguments.requests if arguments.trace else None,
        fit=arguments.fit,
        context=arguments.context,
        block_tokens=arguments.block_tokens,
        block_size=arguments.block_size,
        timeout_s=arguments.timeout_s,
        flush_cache=arguments.flush_cache,
        reference=arguments.reference,
    )


def make_parser(description: str | None) -> argparse.ArgumentParser:
    standard, slo = Workload(), Slo()
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.replay",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0; 1 when a request failed or timed out; 2 when the replay could not run (or not to its "
        "end; levels that ended are written); 130 when interrupted (the same). A missed SLO is a result, not an error. "
        "docs/replay.md has examples.",
    )
    group = parser.add_argument_group("server")
    group.add_argument("--url", default="http://127.0.0.1:8000", help="server, without /v1 (default %(default)s)")
    group.add_argument("--model", help="model id (default: the first that /v1/models lists)")
    group.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="model directory whose tokenizer.json to use when the server has no /tokenize",
    )
    group.add_argument("--timeout-s", type=positive, default=300.0, help="give a request up after this (%(default)s)")
    group.add_argument("--flush-cache", action="store_true", help="POST /flush_cache before each level: all start cold")
    group.add_argument(
        "--block-size", type=at_least(1), metavar="TOKENS", help="of the server's prefix cache (default: measured)"
    )
    group = parser.add_argument_group("load (one level a value)")
    group.add_argument(
        "--qps", type=positive, nargs="+", metavar="QPS", help="open loop: offered rates (default 1 2 4 8 16 32)"
    )
    group.add_argument(
        "--concurrency",
        type=at_least(1),
        nargs="+",
        metavar="N",
        help="closed loop: requests (trace: sessions) at once",
    )
    group.add_argument("--speed", type=positive, nargs="+", metavar="X", help="open loop of a trace: times as fast (1)")
    group.add_argument("--think-s", type=not_negative, default=0.0, help="closed loop: pause of a user (%(default)s)")
    group.add_argument("--think-scale", type=not_negative, default=1.0, help="factor on a trace's pauses (%(default)s)")
    group.add_argument(
        "--session-gap-s", type=not_negative, default=0.0, help="open loop: time between session files' starts (0)"
    )
    group = parser.add_argument_group("eight-session workload (the default)")
    add = group.add_argument
    add("--prefix-tokens", type=int, default=standard.prefix_tokens, help="tokens of a session's prefix (%(default)s)")
    add("--new-tokens", type=int, default=standard.new_tokens, help="new prompt tokens of each request (%(default)s)")
    add("--output-tokens", type=int, default=standard.output_tokens, help="to generate; trace: at most (%(default)s)")
    add("--requests", type=int, help=f"a level, warm-up included ({REQUESTS}); trace: the first so many (all)")
    add("--warmup-gap-s", type=float, default=standard.warmup_gap_s, help="time between the 8 warm-ups (%(default)s)")
    add("--seed", type=int, default=standard.seed, help="of choice and order of the source text (%(default)s)")
    add(
        "--code",
        default=standard.code,
        metavar="SOURCE",
        help="text of prompts: stdlib (default), generated, or a directory",
    )
    group = parser.add_argument_group("recorded trace")
    add = group.add_argument
    add(
        "--trace",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="session files or directories, one Mooncake .jsonl, or captured prompts",
    )
    add("--context", type=at_least(2), metavar="TOKENS", help="make prompts fit this (default: the model's context)")
    add("--fit", choices=["shared", "thin"], default="shared", help="which blocks go to make them fit (%(default)s)")
    add(
        "--block-tokens", type=at_least(2), metavar="N", help="a recorded block becomes N tokens (default: as recorded)"
    )
    group = parser.add_argument_group("verdict and output")
    add = group.add_argument
    add("--slo-ttft-ms", type=positive, default=slo.ttft_ms, help="limit on p99 TTFT (%(default)s)")
    add("--slo-tpot-ms", type=positive, default=slo.tpot_ms, help="limit on p99 TPOT (%(default)s)")
    add(
        "--reference",
        type=Path,
        metavar="FILE",
        help=".requests.jsonl of an earlier replay of the same input: say how many answers are the same",
    )
    default = Path(f"build/replay/{stamp}.json")
    where = "record to write; requests and page go beside it (default build/replay/TIME.json)"
    add("--json", type=Path, default=default, metavar="FILE", help=where)
    return parser


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def at_least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, got {text}")
        return value

    return integer
