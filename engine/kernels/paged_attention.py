"""Attention of a batch of query chunks over their paged keys and values.

Layout: query rows of all chunks are packed `[T, num_heads, head_dim]`; keys and values lie in the pool
`[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, found through each chunk's block table. One row of a block, head
and kind is `block_size * head_dim` numbers in a piece, so a gather copies whole rows and gives `[2, ..., tokens, head_dim]`
without a transpose.

Chunks of one query are gathered together, grouped by length so that padding at most doubles what is read; the query heads that
share a KV head are the rows of its matrix products, so that keys are never repeated. Longer chunks go one by one.

A query's result depends on nothing but its own keys: every gather starts at a multiple of TILE tokens and ends at a multiple of
LANES, which are the strides in which scaled_dot_product_attention reduces on CPU, so masked padding adds exact zeros only.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

TILE = 512
LANES = 16


@dataclass(frozen=True)
class Chunk:
    """Queries at positions start .. start + length - 1 of one sequence, with KV of all positions up to the last one in place."""

    start: int
    length: int
    block_table: list[int]

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Group:
    """Chunks attended to in one call: B of one query each, or one of any length.

    rows    packed query rows: a slice, or int64 `[B]`
    blocks  int64 `[B, N]`: the blocks to gather
    mask    additive, `[B, 1, 1, S]` or `[1, 1, length, S]` with S = N * block_size; None: plain causal from position 0
    """

    rows: slice | torch.Tensor
    single: bool
    blocks: torch.Tensor
    mask: torch.Tensor | None


class AttentionPlan:
    """What every layer of one step shares: which rows attend to which blocks under which mask, for each window in use."""

    def __init__(
        self,
        chunks: list[Chunk],
        block_size: int,
        windows: set[int | None],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.groups = {window: self._groups(chunks, window) for window in windows}

    def _groups(self, chunks: list[Chunk], window: int | None) -> list[Group]:
        groups: list[Group] = []
        singles: dict[int, list[tuple[int, Chunk]]] = {}
        row = 0
        for chunk in chunks:
            if chunk.length == 1:
                num_tokens = chunk.end - self._first(chunk, window)
                singles.setdefault((max(num_tokens, TILE) - 1).bit_length(), []).append((row, chunk))
            else:
                groups.append(self._long_group(row, chunk, window))
            row += chunk.length
        groups.extend(self._single_group(members, row, window) for _, members in sorted(singles.items()))
        return groups

    def _first(self, chunk: Chunk, window: int | None) -> int:
        """First position to gather: the window's start rounded down to where reductions and blocks begin."""
        if window is None:
            return 0
        return max(0, chunk.start - window + 1) // self._stride * self._stride

    @property
    def _stride(self) -> int:
        return math.lcm(TILE, self.block_size)

    def _num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens, padded so that their tokens are a multiple of LANES."""
        step = LANES // math.gcd(self.block_size, LANES)
        return -(-num_tokens // (self.block_size * step)) * step

    def _long_group(self, row: int, chunk: Chunk, window: int | None) -> Group:
        first = self._first(chunk, window)
        blocks = self._blocks(chunk, first, self._num_blocks(chunk.end - first))
        mask = None
        if chunk.start > 0 or (window is not None and chunk.end > window):
            queries = torch.arange(chunk.start, chunk.end)[:, None]
            mask = self._mask(queries, torch.arange(first, first + len(blocks) * self.block_size), window)[None, None]
        return Group(slice(row, row + chunk.length), False, torch.tensor([blocks], device=self.device), mask)

    def _single_group(self, members: list[tuple[int, Chunk]], num_rows: int, window: int | None) -> Group:
        firsts = [self._first(chunk, window) for _, chunk in members]
        num_blocks = self._num_blocks(max(chunk.end - first for (_, chunk), first in zip(members, firsts, strict=True)))
        blocks = [self._blocks(chunk, first, num_blocks) for (_, chunk), first in zip(members, firsts, strict=True)]
        queries = torch.tensor([chunk.start for _, chunk in members])[:, None]
        keys = torch.arange(num_blocks * self.block_size) + torch.tensor(firsts)[:, None]
        rows = (
            slice(0, num_rows)
            if len(members) == num_rows
            else torch.tensor([row for row, _ in members]).to(self.device)
        )
        mask = self._mask(queries, keys, window)[:, None, None]
        return Group(rows, True, torch.tensor(blocks, device=self.device), mask)

    def _blocks(self, chunk: Chunk, first: int, num_blocks: int) -> list[int]:
        begin = first // self.block_size
        blocks = chunk.block_table[begin : -(-chunk.end // self.block_size)]
        return blocks + blocks[-1:] * (num_blocks - len(blocks))

    def _mask(self, queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf")).to(self.device)


def paged_attention(
    query: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan, window: int | None
) -> torch.Tensor:
    """Causal attention, scaled by 1/sqrt(head_dim), of packed queries over one layer of the pool.

    query `[T, num_heads, head_dim]`, num_heads a multiple of the pool's num_kv_heads (head h uses KV head
    h // (num_heads / num_kv_heads)); `window` as in ModelConfig.sliding_windows. Returns `[T, num_heads * head_dim]`.
    """
    num_rows, num_heads, head_dim = query.shape
    out = torch.empty(num_rows, num_heads * head_dim, dtype=query.dtype, device=query.device)
    for group in plan.groups[window]:
        keys, values = _gather(pool, layer, group.blocks)
        if group.single:
            rows = query[group.rows].view(keys.shape[0], keys.shape[1], -1, head_dim)
            attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=group.mask)
            out[group.rows] = attended.reshape(-1, num_heads * head_dim)
        else:
            rows = query[group.rows].transpose(0, 1)[None]
            attended = F.scaled_dot_product_attention(
                rows, keys, values, attn_mask=group.mask, is_causal=group.mask is None, enable_gqa=True
            )
            out[group.rows] = attended[0].transpose(0, 1).reshape(-1, num_heads * head_dim)
    return out


def _gather(pool: torch.Tensor, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[B, num_kv_heads, N * block_size, head_dim]` of blocks `[B, N]`."""
    _, num_layers, _, num_heads, block_size, head_dim = pool.shape
    kinds_heads = torch.arange(2 * num_heads, device=blocks.device).view(2, 1, num_heads, 1)
    rows = (blocks[:, None] * num_layers + layer) * 2 * num_heads + kinds_heads
    gathered = pool.view(-1, block_size * head_dim).index_select(0, rows.view(-1))
    keys, values = gathered.view(2, len(blocks), num_heads, -1, head_dim).unbind(0)
    return keys, values
