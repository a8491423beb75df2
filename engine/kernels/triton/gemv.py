"""Matrix-vector products for one to four rows, bound by the bytes of the weight.

A program computes ROWS outputs for all M inputs: it walks the weight rows in tiles of COLUMNS, loads the next tile
while it multiplies with the last, accumulates in float32 and reduces once at the end. What surrounds the product in a
decoder layer is part of it, so that a layer is a handful of launches:

    NORM      the input is rms_norm(x) * norm_weight: each program sums x * x as it goes and scales at the end
    GATED     the weight holds gate rows, then up rows; the result is silu(gate) * up
    RESIDUAL  the result is added to `out`

With programmatic dependent launch (PDL, SM90) the first weight tile is on its way before the previous kernel has ended.
"""

import torch
import triton
import triton.language as tl

MAX_ROWS = 4


@triton.jit
def _gemv(
    x,
    weight,
    bias,
    norm_weight,
    out,
    num_outputs,
    num_inputs,
    eps,
    M: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    batch = tl.arange(0, M)
    in_rows = rows < num_outputs
    tile = weight + rows.to(tl.int64)[None, :, None] * num_inputs + columns[None, None, :]
    up_tile = tile + num_outputs.to(tl.int64) * num_inputs
    mask = in_rows[None, :, None] & (columns < num_inputs)[None, None, :]
    loaded = tl.load(tile, mask=mask, other=0.0)
    if GATED:
        loaded_up = tl.load(up_tile, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([M, ROWS, COLUMNS], tl.float32)
    acc_up = tl.zeros([M, ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([M, 1, COLUMNS], tl.float32)
    for at in range(0, num_inputs, COLUMNS):
        current = loaded
        inside = at + columns < num_inputs
        next_mask = in_rows[None, :, None] & (at + COLUMNS + columns < num_inputs)[None, None, :]
        loaded = tl.load(tile + at + COLUMNS, mask=next_mask, other=0.0)
        if GATED:
            current_up = loaded_up
            loaded_up = tl.load(up_tile + at + COLUMNS, mask=next_mask, other=0.0)
        values = tl.load(
            x + batch[:, None, None] * num_inputs + at + columns[None, None, :], mask=inside[None, None, :], other=0.0
        ).to(tl.float32)
        if NORM:
            squares += values * values
            values *= tl.load(norm_weight + at + columns, mask=inside, other=0.0).to(tl.float32)[None, None, :]
        acc += current.to(tl.float32) * values
        if GATED:
            acc_up += current_up.to(tl.float32) * values
    result = tl.sum(acc, 2)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 2) / num_inputs + eps)
        result *= scale
    if BIAS:
        result += tl.load(bias + rows, mask=in_rows, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = tl.sum(acc_up, 2)
        if NORM:
            up *= scale
        if BIAS:
            up += tl.load(bias + num_outputs + rows, mask=in_rows, other=0.0).to(tl.float32)[None, :]
        result = result * tl.sigmoid(result) * up
    target = out + batch.to(tl.int64)[:, None] * num_outputs + rows[None, :]
    if RESIDUAL:
        result += tl.load(target, mask=in_rows[None, :], other=0.0).to(tl.float32)
    tl.store(target, result.to(out.dtype.element_ty), mask=in_rows[None, :])


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    rows: int = 4,
    columns: int = 512,
    num_warps: int = 4,
    pdl: bool = False,
) -> torch.Tensor:
    """x `[M, K]`, M of 1, 2 or 4; weight `[N, K]` -> `[M, N]`, or `[M, N / 2]` when gated.

    residual: `[M, N]`, the result is added to it in place and it is returned.
    """
    num_rows, num_inputs = x.shape
    num_outputs = len(weight) // 2 if gated else len(weight)
    out = residual
    if out is None:
        out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    _gemv[(triton.cdiv(num_outputs, rows),)](
        x,
        weight,
        bias if bias is not None else weight,
        norm_weight if norm_weight is not None else weight,
        out,
        num_outputs,
        num_inputs,
        eps,
        M=num_rows,
        NORM=norm_weight is not None,
        GATED=gated,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        ROWS=rows,
        COLUMNS=columns,
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )
    return out
