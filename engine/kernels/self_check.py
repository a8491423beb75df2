"""Every kernel is checked on the device at hand before it serves.

For each operation the fastest implementation that suits the device runs on random inputs of the model's own shapes and
is compared with plain torch in higher precision. One that fails, or raises, is passed over for the next, down to plain
torch, with a warning that names it. The outcome is kept by device, driver, versions and shape, so that it costs its
seconds once.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.cache_directory import cache_directory
from engine.kernels.attention_batch import AttentionBatch, Groups
from engine.kernels.dense_attention import dense_attention
from engine.kernels.registry import OPTIONAL, TABLE, Function, Shape
from engine.kernels.rms_norm import add_rms_norm
from engine.kernels.rope_kv_write import rope_kv_write
from engine.kernels.swiglu import swiglu

log = logging.getLogger("kernels")

TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Largest ||out - reference|| / ||reference||; rounding of the inputs' dtype stays well below it."""


def machine_key(shape: object) -> str:
    """Changes whenever a timing or a check made before may not hold any more."""
    import triton

    kernels = Path(__file__).resolve().parent
    sources = hashlib.blake2b(digest_size=8)
    for path in sorted(kernels.rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            sources.update(path.read_bytes())
    facts = [
        torch.cuda.get_device_name(),
        torch.cuda.get_device_capability(),
        torch.__version__,
        triton.__version__,
        torch.version.cuda,
        sources.hexdigest(),
        shape,
    ]
    return hashlib.blake2b(repr(facts).encode(), digest_size=12).hexdigest()


def choose(shape: Shape, device: torch.device) -> dict[str, tuple[str, Function]]:
    """Backend and function of each operation for this shape on this device. What is optional and has no implementation
    that passes is left out."""
    path = cache_directory() / f"checked-{machine_key(shape)}.json"
    try:
        known: dict[str, str] = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    capability = torch.cuda.get_device_capability(device)
    started = time.monotonic()
    chosen: dict[str, tuple[str, Function]] = {}
    for operation, implementations in TABLE.items():
        for implementation in implementations:
            backend = implementation.backend
            if not implementation.suits(shape, capability) or (known and known.get(operation) != backend):
                continue
            if operation == "shared_prefix_attention" and chosen["decode_attention"][0] != backend:
                continue
            function = implementation.load()
            if backend != "torch" and not known:
                problem = _problem(operation, function, shape, device)
                if problem:
                    log.warning("kernel %s of %s is not used: %s", operation, backend, problem)
                    continue
            chosen[operation] = (backend, function)
            break
        else:
            if operation not in OPTIONAL:
                raise AssertionError(f"no implementation of {operation}: the table must end in plain torch")
    if not known:
        log.info("kernels checked against plain torch in %.1f s", time.monotonic() - started)
        keep(path, {operation: backend for operation, (backend, _) in chosen.items()})
    return chosen


def keep(path: Path, value: object) -> None:
    """Write a cache file; a cache that cannot be written costs time at the next start, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(value, indent=1))
        temporary.replace(path)
    except OSError as error:
        log.info("%s cannot be written (%s): the next start checks again", path, error.strerror)


def _problem(operation: str, function: Function, shape: Shape, device: torch.device) -> str:
    """Why an implementation must not serve, "" when it may."""
    try:
        error = CHECKS[operation](function, shape, device)
        torch.cuda.synchronize(device)
    except Exception as failure:  # whatever a compiler or a driver may raise
        return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    return "" if error <= TOLERANCE[shape.dtype] else f"its result is off by {error:.1e}"


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||, infinite when anything is not finite."""
    difference = (out.double() - reference.double()).norm() / reference.double().norm()
    return float(difference) if torch.isfinite(difference) else float("inf")


def _random(*size: int, shape: Shape, device: torch.device) -> torch.Tensor:
    return torch.randn(size, device=device, dtype=torch.float32).to(shape.dtype)


def _check_norm(function: Function, shape: Shape, device: torch.device) -> float:
    residual = _random(5, shape.hidden_size, shape=shape, device=device)
    parts = torch.randn(2, 5, shape.hidden_size, device=device)
    weight = _random(shape.hidden_size, shape=shape, device=device)
    expected_residual = residual.clone()
    expected = add_rms_norm(expected_residual, parts, weight, 1e-6)
    out = function(residual, parts, weight, 1e-6)
    return max(relative_error(out, expected), relative_error(residual, expected_residual))


def _check_swiglu(function: Function, shape: Shape, device: torch.device) -> float:
    gate_up = _random(5, 2 * shape.intermediate_size, shape=shape, device=device)
    return relative_error(function(gate_up), swiglu(gate_up.float()))


def _check_rope(function: Function, shape: Shape, device: torch.device) -> float:
    heads, kv_heads, dim, size = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size
    qkv = _random(4, (heads + 2 * kv_heads) * dim, shape=shape, device=device)
    norm = _random(dim, shape=shape, device=device)
    angles = torch.rand(2 * size, dim // 2, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    cos_sin = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)
    positions = torch.tensor([0, size - 1, size, 1], dtype=torch.int32, device=device)
    blocks = torch.tensor([2, 0, 1, -1], dtype=torch.int32, device=device)
    pools = [torch.zeros(3, 2, 2, kv_heads, size, dim, dtype=shape.dtype, device=device) for _ in range(2)]
    rest = (norm, norm, 1e-6, cos_sin, positions, blocks)
    out = function(qkv, *rest, pools[0], 1, heads)
    expected = rope_kv_write(qkv, *rest, pools[1], 1, heads)
    return max(relative_error(out, expected), relative_error(pools[0], pools[1]))


def random_batch(
    lengths: list[tuple[int, int]], shape: Shape, device: torch.device, tile_rows: int
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """Queries, a pool of two layers and a batch of sequences given as (cached, new) tokens, blocks in random order."""
    size = shape.block_size
    needed = [-(-(cached + new) // size) for cached, new in lengths]
    order = torch.randperm(sum(needed)).tolist()
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for index, count in enumerate(needed):
        tables[index, :count] = torch.tensor([order.pop() for _ in range(count)])
    pool = _random(sum(needed), 2, 2, shape.num_kv_heads, size, shape.head_dim, shape=shape, device=device)
    total = sum(new for _, new in lengths)
    query = _random(total, shape.num_heads, shape.head_dim, shape=shape, device=device)
    starts = [sum(new for _, new in lengths[:index]) for index in range(len(lengths))]
    tiles = [(index, first) for index, (_, new) in enumerate(lengths) for first in range(0, new, tile_rows)]

    def int32(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = AttentionBatch(
        tables.to(device),
        int32(list(range(len(lengths)))),
        int32(starts),
        int32([new for _, new in lengths]),
        int32([cached + new for cached, new in lengths]),
        int32(tiles),
        tile_rows,
    )
    return query, pool, batch


def _check_prefill(function: Function, shape: Shape, device: torch.device) -> float:
    lengths = [(0, 3 * shape.block_size + 5), (shape.block_size, 70), (37, 1)]
    query, pool, batch = random_batch(lengths, shape, device, 64)
    return relative_error(function(query, pool, 1, batch, None), dense_attention(query, pool, 1, batch, None))


def _check_decode(function: Function, shape: Shape, device: torch.device) -> float:
    lengths = [(0, 1), (5 * shape.block_size, 1), (shape.block_size - 1, 1), (301, 1)]
    query, pool, batch = random_batch(lengths, shape, device, 64)
    expected = dense_attention(query, pool, 1, batch, None)
    return max(relative_error(function(query, pool, 1, batch, None, parts), expected) for parts in (1, 4))


def _check_shared(function: Function, shape: Shape, device: torch.device) -> float:
    from engine.kernels.triton.decode_attention import paged_decode_attention

    size = shape.block_size
    query, pool, batch = random_batch([(5 * size + 3, 1), (5 * size + 9, 1), (2 * size, 1)], shape, device, 64)
    batch.tables[1, :4] = batch.tables[0, :4]
    lens = torch.tensor([4 * size, 4 * size, 0], dtype=torch.int32, device=device)
    tiles = torch.tensor([[0, 2, 4 * size], [0, 0, 0]], dtype=torch.int32, device=device)
    members = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    shared = function(query, pool, 1, batch, Groups(members, tiles, lens), 2, 2)
    out = paged_decode_attention(query, pool, 1, batch, None, 2, shared)
    return relative_error(out, dense_attention(query, pool, 1, batch, None))


def _check_gemv(function: Function, shape: Shape, device: torch.device) -> float:
    inputs, outputs = shape.hidden_size, shape.intermediate_size
    x = _random(1, inputs, shape=shape, device=device)
    weight = _random(2 * outputs, inputs, shape=shape, device=device) * inputs**-0.5
    norm = _random(inputs, shape=shape, device=device)
    normed = torch.nn.functional.rms_norm(x.double(), (inputs,), norm.double(), 1e-6)
    gate, up = (normed @ weight.double().T).chunk(2, dim=1)
    gated = function(x, weight, norm_weight=norm, eps=1e-6, gated=True)
    residual = _random(1, 2 * outputs, shape=shape, device=device)
    expected = residual.double() + x.double() @ weight.double().T
    added = function(x, weight, residual=residual)
    return max(
        relative_error(gated, torch.nn.functional.silu(gate) * up),
        relative_error(added, expected),
    )


def _check_matmul(function: Function, shape: Shape, device: torch.device) -> float:
    from engine.kernels.triton.matmul import UNIFORM

    x = _random(70, shape.hidden_size, shape=shape, device=device)
    weight = _random(shape.intermediate_size, shape.hidden_size, shape=shape, device=device)
    expected = x.double() @ weight.double().T
    parts = function(x, weight, None, replace(UNIFORM, tile_m=16, parts=3))
    return max(relative_error(function(x, weight, None, UNIFORM), expected), relative_error(parts.sum(0), expected))


CHECKS: dict[str, Callable[[Function, Shape, torch.device], float]] = {
    "add_rms_norm": _check_norm,
    "swiglu": _check_swiglu,
    "rope_kv_write": _check_rope,
    "prefill_attention": _check_prefill,
    "decode_attention": _check_decode,
    "shared_prefix_attention": _check_shared,
    "gemv": _check_gemv,
    "matmul": _check_matmul,
}
