"""Decode attention over keys that several sequences share: read once for a group, not once for each member.

Sequences whose block tables start with the same blocks form a group. A program takes up to MEMBERS of them, one KV head
and one part of the shared keys; the members' queries of that head fill one tile. Every shared key is visible to every
member, so there is no mask. Partial results go where decode_attention merges them with each member's own part.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention_batch import AttentionBatch, Groups
from engine.kernels.triton.partial_results import LOG2E, SharedPart, partials
from engine.shared_groups import members_per_tile


@triton.jit
def _shared_prefix_attention(
    query,
    pool,
    partial,
    partial_stats,
    tables,
    slots,
    members,
    tiles,
    scale,
    block_stride,
    kv_stride,
    head_stride,
    table_stride,
    num_heads,
    num_parts,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    count = tl.load(tiles + 3 * tile + 1)
    if count == 0:
        return
    first_member = tl.load(tiles + 3 * tile)
    shared_len = tl.load(tiles + 3 * tile + 2)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    keys = tl.arange(0, KEYS)
    in_dims = dims < D
    valid = rows // GROUP < count
    sequences = tl.load(members + first_member + rows // GROUP, mask=valid, other=0).to(tl.int64)
    heads = sequences * num_heads + kv_head * GROUP + rows % GROUP
    q = tl.load(query + heads[:, None] * D + dims[None, :], mask=valid[:, None] & in_dims[None, :], other=0.0)
    leader = tl.load(members + first_member)
    table = tables + tl.load(slots + leader).to(tl.int64) * table_stride

    steps_each = tl.cdiv(tl.cdiv(shared_len, KEYS), PARTS)
    first = part * steps_each * KEYS
    last = tl.minimum(first + steps_each * KEYS, shared_len)
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
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        decay = tl.exp2(best - new_best)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        best = new_best
    index = heads * num_parts + part
    tl.store(partial + index[:, None] * D + dims[None, :], acc, mask=valid[:, None] & in_dims[None, :])
    tl.store(partial_stats + index * 2, best, mask=valid)
    tl.store(partial_stats + index * 2 + 1, total, mask=valid)


def shared_prefix_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    groups: Groups,
    num_parts: int,
    own_parts: int,
) -> SharedPart:
    """Partial results of `query` `[B, Hq, D]` over the groups' shared keys, in `num_parts` parts, with room for
    `own_parts` more. No sliding window."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = pool.shape[3:5]
    group = num_heads // num_kv_heads
    base = pool[:, layer]
    partial, stats = partials(query, num_parts + own_parts)
    _shared_prefix_attention[(len(groups.tiles), num_kv_heads, num_parts)](
        query,
        base,
        partial,
        stats,
        batch.tables,
        batch.slots,
        groups.members,
        groups.tiles,
        head_dim**-0.5 * LOG2E,
        base.stride(0),
        base.stride(1),
        base.stride(2),
        batch.tables.stride(0),
        num_heads,
        num_parts + own_parts,
        PARTS=num_parts,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(members_per_tile(group) * group)),
        D=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        KEYS=min(block_size, 64),
        num_warps=4,
        num_stages=3,
    )
    return SharedPart(partial, stats, num_parts, groups.lens)
