"""Round-to-nearest: the integers, scales and zero points of a weight, with nothing known but the weight itself."""

import torch
import torch.nn.functional as F

from engine.kernels.quantized_linear import QuantizedEmbedding, QuantizedLinear, Scheme, from_codes, stack

GROUP_SIZE = 128
MOST_VALUES = 1 << 22
"""Weights are quantized this many values at a time, which bounds the memory it takes."""
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Parts of a group's range that are tried; the one with the least squared error is kept."""


def group_parameters(
    groups: torch.Tensor, bits: int, symmetric: bool, search: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point `[..., 1]` of weights float32 `[..., group_size]`; scales are exact in float16."""
    best_scale, best_zero = _range_parameters(groups, bits, symmetric, SHRINKS[0])
    best_error = _squared_error(groups, best_scale, best_zero, bits)
    for shrink in SHRINKS[1:] if search else ():
        scale, zero = _range_parameters(groups, bits, symmetric, shrink)
        error = _squared_error(groups, scale, zero, bits)
        better = error < best_error
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
        best_error = torch.where(better, error, best_error)
    return best_scale, best_zero


def _squared_error(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    return (apply(groups, scale, zero, bits) - groups).square_().sum(-1, keepdim=True)


def _range_parameters(
    groups: torch.Tensor, bits: int, symmetric: bool, shrink: float
) -> tuple[torch.Tensor, torch.Tensor]:
    top = (1 << bits) - 1
    if symmetric:
        middle = 1 << (bits - 1)
        scale = groups.abs().amax(-1, keepdim=True) * shrink / (middle - 0.5)
        scale = _representable(scale)
        return scale, torch.full_like(scale, middle)
    low = groups.amin(-1, keepdim=True).clamp_max(0) * shrink
    high = groups.amax(-1, keepdim=True).clamp_min(0) * shrink
    scale = _representable((high - low) / top)
    return scale, (-low / scale).round_().clamp_(0, top)


def _representable(scale: torch.Tensor) -> torch.Tensor:
    """Rounded to float16, in which it is stored, and never zero."""
    return scale.clamp_min(1e-6).half().float()


def encode(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest codes, float."""
    return (values / scale + zero).round_().clamp_(0, (1 << bits) - 1)


def apply(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """What the values become."""
    return (encode(values, scale, zero, bits) - zero) * scale


def round_weight(
    weight: torch.Tensor, scheme: Scheme, *, group_size: int = GROUP_SIZE, symmetric: bool = False
) -> QuantizedLinear:
    """Quantize a weight `[N, K]` by rounding, on its own device. 4-bit weights are asymmetric by default; 8 bits are
    always symmetric."""
    if weight.numel() > MOST_VALUES and len(weight) > 1:
        rows = weight.split(max(1, MOST_VALUES // weight.shape[1]))
        return stack([round_weight(part, scheme, group_size=group_size, symmetric=symmetric) for part in rows])
    if scheme == "w8a8":
        scales = (weight.float().abs().amax(1) / 127).clamp_min(1e-10)
        codes = (weight.float() / scales[:, None]).round_().to(torch.int8)
        return QuantizedLinear("w8a8", weight.shape[1], codes, scales)
    bits = 4 if scheme == "w4a16" else 8
    values = F.pad(weight.float(), (0, -weight.shape[1] % group_size)).unflatten(1, (-1, group_size))
    scale, zero = group_parameters(values, bits, symmetric or bits == 8, search=bits == 4)
    codes = encode(values, scale, zero, bits).to(torch.uint8).flatten(1)[:, : weight.shape[1]]
    return from_codes(codes, scale[..., 0].half(), zero[..., 0], bits=bits, group_size=group_size)


def round_embedding(weight: torch.Tensor) -> QuantizedEmbedding:
    """int8 with a scale for each row."""
    rounded = round_weight(weight, "w8a8")
    return QuantizedEmbedding(rounded.codes, rounded.scales, weight.dtype)
