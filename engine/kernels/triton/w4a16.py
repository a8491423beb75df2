"""Products with int4 and int8 weights and plain activations, in the layout of engine/kernels/quantized_linear.py.

    gemv        one to four rows, no tl.dot; bound by the bytes of the weight, with the norm, the gate and the residual
                of engine/kernels/triton/gemv.py inside
    matmul      up to a few dozen rows with tl.dot (SM80 and newer): the weight is the left operand, which goes from
                registers to the tensor cores, and the activations, transposed, are the right one
    dequantize  the whole weight in the activations' dtype, for cuBLAS: many rows

A block is 16 words. Field i of its words, 16 neighbouring inputs, is taken out of all of them at once:

    gemv    the field stays where it is in the low 16 bits, which by themselves are a float32, code * 2^(place - 149), a
            subnormal one; x is multiplied by 2^(96 - place), all of it exact, and what is left, 2^-53, is undone at
            the end. So a weight costs one logic instruction and one multiply-add. Zeros go on the sum of x
    matmul  the field is shifted down and becomes the low mantissa of a float16 of exponent 2^10, less 2^10 and the zero

Codes less zeros are small integers, exact in every dtype; scales are applied to float32 sums of a group.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.quantized_linear import PADDING, WORDS, QuantizedLinear

TWO_53 = tl.constexpr(2.0**53)
TWO_96 = tl.constexpr(2.0**96)
PROGRAMS_WANTED = 256
"""Programs of a matmul that keep a GPU busy."""
MOST_PARTS = 8


@dataclass(frozen=True)
class Tiling:
    """parts > 1: the inputs are split, and the result is float32 `[parts, M, N]`, to be summed."""

    tile_m: int
    tile_n: int
    parts: int = 1
    num_warps: int = 4
    num_stages: int = 4


UNIFORM = Tiling(64, 64)
"""One tiling for any number of rows: each row's sums are made in the same order whatever the batch."""


@triton.jit
def _subnormal(words, FIELD: tl.constexpr, BITS: tl.constexpr):
    """code * 2^(place - 149) of one field, float32; place = BITS * (FIELD % (16 / BITS))."""
    PLACES: tl.constexpr = 16 // BITS
    MASK: tl.constexpr = ((1 << BITS) - 1) << (BITS * (FIELD % PLACES))
    half = words >> 16 if FIELD >= PLACES else words
    return (half & MASK).to(tl.float32, bitcast=True)


