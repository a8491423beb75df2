"""Paged attention in plain torch, one sequence at a time: what the paged kernels are checked against, and what serves
where none of them can. It reads lengths on the host, so it cannot be recorded in a graph."""

import math

import torch

from engine.kernels.attention_batch import AttentionBatch


def dense_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    window: int | None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of each sequence's queries over its keys, computed in `dtype`.

    query `[T, Hq, D]`, pool `[num_blocks, layers, 2, Hkv, block_size, D]` -> `[T, Hq, D]` in query's dtype; rows of no
    sequence are zero.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = pool.shape[3:5]
    out = torch.zeros_like(query)
    lists = [tensor.tolist() for tensor in (batch.slots, batch.query_start, batch.query_len, batch.kv_len)]
    for slot, first, count, kv_len in zip(*lists):
        if count == 0 or kv_len == 0:
            continue
        table = batch.tables[slot, : -(-kv_len // block_size)].long()
        keys, values = pool[table, layer].to(dtype).unbind(1)  # [blocks, Hkv, block_size, D]
        keys, values = (
            part.transpose(0, 1)
            .reshape(num_kv_heads, -1, head_dim)[:, :kv_len]
            .repeat_interleave(num_heads // num_kv_heads, dim=0)
            for part in (keys, values)
        )
        positions = torch.arange(kv_len - count, kv_len, device=query.device)[:, None]
        at = torch.arange(kv_len, device=query.device)[None, :]
        visible = at <= positions
        if window is not None:
            visible &= at > positions - window
        scores = query[first : first + count].to(dtype).transpose(0, 1) @ keys.transpose(1, 2) * head_dim**-0.5
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        out[first : first + count] = (weights @ values).transpose(0, 1).to(query.dtype)
    return out


def dense_prefill_attention(query, pool, layer, batch: AttentionBatch, window: int | None, uniform: bool = False):
    """The interface of the prefill kernels."""
    return dense_attention(query, pool, layer, batch, window)


def dense_decode_attention(
    query, pool, layer, batch: AttentionBatch, window: int | None, num_parts: int = 1, shared=None, pdl: bool = False
):
    """The interface of the decode kernels."""
    assert shared is None, "plain torch attention takes no shared prefixes"
    return dense_attention(query, pool, layer, batch, window)
