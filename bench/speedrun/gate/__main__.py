"""Build the accuracy gate of a model, put it to a running server, or damage a model to see the gate fail.

build asks the unmodified model several hundred multiple-choice questions through transformers and keeps 200 that it
answers with its own greedy choice, with a hash of the model and the protocol. check asks a server the same ones: it
passes when at least 95 % of its answers are those of the unmodified model.
"""

import argparse
import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from bench.progress import Progress
from bench.speedrun.gate.build import build_gate
from bench.speedrun.gate.check import GateResult, check_gate
from bench.speedrun.gate.damage import write_damaged
from bench.speedrun.gate.record import Gate, GateError, gate_path, read_gate
from bench.speedrun.model_files import ModelFilesError, load_tokenizer, model_hash


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 1 when a server failed the gate, 2 when the command could not run."""
    arguments = parse_arguments(argv)
    try:
        return arguments.run(arguments)
    except (GateError, ModelFilesError, OSError) as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gate: interrupted", file=sys.stderr)
        return 130


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.speedrun.gate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0; 1 when the server failed the gate; 2 when the command could not run.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    default_dir = os.environ.get("MODEL_DIR")

    build = commands.add_parser("build", help="make the gate of an unmodified model (minutes on two CPU cores)")
    build.add_argument("--model-dir", type=Path, default=default_dir, required=default_dir is None, help="(MODEL_DIR)")
    build.add_argument(
        "--output", type=Path, metavar="FILE", help="default: where bench.speedrun looks for it, in build/speedrun/"
    )
    build.add_argument(
        "--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto", help="auto: float16 on a GPU"
    )
    build.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(%(default)s)")
    build.set_defaults(run=run_build)

    check = commands.add_parser("check", help="put a gate to a running server")
    check.add_argument("--url", default="http://127.0.0.1:8000", help="(%(default)s)")
    check.add_argument(
        "--model-dir",
        type=Path,
        default=default_dir,
        required=default_dir is None,
        help="the unmodified model (MODEL_DIR)",
    )
    check.add_argument("--gate", type=Path, metavar="FILE", help="default: the one that build writes")
    check.add_argument("--json", type=Path, metavar="FILE", help="write the result with every answer")
    check.set_defaults(run=run_check)

    damage = commands.add_parser("damage", help="write a damaged copy of a model")
    damage.add_argument("--model-dir", type=Path, default=default_dir, required=default_dir is None, help="(MODEL_DIR)")
    damage.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new directory")
    damage.add_argument("--noise", type=float, default=0.5, help="of each matrix' standard deviation (%(default)s)")
    damage.set_defaults(run=run_damage)
    return parser.parse_args(argv)


def run_build(arguments: argparse.Namespace) -> int:
    gate = build_gate(arguments.model_dir, arguments.dtype, arguments.device)
    path = arguments.output or gate_path(gate.model_hash)
    gate.write(path)
    print(describe(gate))
    print(f"wrote {path}")
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    gate = read_gate(arguments.gate or gate_path(model_hash(arguments.model_dir)))
    result = run_with_progress(arguments.url, gate, arguments.model_dir)
    print(result.line())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(asdict(result) | {"passed": result.passed}, indent=1) + "\n")
        print(f"wrote {arguments.json}")
    return 0 if result.passed else 1


def run_damage(arguments: argparse.Namespace) -> int:
    write_damaged(arguments.model_dir, arguments.output, arguments.noise)
    print(f"wrote {arguments.output}: {arguments.model_dir.name} with noise {arguments.noise:g}")
    return 0


def run_with_progress(url: str, gate: Gate, model_dir: Path) -> GateResult:
    tokenizer = load_tokenizer(model_dir)
    with Progress("gate", len(gate.questions)) as progress:
        return asyncio.run(check_gate(url.rstrip("/").removesuffix("/v1"), gate, tokenizer, progress.update))


def describe(gate: Gate) -> str:
    summary = gate.summary()
    return (
        f"{summary['questions']} of {gate.pool_size} questions kept for {gate.model} ({gate.dtype}); mean gap between "
        f"best and second choice {gate.mean_gap:.2f} logits; {gate.true_share:.0%} of the answers are true; "
        f"a constant answer reaches {gate.constant_share:.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
