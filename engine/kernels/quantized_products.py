"""Which kernel multiplies with a quantized weight on a GPU: by scheme, number of rows, and what passed its check there.

w4a16, w8a16   one, two or four rows: gemv; up to MATMUL_ROWS (or any number for a head, whose weight is large):
               matmul; more: the weight is dequantized for cuBLAS
w8a8           int8 product of cuBLAS
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from engine.kernels.linear import Linear
from engine.kernels.quantized_linear import QuantizedLinear, dequantize, int8_linear

log = logging.getLogger("kernels")

GEMV_ROWS = (1, 2, 4)
MATMUL_ROWS = 64
MOST_DEQUANTIZED = 1 << 28
"""Weights of more values than this are not dequantized as a whole."""
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}
CHECKED_OUTPUTS = 256
OPERATIONS = ("gemv", "matmul", "dequantize")


class QuantizedProducts:
    """backends: "triton" or "torch" for each of OPERATIONS. beside_plain: the model has plain linear layers as well.

    deterministic: as engine.kernels.registry.Kernels has it.
    """

    def __init__(self, backends: dict[str, str], *, fusible: bool, beside_plain: bool, deterministic: bool = False):
        self.backends = backends
        self.fusible = fusible
        self.beside_plain = beside_plain
        self.deterministic = deterministic

    def fuses_rows(self, num_rows: int) -> bool:
        """Whether a decode batch of this size can go through gemv."""
        return self.fusible and self.backends["gemv"] == "triton" and num_rows in GEMV_ROWS

    def gemv(self, x: torch.Tensor, layer: QuantizedLinear, **fused: Any) -> torch.Tensor:
        """x `[M, K]`, M in GEMV_ROWS; `fused` are the keywords of engine/kernels/triton/w4a16.py."""
        from engine.kernels.triton import w4a16

        return w4a16.gemv(x, layer, **fused)

    def linear(self, x: torch.Tensor, layer: QuantizedLinear, may_split: bool = False) -> torch.Tensor:
        """x `[T, K]` -> `[T, N]`; with may_split maybe float32 `[parts, T, N]`, whose sum it is."""
        if layer.scheme == "w8a8":
            return int8_linear(x, layer)
        from engine.kernels.triton import w4a16

        if self.backends["matmul"] == "triton":
            if self.deterministic:
                return w4a16.matmul(x, layer, w4a16.UNIFORM)
            if len(x) <= MATMUL_ROWS or layer.out_features * layer.in_features > MOST_DEQUANTIZED:
                return w4a16.matmul(x, layer, w4a16.tiling_for(len(x), layer, may_split))
        elif len(x) in GEMV_ROWS and self.backends["gemv"] == "triton":
            return w4a16.gemv(x, layer)
        fast = self.backends["dequantize"] == "triton"
        weight = w4a16.dequantize(layer, x.dtype) if fast else dequantize(layer, x.dtype)
        return F.linear(x, weight, layer.bias)


def choose_products(
    layers: Iterable[Linear | QuantizedLinear], dtype: torch.dtype, capability: tuple[int, int], deterministic: bool
) -> QuantizedProducts | None:
    """Check the kernels on the model's own weights, one of each kind, on their device. None: nothing is quantized."""
    found = list(layers)
    quantized = [layer for layer in found if isinstance(layer, QuantizedLinear)]
    if not quantized:
        return None
    weight_only = [layer for layer in quantized if layer.scheme != "w8a8"]
    kinds = {
        (layer.scheme, layer.group_size, layer.zeros is None, layer.permutation is None): layer for layer in weight_only
    }
    backends = dict.fromkeys(OPERATIONS, "torch")
    for operation in OPERATIONS:
        if operation == "matmul" and capability < (8, 0):
            continue  # tl.dot makes no tensor-core code there
        problem = next(filter(None, (_problem(operation, layer, dtype) for layer in kinds.values())), "")
        if problem:
            log.warning("kernel %s of quantized weights is not used: %s", operation, problem)
        else:
            backends[operation] = "triton"
    log.info("quantized kernels: %s", ", ".join(f"{name} {backend}" for name, backend in backends.items()))
    return QuantizedProducts(
        backends,
        fusible=len(weight_only) == len(quantized),
        beside_plain=len(quantized) < len(found),
        deterministic=deterministic,
    )


def _problem(operation: str, layer: QuantizedLinear, dtype: torch.dtype) -> str:
    """Why a kernel must not serve for weights of this kind, "" when it may."""
    zeros = None if layer.zeros is None else layer.zeros[:CHECKED_OUTPUTS]
    part = replace(
        layer, codes=layer.codes[:CHECKED_OUTPUTS], scales=layer.scales[:CHECKED_OUTPUTS], zeros=zeros, bias=None
    )
    try:
        error = CHECKS[operation](part, dtype)
    except Exception as failure:  # whatever a compiler or a driver may raise
        return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    return "" if error <= TOLERANCE[dtype] else f"its result for {layer.scheme} is off by {error:.1e}"


def _input(rows: int, layer: QuantizedLinear, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows, and their products in double precision."""
    x = torch.randn(rows, layer.in_features, device=layer.codes.device, dtype=torch.float32).to(dtype)
    return x, x.double() @ dequantize(layer, torch.float64).T


def _off(out: torch.Tensor, expected: torch.Tensor) -> float:
    error = (out.double() - expected).norm() / expected.norm()
    return float(error) if torch.isfinite(error) else float("inf")


def _check_gemv(layer: QuantizedLinear, dtype: torch.dtype) -> float:
    from engine.kernels.triton.w4a16 import gemv

    worst = 0.0
    for rows in GEMV_ROWS:
        x, expected = _input(rows, layer, dtype)
        worst = max(worst, _off(gemv(x, layer), expected))
    weight = torch.randn(layer.in_features, device=x.device).to(dtype)
    normed = F.rms_norm(x.double(), weight.shape, weight.double(), 1e-6)
    gate, up = (normed @ dequantize(layer, torch.float64).T).chunk(2, 1)
    gated = gemv(x, layer, norm_weight=weight, eps=1e-6, gated=True)
    return max(worst, _off(gated, F.silu(gate) * up))


def _check_matmul(layer: QuantizedLinear, dtype: torch.dtype) -> float:
    from engine.kernels.triton.w4a16 import matmul, tiling_for

    worst = 0.0
    for rows in (3, 33):
        x, expected = _input(rows, layer, dtype)
        out = matmul(x, layer, tiling_for(rows, layer, may_split=True))
        worst = max(worst, _off(out.sum(0) if out.ndim == 3 else out, expected))
    return worst


def _check_dequantize(layer: QuantizedLinear, dtype: torch.dtype) -> float:
    from engine.kernels.triton import w4a16

    return _off(w4a16.dequantize(layer, dtype), dequantize(layer, torch.float64))


CHECKS: dict[str, Callable[[QuantizedLinear, torch.dtype], float]] = {
    "gemv": _check_gemv,
    "matmul": _check_matmul,
    "dequantize": _check_dequantize,
}
