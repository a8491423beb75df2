"""Residual addition and RMSNorm in one pass.

One program a row: residual += delta (rounded to the residual's dtype), out = rms_norm(residual) * weight, both read and
written once. The arithmetic is float32.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm(
    delta,
    residual,
    weight,
    out,
    num_columns,
    part_stride,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(residual + row * num_columns + columns, mask=inside, other=0.0)
    if PARTS > 0:
        added = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            at = delta + part * part_stride + row * num_columns + columns
            added += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + added).to(x.dtype)
        tl.store(residual + row * num_columns + columns, x, mask=inside)
    x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / num_columns + eps)
    tl.store(out + row * num_columns + columns, (x * scale).to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, pdl: bool = False
) -> torch.Tensor:
    """residual `[T, D]` += delta in place (unless None); returns rms_norm(residual) * weight, `[T, D]`.

    delta: `[T, D]`, or `[parts, T, D]` to be summed (engine/kernels/triton/matmul.py).
    """
    num_rows, num_columns = residual.shape
    out = torch.empty_like(residual)
    parts = 0 if delta is None else 1 if delta.ndim == 2 else len(delta)
    block = triton.next_power_of_2(num_columns)
    _add_rms_norm[(num_rows,)](
        delta if delta is not None else residual,
        residual,
        weight,
        out,
        num_columns,
        num_rows * num_columns,
        eps,
        PARTS=parts,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=pdl,
    )
    return out
