"""Replay a coding-agent workload against any OpenAI-compatible server.

Eight sessions, each with a code prefix of its own, are warmed one after another; then requests arrive at the offered
rate whatever the server does (open loop), or as earlier ones end (closed loop), each with its session's prefix and new
input. Or a recorded trace is replayed, its prompts made to fit the model. Reports TTFT (from the moment a request was
due), TPOT, cached tokens as the server measured them beside those an infinite cache would have held, why prompts
missed, effective QPS and goodput, for each load level.
"""

import asyncio
import sys
from pathlib import Path

from bench.replay.options import parse_arguments
from bench.replay.page import html_page
from bench.replay.plan import WorkloadError
from bench.replay.report import Result, text_report, write_files
from bench.replay.run import run_replay
from bench.replay.server import ServerError


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 1 when requests failed or timed out, 2 when the replay could not run, 130 when interrupted."""
    try:
        options, path = parse_arguments(argv, __doc__)
    except WorkloadError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    result = Result(slo=options.slo, flushed_between_levels=options.flush_cache)
    status = 0
    try:
        asyncio.run(run_replay(options, result))
        status = 1 if result.failures else 0
    except (ServerError, WorkloadError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print(f"replay: interrupted, {len(result.levels)} load levels had ended", file=sys.stderr)
        status = 130
    return report(result, path) or status if result.levels else status


def report(result: Result, path: Path) -> int:
    """Print the result and write its files. Returns 0, or 2 when they cannot be written."""
    print(text_report(result))
    try:
        files = write_files(result, path, html_page(result))
    except OSError as error:
        print(f"replay: cannot write {path}: {error}", file=sys.stderr)
        return 2
    print("\n" + "\n".join(f"wrote {file}" for file in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
