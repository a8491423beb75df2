"""Matrix-vector products of one row in CUDA C++ for SM75 and newer, with the layer operations around them (gemv.cu)."""

import functools
from pathlib import Path

import torch

from engine.kernels.cuda.module import Kernel, Module, native_arch

SLICE = 512
"""Inputs of a warp."""
MAX_WARPS, MAX_NORM_WARPS = 20, 16
BUSY_WARPS = 10
"""Warps a multiprocessor that keep the memory busy: 16 loads of 16 bytes a thread are on their way."""
ARGUMENTS = "PPPPPiiif"
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def supports(num_inputs: int, dtype: torch.dtype, norm: bool = False) -> bool:
    """Whether a weight with this many columns can be multiplied, with a norm ahead of it or not."""
    return num_inputs % 8 == 0 and num_inputs <= (MAX_NORM_WARPS if norm else MAX_WARPS) * SLICE and dtype in NAMES


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
    arch: str | None = None,
) -> torch.Tensor:
    """x `[1, K]`, weight `[N, K]` -> `[1, N]`, or `[1, N / 2]` when gated (with norm_weight only).

    norm_weight: `[K]`, the input is rms_norm(x) * norm_weight. residual: `[1, N]`, the result is added to it in place
    and it is returned. `arch` as for `build`, by default the device's own. Raises ValueError for what `supports`
    refuses. `pdl` is for other implementations: these launches wait for the one before.
    """
    num_rows, num_inputs = x.shape
    if not supports(num_inputs, x.dtype, norm_weight is not None) or num_rows != 1:
        raise ValueError(f"gemv takes no {num_rows} rows of {num_inputs} {x.dtype}")
    if gated and norm_weight is None or residual is not None and norm_weight is not None:
        raise ValueError("gated needs a norm, and a residual takes none")
    num_outputs = len(weight) // 2 if gated else len(weight)
    kind = "residual" if residual is not None else "gated" if gated else "norm" if norm_weight is not None else "plain"
    out = residual
    if out is None:
        out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    warps = -(-num_inputs // SLICE)
    blocks = _multiprocessors(x.device.index) * max(1, BUSY_WARPS // warps)
    rows_per_block = -(-num_outputs // blocks)
    _kernel(f"gemv_{kind}_{NAMES[x.dtype]}", warps * 32, arch, x.device.index)(
        (-(-num_outputs // rows_per_block), 1, 1),
        x.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr() if bias is not None else 0,
        norm_weight.data_ptr() if norm_weight is not None else 0,
        out.data_ptr(),
        num_outputs,
        num_inputs,
        rows_per_block,
        eps,
    )
    return out


@functools.cache
def _multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@functools.cache
def _module(arch: str, device_index: int) -> Module:
    return Module(Path(__file__).with_name("gemv.cu"), arch, device_index)


@functools.cache
def _kernel(name: str, threads: int, arch: str | None, device_index: int) -> Kernel:
    return Kernel(_module(arch or native_arch(device_index), device_index), name, ARGUMENTS, threads)
