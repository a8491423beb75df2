"""A pool as one process describes it to another, in Welcome.pool: block layout and number of blocks. Channels add where
the memory is."""

import torch

from engine.kv_pool import KVLayout, KVPool
from kv_transfer.channel import ChannelError

PoolDescription = dict[str, str | int]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def describe_blocks(pool: KVPool) -> PoolDescription:
    layout = pool.layout
    return {
        "bytes": pool.num_blocks * layout.block_bytes,
        "num_blocks": pool.num_blocks,
        "num_layers": layout.num_layers,
        "num_kv_heads": layout.num_kv_heads,
        "block_size": layout.block_size,
        "head_dim": layout.head_dim,
        "dtype": str(layout.dtype).removeprefix("torch."),
    }


def read_blocks(channel: str, description: PoolDescription) -> tuple[KVLayout, int]:
    """(layout, number of blocks). Raises ChannelError for a description that is not whole."""
    try:
        layout = KVLayout(
            num_layers=int(description["num_layers"]),
            num_kv_heads=int(description["num_kv_heads"]),
            block_size=int(description["block_size"]),
            head_dim=int(description["head_dim"]),
            dtype=_DTYPES[str(description["dtype"])],
        )
        return layout, int(description["num_blocks"])
    except (KeyError, ValueError) as error:
        raise unusable(channel, error) from None


def unusable(channel: str, error: Exception) -> ChannelError:
    return ChannelError(f"channel {channel!r}: the prefill worker's pool description is not usable: {error!r}")
