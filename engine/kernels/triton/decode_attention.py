"""Paged decode attention: one query a sequence, its keys split over several programs.

A program takes one sequence, one KV head and one part of the keys. The query heads that share the KV head fill one tile
(padded to 16 rows, the least a matrix instruction takes), so keys and values are read once. Parts are whole blocks,
found from kv_len on the device, so that a recorded launch serves any length. Partial results (float32: sum of weighted
values, maximum, sum of weights) are merged by a second kernel.

Rows whose first blocks are also other rows' (`shared`) leave those to the shared-prefix kernel
(engine/kernels/triton/shared_prefix.py): here they start at `shared_len`, and the merge takes in its parts too.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.triton.partial_results import LOG2E, SharedPart, merge, partials


@triton.jit
def _decode_attention(
    query,
    pool,
    out,
    partial,
    partial_stats,
    tables,
    slots,
    kv_lens,
    shared_lens,
    scale,
    block_stride,
    kv_stride,
    head_stride,
    table_stride,
    num_heads,
    first_part,
    num_parts,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    keys = tl.arange(0, KEYS)
    in_dims = dims < D
    in_group = rows < GROUP
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_len = tl.load(kv_lens + sequence)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(kv_len - WINDOW, 0) // KEYS * KEYS
    if SHARED:
        begin = tl.load(shared_lens + sequence)
    steps = tl.cdiv(tl.maximum(kv_len - begin, 0), KEYS)
    steps_each = tl.cdiv(steps, PARTS)
    first = begin + part * steps_each * KEYS
    last = tl.minimum(first + steps_each * KEYS, kv_len)
    table = tables + tl.load(slots + sequence).to(tl.int64) * table_stride
    heads = kv_head * GROUP + rows
    q_offsets = (sequence.to(tl.int64) * num_heads + heads)[:, None] * D + dims[None, :]
    q = tl.load(query + q_offsets, mask=in_group[:, None] & in_dims[None, :], other=0.0)

    base = pool + kv_head.to(tl.int64) * head_stride
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for at in range(first, last, KEYS):
        block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
        place = base + block * block_stride + (at % BLOCK_SIZE) * D
        k = tl.load(place + keys[None, :] * D + dims[:, None], mask=in_dims[:, None], other=0.0)
        v = tl.load(place + kv_stride + keys[:, None] * D + dims[None, :], mask=in_dims[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        visible = at + keys < kv_len
        if WINDOW > 0:
            visible = visible & (at + keys >= kv_len - WINDOW)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - safe[:, None])
        decay = tl.exp2(best - safe)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        best = new_best
    valid = in_group[:, None] & in_dims[None, :]
    if PARTS == 1 and not SHARED:
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + q_offsets, acc.to(out.dtype.element_ty), mask=valid)
    else:
        index = (sequence.to(tl.int64) * num_heads + heads) * num_parts + first_part + part
        tl.store(partial + index[:, None] * D + dims[None, :], acc, mask=valid)
        tl.store(partial_stats + index * 2, best, mask=in_group)
        tl.store(partial_stats + index * 2 + 1, total, mask=in_group)


def paged_decode_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    window: int | None,
    num_parts: int,
    shared: SharedPart | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """query `[B, Hq, D]`, one for each sequence of `batch` -> `[B, Hq, D]`; zeros where kv_len is 0.

    num_parts    programs that share a sequence's keys
    shared       what the shared-prefix kernel has seen to; its partial results have room for num_parts more
    """
    batch_size, num_heads, head_dim = query.shape
    num_kv_heads, block_size = pool.shape[3:5]
    base = pool[:, layer]
    out = torch.empty_like(query)
    direct = num_parts == 1 and shared is None
    if shared is None:
        shared = SharedPart(*((out, out) if direct else partials(query, num_parts)), 0, None)
    _decode_attention[(batch_size, num_kv_heads, num_parts)](
        query,
        base,
        out,
        shared.partial,
        shared.stats,
        batch.tables,
        batch.slots,
        batch.kv_len,
        shared.lens if shared.lens is not None else batch.kv_len,
        head_dim**-0.5 * LOG2E,
        base.stride(0),
        base.stride(1),
        base.stride(2),
        batch.tables.stride(0),
        num_heads,
        shared.num_parts,
        shared.num_parts + num_parts,
        PARTS=num_parts,
        GROUP=num_heads // num_kv_heads,
        ROWS=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        D=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        KEYS=min(block_size, 64),
        WINDOW=window or 0,
        SHARED=shared.lens is not None,
        PDL=pdl,
        num_warps=2 if num_parts == 1 else 4,
        num_stages=3,
        launch_pdl=pdl,
    )
    if not direct:
        merge(out, shared, num_parts, pdl)
    return out
