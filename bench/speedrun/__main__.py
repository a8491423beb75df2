"""Measure a server against the naive baseline on this device: accuracy gate, three scenarios, one score.

Starts the baseline server, measures it (or takes an earlier measurement of it on this device), then runs the
candidate: setup.sh if there is one, sh start_server.sh, gate, chat, long prompt, burst. The score is the geometric mean
of the three speedups. --quick measures a server that already runs, without baseline, gate or score.
"""

import argparse
import json
import os
import signal
import sys
from datetime import datetime, timezone
from pathlib import Path

from bench.facts import ROOT
from bench.speedrun.gate.record import GateError
from bench.speedrun.launch import START_LIMIT_S
from bench.speedrun.model_files import ModelFilesError
from bench.speedrun.page import html_page
from bench.speedrun.quick import run_quick
from bench.speedrun.report import json_record, text_report
from bench.speedrun.runner import RunError, Runner
from bench.speedrun.scenarios import SIZES
from bench.speedrun.settings import OUTPUT_DIR, Settings

JSON_HELP = "record to write; the page goes beside it (default build/speedrun/TIME.json; --quick: none)"
EPILOG = """\
outcomes:
  SCORED     every scenario gave a figure and the gate passed
  INCORRECT  the gate failed: what is served is no longer this model
  FAIL       the server did not start, a request failed, answers were short or not streamed
  TIMEOUT    start-up, build step, gate or a scenario took longer than its limit (2 x the baseline's time)

The variables CONFIG, DRAFTER_BYO_DIR and PYTHON reach the candidate.
Exit status: 0 with a score, 1 without one, 2 when there is nothing to compare with or the command is wrong.
"""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status that --help tells, 130 when interrupted."""
    arguments = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped on the way out
    try:
        return quick(arguments) if arguments.quick else full(arguments)
    except (RunError, GateError, ModelFilesError, OSError) as error:
        print(f"speedrun: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("speedrun: interrupted, nothing written", file=sys.stderr)
        return 130


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.speedrun",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    model_dir = os.environ.get("MODEL_DIR")
    add("--model-dir", type=Path, default=model_dir, required=not model_dir, help="unmodified model (MODEL_DIR)")
    add("--candidate", type=Path, default=ROOT, metavar="DIR", help="holds start_server.sh (default: this repository)")
    add("--candidate-model-dir", type=Path, metavar="DIR", help="what the candidate serves (default: --model-dir)")
    add(
        "--weights",
        choices=("files", "random"),
        default="files",
        help="random: config.json and tokenizer are enough; no gate",
    )
    add(
        "--size",
        choices=sorted(set(SIZES) - {"kit", "quick-cpu"}),
        help="of the scenarios (default: full with a GPU, else cpu)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the baseline and the gate (%(default)s)")
    add("--repeats", type=positive, default=3, help="runs of each scenario (%(default)s)")
    add("--seed", type=int, default=0, help="of the prompts (%(default)s)")
    add("--gate", type=Path, metavar="FILE", help="gate file (default: the model's, built when there is none)")
    add("--fresh-baseline", action="store_true", help="measure the baseline again")
    add("--start-limit-s", type=float, default=START_LIMIT_S, help="for a server to be healthy (%(default)g)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    add("--quick", action="store_true", help="three figures of a server that runs at --port, with a burst of 8")
    add("--port", type=int, default=int(os.environ.get("PORT", "8000")), help="with --quick (PORT, else 8000)")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def settings_of(arguments: argparse.Namespace) -> Settings:
    has_gpu = arguments.device == "cuda" or (arguments.device == "auto" and gpu_is_there())
    size = arguments.size or ("full" if has_gpu else "cpu")
    if arguments.quick:
        size = "kit" if size == "full" else "quick-cpu"
    return Settings(
        model_dir=arguments.model_dir,
        size=size,
        candidate=arguments.candidate,
        candidate_model_dir=arguments.candidate_model_dir,
        config=os.environ.get("CONFIG", ""),
        weights=arguments.weights,
        device=arguments.device,
        seed=arguments.seed,
        repeats=arguments.repeats,
    )


def gpu_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def full(arguments: argparse.Namespace) -> int:
    result = Runner(settings_of(arguments), arguments.start_limit_s).run(arguments.gate, arguments.fresh_baseline)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    record: Path = arguments.json or OUTPUT_DIR / f"{stamp}.json"
    page = record.with_suffix(".html")
    write_json(record, json_record(result) | {"page": page.name})
    page.write_text(html_page(result))
    print(text_report(result))
    print(f"\nwrote {record}\nwrote {page}")
    return 0 if result.score is not None else 1


def quick(arguments: argparse.Namespace) -> int:
    lines, record, complete = run_quick(settings_of(arguments), f"http://127.0.0.1:{arguments.port}")
    print("\n".join(lines))
    if arguments.json:
        write_json(arguments.json, record)
        print(f"wrote {arguments.json}")
    return 0 if complete else 1


def write_json(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
