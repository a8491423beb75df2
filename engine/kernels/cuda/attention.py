"""Paged attention in CUDA C++ for SM75 and newer, fp16. The kernels' own files say how they work."""

import functools
import math
from pathlib import Path

import torch

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cuda.module import Kernel, Module, native_arch

TILE_ROWS = 64
"""Query rows of one prefill tile."""

HEAD_DIMS = (64, 128)
BLOCK_SIZES = (16, 32, 64, 128)
MAX_GROUP = 8
NO_WINDOW = 1 << 30
THREADS = 128
DIRECTORY = Path(__file__).parent


def supports(head_dim: int, block_size: int, dtype: torch.dtype, group: int) -> bool:
    """Whether these kernels take this shape; `group` is query heads over KV heads."""
    return head_dim in HEAD_DIMS and block_size in BLOCK_SIZES and dtype == torch.float16 and 1 <= group <= MAX_GROUP


def paged_prefill_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    window: int | None,
    uniform: bool = False,
    *,
    out: torch.Tensor | None = None,
    arch: str | None = None,
) -> torch.Tensor:
    """Causal attention of packed query chunks over one layer of the paged pool, scaled by D ** -0.5.

    query `[T, Hq, D]` fp16, rows may be strided; pool `[num_blocks, layers, 2, Hkv, block_size, D]` fp16, contiguous,
    with the chunks' own keys and values already in it. Row r of sequence s is at position kv_len[s] - query_len[s] + r
    and sees key j if j <= position and, with a window, j > position - window. Query head h uses KV head
    h // (Hq / Hkv). `batch.tile_rows` is TILE_ROWS; only rows that its tiles cover are written. `uniform` must
    be False: how a prompt is cut can change the last bit. `arch` as for `build`, by default the device's own.
    Returns `out` `[T, Hq, D]` fp16. Raises ValueError for what `supports` refuses or a tensor laid out otherwise.
    """
    group = _check(query, pool)
    if uniform:
        raise ValueError("this kernel's results depend on how a prompt is cut; uniform must be False")
    if batch.tile_rows != TILE_ROWS:
        raise ValueError(f"prefill tiles have {batch.tile_rows} rows; this kernel needs {TILE_ROWS}")
    out = _output(query, out)
    num_tiles = batch.tiles.shape[0]
    if num_tiles == 0:
        return out
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    value_offset = num_kv_heads * block_size * head_dim
    _prefill_kernel(head_dim, arch, query.device.index)(
        (num_tiles, query.shape[1], 1),
        query.data_ptr(),
        out.data_ptr(),
        pool.data_ptr() + 2 * layer * pool.stride(1),
        batch.tables.data_ptr(),
        batch.slots.data_ptr(),
        batch.query_start.data_ptr(),
        batch.query_len.data_ptr(),
        batch.kv_len.data_ptr(),
        batch.tiles.data_ptr(),
        query.stride(0),
        pool.stride(0),
        value_offset,
        head_dim**-0.5 * math.log2(math.e),
        batch.tables.stride(0),
        block_size.bit_length() - 1,
        query.shape[1],
        group,
        NO_WINDOW if window is None else window,
    )
    return out


def workspace_floats(batch_size: int, num_heads: int, head_dim: int, num_parts: int) -> int:
    """Size of the workspace that a decode launch needs."""
    return batch_size * num_heads * num_parts * (head_dim + 2) if num_parts > 1 else 0


