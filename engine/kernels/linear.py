"""Matrix product with a weight: y = x @ weight.T + bias.

With the few rows of a decode step MKL spends more time rearranging the weight than multiplying by it, so on CPU a
weight may carry a copy that is already arranged for PACKED_ROWS rows; fewer rows are padded with zeros. Both ways give
the same bits (the bias is added after the product for that reason).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

PACKED_ROWS = 8


@dataclass
class Linear:
    """weight `[out_features, in_features]`, bias `[out_features]`; `packed` is made by `pack`."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    packed: torch.Tensor | None = None


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """x `[T, in_features]` -> `[T, out_features]`."""
    num_rows = len(x)
    if layer.packed is not None and 0 < num_rows <= PACKED_ROWS:
        padded = F.pad(x, (0, 0, 0, PACKED_ROWS - num_rows))
        product = torch.ops.mkl._mkl_linear(padded, layer.packed, layer.weight, None, PACKED_ROWS)[:num_rows]
    else:
        product = F.linear(x, layer.weight)
    return product if layer.bias is None else product.add_(layer.bias)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this build of torch can pack the weight: float32 on CPU, with MKL."""
    is_float = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return is_float and torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")


def pack(layer: Linear) -> None:
    """Give the layer its packed copy, which is as large as the weight itself."""
    layer.packed = torch.ops.mkl._mkl_reorder_linear_weight(layer.weight, PACKED_ROWS)
