"""How long a handoff takes, by channel and size, and what of the raw link it uses.

Two processes on this host, as in a deployment: one offers KV blocks and a Handoff, the other waits until the Handoff
comes out of its channel, which it does when every block is in place. Blocks have Qwen3-4B's shape, 9.4 MB each (64
tokens; 4096 tokens are 64 blocks). "exposed" is what remains after the last of four parts was computed, the others
having left while it was. Channels that share a pool move no byte.

  python3 -m bench.transfer                                            what works here
  python3 -m bench.transfer --channels cuda_p2p,nccl --gpus 0,1 --json out.json --plot out.svg
  python3 -m bench.transfer --channels cuda_p2p --scattered            blocks anywhere in both pools
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bench.facts import ROOT, collect_facts
from bench.progress import Progress, say

if TYPE_CHECKING:
    from bench.transfer.report import Result

CPU_CHANNELS, GPU_CHANNELS = ("shm", "tcp"), ("cuda_ipc", "cuda_p2p", "nccl", "tcp")
CPU_LAYERS, GPU_LAYERS = 8, 36


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 2 when nothing could be measured."""
    arguments = parse_arguments(argv)
    gpus = [] if arguments.device == "cpu" else place(arguments.gpus)  # before anything starts CUDA
    from bench.transfer.report import Result, draw, table
    from kv_transfer.channel import ChannelError

    device = arguments.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        print("transfer: no GPU here; use --device cpu", file=sys.stderr)
        return 2
    channels = arguments.channels or (GPU_CHANNELS if device == "cuda" else CPU_CHANNELS)
    results = []
    for channel in channels:
        try:
            results.append(measure_channel(channel, device, gpus, arguments))
        except (ChannelError, RuntimeError) as error:
            results.append(Result(channel, reason=" ".join(str(error).split())))
    print(table(results))
    if arguments.json:
        record = {"facts": asdict(collect_facts()), "results": [result.record() for result in results]}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"record: {arguments.json}")
    if arguments.plot:
        draw(results, arguments.plot)
        print(f"plot: {arguments.plot}")
    return 0 if any(result.measured for result in results) else 2


def measure_channel(channel: str, device: str, gpus: list[str], arguments: argparse.Namespace) -> "Result":
    from bench.transfer.measure import DecodeSide, Measured
    from bench.transfer.raw_link import raw_gb_per_s
    from bench.transfer.report import Result
    from bench.transfer.setting import Setting

    num_layers = arguments.layers or (CPU_LAYERS if device == "cpu" else GPU_LAYERS)
    num_blocks = max(arguments.blocks) * (2 if arguments.scattered else 1)
    setting = Setting(channel, device, num_blocks, num_layers, arguments.gap_ms, arguments.scattered)
    environment = dict(os.environ)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(prefill_first(gpus, channel))
    say(f"{channel} on {device}, {setting.layout.block_bytes / 1e6:.1f} MB a block")
    what, raw = raw_gb_per_s(channel, device, max(arguments.blocks) * setting.layout.block_bytes)
    with DecodeSide(setting, environment) as side, Progress(channel, len(arguments.blocks)) as progress:
        measured = Measured(channel, device, side.round_trip_ms(arguments.repeats))
        for done, blocks in enumerate(arguments.blocks):
            progress.update(done, f"{blocks} blocks")
            measured.points.append(side.measure(blocks, arguments.repeats))
        progress.update(len(arguments.blocks), "")
    return Result(channel, measured, raw_link=what, raw_gb_per_s=raw)


def place(gpus: list[str] | None) -> list[str]:
    """Names of the prefill and the decode side's GPU, empty without GPUs. This process, the decode side, will see its
    own first; so the driver, which looks once, must not have been started here."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    count = "from kv_transfer.choose import find_gpus; print(find_gpus().number)"
    number = int(subprocess.run([sys.executable, "-c", count], cwd=ROOT, capture_output=True, check=True).stdout)
    if number == 0:
        return []
    names = visible or [str(index) for index in range(number)]
    prefill, decode = gpus or (names[0], names[min(1, len(names) - 1)])
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys([decode, prefill]))
    return [prefill, decode]


def prefill_first(gpus: list[str], channel: str) -> list[str]:
    """What the prefill side sees. A pool is shared on one GPU: the decode side's."""
    prefill, decode = gpus
    return [decode] if channel == "cuda_ipc" else list(dict.fromkeys([prefill, decode]))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.transfer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--channels", type=names, metavar="A,B", help="default: shm,tcp; on a GPU cuda_ipc,cuda_p2p,nccl,tcp")
    add("--device", choices=("cpu", "cuda"), help="where the pools are (a GPU if there is one)")
    add("--gpus", type=two, metavar="P,D", help="of the prefill and the decode side (0,1, or 0,0 with one GPU)")
    add("--blocks", type=sizes, default=[1, 4, 16, 64], metavar="N,N", help="sizes of a transfer (1,4,16,64)")
    add("--layers", type=positive, help=f"of the model, 262 KB a block each ({GPU_LAYERS}; {CPU_LAYERS} on a CPU)")
    add("--repeats", type=positive, default=20, help="of each size (%(default)s)")
    add("--gap-ms", type=float, default=5.0, help="between the parts of a chunked transfer (%(default)s)")
    add("--scattered", action="store_true", help="blocks lie anywhere in pools of twice the size")
    add("--json", type=Path, metavar="FILE", help="write the record here")
    add("--plot", type=Path, metavar="FILE", help="draw latency and bandwidth here (.svg, .png; needs matplotlib)")
    return parser.parse_args(argv)


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def two(text: str) -> list[str]:
    given = names(text)
    if len(given) != 2:
        raise argparse.ArgumentTypeError(f"two GPUs, the prefill side's first, not {text!r}")
    return given


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def sizes(text: str) -> list[int]:
    return sorted({positive(name) for name in names(text)})


if __name__ == "__main__":
    sys.exit(main())
