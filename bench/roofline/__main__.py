"""Bytes and FLOPs that each speedrun scenario must move for a model, and the floor on time that a device sets.

Measures this device's memory bandwidth and matrix rate; with --device t4 it projects from given ones instead. --run
compares with what a speedrun achieved, --explain changes one thing at a time: bits of weights, head and KV, acceptance
length, batch, block size.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.facts import collect_facts
from bench.progress import say
from bench.roofline.cost import Decoding, Floor, Precision, Workload, floors
from bench.roofline.devices import GIVEN, Ceilings, measure
from bench.roofline.explain import BlockChange, Change, explain, explain_blocks
from bench.roofline.shape import QWEN3_4B, ShapeError, read_shape


class RunRecordError(ValueError):
    """The file of --run is no speedrun record."""


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 2 when the command could not run."""
    arguments = parse_arguments(argv)
    try:
        report(arguments)
    except (ShapeError, RunRecordError, OSError) as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 2
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.roofline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model-dir",
        type=Path,
        default=os.environ.get("MODEL_DIR"),
        metavar="DIR",
        help="with config.json (MODEL_DIR, else the Qwen3-4B shape)",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda", *GIVEN),
        default="auto",
        help="measure this one, or project for a named one (%(default)s)",
    )
    add("--weight-bits", type=bits, help="(16; 32 on a CPU)")
    add("--head-bits", type=bits, help="of the output projection (--weight-bits, at least 8)")
    add("--kv-bits", type=bits, help="(16; 32 on a CPU)")
    add("--group-size", type=positive, default=128, help="weights that share a scale below 16 bits (%(default)s)")
    add("--block-size", type=positive, default=64, help="tokens in a KV block (%(default)s)")
    add(
        "--acceptance-length",
        type=at_least_one,
        default=1.0,
        help="tokens kept for each pass (%(default)s: no speculation)",
    )
    add("--drafter-gb", type=float, default=0.0, help="GB a drafter reads for each pass (%(default)s)")
    add("--batch", type=positive, help="requests of the burst (32, or the run's)")
    add("--run", type=Path, metavar="FILE", help="JSON record of bench.speedrun: its sizes, and what it achieved")
    add("--explain", action="store_true", help="what would change if ...")
    add("--json", type=Path, metavar="FILE", help="write everything here as well")
    return parser.parse_args(argv)


