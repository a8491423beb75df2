"""Attention of a batch of query chunks over their paged keys and values.

Layout: query rows of all chunks are packed `[T, num_heads, head_dim]`; keys and values lie in the pool,
`[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, found through each chunk's block table. The keys (or
values) of one head in one block, `[block_size, head_dim]`, are a contiguous row of numbers, so a gather copies whole
rows and comes out as `[2, ..., tokens, head_dim]` without a transpose. The query heads that share a KV head are rows of
one matrix product: keys are never repeated.

Chunks of one query (decode) are gathered and computed together, grouped by length so that padding at most doubles what
is read. Longer chunks go one by one, in tiles of ROWS queries that stop at their last visible key.

A query's result depends on nothing but its own keys, bit for bit (see engine/kernels/__init__.py): sums over keys are
split at multiples of TILE, where a product's inner dimension is still summed in order, and what is gathered ends at a
multiple of LANES, so that hidden keys add exact zeros and shift nothing. torch's scaled_dot_product_attention is as
fast but sums up to 512 keys in one product, which MKL splits differently for different lengths.
"""

import math
from dataclasses import dataclass

import torch

from engine.kv_pool import KVLayout

TILE = 192
LANES = 16
ROWS = 64
SMALLEST_GROUP = 128


@dataclass(frozen=True)
class Chunk:
    """Queries at positions start .. start + length - 1 of one sequence, whose KV is in place up to the last one."""

    start: int
    length: int
    block_table: list[int]

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class SingleQueries:
    """B chunks of one query each.

    rows    their packed query rows, int64 `[B]`, or None for all rows in order
    gather  int64 `[2 * B * num_kv_heads * N]`: pool rows of layer 0 (keys, then values)
    mask    additive `[B, 1, 1, S]`, S = N * block_size
    """

    rows: torch.Tensor | None
    gather: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class QueryTile:
    """Packed query rows, which see the gathered keys below `num_keys` less those that `mask` hides; it is additive
    `[rows, num_keys - first_masked]` and covers the keys from `first_masked` on."""

    rows: slice
    num_keys: int
    first_masked: int
    mask: torch.Tensor


@dataclass(frozen=True)
class LongChunk:
    """One chunk of several queries; `gather` as in SingleQueries with B = 1."""

    gather: torch.Tensor
    tiles: list[QueryTile]


