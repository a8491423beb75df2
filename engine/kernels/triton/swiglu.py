"""silu(gate) * up of a stacked gate and up projection, element by element."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """gate_up `[T, 2 * I]`, gate in the first half -> `[T, I]`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_rows, triton.cdiv(width, BLOCK))
    _swiglu[grid](gate_up, out, width, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl)
    return out
