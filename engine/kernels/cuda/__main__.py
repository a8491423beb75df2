"""Builds every CUDA kernel ahead of the first start.

    python3 -m engine.kernels.cuda               for each GPU of this machine
    python3 -m engine.kernels.cuda sm_75 sm_90   for the architectures named; needs no GPU

The results go to $BATON_CACHE or ~/.cache/baton, where the server finds them. Without this step the server builds
what it needs when it starts. Ends with 0 when there is nothing to build with or for, and says what that means.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from engine.kernels.cuda.build import PTX75, BuildError, build, find_nvcc

SLOWER = "the server still starts; on GPUs older than SM80 attention then runs in plain torch, which is slower"


def architectures_here() -> list[str]:
    """Architectures of this machine's GPUs as nvidia-smi reports them; empty without a GPU or driver."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted({f"sm_{major}{minor}" for major, minor in re.findall(r"^(\d+)\.(\d+)$", done.stdout, re.M)})


def architecture(text: str) -> str:
    """Checks a command-line argument."""
    if text != PTX75 and not re.fullmatch(r"sm_\d{2,3}[a-z]?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no architecture; give one such as sm_75, or {PTX75}")
    return text


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m engine.kernels.cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "arch", nargs="*", type=architecture, help=f"sm_NN, or {PTX75}: code for SM75 that any newer GPU can run"
    )
    wanted = parser.parse_args(arguments).arch or architectures_here()
    if not wanted:
        print(f"kernels: no NVIDIA GPU found, nothing built; name an architecture (sm_75) to build anyway; {SLOWER}")
        return 0
    try:
        nvcc = find_nvcc()
    except BuildError as error:
        print(f"kernels: nothing built: {error}; {SLOWER}")
        return 0
    print(f"kernels: compiler {nvcc}", flush=True)
    failed = False
    for arch in wanted:
        for source in sorted(Path(__file__).parent.glob("*.cu")):
            try:
                result = build(source, arch)
            except BuildError as error:
                print(f"kernels: error: {error}", file=sys.stderr)
                failed = True
                continue
            how = "already built" if result.cached else f"built in {result.seconds:.1f} s"
            print(f"kernels: {source.name} for {arch}: {how}: {result.path}", flush=True)
    if failed:
        print(
            "kernels: not everything was built; the server still starts, with slower ones in its place", file=sys.stderr
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
