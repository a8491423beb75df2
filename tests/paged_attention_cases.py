"""Random inputs for paged attention kernels, and the answer by its formula in float64."""

import math
import random

import torch

from engine.kernels.attention_batch import AttentionBatch

LAYERS = 2


def make_case(
    kv_lens: list[int],
    query_lens: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    tile_rows: int = 64,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """A query `[T, Hq, D]` with strided rows, a pool of LAYERS layers and the batch, for chunks of `query_lens` that
    end their sequences of `kv_lens`. Two more packed rows belong to no sequence, and two tiles are empty.

    Whatever a kernel must not read is NaN: blocks that no sequence owns, which block tables name past a sequence's end,
    and slots past a sequence's last key.
    """
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in kv_lens]
    blocks = draw.sample(range(sum(counts) + 3), sum(counts) + 3)
    pool = torch.randn(len(blocks), LAYERS, 2, num_kv_heads, block_size, head_dim, generator=generator).half()
    slots = draw.sample(range(len(kv_lens) + 2), len(kv_lens))
    tables = torch.full((len(kv_lens) + 2, max(counts) + 2), blocks[-1], dtype=torch.int32)
    pool[blocks[-3:]] = math.nan
    for slot, count, length in zip(slots, counts, kv_lens):
        own, blocks = blocks[:count], blocks[count:]
        tables[slot, :count] = torch.tensor(own, dtype=torch.int32)
        if length % block_size:
            pool[own[-1], :, :, :, length % block_size :] = math.nan
    starts = [sum(query_lens[:i]) for i in range(len(query_lens))]
    tiles = [(i, row) for i, rows in enumerate(query_lens) for row in range(0, rows, tile_rows)]
    for _ in range(2):
        tiles.insert(draw.randrange(len(tiles) + 1), (-1, 0))
    rows = torch.randn(sum(query_lens) + 2, num_heads * head_dim + 64, generator=generator).half() * 2

    def ints(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    query = rows.to(device)[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    batch = AttentionBatch(
        tables.to(device), ints(slots), ints(starts), ints(query_lens), ints(kv_lens), ints(tiles), tile_rows
    )
    return query, pool.to(device), batch


def expected_attention(
    query: torch.Tensor, pool: torch.Tensor, layer: int, batch: AttentionBatch, window: int | None
) -> torch.Tensor:
    """softmax(query keys^T / sqrt(D)) values, float64: NaN in rows of no sequence, zeros where there is no key."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = pool.shape[3:5]
    out = torch.full(query.shape, math.nan, dtype=torch.float64, device=query.device)
    lists = [tensor.tolist() for tensor in (batch.slots, batch.query_start, batch.query_len, batch.kv_len)]
    for slot, first, rows, kv_len in zip(*lists):
        if kv_len == 0:
            out[first : first + rows] = 0
            continue
        at = torch.arange(kv_len, device=query.device)
        blocks = batch.tables[slot].long()[at // block_size]
        keys, values = (pool[blocks, layer, i, :, at % block_size].double() for i in (0, 1))
        grouped = query[first : first + rows].double().unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("rhgd,khd->hgrk", grouped, keys) / math.sqrt(head_dim)
        positions = torch.arange(kv_len - rows, kv_len, device=query.device)[:, None]
        hidden = at > positions
        if window is not None:
            hidden |= at <= positions - window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out[first : first + rows] = torch.einsum("hgrk,khd->rhgd", weights, values).flatten(1, 2)
    return out


def assert_attention_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-3) -> None:
    """Every row of every head within `tolerance` times its norm (weights and results in fp16 usually give 4e-4), zeros
    exact, and rows of no sequence untouched, that is still NaN."""
    unowned = expected.isnan()
    assert torch.equal(actual.isnan(), unowned)
    error = (actual.double() - expected).masked_fill(unowned, 0).norm(dim=-1)
    norm = expected.masked_fill(unowned, 0).norm(dim=-1)
    worst = (error - tolerance * norm).max()
    assert worst <= 0, f"largest relative error of a row: {(error / norm).nan_to_num().max():.1e}"
