"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): inputs are rounded one after the other, and each one's error is made up
for by those that are still to come, weighed by how inputs go together in the calibration text.

Inputs are taken by falling importance while the groups' scales are fixed beforehand, so that the stored order stays the
natural one.
"""

import torch
import torch.nn.functional as F

from engine.kernels.quantized_linear import QuantizedLinear, Scheme, from_codes
from engine.quantize.rounding import GROUP_SIZE, encode, group_parameters

DAMPING = 0.01
"""Part of the mean diagonal that is added to it, so that the inverse exists."""
COLUMNS = 128
"""Inputs whose errors are passed on at once."""


def gptq_weight(
    weight: torch.Tensor, products: torch.Tensor, scheme: Scheme, *, group_size: int = GROUP_SIZE
) -> QuantizedLinear:
    """Quantize a weight `[N, K]`. products: float32 `[K, K]`, the sum of x x^T over the inputs it will see."""
    values = weight.float().clone()
    num_inputs = values.shape[1]
    scale, zero = _parameters(values, scheme, group_size)
    bits = 4 if scheme == "w4a16" else 8
    order = torch.argsort(products.diagonal(), descending=True)
    values, inverse = values[:, order], _inverse_factor(products[order][:, order])
    scale_of, zero_of = scale[:, order], zero[:, order]
    codes = torch.empty_like(values)
    for first in range(0, num_inputs, COLUMNS):
        last = min(first + COLUMNS, num_inputs)
        block, factor = values[:, first:last], inverse[first:last, first:last]
        errors = torch.empty_like(block)
        for column in range(last - first):
            at = first + column
            column_scale, column_zero = scale_of[:, at], zero_of[:, at]
            codes[:, at] = encode(block[:, column], column_scale, column_zero, bits)
            rounded = (codes[:, at] - column_zero) * column_scale
            errors[:, column] = (block[:, column] - rounded) / factor[column, column]
            block[:, column:] -= errors[:, column, None] * factor[column, column:]
        values[:, last:] -= errors @ inverse[first:last, last:]
    natural = torch.empty_like(codes)
    natural[:, order] = codes
    if scheme == "w8a8":
        return QuantizedLinear("w8a8", num_inputs, (natural - 128).to(torch.int8), scale[:, 0].contiguous())
    return from_codes(
        natural.to(torch.uint8), scale[:, ::group_size].half(), zero[:, ::group_size], bits=bits, group_size=group_size
    )


def _parameters(values: torch.Tensor, scheme: Scheme, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of every weight, `[N, K]`."""
    num_inputs = values.shape[1]
    if scheme == "w8a8":
        scale = (values.abs().amax(1, keepdim=True) / 127).clamp_min(1e-10)
        return scale.expand_as(values), torch.full_like(values, 128)
    groups = F.pad(values, (0, -num_inputs % group_size)).unflatten(1, (-1, group_size))
    found = group_parameters(groups, 4 if scheme == "w4a16" else 8, symmetric=scheme == "w8a16")
    scale, zero = (part.expand_as(groups).flatten(1)[:, :num_inputs] for part in found)
    return scale, zero


def _inverse_factor(products: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of the damped products."""
    damped = products.clone()
    diagonal = damped.diagonal()
    diagonal += DAMPING * diagonal.mean() + 1e-8
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