def paged_decode_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    window: int | None,
    num_parts: int,
    shared: None = None,
    pdl: bool = False,
    *,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    arch: str | None = None,
) -> torch.Tensor:
    """Attention of one query a sequence over one layer of the paged pool, scaled by D ** -0.5.

    query `[B, Hq, D]` fp16, rows may be strided; row b belongs to sequence b and sees its kv_len[b] keys, or the last
    `window` of them; kv_len[b] == 0 is a padding row and gives zeros. kv_len is read on the device: a captured graph
    serves every length. pool and `arch` as for prefill.

    num_parts   thread blocks that share a sequence's keys; a result depends on it in the last bits
    workspace   fp32, at least `workspace_floats`; allocated if not given
    shared, pdl for other implementations; shared prefixes are not supported here and pdl changes nothing

    Returns `out` `[B, Hq, D]` fp16. Raises ValueError for what `supports` refuses or a tensor laid out otherwise.
    """
    assert shared is None, "this kernel takes no shared prefixes"
    group = _check(query, pool)
    out = _output(query, out)
    batch_size, num_heads, head_dim = query.shape
    if batch_size == 0:
        return out
    num_kv_heads, block_size = pool.shape[3:5]
    floats = workspace_floats(batch_size, num_heads, head_dim, num_parts)
    if workspace is None:
        workspace = torch.empty(floats, dtype=torch.float32, device=query.device)
    elif workspace.numel() < floats or workspace.dtype != torch.float32 or not workspace.is_contiguous():
        raise ValueError(f"decode workspace has {workspace.numel()} x {workspace.dtype}; needs {floats} x float32")
    arguments = (
        query.data_ptr(),
        out.data_ptr(),
        pool.data_ptr() + 2 * layer * pool.stride(1),
        workspace.data_ptr(),
        batch.tables.data_ptr(),
        batch.slots.data_ptr(),
        batch.kv_len.data_ptr(),
        query.stride(0),
        pool.stride(0),
        num_kv_heads * block_size * head_dim,
        head_dim**-0.5 * math.log2(math.e),
        batch.tables.stride(0),
        block_size.bit_length() - 1,
        batch_size,
        num_heads,
        group,
        NO_WINDOW if window is None else window,
        num_parts,
    )
    attend, merge = _decode_kernels(head_dim, arch, query.device.index)
    attend((batch_size, num_kv_heads, num_parts), *arguments)
    if num_parts > 1:
        merge((batch_size, num_heads, 1), *arguments)
    return out


def _check(query: torch.Tensor, pool: torch.Tensor) -> int:
    """Query heads of a KV head."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = pool.shape[3:5]
    group = num_heads // num_kv_heads
    if not supports(head_dim, block_size, query.dtype, group) or num_heads % num_kv_heads or pool.dtype != query.dtype:
        raise ValueError(
            f"paged attention in CUDA C++ does not take {num_heads}/{num_kv_heads} heads of {head_dim}, "
            f"block size {block_size}, {query.dtype}; ask supports() first"
        )
    if pool.shape[5] != head_dim or not pool.is_contiguous():
        raise ValueError(f"KV pool {tuple(pool.shape)} must be contiguous with head dimension {head_dim}")
    if (
        query.stride(2) != 1
        or (num_heads > 1 and query.stride(1) != head_dim)
        or query.stride(0) % 8
        or query.data_ptr() % 16
    ):
        raise ValueError(f"query rows must be contiguous and aligned to 16 bytes; strides are {query.stride()}")
    return group


def _output(query: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if out.shape != query.shape or out.dtype != query.dtype or not out.is_contiguous():
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}; needs contiguous {tuple(query.shape)} {query.dtype}")
    return out


@functools.cache
def _module(name: str, arch: str | None, device_index: int) -> Module:
    return Module(DIRECTORY / f"{name}.cu", arch or native_arch(device_index), device_index)


@functools.cache
def _prefill_kernel(head_dim: int, arch: str | None, device_index: int) -> Kernel:
    module = _module("paged_prefill", arch, device_index)
    return Kernel(module, f"paged_prefill_{head_dim}", "9Pq2if5i", THREADS)


@functools.cache
def _decode_kernels(head_dim: int, arch: str | None, device_index: int) -> tuple[Kernel, Kernel]:
    module, layout = _module("paged_decode", arch, device_index), "7Pq2if7i"
    return (
        Kernel(module, f"paged_decode_{head_dim}", layout, THREADS),
        Kernel(module, f"paged_decode_merge_{head_dim}", layout, head_dim),
    )