class AttentionPlan:
    """What every layer of one step shares: which rows attend to which pool rows under which mask, for each window in
    use (see ModelConfig.sliding_windows)."""

    def __init__(self, chunks: list[Chunk], layout: KVLayout, windows: set[int | None], device: torch.device):
        self._layout = layout
        self._device = device
        self.groups = {window: self._groups(chunks, window) for window in windows}

    def _groups(self, chunks: list[Chunk], window: int | None) -> list[SingleQueries | LongChunk]:
        groups: list[SingleQueries | LongChunk] = []
        singles: dict[int, list[tuple[int, Chunk]]] = {}
        row = 0
        for chunk in chunks:
            if chunk.length == 1:
                num_keys = max(chunk.end - self._first_key(chunk, window), SMALLEST_GROUP)
                singles.setdefault((num_keys - 1).bit_length(), []).append((row, chunk))
            else:
                groups.append(self._long_chunk(row, chunk, window))
            row += chunk.length
        groups.extend(self._single_queries(members, row, window) for members in singles.values())
        return groups

    def _single_queries(self, members: list[tuple[int, Chunk]], num_rows: int, window: int | None) -> SingleQueries:
        chunks = [chunk for _, chunk in members]
        firsts = [self._first_key(chunk, window) for chunk in chunks]
        num_blocks = max(self._num_blocks(chunk.end - first) for chunk, first in zip(chunks, firsts, strict=True))
        blocks = [self._blocks(chunk, first, num_blocks) for chunk, first in zip(chunks, firsts, strict=True)]
        queries = torch.tensor([chunk.start for chunk in chunks])[:, None]
        keys = torch.tensor(firsts)[:, None] + torch.arange(num_blocks * self._layout.block_size)
        rows = None if len(members) == num_rows else torch.tensor([row for row, _ in members], device=self._device)
        return SingleQueries(rows, self._pool_rows(blocks), self._mask(queries, keys, window)[:, None, None])

    def _long_chunk(self, row: int, chunk: Chunk, window: int | None) -> LongChunk:
        first = self._first_key(chunk, window)
        blocks = self._blocks(chunk, first, self._num_blocks(chunk.end - first))
        tiles = []
        for begin in range(chunk.start, chunk.end, ROWS):
            end = min(begin + ROWS, chunk.end)
            num_keys = -(-(end - first) // LANES) * LANES
            first_masked = begin - first if window is None else 0
            queries = torch.arange(begin, end)[:, None]
            keys = torch.arange(first + first_masked, first + num_keys)
            rows = slice(row + begin - chunk.start, row + end - chunk.start)
            tiles.append(QueryTile(rows, num_keys, first_masked, self._mask(queries, keys, window)))
        return LongChunk(self._pool_rows([blocks]), tiles)

    def _first_key(self, chunk: Chunk, window: int | None) -> int:
        """First position to gather: where the first query's window starts, rounded down to a block and a TILE."""
        if window is None:
            return 0
        stride = math.lcm(TILE, self._layout.block_size)
        return max(0, chunk.start - window + 1) // stride * stride

    def _num_blocks(self, num_keys: int) -> int:
        """Blocks that hold num_keys, padded so that their tokens are a multiple of LANES."""
        step = LANES // math.gcd(self._layout.block_size, LANES)
        return -(-num_keys // (self._layout.block_size * step)) * step

    def _blocks(self, chunk: Chunk, first_key: int, num_blocks: int) -> list[int]:
        """The chunk's blocks from first_key on, its last one repeated to make num_blocks."""
        block_size = self._layout.block_size
        blocks = chunk.block_table[first_key // block_size : -(-chunk.end // block_size)]
        return blocks + blocks[-1:] * (num_blocks - len(blocks))

    def _pool_rows(self, blocks: list[list[int]]) -> torch.Tensor:
        num_heads = self._layout.num_kv_heads
        heads = torch.arange(2 * num_heads).view(2, 1, num_heads, 1)
        first_row = torch.tensor(blocks)[:, None] * (self._layout.num_layers * 2 * num_heads)
        return (first_row + heads).view(-1).to(self._device)

    def _mask(self, queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._layout.dtype).masked_fill_(hidden, float("-inf"))
        return mask.to(self._device)


def paged_attention(
    query: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan, window: int | None
) -> torch.Tensor:
    """Causal attention, scaled by 1/sqrt(head_dim), of packed queries over one layer of the pool.

    query `[T, num_heads, head_dim]` for the chunks the plan was made from; head h uses KV head
    h // (num_heads / num_kv_heads). Returns `[T, num_heads * head_dim]`.
    """
    query = query * query.shape[2] ** -0.5
    out = torch.empty_like(query)
    for group in plan.groups[window]:
        if isinstance(group, SingleQueries):
            _attend_singles(query, pool, layer, group, out)
        else:
            _attend_long(query, pool, layer, group, out)
    return out.flatten(1)


def _attend_singles(
    query: torch.Tensor, pool: torch.Tensor, layer: int, group: SingleQueries, out: torch.Tensor
) -> None:
    batch, num_kv_heads, head_dim = len(group.mask), pool.shape[3], pool.shape[5]
    keys, values = _gather(pool, layer, group.gather, batch * num_kv_heads)
    rows = query if group.rows is None else query[group.rows]
    scores = torch.bmm(rows.view(batch * num_kv_heads, -1, head_dim), keys.transpose(1, 2))
    scores.view(batch, num_kv_heads, -1, scores.shape[2]).add_(group.mask)
    attended = _average(scores, values).view(batch, -1, head_dim)
    if group.rows is None:
        out.copy_(attended)
    else:
        out[group.rows] = attended


def _attend_long(query: torch.Tensor, pool: torch.Tensor, layer: int, chunk: LongChunk, out: torch.Tensor) -> None:
    num_kv_heads, head_dim = pool.shape[3], pool.shape[5]
    keys, values = _gather(pool, layer, chunk.gather, num_kv_heads)
    for tile in chunk.tiles:
        num_rows = len(tile.mask)
        rows = query[tile.rows].view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = torch.bmm(rows.reshape(num_kv_heads, -1, head_dim), keys[:, : tile.num_keys].transpose(1, 2))
        scores.view(num_kv_heads, -1, num_rows, tile.num_keys)[..., tile.first_masked :].add_(tile.mask)
        attended = _average(scores, values).view(num_kv_heads, -1, num_rows, head_dim)
        out[tile.rows].view(num_rows, num_kv_heads, -1, head_dim).copy_(attended.permute(2, 0, 1, 3))


def _gather(pool: torch.Tensor, layer: int, rows: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each `[num_rows, S, head_dim]`, of the pool rows that `rows` names for layer 0."""
    _, _, _, num_kv_heads, block_size, head_dim = pool.shape
    gathered = pool.view(-1, block_size * head_dim).index_select(0, rows + layer * 2 * num_kv_heads)
    keys, values = gathered.view(2, num_rows, -1, head_dim).unbind(0)
    return keys, values


def _average(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values `[P, >= S, D]` averaged with the softmax of masked scores `[P, R, S]`: `[P, R, D]`."""
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    num_keys = scores.shape[2]
    out = torch.bmm(weights[:, :, :TILE], values[:, : min(TILE, num_keys)])
    for begin in range(TILE, num_keys, TILE):
        end = min(begin + TILE, num_keys)
        out.baddbmm_(weights[:, :, begin:end], values[:, begin:end])
    return out
