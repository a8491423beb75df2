"""The Triton kernels of quantized weights under Triton's interpreter, against double precision. Run as a program."""

import tests.triton_interpreter  # noqa: F401, I001  (first: it decides how kernels are run)

import torch
import torch.nn.functional as F

from engine.kernels.quantized_linear import QuantizedLinear, from_codes
from engine.kernels.triton.w4a16 import Tiling, dequantize, gemv, matmul

OUTPUTS = 12
TOLERANCE = 1e-3
"""Of float16 outputs; float32 partial sums are held to a thousandth of it."""


def make(bits: int, inputs: int, group: int, zeros: bool, permuted: bool, bias: bool):
    """A layer of random codes, and its weight by definition, float64 `[N, K]`."""
    codes = torch.randint(0, 1 << bits, (OUTPUTS, inputs), dtype=torch.uint8)
    groups = torch.arange(inputs) // group
    if permuted:
        groups = groups[torch.randperm(inputs)]
    count = int(groups.max()) + 1
    scales = (torch.rand(OUTPUTS, count) + 0.5).half() / 16
    points = torch.randint(0, 1 << bits, (OUTPUTS, count)).half() if zeros else None
    order = groups if permuted else None
    layer = from_codes(codes, scales, points, bits=bits, group_size=group, groups=order)
    layer.bias = torch.randn(OUTPUTS).half() if bias else None
    zero = points.double()[:, groups] if points is not None else float(1 << (bits - 1))
    return layer, (codes.double() - zero) * scales.double()[:, groups]


def near(out: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < tolerance, f"{what}: relative error {error:.2e}"


def product(x: torch.Tensor, weight: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
    return F.linear(x.double(), weight, None if layer.bias is None else layer.bias.double())


def check(case: tuple, rows: int) -> None:
    layer, weight = make(*case)
    near(dequantize(layer, torch.float32), weight, 1e-6, f"dequantize {case}")
    x = torch.randn(rows, layer.in_features).half()
    out = gemv(x, layer, rows=4, blocks=2)
    near(out, product(x, weight, layer), TOLERANCE, f"gemv {case} of {rows}")
    norm = torch.randn(layer.in_features).half()
    normed = F.rms_norm(x.double(), norm.shape, norm.double(), 1e-5)
    gate, up = product(normed, weight, layer).chunk(2, 1)
    out = gemv(x, layer, norm_weight=norm, eps=1e-5, gated=True, rows=4, blocks=1)
    near(out, F.silu(gate) * up, TOLERANCE, f"gated gemv {case} of {rows}")
    residual = torch.randn(rows, OUTPUTS).half()
    expected = residual.double() + product(x, weight, layer)
    assert gemv(x, layer, residual=residual, rows=8, blocks=4) is residual
    near(residual, expected, TOLERANCE, f"gemv {case} of {rows} with residual")
    x = torch.randn(17, layer.in_features).half()
    expected = product(x, weight, layer)
    near(matmul(x, layer, Tiling(16, 16)), expected, TOLERANCE, f"matmul {case}")
    if layer.bias is None:
        parts = matmul(x, layer, Tiling(32, 16, 2))
        assert parts.shape[0] == 2 and parts.dtype == torch.float32
        near(parts.sum(0), expected, TOLERANCE / 1000, f"matmul {case} in parts")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    check((4, 200, 128, True, False, True), 1)
    check((4, 256, 32, True, True, False), 2)
    check((8, 136, 128, False, False, False), 1)
    check((8, 128, 32, True, True, True), 4)
