"""Which running sequences share leading blocks, so that decode attention reads those once for all of them.

A block is shared only through the prefix cache, so equal block ids mean equal keys. Sequences with the same first block
are candidates; a group keeps its members' common leading blocks. Groups change when sequences come and go, not from
step to step: block tables only grow at their ends.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TILE_QUERIES = 64
"""Query heads of one KV head in a tile of the kernel, those of all its members together."""
MIN_SHARED_BLOCKS = 4
"""Fewer shared blocks do not pay for the second launch."""


def members_per_tile(group: int) -> int:
    """Sequences in one tile when `group` query heads share a KV head."""
    return max(1, TILE_QUERIES // group)


@dataclass(frozen=True)
class GroupPlan:
    """members: rows of the batch, tile by tile, then the others; tiles: (first index, count, shared tokens)."""

    members: list[int]
    lens: list[int]
    tiles: list[tuple[int, int, int]]

    def write(self, buffer: npt.NDArray[np.int32], size: int) -> None:
        """Fill the groups' part of a decode graph's inputs: members `[size]`, lens `[size]`, tiles `[n, 3]`."""
        buffer[:] = 0
        buffer[: len(self.members)] = self.members
        buffer[size : size + len(self.lens)] = self.lens
        tiles = [value for tile in self.tiles for value in tile]
        buffer[2 * size : 2 * size + len(tiles)] = tiles


class SharedGroups:
    """group: query heads that share one KV head; block_size in tokens."""

    def __init__(self, group: int, block_size: int):
        self.members_per_tile = members_per_tile(group)
        self.block_size = block_size
        self.tables: dict[int, tuple[int, ...]] = {}
        self._plans: dict[tuple[int, ...], GroupPlan | None] = {}

    @staticmethod
    def most_tiles(size: int) -> int:
        """Tiles that a batch of `size` rows can have: groups have two members or more."""
        return max(1, size // 2)

    def join(self, slot: int, block_table: list[int]) -> None:
        self.tables[slot] = tuple(block_table)
        self._plans.clear()

    def leave(self, slot: int) -> None:
        self.tables.pop(slot, None)
        self._plans.clear()

    def plan(self, slots: list[int]) -> GroupPlan | None:
        """Groups among these slots, in batch order. None when nothing worth it is shared."""
        key = tuple(slots)
        if key not in self._plans:
            if len(self._plans) > 8:
                self._plans.clear()
            self._plans[key] = self._find(slots)
        return self._plans[key]

    def _find(self, slots: list[int]) -> GroupPlan | None:
        by_first: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            table = self.tables[slot]
            if table:
                by_first.setdefault(table[0], []).append(row)
        members: list[int] = []
        lens = [0] * len(slots)
        tiles: list[tuple[int, int, int]] = []
        for rows in by_first.values():
            if len(rows) < 2:
                continue
            shared = self._common([self.tables[slots[row]] for row in rows])
            if shared < MIN_SHARED_BLOCKS:
                continue
            tokens = shared * self.block_size
            for start in range(0, len(rows), self.members_per_tile):
                part = rows[start : start + self.members_per_tile]
                tiles.append((len(members), len(part), tokens))
                members += part
            for row in rows:
                lens[row] = tokens
        if not tiles:
            return None
        return GroupPlan(members, lens, tiles)

    def _common(self, tables: list[tuple[int, ...]]) -> int:
        """Leading blocks that all tables have. The last block of a table may still be written: never count it."""
        low, high = min(tables), max(tables)
        most = min(len(table) for table in tables) - 1
        for index in range(most):
            if low[index] != high[index]:
                return index
        return most
