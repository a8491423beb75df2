"""Matrix product with a quantized weight: the layout that every kernel reads, and the reference (dequantize, multiply).

Schemes
    w4a16, w8a16   integers of 4 or 8 bits with a scale (and a zero point) for each group of inputs; plain activations
    w8a8           int8 with one scale for each output; activations are rounded to int8 for each token

Layout of w4a16 and w8a16. Inputs are cut into blocks of 16 * P, where P = 32 / bits codes share a word: 128 inputs for
4 bits, 64 for 8. A block is 16 words; field i (bits i * bits and up) of word w is the code of the block's input
i * 16 + w. So whoever has unpacked field i of 16 neighbouring words holds 16 neighbouring inputs. Inputs are padded to
a multiple of 128; what the padding's codes are does not matter, its inputs are zeros. Codes are unsigned:

    weight[n, k] = (code[n, k] - zero[n, k / group_size]) * scale[n, k / group_size]

A checkpoint whose groups are not runs of inputs (act-order) is stored with its inputs reordered, and `permutation` says
how: stored input k is input permutation[k] of x.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
import torch.nn.functional as F

from engine.kernels.linear import Linear
from engine.kernels.linear import linear as plain_linear

Scheme = Literal["w4a16", "w8a16", "w8a8"]
SCHEMES: tuple[Scheme, ...] = ("w4a16", "w8a16", "w8a8")
BITS: dict[Scheme, int] = {"w4a16": 4, "w8a16": 8, "w8a8": 8}
GROUP_SIZES = (32, 64, 128)
PADDING = 128
FEWEST_INT8_ROWS = 16
"""torch._int_mm takes more rows than this."""
WORDS = 16
"""Words of a block."""


@dataclass
class QuantizedLinear:
    """A weight `[out_features, in_features]`.

    codes        int32 `[out_features, words]` of w4a16 and w8a16, int8 `[out_features, in_features]` of w8a8
    scales       `[out_features, groups]`, of any float dtype; float32 `[out_features]` of w8a8
    zeros        as scales, None: all 2^(bits - 1) (symmetric)
    group_size   inputs that share a scale; 0 for w8a8
    permutation  int32 `[in_features]` or None, see above
    dense        the weight once dequantized, where memory is no concern (CPU)
    """

    scheme: Scheme
    in_features: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    group_size: int = 0
    permutation: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    dense: Linear | None = None

    @property
    def bits(self) -> int:
        return BITS[self.scheme]

    @property
    def out_features(self) -> int:
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        """Bytes that a product with it reads."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is stored of it, without the bias."""
        named = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "permutation": self.permutation}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, device: torch.device) -> "QuantizedLinear":
        moved = {
            field.name: getattr(self, field.name).to(device)
            for field in fields(self)
            if isinstance(getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)


@dataclass
class QuantizedEmbedding:
    """codes int8 `[vocab_size, hidden_size]`, scales float32 `[vocab_size]`; `dtype` is that of its rows."""

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


def embed(token_ids: torch.Tensor, embedding: torch.Tensor | QuantizedEmbedding) -> torch.Tensor:
    """Rows `[T, hidden_size]` of token_ids `[T]`."""
    if isinstance(embedding, torch.Tensor):
        return F.embedding(token_ids, embedding)
    rows = F.embedding(token_ids, embedding.codes).float() * F.embedding(token_ids, embedding.scales[:, None])
    return rows.to(embedding.dtype)


def linear(x: torch.Tensor, layer: Linear | QuantizedLinear) -> torch.Tensor:
    """x `[T, in_features]` -> `[T, out_features]`, whichever kind of weight it is."""
    return quantized_linear(x, layer) if isinstance(layer, QuantizedLinear) else plain_linear(x, layer)


def quantized_linear(x: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
    """x `[T, in_features]` -> `[T, out_features]`, in x's dtype."""
    if layer.scheme == "w8a8":
        x = round_activations(x)
    if layer.dense is not None:
        return plain_linear(x, layer.dense)
    return F.linear(x, dequantize(layer, x.dtype), layer.bias)


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """x `[T, K]` as an int8 product sees it: each row a multiple of its largest magnitude / 127, same dtype."""
    codes, scales = quantize_activations(x)
    return (codes.float() * scales[:, None]).to(x.dtype)


def quantize_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x `[T, K]` -> int8 codes `[T, K]` and float32 scales `[T]`."""
    scales = (x.float().abs().amax(1) / 127).clamp_min(1e-10)
    return (x.float() / scales[:, None]).round_().to(torch.int8), scales


def dequantize(layer: QuantizedLinear, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight `[out_features, in_features]`, inputs in x's order."""
    if layer.scheme == "w8a8":
        return (layer.codes.float() * layer.scales[:, None]).to(dtype)
    codes = unpack(layer.codes, layer.bits)
    grouped = codes.float().unflatten(1, (-1, layer.group_size))
    zeros = 1 << (layer.bits - 1) if layer.zeros is None else layer.zeros.float()[..., None]
    weight = ((grouped - zeros) * layer.scales.float()[..., None]).flatten(1)[:, : layer.in_features].to(dtype)
    if layer.permutation is None:
        return weight
    natural = torch.empty_like(weight)
    natural[:, layer.permutation.long()] = weight
    return natural


def densify(layer: QuantizedLinear, dtype: torch.dtype) -> None:
    """Keep the dequantized weight beside the codes, so that a product need not make it again."""
    layer.dense = Linear(dequantize(layer, dtype), layer.bias)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes uint8 `[N, K]` -> int32 `[N, ceil(K / 128) * 4 * bits]` in the layout above."""
    codes = F.pad(codes, (0, -codes.shape[1] % PADDING), value=1 << (bits - 1))
    per_word = 32 // bits
    blocks = codes.view(len(codes), -1, per_word, WORDS)
    words = torch.zeros(len(codes), blocks.shape[1], WORDS, dtype=torch.int32, device=codes.device)
    for field in range(per_word):
        words |= blocks[:, :, field].int() << (bits * field)
    return words.flatten(1)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack`: uint8 `[N, K]` with K padded."""
    blocks = words.view(len(words), -1, 1, WORDS)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)[:, None]
    return ((blocks >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


def int8_linear(x: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
    """quantized_linear of a w8a8 layer as an integer product (tensor cores on a GPU), exact up to the final scaling."""
    codes, scales = quantize_activations(x)
    rows = len(codes)
    if rows <= FEWEST_INT8_ROWS:
        codes = F.pad(codes, (0, 0, 0, FEWEST_INT8_ROWS + 1 - rows))
    product = torch._int_mm(codes, layer.codes.T)[:rows]
    out = (product.float() * scales[:, None] * layer.scales).to(x.dtype)
    return out if layer.bias is None else out.add_(layer.bias)


def stack(layers: list[QuantizedLinear]) -> QuantizedLinear:
    """Projections of one input as one, by output. They must agree in all but their outputs (see `can_stack`)."""
    first = layers[0]
    assert can_stack(layers)
    return replace(
        first,
        codes=torch.cat([layer.codes for layer in layers]),
        scales=torch.cat([layer.scales for layer in layers]),
        zeros=_stack_zeros(layers),
    )


def can_stack(layers: list[QuantizedLinear]) -> bool:
    """Whether scheme, group size and order of inputs are the same."""
    first = layers[0]
    same = all((layer.scheme, layer.group_size) == (first.scheme, first.group_size) for layer in layers)
    if first.permutation is None:
        return same and all(layer.permutation is None for layer in layers)
    return same and all(
        layer.permutation is not None and torch.equal(layer.permutation, first.permutation) for layer in layers
    )


def _stack_zeros(layers: list[QuantizedLinear]) -> torch.Tensor | None:
    if all(layer.zeros is None for layer in layers):
        return None
    return torch.cat(
        [
            torch.full_like(layer.scales, 1 << (layer.bits - 1)) if layer.zeros is None else layer.zeros
            for layer in layers
        ]
    )


def from_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    group_size: int,
    groups: torch.Tensor | None = None,
) -> QuantizedLinear:
    """A w4a16 or w8a16 layer.

    codes   uint8 `[N, K]`, unsigned
    scales  `[N, ceil(K / group_size)]`; group_size -1 (or K): one for each output. zeros: as scales, or None
    groups  int `[K]`: the group of each input where that is not k / group_size (act-order)
    """
    num_inputs = codes.shape[1]
    permutation = None
    if groups is not None:
        order = torch.argsort(groups.long(), stable=True)
        if not torch.equal(groups[order].long(), torch.arange(num_inputs, device=order.device) // group_size):
            raise ValueError(f"groups that do not hold {group_size} inputs each")
        if not torch.equal(order, torch.arange(num_inputs, device=order.device)):
            permutation = order.int()
            codes = codes[:, order]
    if group_size <= 0:
        group_size = num_inputs if num_inputs % PADDING == 0 else -(-num_inputs // PADDING) * PADDING
    if group_size % PADDING == 0 and group_size > PADDING:
        repeats = group_size // PADDING
        num_groups = -(-num_inputs // PADDING)
        scales = scales.repeat_interleave(repeats, 1)[:, :num_groups]
        zeros = None if zeros is None else zeros.repeat_interleave(repeats, 1)[:, :num_groups]
        group_size = PADDING
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size {group_size}")
    missing = -(-num_inputs // PADDING) * PADDING // group_size - scales.shape[1]
    scales = F.pad(scales, (0, missing))
    if zeros is not None:
        zeros = F.pad(zeros, (0, missing))
    symmetric = zeros is None or bool((zeros == 1 << (bits - 1)).all())
    return QuantizedLinear(
        "w4a16" if bits == 4 else "w8a16",
        num_inputs,
        pack(codes, bits),
        scales.contiguous(),
        None if symmetric or zeros is None else zeros.to(scales.dtype).contiguous(),
        group_size,
        permutation,
    )
