"""Store new keys and values in their KV blocks."""

import torch


def kv_write(pool: torch.Tensor, layer: int, key_value: torch.Tensor, slots: torch.Tensor) -> None:
    """Write the keys and values of T tokens to one layer of the pool.

    pool       `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous, written in place
    key_value  `[T, 2, num_kv_heads, head_dim]`
    slots      int64 `[T]`: block id * block_size + offset in the block; all different
    """
    _, num_layers, _, num_heads, block_size, head_dim = pool.shape
    block, offset = slots // block_size, slots % block_size
    heads = torch.arange(2 * num_heads, device=slots.device)
    row_of_head = ((block * num_layers + layer) * 2 * num_heads)[:, None] + heads
    rows = row_of_head * block_size + offset[:, None]
    pool.view(-1, head_dim).index_copy_(0, rows.view(-1), key_value.reshape(-1, head_dim))