@triton.jit
def _gemv(
    x,
    codes,
    scales,
    zeros,
    permutation,
    bias,
    norm_weight,
    out,
    num_outputs,
    num_inputs,
    num_blocks,
    num_groups,
    eps,
    M: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    PERMUTED: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    FIELDS: tl.constexpr = 32 // BITS
    BLOCK: tl.constexpr = 16 * FIELDS
    SUBS: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch = tl.arange(0, M)[:, None, None, None]
    row = rows[None, :, None, None]
    block = tl.arange(0, BLOCKS)[None, None, :, None]
    word = tl.arange(0, 16)[None, None, None, :]
    in_rows = row < num_outputs
    tile = codes + row.to(tl.int64) * num_blocks * 16 + block * 16 + word
    up_tile = tile + num_outputs.to(tl.int64) * num_blocks * 16
    mask = in_rows & (block < num_blocks)
    loaded = tl.load(tile, mask=mask, other=0)
    if GATED:
        loaded_up = tl.load(up_tile, mask=mask, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([M, ROWS, BLOCKS, 16], tl.float32)
    acc_up = tl.zeros([M, ROWS, BLOCKS, 16], tl.float32)
    squares = tl.zeros([M, 1, BLOCKS, 16], tl.float32)
    for first in range(0, num_blocks, BLOCKS):
        words = loaded
        next_mask = in_rows & (first + BLOCKS + block < num_blocks)
        loaded = tl.load(tile + (first + BLOCKS) * 16, mask=next_mask, other=0)
        if GATED:
            words_up = loaded_up
            loaded_up = tl.load(up_tile + (first + BLOCKS) * 16, mask=next_mask, other=0)
        for sub in tl.static_range(SUBS):
            part = tl.zeros([M, ROWS, BLOCKS, 16], tl.float32)
            part_up = tl.zeros([M, ROWS, BLOCKS, 16], tl.float32)
            total = tl.zeros([M, 1, BLOCKS, 16], tl.float32)
            for step in tl.static_range(FIELDS // SUBS):
                inputs = (first + block) * BLOCK + (sub * (FIELDS // SUBS) + step) * 16 + word
                inside = inputs < num_inputs
                source = tl.load(permutation + inputs, mask=inside, other=0) if PERMUTED else inputs
                values = tl.load(x + batch * num_inputs + source, mask=inside, other=0.0).to(tl.float32)
                if NORM:
                    squares += values * values
                    values *= tl.load(norm_weight + source, mask=inside, other=0.0).to(tl.float32)
                total += values
                values *= TWO_96 / (1 << (BITS * ((sub * (FIELDS // SUBS) + step) % (16 // BITS))))
                part += _subnormal(words, sub * (FIELDS // SUBS) + step, BITS) * values
                if GATED:
                    part_up += _subnormal(words_up, sub * (FIELDS // SUBS) + step, BITS) * values
            total *= 1 / TWO_53
            group = ((first + block) * BLOCK + sub * GROUP) // GROUP
            in_groups = in_rows & (group < num_groups)
            at = row * num_groups + group
            if ZEROS:
                part -= tl.load(zeros + at, mask=in_groups, other=0.0).to(tl.float32) * total
            else:
                part -= total * (1 << (BITS - 1))
            acc += part * tl.load(scales + at, mask=in_groups, other=0.0).to(tl.float32)
            if GATED:
                at_up = at + num_outputs * num_groups
                if ZEROS:
                    part_up -= tl.load(zeros + at_up, mask=in_groups, other=0.0).to(tl.float32) * total
                else:
                    part_up -= total * (1 << (BITS - 1))
                acc_up += part_up * tl.load(scales + at_up, mask=in_groups, other=0.0).to(tl.float32)
    in_outputs = rows < num_outputs
    result = tl.sum(tl.sum(acc, 3), 2) * TWO_53
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 3), 2) / num_inputs + eps)
        result *= scale
    if BIAS:
        result += tl.load(bias + rows, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = tl.sum(tl.sum(acc_up, 3), 2) * TWO_53
        if NORM:
            up *= scale
        if BIAS:
            up += tl.load(bias + num_outputs + rows, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
        result = result * tl.sigmoid(result) * up
    target = out + tl.arange(0, M).to(tl.int64)[:, None] * num_outputs + rows[None, :]
    if RESIDUAL:
        result += tl.load(target, mask=in_outputs[None, :], other=0.0).to(tl.float32)
    tl.store(target, result.to(out.dtype.element_ty), mask=in_outputs[None, :])


def gemv(
    x: torch.Tensor,
    layer: QuantizedLinear,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    rows: int | None = None,
    blocks: int = 8,
    num_warps: int = 1,
    pdl: bool = False,
) -> torch.Tensor:
    """x `[M, K]`, M of 1, 2 or 4; a w4a16 or w8a16 layer of N outputs -> `[M, N]`, or `[M, N / 2]` when gated.

    norm_weight: the input is rms_norm(x) * norm_weight. gated: the layer holds gate rows, then up rows; the result is
    silu(gate) * up. residual: `[M, N]`, the result is added to it in place and it is returned. A program computes
    `rows` outputs (4; 2 for four rows of x, which fit the registers) and walks their inputs `blocks` blocks at a time;
    with 8 blocks a warp its threads share no inputs.
    """
    num_rows, num_inputs = x.shape
    num_outputs = layer.out_features // 2 if gated else layer.out_features
    rows = rows or (2 if num_rows > 2 else 4)
    out = residual
    if out is None:
        out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    unused = layer.scales
    _gemv[(triton.cdiv(num_outputs, rows),)](
        x,
        layer.codes,
        layer.scales,
        layer.zeros if layer.zeros is not None else unused,
        layer.permutation if layer.permutation is not None else layer.codes,
        layer.bias if layer.bias is not None else unused,
        norm_weight if norm_weight is not None else unused,
        out,
        num_outputs,
        num_inputs,
        layer.codes.shape[1] // WORDS,
        layer.scales.shape[1],
        eps,
        M=num_rows,
        BITS=layer.bits,
        GROUP=layer.group_size,
        ZEROS=layer.zeros is not None,
        PERMUTED=layer.permutation is not None,
        NORM=norm_weight is not None,
        GATED=gated,
        RESIDUAL=residual is not None,
        BIAS=layer.bias is not None,
        ROWS=rows,
        BLOCKS=blocks,
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )
    return out


@triton.jit
def _code_and_zero(words, zero, FIELD: tl.constexpr, BITS: tl.constexpr):
    """code - zero, float16; zero float16 `[N, 1]`, 1024 larger than it is."""
    bits = ((words >> (BITS * FIELD)) & ((1 << BITS) - 1)) | 0x6400
    return bits.to(tl.int16).to(tl.float16, bitcast=True) - zero


@triton.jit
def _matmul(
    x,
    codes,
    scales,
    zeros,
    permutation,
    bias,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    num_blocks,
    num_groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    PERMUTED: tl.constexpr,
    BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    FIELDS: tl.constexpr = 32 // BITS
    BLOCK: tl.constexpr = 16 * FIELDS
    SUBS: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    outputs = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    part_id = tl.program_id(2)
    word = tl.arange(0, 16)
    in_rows = rows < num_rows
    in_outputs = outputs < num_outputs
    blocks_each = tl.cdiv(num_blocks, PARTS)
    first = part_id * blocks_each
    last = tl.minimum(first + blocks_each, num_blocks)
    tile = codes + outputs.to(tl.int64)[:, None] * num_blocks * 16 + word[None, :]
    x_rows = x + rows.to(tl.int64)[None, :] * num_inputs
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    for block in range(first, last):
        words = tl.load(tile + block * 16, mask=in_outputs[:, None], other=0)
        for sub in tl.static_range(SUBS):
            group = (block * BLOCK + sub * GROUP) // GROUP
            at = outputs * num_groups + group
            in_groups = in_outputs & (group < num_groups)
            scale = tl.load(scales + at, mask=in_groups, other=0.0).to(tl.float32)
            if ZEROS:
                zero = (tl.load(zeros + at, mask=in_groups, other=0.0).to(tl.float32) + 1024.0).to(tl.float16)
            else:
                zero = tl.full([TILE_N], 1024 + (1 << (BITS - 1)), tl.float16)
            part = tl.zeros([TILE_N, TILE_M], tl.float32)
            for step in tl.static_range(FIELDS // SUBS):
                inputs = block * BLOCK + (sub * (FIELDS // SUBS) + step) * 16 + word
                inside = inputs < num_inputs
                source = tl.load(permutation + inputs, mask=inside, other=0) if PERMUTED else inputs
                right = tl.load(x_rows + source[:, None], mask=inside[:, None] & in_rows[None, :], other=0.0)
                left = _code_and_zero(words, zero[:, None], sub * (FIELDS // SUBS) + step, BITS).to(right.dtype)
                part = tl.dot(left, right, part, input_precision="ieee")
            acc += part * scale[:, None]
    if BIAS:
        acc += tl.load(bias + outputs, mask=in_outputs, other=0.0).to(tl.float32)[:, None]
    target = out + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    if PARTS > 1:
        target += part_id.to(tl.int64) * num_rows * num_outputs
    tl.store(target, acc.to(out.dtype.element_ty), mask=in_outputs[:, None] & in_rows[None, :])


def tiling_for(num_rows: int, layer: QuantizedLinear, may_split: bool) -> Tiling:
    """A tiling that reads the weight once for up to 64 rows and has enough programs to keep a GPU busy."""
    tile_m = min(64, max(16, triton.next_power_of_2(num_rows)))
    tile_n = 64
    programs = triton.cdiv(num_rows, tile_m) * triton.cdiv(layer.out_features, tile_n)
    parts = max(1, min(MOST_PARTS, PROGRAMS_WANTED // programs)) if may_split and layer.bias is None else 1
    return Tiling(tile_m, tile_n, parts)


def matmul(x: torch.Tensor, layer: QuantizedLinear, tiling: Tiling, pdl: bool = False) -> torch.Tensor:
    """x `[M, K]`, a w4a16 or w8a16 layer -> `[M, N]`; with parts > 1 float32 `[parts, M, N]` (no bias then)."""
    assert layer.bias is None or tiling.parts == 1, "a bias is added once, not in each part"
    num_rows, num_inputs = x.shape
    num_outputs = layer.out_features
    if tiling.parts == 1:
        out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    else:
        out = torch.empty((tiling.parts, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_rows, tiling.tile_m), triton.cdiv(num_outputs, tiling.tile_n), tiling.parts)
    _matmul[grid](
        x,
        layer.codes,
        layer.scales,
        layer.zeros if layer.zeros is not None else layer.scales,
        layer.permutation if layer.permutation is not None else layer.codes,
        layer.bias if layer.bias is not None else layer.scales,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        layer.codes.shape[1] // WORDS,
        layer.scales.shape[1],
        BITS=layer.bits,
        GROUP=layer.group_size,
        ZEROS=layer.zeros is not None,
        PERMUTED=layer.permutation is not None,
        BIAS=layer.bias is not None,
        TILE_M=tiling.tile_m,
        TILE_N=tiling.tile_n,
        PARTS=tiling.parts,
        PDL=pdl,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        launch_pdl=pdl,
    )
    return out


@triton.jit
def _dequantize(
    codes,
    scales,
    zeros,
    permutation,
    out,
    num_outputs,
    num_inputs,
    num_words,
    num_groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    PERMUTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    FIELDS: tl.constexpr = 32 // BITS
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inputs = tl.program_id(0) * 128 + tl.arange(0, 128)
    in_rows = (rows < num_outputs)[:, None]
    inside = in_rows & (inputs < num_inputs)[None, :]
    word = inputs // (16 * FIELDS) * 16 + inputs % 16
    shift = (inputs // 16 % FIELDS) * BITS
    words = tl.load(codes + rows.to(tl.int64)[:, None] * num_words + word[None, :], mask=inside, other=0)
    code = ((words >> shift[None, :]) & ((1 << BITS) - 1)).to(tl.float32)
    at = rows[:, None] * num_groups + (inputs // GROUP)[None, :]
    if ZEROS:
        code -= tl.load(zeros + at, mask=inside, other=0.0).to(tl.float32)
    else:
        code -= 1 << (BITS - 1)
    weight = code * tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    column = inputs
    if PERMUTED:
        column = tl.load(permutation + inputs, mask=inputs < num_inputs, other=0)
    target = out + rows.to(tl.int64)[:, None] * num_inputs + column[None, :]
    tl.store(target, weight.to(out.dtype.element_ty), mask=inside)


def dequantize(layer: QuantizedLinear, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a w4a16 or w8a16 layer, `[N, K]`, inputs in x's order."""
    rows = 16
    num_outputs, num_inputs = layer.out_features, layer.in_features
    out = torch.empty((num_outputs, num_inputs), dtype=dtype, device=layer.codes.device)
    _dequantize[(triton.cdiv(num_inputs, PADDING), triton.cdiv(num_outputs, rows))](
        layer.codes,
        layer.scales,
        layer.zeros if layer.zeros is not None else layer.scales,
        layer.permutation if layer.permutation is not None else layer.codes,
        out,
        num_outputs,
        num_inputs,
        layer.codes.shape[1],
        layer.scales.shape[1],
        BITS=layer.bits,
        GROUP=layer.group_size,
        ZEROS=layer.zeros is not None,
        PERMUTED=layer.permutation is not None,
        ROWS=rows,
    )
    return out
