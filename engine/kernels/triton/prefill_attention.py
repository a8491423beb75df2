"""Paged prefill attention: chunks of queries against cached and new keys, causal, variable lengths in one launch.

A program computes one tile of TILE queries of one sequence for one query head, flash style (Dao et al. 2022,
arXiv:2205.14135): it walks the keys in steps of KEYS along the block table, keeping the running maximum and sum of each
row in float32. Blocks are read where they are, `[block_size, D]` contiguous for each head.

Steps that every row of the tile sees whole skip the mask, which the compiler turns into other instructions. UNIFORM
masks every step and leaves the keys to one program: then a row's result depends on its own keys only, and chunking and
caching do not change a bit of it.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.triton.partial_results import LOG2E, SharedPart, merge, partials

PROGRAMS_WANTED = 256
MOST_PARTS = 8


@triton.jit
def _prefill_attention(
    query,
    pool,
    out,
    partial,
    partial_stats,
    tables,
    slots,
    query_starts,
    query_lens,
    kv_lens,
    tiles,
    scale,
    block_stride,
    kv_stride,
    head_stride,
    table_stride,
    num_heads,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    UNIFORM: tl.constexpr,
    PARTS: tl.constexpr,
):
    # The longest tiles are the last ones of a sequence: start with them.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    first = tl.load(tiles + 2 * tile + 1)
    query_len = tl.load(query_lens + sequence)
    start = tl.load(kv_lens + sequence) - query_len
    row = tl.load(query_starts + sequence).to(tl.int64) + first
    table = tables + tl.load(slots + sequence).to(tl.int64) * table_stride

    rows = tl.arange(0, TILE)
    dims = tl.arange(0, DIMS)
    keys = tl.arange(0, KEYS)
    in_rows = (first + rows) < query_len
    in_dims = dims < D
    q_offsets = ((row + rows)[:, None] * num_heads + head) * D + dims[None, :]
    q = tl.load(query + q_offsets, mask=in_rows[:, None] & in_dims[None, :], other=0.0)
    positions = start + first + rows

    base = pool + (head // GROUP).to(tl.int64) * head_stride
    best = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, DIMS], tl.float32)
    end = tl.minimum(start + first + TILE, start + query_len)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start + first - WINDOW + 1, 0) // KEYS * KEYS
    if PARTS > 1:
        each = tl.cdiv(tl.cdiv(end - begin, KEYS), PARTS) * KEYS
        begin += tl.program_id(2) * each
        end = tl.minimum(end, begin + each)
    unmasked_end = tl.minimum((start + first + 1) // KEYS * KEYS, end)
    if WINDOW > 0 or UNIFORM:
        unmasked_end = begin
    for at in range(begin, unmasked_end, KEYS):
        block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
        place = base + block * block_stride + (at % BLOCK_SIZE) * D
        k = tl.load(place + keys[None, :] * D + dims[:, None], mask=in_dims[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        decay = tl.exp2(best - new_best)
        v = tl.load(place + kv_stride + keys[:, None] * D + dims[None, :], mask=in_dims[None, :], other=0.0)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        best = new_best
    for at in range(tl.maximum(unmasked_end, begin), end, KEYS):
        block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
        place = base + block * block_stride + (at % BLOCK_SIZE) * D
        k = tl.load(place + keys[None, :] * D + dims[:, None], mask=in_dims[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        visible = (at + keys)[None, :] <= positions[:, None]
        if WINDOW > 0:
            visible = visible & ((at + keys)[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row may have seen no key yet: keep exp2 away from (-inf) - (-inf).
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - safe[:, None])
        decay = tl.exp2(best - safe)
        v = tl.load(place + kv_stride + keys[:, None] * D + dims[None, :], mask=in_dims[None, :], other=0.0)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        best = new_best
    valid = in_rows[:, None] & in_dims[None, :]
    if PARTS == 1:
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + q_offsets, acc.to(out.dtype.element_ty), mask=valid)
    else:
        index = ((row + rows) * num_heads + head) * PARTS + tl.program_id(2)
        tl.store(partial + index[:, None] * D + dims[None, :], acc, mask=valid)
        tl.store(partial_stats + index * 2, best, mask=in_rows)
        tl.store(partial_stats + index * 2 + 1, total, mask=in_rows)


def paged_prefill_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    window: int | None,
    uniform: bool = False,
) -> torch.Tensor:
    """query `[T, Hq, D]`, pool `[num_blocks, layers, 2, Hkv, block_size, D]` (the new keys and values are in it) ->
    `[T, Hq, D]`. `batch.tile_rows` is a power of two, at least 16. `window`: latest positions a query sees;
    `uniform`: the same bits however a prompt is cut into chunks."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = pool.shape[3:5]
    base = pool[:, layer]
    out = torch.empty_like(query)
    num_parts = 1 if uniform else prefill_parts(len(query), num_heads, batch.tile_rows)
    partial, stats = partials(query, num_parts) if num_parts > 1 else (out, out)
    _prefill_attention[(num_heads, len(batch.tiles), num_parts)](
        query,
        base,
        out,
        partial,
        stats,
        batch.tables,
        batch.slots,
        batch.query_start,
        batch.query_len,
        batch.kv_len,
        batch.tiles,
        head_dim**-0.5 * LOG2E,
        base.stride(0),
        base.stride(1),
        base.stride(2),
        batch.tables.stride(0),
        num_heads,
        GROUP=num_heads // num_kv_heads,
        D=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        KEYS=min(block_size, 64),
        TILE=batch.tile_rows,
        WINDOW=window or 0,
        UNIFORM=uniform,
        PARTS=num_parts,
        num_warps=8 if batch.tile_rows >= 128 else 4,
        num_stages=3,
    )
    if num_parts > 1:
        merge(out, SharedPart(partial, stats, 0, None), num_parts)
    return out


def prefill_parts(num_rows: int, num_heads: int, tile_rows: int) -> int:
    """Programs that share a tile's keys: few rows behind a long cached prefix would leave most of the device idle."""
    programs = triton.cdiv(num_rows, tile_rows) * num_heads
    return min(MOST_PARTS, max(1, PROGRAMS_WANTED // programs))
