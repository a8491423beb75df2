"""The KV pool: one tensor, block-major, so that a block is one contiguous range of bytes and one copy moves it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVLayout:
    """Shape of one block: `[num_layers, 2 (key, value), num_kv_heads, block_size (tokens), head_dim]` of `dtype`."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    def describe(self) -> str:
        """The layout as text. Two pools can exchange blocks if and only if these are equal."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"layers={self.num_layers},kv=2,heads={self.num_kv_heads},block={self.block_size},"
            f"dim={self.head_dim},dtype={dtype}"
        )


class KVPool:
    """`num_blocks` blocks of one layout in one tensor `[num_blocks, *layout.block_shape]`.

    The pool is only memory; who may touch which block is decided by its allocator (engine/kv_cache.py).
    """

    def __init__(self, layout: KVLayout, num_blocks: int, tensor: torch.Tensor):
        expected = (num_blocks, *layout.block_shape)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"KV pool tensor has shape {tuple(tensor.shape)}; {layout.describe()} needs {expected}")
        if tensor.dtype != layout.dtype:
            raise ValueError(f"KV pool tensor has dtype {tensor.dtype}; the layout says {layout.dtype}")
        if not tensor.is_contiguous():
            raise ValueError("KV pool tensor is not contiguous; a block must be one range of bytes")
        self.layout = layout
        self.num_blocks = num_blocks
        self.tensor = tensor

    @classmethod
    def allocate(cls, layout: KVLayout, num_blocks: int, device: str | torch.device = "cpu") -> "KVPool":
        """A new pool, zero-filled: attention may read slots past a sequence's end, and those must not hold NaN."""
        return cls(
            layout, num_blocks, torch.zeros((num_blocks, *layout.block_shape), dtype=layout.dtype, device=device)
        )

    def layer(self, index: int) -> torch.Tensor:
        """View of one layer in every block: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, constant stride."""
        return self.tensor[:, index]

    def block_bytes_view(self, block_id: int) -> memoryview:
        """Writable view of one block's bytes, `layout.block_bytes` long, sharing the pool's memory. CPU pools only."""
        if self.tensor.device.type != "cpu":
            raise ValueError(f"block bytes are visible on CPU pools only; this pool is on {self.tensor.device}")
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} is outside the pool of {self.num_blocks} blocks")
        return memoryview(self.tensor[block_id].view(torch.uint8).reshape(-1).numpy())  # type: ignore[arg-type]
