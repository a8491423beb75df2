"""y = x @ weight.T with tl.dot, for a few rows (bound by the weight's bytes) and for results that must not depend on
how many rows there are.

A program computes a TILE_M x TILE_N tile over one part of K, in steps of TILE_K, float32 accumulation. With PARTS > 1
the parts' sums go to `partial` and are added, in order, by whoever reads them (engine/kernels/triton/rms_norm.py):
products with few output columns would otherwise leave most of the device idle.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Tiling:
    tile_m: int
    tile_n: int
    tile_k: int
    parts: int = 1
    num_warps: int = 4
    num_stages: int = 4


UNIFORM = Tiling(64, 128, 64, 1, 4, 4)
"""One tiling for any number of rows: each row's sums are made in the same order whatever the batch."""


@triton.jit
def _matmul(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    outputs = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    part = tl.program_id(2)
    inner = tl.arange(0, TILE_K)
    in_rows = rows < num_rows
    in_outputs = outputs < num_outputs
    steps = tl.cdiv(num_inputs, TILE_K)
    steps_each = tl.cdiv(steps, PARTS)
    first = part * steps_each
    last = tl.minimum(first + steps_each, steps)
    x_tile = x + rows.to(tl.int64)[:, None] * num_inputs + inner[None, :]
    weight_tile = weight + outputs.to(tl.int64)[None, :] * num_inputs + inner[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for step in range(first, last):
        at = step * TILE_K
        inside = at + inner < num_inputs
        a = tl.load(x_tile + at, mask=in_rows[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight_tile + at, mask=in_outputs[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    mask = in_rows[:, None] & in_outputs[None, :]
    target = out + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    if BIAS:
        acc += tl.load(bias + outputs, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    if PARTS > 1:
        target += part.to(tl.int64) * num_rows * num_outputs
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


def matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiling: Tiling, pdl: bool = False
) -> torch.Tensor:
    """x `[M, K]`, weight `[N, K]`, bias `[N]` -> `[M, N]`; with parts > 1 float32 `[parts, M, N]`, to be summed (no
    bias then)."""
    assert bias is None or tiling.parts == 1, "a bias is added once, not in each part"
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    if tiling.parts == 1:
        out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    else:
        out = torch.empty((tiling.parts, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_rows, tiling.tile_m), triton.cdiv(num_outputs, tiling.tile_n), tiling.parts)
    _matmul[grid](
        x,
        weight,
        bias if bias is not None else weight,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        TILE_M=tiling.tile_m,
        TILE_N=tiling.tile_n,
        TILE_K=tiling.tile_k,
        PARTS=tiling.parts,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        launch_pdl=pdl,
    )
    return out
