"""Times the candidates for this model's matrix products on this device and keeps the fastest of each size.

cuBLAS leaves a third of the memory's bandwidth unused on some products with few rows; which, and what beats it, differs
from device to device. The products are timed with the model's own weights, one layer after another as in a decode step,
so that none is found in the cache. The choice is kept by device, versions, kernel sources and shape; a worker times
what is not known yet at its first start, within a budget.
"""

import argparse
import itertools
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.cache_directory import cache_directory
from engine.kernels.linear import Linear
from engine.kernels.quantized_linear import QuantizedLinear
from engine.kernels.registry import Shape, Tuning, size_of
from engine.kernels.self_check import keep, machine_key
from engine.weights import ModelWeights

log = logging.getLogger("tune")

ROWS = (4, 8, 16, 32, 64)
"""Batch sizes that are timed; each choice holds from the size before up to its own. Beyond, cuBLAS is kept."""
MIN_GAIN = 0.03
"""A kernel replaces cuBLAS when it is faster by more than this: less is noise."""
FIRST_START_BUDGET_S = 60.0

TILES = ((32, 128, 5, 4), (64, 128, 4, 4), (64, 64, 6, 4), (128, 64, 5, 4), (128, 128, 3, 8))
"""(outputs, inputs, stages, warps) of a tile."""
PARTS = (1, 2, 4)


def load_or_tune(shape: Shape, weights: ModelWeights, budget_s: float, *, again: bool = False) -> Tuning:
    """The kept choice for this model and device, or a new one, made in about `budget_s` seconds. Sizes that the budget
    does not reach stay with cuBLAS and are not kept."""
    if shape.dtype == torch.float32 or torch.cuda.get_device_capability() < (8, 0):
        return Tuning()  # nothing but cuBLAS to choose from
    sizes = {name: size_of(products[0].weight) for name, products in _products(weights).items()}
    path = cache_directory() / f"tuned-{machine_key((shape, sizes))}.json"
    if not again:
        try:
            return Tuning(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            pass
    tuning, is_complete = tune(weights, budget_s)
    if is_complete:
        keep(path, asdict(tuning))
    return tuning


def tune(weights: ModelWeights, budget_s: float) -> tuple[Tuning, bool]:
    """Time every product. Returns the choice, and whether the budget sufficed for all of them."""
    tuning = Tuning()
    started = last_report = time.monotonic()
    log.info("timing matrix products on %s (at most %.0f s, once)", torch.cuda.get_device_name(), budget_s)
    for rows, (name, products) in itertools.product(ROWS, _products(weights).items()):
        if time.monotonic() - started > budget_s:
            log.info("the budget is used up: cuBLAS serves what was not timed")
            return tuning, False
        if time.monotonic() - last_report > 2:
            log.info("timing matrix products: %d rows, %s", rows, name)
            last_report = time.monotonic()
        cublas, best, tiling = time_product(rows, products, may_split=name in ("attention_out", "down"))
        chosen = tiling if best < cublas * (1 - MIN_GAIN) else None
        tuning.linear.setdefault(size_of(products[0].weight), []).append((rows, chosen))
        floor = products[0].weight.nbytes / 1e3
        log.info(
            "%3d rows  %-13s cuBLAS %6.1f us, best kernel %6.1f us (%4.0f GB/s): %s",
            rows,
            name,
            cublas,
            best,
            floor / best,
            "cuBLAS" if chosen is None else "tile " + "x".join(map(str, chosen)),
        )
    return tuning, True


def time_product(rows: int, products: list[Linear], may_split: bool) -> tuple[float, float, tuple[int, ...] | None]:
    """Microseconds of cuBLAS and of the best tiling, and that tiling."""
    from engine.kernels.triton.matmul import Tiling, matmul

    weight = products[0].weight
    x = torch.randn(rows, weight.shape[1], device=weight.device).to(weight.dtype)
    cublas = time_us(lambda index: F.linear(x, products[index % len(products)].weight), len(products))
    best: tuple[float, tuple[int, ...] | None] = (float("inf"), None)
    tile_m = max(16, 1 << (rows - 1).bit_length())

    def multiply(tiling: Tiling, index: int) -> torch.Tensor:
        return matmul(x, products[index % len(products)].weight, None, tiling)

    for (tile_n, tile_k, stages, warps), parts in itertools.product(TILES, PARTS if may_split else (1,)):
        tiling = Tiling(tile_m, tile_n, tile_k, parts, warps, stages)
        try:
            taken = time_us(partial(multiply, tiling), len(products))
        except Exception as error:  # more shared memory than the device has, say
            log.debug("%s does not run: %s", tiling, error)
            continue
        best = min(best, (taken, (tile_m, tile_n, tile_k, parts, warps, stages)), key=lambda pair: pair[0])
    return cublas, *best


def time_us(launch: Callable[[int], object], count: int, repeats: int = 5) -> float:
    """Median microseconds of one launch, from replays of a graph of `count` of them."""
    for index in range(2):
        launch(index)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(count):
            launch(index)
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return statistics.median(times)


def _products(weights: ModelWeights) -> dict[str, list[Linear]]:
    """The plain ones; quantized weights have kernels of their own."""
    layers = weights.layers[:16]
    named: dict[str, list[Any]] = {
        "qkv": [layer.qkv for layer in layers],
        "attention_out": [layer.attention_out for layer in layers],
        "gate_up": [layer.gate_up for layer in layers],
        "down": [layer.down for layer in layers],
        "head": [weights.head],
    }
    return {name: found for name, found in named.items() if not any(isinstance(one, QuantizedLinear) for one in found)}


def main() -> int:
    """Returns 0, or 1 when there is no GPU or no model."""
    from engine.config import DeploymentConfig
    from engine.gpu_runner import kernel_shape
    from engine.models.config import ModelError
    from engine.runner import ModelRunner

    parser = argparse.ArgumentParser(
        prog="python3 -m engine.tune",
        description="Time the matrix products of a model on this GPU and keep the fastest kernels for its workers. "
        "Workers do this themselves at their first start, within a budget; run it after a change of driver or torch, "
        "or to see the table.",
    )
    parser.add_argument("--model-dir", default=os.environ.get("MODEL_DIR"), help="default: $MODEL_DIR")
    parser.add_argument("--weights", choices=("files", "random"), default="files", help="(default %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float16 or bfloat16 (default %(default)s)")
    parser.add_argument("--budget-s", type=float, default=600.0, metavar="S", help="(default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the choice here too")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if not given.model_dir:
        sys.exit("tune: no model: give --model-dir or set MODEL_DIR")
    if not torch.cuda.is_available():
        sys.exit("tune: no CUDA device: on CPU there is nothing to choose")
    block_size = DeploymentConfig().kv.block_size
    try:
        runner = ModelRunner.load(
            given.model_dir, weights=given.weights, dtype=given.dtype, device="cuda", block_size=block_size
        )
    except ModelError as error:
        sys.exit(f"tune: {error}")
    tuning = load_or_tune(kernel_shape(runner), runner.model.weights, given.budget_s, again=True)
    if given.json:
        given.json.write_text(json.dumps(asdict(tuning), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
