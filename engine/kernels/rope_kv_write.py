"""Query and key norms, rope and the KV write, from the stacked projection to the queries and the pool."""

import torch

from engine.kernels.rms_norm import rms_norm
from engine.kernels.rope import apply_rope


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
    pool       `[num_blocks, layers, 2, Hkv, block_size, D]`; `pdl` is for kernels
    """
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    heads = qkv.view(len(qkv), -1, head_dim).float()
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if query_norm is not None and key_norm is not None:
        query, key = rms_norm(query, query_norm.float(), eps), rms_norm(key, key_norm.float(), eps)
    angles = cos_sin[positions.clamp(min=0).long()]
    kept = blocks >= 0
    where = (blocks[kept].long(), layer, slice(None), slice(None), (positions[kept] % block_size).long())
    pool[where] = torch.stack((apply_rope(key, angles), value), dim=1)[kept].to(pool.dtype)
    return apply_rope(query, angles).to(qkv.dtype)
