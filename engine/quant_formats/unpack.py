"""Tensors of one published linear layer -> codes, scales and zero points in plain order.

Every format holds 32 / bits integers in an int32, first in the low bits, but for the order of AWQ's.

    awq                 qweight [K, N/8], qzeros [K/g, N/8]: along N, in the order 0 2 4 6 1 3 5 7; scales [K/g, N]
    gptq                qweight [K/8, N]: along K; qzeros [K/g, N/8]: along N, stored less one in the first format;
                        scales [K/g, N]; g_idx [K]: the group of each input
    compressed-tensors  weight_packed [N, K/8]: along K, weight_zero_point [N/8, K/g]: along N, both shifted from
                        -8..7 to 0..15; weight_scale [N, K/g]; weight_g_idx [K]; or weight int8 [N, K]
"""

from collections.abc import Callable

import torch

from engine.kernels.quantized_linear import QuantizedLinear, from_codes
from engine.quant_formats.published import PublishedFormat

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Field i of a word holds column AWQ_ORDER[i]."""

Get = Callable[[str], torch.Tensor | None]
"""The tensor of the layer with this last name, None when there is none."""


class LayoutError(ValueError):
    """A tensor is missing or does not have the shape that its format gives it."""


def is_quantized(has: Callable[[str], bool]) -> bool:
    """Whether a layer of a quantized checkpoint is itself quantized; `has(last name)` tells what tensors there are."""
    return has("qweight") or has("weight_packed") or (has("weight") and has("weight_scale"))


def unpack_layer(get: Get, form: PublishedFormat, num_outputs: int, num_inputs: int) -> QuantizedLinear:
    """Raises LayoutError."""
    if form.method == "awq":
        return _awq(get, form, num_outputs, num_inputs)
    if form.method == "gptq":
        return _gptq(get, form, num_outputs, num_inputs)
    if form.int8_activations or get("weight_packed") is None:
        return _int8(get, form, num_outputs, num_inputs)
    return _packed(get, form, num_outputs, num_inputs)


def unpack_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32 -> uint8 with 32 / bits times as many entries along `dim` (0 or 1)."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    wide = words.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts)
    return (wide & ((1 << bits) - 1)).to(torch.uint8).flatten(dim, dim + 1)


def _awq(get: Get, form: PublishedFormat, num_outputs: int, num_inputs: int) -> QuantizedLinear:
    groups = _num_groups(form, num_inputs)
    codes = _awq_columns(_take(get, "qweight", (num_inputs, num_outputs // 8)))
    scales = _take(get, "scales", (groups, num_outputs))
    zeros = get("qzeros")
    if zeros is not None:
        zeros = _awq_columns(_take(get, "qzeros", (groups, num_outputs // 8))).T.to(scales.dtype)
    return from_codes(codes.T, scales.T, zeros, bits=4, group_size=form.group_size)


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    fields = unpack_words(words, 4, 1).unflatten(1, (-1, 8))
    columns = torch.empty_like(fields)
    columns[..., list(AWQ_ORDER)] = fields
    return columns.flatten(1)


def _gptq(get: Get, form: PublishedFormat, num_outputs: int, num_inputs: int) -> QuantizedLinear:
    per_word, groups = 32 // form.bits, _num_groups(form, num_inputs)
    codes = unpack_words(_take(get, "qweight", (num_inputs // per_word, num_outputs)), form.bits, 0)
    scales = _take(get, "scales", (groups, num_outputs))
    zeros = unpack_words(_take(get, "qzeros", (groups, num_outputs // per_word)), form.bits, 1).int()
    zeros = (zeros + form.zero_offset) & ((1 << form.bits) - 1)
    order = None if get("g_idx") is None else _take(get, "g_idx", (num_inputs,))
    return _from_codes(codes.T, scales.T, zeros.T.to(scales.dtype), form, order)


def _packed(get: Get, form: PublishedFormat, num_outputs: int, num_inputs: int) -> QuantizedLinear:
    per_word, groups = 32 // form.bits, _num_groups(form, num_inputs)
    codes = unpack_words(_take(get, "weight_packed", (num_outputs, -(-num_inputs // per_word))), form.bits, 1)
    scales = _take(get, "weight_scale", (num_outputs, groups))
    zeros = get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        packed_rows = -(-num_outputs // per_word)
        zeros = unpack_words(_take(get, "weight_zero_point", (packed_rows, groups)), form.bits, 0)[:num_outputs]
        zeros = zeros.to(scales.dtype)
    elif zeros is not None:
        zeros = _take(get, "weight_zero_point", (num_outputs, groups)).to(scales.dtype) + (1 << (form.bits - 1))
    order = None if get("weight_g_idx") is None else _take(get, "weight_g_idx", (num_inputs,))
    return _from_codes(codes[:, :num_inputs], scales, zeros, form, order)


def _int8(get: Get, form: PublishedFormat, num_outputs: int, num_inputs: int) -> QuantizedLinear:
    codes = _take(get, "weight", (num_outputs, num_inputs))
    if codes.dtype != torch.int8:
        raise LayoutError(f"weight has dtype {codes.dtype}, expected torch.int8")
    scales = get("weight_scale")
    if scales is None or scales.numel() not in (1, num_outputs):
        raise LayoutError(f"weight_scale must hold 1 or {num_outputs} values")
    scales = scales.flatten().expand(num_outputs)
    if form.int8_activations:
        return QuantizedLinear("w8a8", num_inputs, codes, scales.float().contiguous())
    unsigned = (codes.int() + 128).to(torch.uint8)
    return from_codes(unsigned, scales[:, None], None, bits=8, group_size=-1)


def _from_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    form: PublishedFormat,
    order: torch.Tensor | None,
) -> QuantizedLinear:
    order = None if form.group_size == -1 else order
    try:
        return from_codes(codes, scales, zeros, bits=form.bits, group_size=form.group_size, groups=order)
    except ValueError as error:
        raise LayoutError(f"not supported: {error}") from None


def _num_groups(form: PublishedFormat, num_inputs: int) -> int:
    return 1 if form.group_size == -1 else -(-num_inputs // form.group_size)


def _take(get: Get, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = get(name)
    if tensor is None:
        raise LayoutError(f"tensor {name} is missing")
    if tuple(tensor.shape) != shape:
        raise LayoutError(f"tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
    return tensor