def bits(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 32:
        raise argparse.ArgumentTypeError(f"must be from 1 to 32, got {text}")
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def at_least_one(text: str) -> float:
    value = float(text)
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def report(arguments: argparse.Namespace) -> None:
    shape = read_shape(arguments.model_dir) if arguments.model_dir else QWEN3_4B
    workload, achieved = read_run(arguments.run) if arguments.run else (Workload(), {})
    if arguments.batch:
        workload = Workload(workload.chat, workload.long, workload.burst, arguments.batch)
    if arguments.device in GIVEN:
        ceilings = GIVEN[arguments.device]
    else:
        say("measuring memory bandwidth and matrix rate")
        ceilings = measure(arguments.device)
    decoding = decoding_of(arguments, ceilings)
    found = floors(shape, decoding, workload, ceilings)
    print(f"{shape.name} on {ceilings.name} ({ceilings.kind})")
    print(
        f"{ceilings.bytes_per_s / 1e9:.0f} GB/s, {ceilings.flops_per_s / 1e12:.3g} TFLOP/s {ceilings.dtype}: "
        f"{ceilings.source}"
    )
    precision = decoding.precision
    print(
        f"weights {precision.weight_bits:g} bits, head {precision.head_bits:g}, KV {precision.kv_bits:g}, "
        f"acceptance length {decoding.acceptance_length:g}\n"
    )
    print(
        table(
            ("scenario", "metric", "GB", "TFLOP", "bound by", "floor", "achieved", "floor share"),
            [floor_row(floor, achieved) for floor in found],
        )
    )
    if any((share_of_floor(floor, achieved) or 0.0) > 1.0 for floor in found):
        print(
            "\na share above 100 %: the ceilings were measured while this machine had less to give than during the run"
        )
    changes, blocks = [], []
    if arguments.explain:
        changes = explain(shape, decoding, workload, ceilings)
        blocks = explain_blocks(shape, decoding, workload, ceilings)
        print("\nfloors if one thing changed\n")
        print(
            table(
                ("change", "chat ms/token", "long ms", "burst tokens/s", "because"),
                [change_row(change) for change in changes],
            )
        )
        print("\nthe block size moves no floor; it decides what fits and what is reused\n")
        print(
            table(
                ("block", "wasted tokens a sequence", "burst sequences that fit", "computed again on a full hit"),
                [block_row(row) for row in blocks],
            )
        )
    if arguments.json:
        record = {
            "kind": ceilings.kind,
            "benchmark": "roofline",
            "facts": asdict(collect_facts(ceilings.kind)),
            "shape": asdict(shape),
            "ceilings": asdict(ceilings),
            "decoding": asdict(decoding),
            "workload": asdict(workload),
            "floors": [asdict(floor) for floor in found],
            "achieved": achieved,
            "explain": [asdict(change) for change in changes],
            "blocks": [asdict(row) for row in blocks],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nwrote {arguments.json}")


def decoding_of(arguments: argparse.Namespace, ceilings: Ceilings) -> Decoding:
    natural = 32.0 if ceilings.dtype == "float32" else 16.0
    weight_bits = arguments.weight_bits or natural
    head_bits = arguments.head_bits or max(8.0, weight_bits)
    precision = Precision(weight_bits, head_bits, arguments.kv_bits or natural, arguments.group_size)
    return Decoding(precision, arguments.acceptance_length, arguments.drafter_gb, arguments.block_size)


def read_run(path: Path) -> tuple[Workload, dict[str, float]]:
    """Sizes of a speedrun, and the candidate's values by scenario. Raises RunRecordError, OSError."""
    try:
        record = json.loads(path.read_text())
        sizes = {entry["name"]: entry for entry in record["scenarios"]}
        prompt_and_output = {name: (entry["prompt_tokens"], entry["output_tokens"]) for name, entry in sizes.items()}
        achieved = {name: float(entry["value"]) for name, entry in record["candidate"].items()}
        return Workload(**prompt_and_output, batch=sizes["burst"]["requests"]), achieved
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunRecordError(f"{path} is no record of bench.speedrun ({type(error).__name__}: {error})") from None


def share_of_floor(floor: Floor, achieved: dict[str, float]) -> float | None:
    """1 where a run reached the floor; None where it has no value."""
    value = achieved.get(floor.scenario)
    if not value:
        return None
    return value / floor.value if floor.scenario == "burst" else floor.value / value


def floor_row(floor: Floor, achieved: dict[str, float]) -> tuple[str, ...]:
    value, share = achieved.get(floor.scenario), share_of_floor(floor, achieved)
    return (
        floor.scenario,
        floor.metric,
        f"{floor.bytes / 1e9:.3f}",
        f"{floor.flops / 1e12:.3g}",
        floor.bound,
        f"{floor.value:.4g}",
        "-" if value is None else f"{value:.4g}",
        "-" if share is None else f"{share:.1%}",
    )


def change_row(change: Change) -> tuple[str, ...]:
    return (
        change.what,
        f"{change.chat_ms:.3g}",
        f"{change.long_ms:.4g}",
        f"{change.burst_tokens_per_s:.4g}",
        change.why,
    )


def block_row(row: BlockChange) -> tuple[str, ...]:
    return (str(row.block_size), f"{row.wasted_tokens:g}", str(row.sequences_that_fit), str(row.recomputed_tokens))


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines: list[tuple[Any, ...]] = [columns, *rows]
    widths = [max(len(row[column]) for row in lines) for column in range(len(columns))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in lines]
    texts.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(texts)


if __name__ == "__main__":
    sys.exit(main())
