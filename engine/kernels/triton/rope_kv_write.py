"""Query and key norms, rope, and the KV write in one pass over the stacked projection.

Input row: Hq query heads, Hkv key heads, Hkv value heads of D. A program takes HEADS of them: queries are normed,
rotated and written to their own tensor; keys are normed, rotated and written to the row's place in the paged pool;
values go there as they are. Halves of a head are loaded apart, since rope turns dimension i with i + D/2.
"""

import torch
import triton
import triton.language as tl

HEADS = 16


@triton.jit
def _rope_kv_write(
    qkv,
    query_norm,
    key_norm,
    cos_sin,
    positions,
    blocks,
    query_out,
    pool,
    eps,
    block_stride,
    kv_stride,
    head_stride,
    num_heads,
    num_kv_heads,
    block_size,
    QK_NORM: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)
    total = num_heads + 2 * num_kv_heads
    valid = (heads < total)[:, None] & (dims < D // 2)[None, :]
    is_query = heads < num_heads
    is_value = heads >= num_heads + num_kv_heads
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions + row).to(tl.int64)
    block = tl.load(blocks + row).to(tl.int64)
    source = qkv + row * total * D + heads[:, None] * D + dims[None, :]
    first = tl.load(source, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2, mask=valid, other=0.0).to(tl.float32)
    plain_first, plain_second = first, second
    if QK_NORM:
        inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        inside = dims < D // 2
        q_first = tl.load(query_norm + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        q_second = tl.load(query_norm + D // 2 + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_first = tl.load(key_norm + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_second = tl.load(key_norm + D // 2 + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        first = first * inverse * tl.where(is_query[:, None], q_first, k_first)
        second = second * inverse * tl.where(is_query[:, None], q_second, k_second)
    place = tl.maximum(position, 0)
    cos = tl.load(cos_sin + place * 2 * D + dims, mask=dims < D // 2, other=0.0)[None, :]
    sin = tl.load(cos_sin + place * 2 * D + D + D // 2 + dims, mask=dims < D // 2, other=0.0)[None, :]
    turned_first = tl.where(is_value[:, None], plain_first, first * cos - second * sin)
    turned_second = tl.where(is_value[:, None], plain_second, second * cos + first * sin)

    kv_head = heads - num_heads - tl.where(is_value, num_kv_heads, 0)
    pool_offset = (
        block * block_stride
        + tl.where(is_value, kv_stride, 0)
        + kv_head.to(tl.int64) * head_stride
        + (position % block_size) * D
    )
    query_target = query_out + (row * num_heads + heads)[:, None] * D + dims[None, :]
    pool_target = pool + pool_offset[:, None] + dims[None, :]
    to_query = valid & is_query[:, None]
    to_pool = valid & (~is_query)[:, None] & (block >= 0)
    tl.store(query_target, turned_first.to(query_out.dtype.element_ty), mask=to_query)
    tl.store(query_target + D // 2, turned_second.to(query_out.dtype.element_ty), mask=to_query)
    tl.store(pool_target, turned_first.to(pool.dtype.element_ty), mask=to_pool)
    tl.store(pool_target + D // 2, turned_second.to(pool.dtype.element_ty), mask=to_pool)


def rope_kv_write(
    qkv: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    num_heads: int,
    pdl: bool = False,
) -> torch.Tensor:
    """Returns the queries `[T, num_heads, D]`, writes keys and values to the pool.

    qkv        `[T, (num_heads + 2 * Hkv) * D]`
    cos_sin    float32 `[num_positions, 2, D]` (engine/models/rope.py)
    positions  int32 `[T]`; blocks int32 `[T]`: the block of each row's position, -1 to write nothing
    pool       `[num_blocks, layers, 2, Hkv, block_size, D]`
    """
    num_rows = len(qkv)
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    base = pool[:, layer]
    query = torch.empty((num_rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    grid = (num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS))
    qk_norm = query_norm is not None and key_norm is not None
    _rope_kv_write[grid](
        qkv,
        query_norm if qk_norm else qkv,
        key_norm if qk_norm else qkv,
        cos_sin,
        positions,
        blocks,
        query,
        base,
        eps,
        base.stride(0),
        base.stride(1),
        base.stride(2),
        num_heads,
        num_kv_heads,
        block_size,
        QK_NORM=qk_norm,
        D=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        HEADS=HEADS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return query
