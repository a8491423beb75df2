"""What a device can do: measured here, or given for devices that are not here."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal


@dataclass(frozen=True)
class Ceilings:
    """bytes_per_s counts bytes read plus bytes written; flops_per_s is of matrix products in `dtype`, two operations
    for a multiply-add. memory_gb: 10^9 bytes."""

    name: str
    kind: Literal["measured", "projected"]
    bytes_per_s: float
    flops_per_s: float
    dtype: str
    memory_gb: float
    source: str


GIVEN = {
    "t4": Ceilings(
        "NVIDIA T4",
        "projected",
        260e9,
        24e12,
        "float16",
        16.0,
        "320 GB/s nominal of which matrix-vector products reach about 260; about 24 TFLOP/s of cuBLAS float16 "
        "sustained under the 70 W limit (65 nominal)",
    ),
}
"""Not measured here: public figures for the device."""

REPEATS = 7
VECTOR = 4096


def measure(device: str = "auto") -> Ceilings:
    """Memory bandwidth and matrix rate of the GPU, or of the CPU with the threads torch uses. A few seconds.

    The bandwidth is that of a copy or of a matrix-vector product, which only reads as a decode step does: the better.
    """
    import torch

    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    place = torch.device("cuda" if cuda else "cpu")
    dtype = torch.float16 if cuda else torch.float32
    properties: Any = torch.cuda.get_device_properties(0) if cuda else None
    copied = 1 << (31 if cuda else 27)  # bytes, far beyond any cache
    source = torch.ones(copied // 4, dtype=torch.float32, device=place)
    target = torch.empty_like(source)
    copy_s = best_time(partial(target.copy_, source), place)
    del source, target
    weights = torch.ones(copied // dtype.itemsize // VECTOR, VECTOR, dtype=dtype, device=place)
    read_s = best_time(partial(torch.mv, weights, torch.ones(VECTOR, dtype=dtype, device=place)), place)
    del weights
    copy_rate, read_rate = 2 * copied / copy_s, copied / read_s
    rows, inner, columns = (4096, 2560, 19456) if cuda else (512, 1024, 4096)
    left = torch.randn(rows, inner, dtype=dtype, device=place)
    right = torch.randn(columns, inner, dtype=dtype, device=place)
    product_s = best_time(partial(torch.matmul, left, right.T), place)
    return Ceilings(
        name=properties.name if cuda else f"CPU, {torch.get_num_threads()} threads",
        kind="measured",
        bytes_per_s=max(copy_rate, read_rate),
        flops_per_s=2 * rows * inner * columns / product_s,
        dtype=str(dtype).removeprefix("torch."),
        memory_gb=properties.total_memory / 1e9 if cuda else memory_gb(),
        source=(
            f"best of {REPEATS}: copy of {copied / 2**20:.0f} MiB {copy_rate / 1e9:.0f} GB/s, matrix-vector product of "
            f"as much {read_rate / 1e9:.0f} GB/s; matrix product {rows} x {inner} x {columns}"
        ),
    )


def best_time(work: Callable[[], Any], place: Any) -> float:
    """Least seconds of one call, after three that are not counted: a ceiling is what was reached once."""
    import torch

    def wait() -> None:
        if place.type == "cuda":
            torch.cuda.synchronize()

    seconds = []
    for repeat in range(3 + REPEATS):
        wait()
        start = time.perf_counter()
        work()
        wait()
        if repeat >= 3:
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
