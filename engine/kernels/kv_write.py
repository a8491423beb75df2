"""Store new keys and values in their KV blocks."""

import torch


def kv_write(
    pool: torch.Tensor, layer: int, key_value: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Write the keys and values of T tokens to one layer of the pool.

    pool             `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, written in place
    key_value        `[T, 2, num_kv_heads, head_dim]`
    blocks, offsets  int64 `[T]`: each token's block and its place in it; no two tokens share a place
    """
    pool[:, layer].flatten(1, 2)[blocks, :, offsets] = key_value.flatten(1, 2)
