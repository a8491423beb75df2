"""KVCache: the one allocator of a KV pool, with its prefix cache.

A block has one owner state, which follows from who refers to it:

    state     holders  leases  indexed   owner                       may write         leaves the state when
    FREE      0        0       no        the pool                    -                 acquire / grow takes it
    IN_USE    >= 1     any     yes | no  requests (their tables)     see below         the last holder releases it
    LEASED    0        >= 1    yes | no  transfers                   nobody            the last transfer ends its lease
    CACHED    0        0       yes       prefix cache                nobody            matched again, evicted or flushed

    FREE -- acquire, grow --> IN_USE -- release --> LEASED -- end_lease --> CACHED (indexed) | FREE (not indexed)
                                     -- release -----------------------> CACHED (indexed) | FREE (not indexed)
    CACHED -- acquire that matches it --> IN_USE          CACHED -- evicted (LRU, leaf first) or flushed --> FREE

An IN_USE block is written by the engine of its one holder while it fills (prefill: FILLING, decode: APPENDING) and by
nobody once it is indexed: `commit` is the holder's promise never to write it again, and only then can others match it.
`rename` and `move` pass blocks from holder to holder (a handoff) without a moment in which they belong to nobody.

Invariant: free + cached + leased + in_use == total. `check` proves it from the tables, leases, index and free list.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.block_hash import encode_tokens
from engine.prefix_index import Node, PrefixIndex, expect
from engine.protocol import PoolCounts


@dataclass(frozen=True)
class Allocation:
    """Blocks of one request: block i of `block_table` holds tokens i*block_size .. (i+1)*block_size - 1.
    The KV of the first `num_cached_tokens` tokens is already there."""

    block_table: list[int]
    num_cached_tokens: int


@dataclass
class Holder:
    """table     blocks in the order of the tokens they hold
    path      index nodes of the leading full blocks: its own, or another's equal block
    salt      cache_salt of the tokens; None until known
    num_seen  full blocks that `commit` has looked at
    gap       position from which blocks were moved away; the table no longer spells the tokens beyond it"""

    table: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    salt: str | None = None
    num_seen: int = 0
    gap: int | None = None


class KVCache:
    """Allocator and prefix cache of `num_blocks` blocks of `block_size` tokens. Pure bookkeeping: it never touches the
    pool's memory. Not thread-safe; one engine loop owns it.

    A holder is any name that keeps blocks: a request, or a peer's stock. Misuse (an unknown holder, a block that is
    not the holder's) raises AssertionError and changes nothing.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV cache needs at least 1 block of at least 1 token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        # A stack. Tables are freed tail first, so the next table gets ascending ids again: long runs, few copies.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders: dict[str, Holder] = {}
        self._leases: dict[str, dict[int, None]] = {}  # ordered sets
        self._num_holds = [0] * num_blocks
        self._num_leases = [0] * num_blocks
        self._node: list[Node | None] = [None] * num_blocks
        self._flushed: set[int] = set()  # referenced blocks that left the index for good
        self._index = PrefixIndex(block_size)
        self._num_in_use = 0
        self._num_leased = 0
        self._num_cached = 0

    @property
    def num_available(self) -> int:
        """Blocks that `grow` could give now: free ones and those eviction can reach."""
        return len(self._free) + self._index.num_evictable

    def match(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Leading tokens a request with this prompt would reuse: whole blocks, at most len - 1 tokens, because the last
        token must be computed to get logits. Takes nothing and does not count as a use."""
        return len(self._match(token_ids, len(token_ids), salt)) * self.block_size

    def acquire(
        self, holder: str, token_ids: Sequence[int], num_tokens: int, salt: str = "", reuse: bool = True
    ) -> Allocation | None:
        """Give a new holder a block table for `num_tokens` tokens, of which the first are `token_ids`.

        All or nothing: cached prefix blocks are shared (unless `reuse` is False), the rest are new blocks, for which
        cached blocks are evicted if need be. None, with nothing changed, when there are too few.
        """
        assert holder not in self._holders, f"holder {holder!r} already has blocks; release it first"
        path = self._match(token_ids, num_tokens, salt) if reuse else []
        num_new = -(-num_tokens // self.block_size) - len(path)
        # Blocks about to be reused stop being evictable, and only those: their ancestors are on the path too.
        if num_new > self.num_available - sum(node.num_pins == 0 for node in path):
            return None
        table = [node.block_id for node in path]
        for block_id in table:
            self._refer(block_id, holds=1)
        table += self._take(num_new)
        self._holders[holder] = Holder(table, path, salt if len(token_ids) else None, num_seen=len(path))
        return Allocation(list(table), len(path) * self.block_size)

    def grow(self, holder: str, num_blocks: int) -> list[int] | None:
        """Append `num_blocks` new blocks to the holder's table and return them. None, with nothing changed, when there
        are too few."""
        entry = self._entry(holder)
        if num_blocks > self.num_available:
            return None
        new = self._take(num_blocks)
        entry.table += new
        return new

    def commit(self, holder: str, token_ids: Sequence[int], num_computed: int, salt: str = "") -> None:
        """Index the holder's full blocks among its first `num_computed` tokens, whose KV is computed and final.

        `token_ids` are the holder's tokens from the first on. Call it again whenever more are computed; what is
        indexed already costs nothing. A block whose prefix another block holds in the index stays private, and the
        blocks after it continue the indexed path.
        """
        entry = self._entry(holder)
        num_full = num_computed // self.block_size
        if not self.prefix_cache or num_full <= entry.num_seen:
            return
        limit = min(len(token_ids) // self.block_size, len(entry.table) if entry.gap is None else entry.gap)
        assert num_full <= limit, f"holder {holder!r} commits {num_full} blocks but has tokens and blocks for {limit}"
        assert entry.salt in (None, salt), (
            f"holder {holder!r} commits with another cache_salt than it was acquired with"
        )
        entry.salt, entry.num_seen = salt, num_full

        # Another's block on the path may be gone by now; then this holder's own equal block takes its place.
        path = entry.path
        while path and not path[-1].attached:
            path.pop()
        for position in range(len(path), num_full):
            tokens = encode_tokens(token_ids[position * self.block_size : (position + 1) * self.block_size])
            parent = path[-1] if path else None
            block_id = entry.table[position]
            node = self._index.find(parent, tokens, salt)
            if node is None and block_id not in self._flushed:
                assert self._node[block_id] is None, f"block {block_id} is already indexed under other tokens"
                node = self._node[block_id] = self._index.insert(parent, tokens, block_id, salt)
            if node is None:
                break
            path.append(node)

    def release(self, holder: str) -> None:
        """Drop everything the holder has. Its indexed blocks stay cached, the others become free. Idempotent."""
        entry = self._holders.pop(holder, None)
        if entry is None:
            return
        for block_id in reversed(entry.table):  # tail first: the tail is what LRU gives up first
            self._refer(block_id, holds=-1)

    def rename(self, old: str, new: str) -> None:
        """The whole table of `old` becomes that of `new`, which must not exist yet."""
        assert new not in self._holders, f"holder {new!r} already has blocks; it cannot take over those of {old!r}"
        entry = self._entry(old)
        del self._holders[old]
        self._holders[new] = entry

    def move(self, block_ids: Sequence[int], src: str, dst: str) -> None:
        """Take these blocks out of the table of `src` and append them, in this order, to that of `dst`, which is made
        if it does not exist. `src` remains, if only with an empty table."""
        source = self._holders.get(src, Holder())
        leaving = Counter(block_ids)
        missing = leaving - Counter(source.table)
        assert not missing, f"block {next(iter(missing))} is not in the table of holder {src!r}"
        kept: list[int] = []
        gap = len(source.table) if source.gap is None else source.gap
        for position, block_id in enumerate(source.table):
            if leaving[block_id] > 0:
                leaving[block_id] -= 1
                gap = min(gap, position)
            else:
                kept.append(block_id)
        source.table = kept
        source.gap = gap if gap < len(kept) else None
        source.num_seen = min(source.num_seen, gap)
        del source.path[gap:]
        self._holders.setdefault(dst, Holder()).table.extend(block_ids)

    def table(self, holder: str) -> list[int]:
        """The holder's block table, a copy."""
        return list(self._entry(holder).table)

    def lease(self, lease_id: str, block_ids: Iterable[int]) -> None:
        """Keep these blocks from being evicted or given away until `end_lease`, whatever their holders do. Leasing more
        blocks under the same id extends the lease; a block it already covers is not counted twice."""
        covered = self._leases.get(lease_id, {})
        new = {block_id: None for block_id in block_ids if block_id not in covered}
        for block_id in new:
            assert self._is_referenced(block_id) or self._node[block_id], (
                f"block {block_id} is free and cannot be leased"
            )
        for block_id in new:
            self._refer(block_id, leases=1)
        self._leases[lease_id] = covered | new

    def end_lease(self, lease_id: str) -> None:
        """The transfer no longer reads its blocks. Idempotent."""
        for block_id in reversed(self._leases.pop(lease_id, {})):
            self._refer(block_id, leases=-1)

    def flush(self) -> int:
        """Empty the index and return the number of idle blocks that became free. Blocks in use or leased stay usable,
        but nobody matches them any more, and they go free when they are let go."""
        for entry in self._holders.values():
            self._flushed.update(entry.table[: entry.num_seen])
        num_dropped = 0
        for node in self._index.clear():
            self._node[node.block_id] = None
            if self._is_referenced(node.block_id):
                self._flushed.add(node.block_id)
            else:
                self._free.append(node.block_id)
                num_dropped += 1
        self._num_cached -= num_dropped
        return num_dropped

    def counts(self) -> PoolCounts:
        """Blocks by state, O(1)."""
        return PoolCounts(self.num_blocks, len(self._free), self._num_cached, self._num_leased, self._num_in_use)

    def check(self) -> None:
        """Prove the invariant by recounting everything from the tables, leases, index and free list, and compare the
        result with the counters. Raises AssertionError naming the first block that is wrong."""
        holds = Counter(block_id for entry in self._holders.values() for block_id in entry.table)
        leases = Counter(block_id for lease in self._leases.values() for block_id in lease)
        free = Counter(self._free)
        nodes = self._index.check(referenced=holds.keys() | leases.keys())
        states: Counter[str] = Counter()
        for block_id in range(self.num_blocks):
            where = (
                f"block {block_id}: held {holds[block_id]} times, leased {leases[block_id]} times, "
                f"free {free[block_id]} times, {'' if block_id in nodes else 'not '}indexed"
            )
            referenced = holds[block_id] > 0 or leases[block_id] > 0
            claims = (referenced or block_id in nodes) + free[block_id]
            expect(claims == 1, f"{where}; {'nobody' if claims == 0 else 'more than one'} owns it")
            shareable = block_id in nodes or block_id in self._flushed
            expect(holds[block_id] <= 1 or shareable, f"{where}; several holders may write it")
            counted = (self._num_holds[block_id], self._num_leases[block_id])
            expect(counted == (holds[block_id], leases[block_id]), f"{where}; its counters say {counted}")
            expect(self._node[block_id] is nodes.get(block_id), f"{where}; its index entry is another block's")
            flush_holds = block_id not in self._flushed or (referenced and block_id not in nodes)
            expect(flush_holds, f"{where}; it was flushed, so it must be referenced and not indexed")
            states[
                "free" if free[block_id] else "in_use" if holds[block_id] else "leased" if referenced else "cached"
            ] += 1
        outside = (holds.keys() | leases.keys() | free.keys() | nodes.keys()) - set(range(self.num_blocks))
        expect(not outside, f"block {min(outside, default=0)}: not one of the pool's {self.num_blocks} blocks")
        recounted = PoolCounts(self.num_blocks, states["free"], states["cached"], states["leased"], states["in_use"])
        expect(self.counts() == recounted, f"counters say {self.counts()}, the blocks are {recounted}")

    def drain_events(self) -> tuple[list[str], list[str]]:
        """Chained hashes (hex) that entered and that left the index since the last call: the net change, so no hash is
        in both lists."""
        added, removed = self._index.drain_changes()
        return [key.hex() for key in added], [key.hex() for key in removed]

    def indexed_hashes(self) -> list[str]:
        """Chained hashes (hex) of every block in the index now: where `drain_events` goes on from."""
        self._index.drain_changes()
        return [key.hex() for key in self._index.nodes]

    def _entry(self, holder: str) -> Holder:
        assert holder in self._holders, f"holder {holder!r} has no blocks"
        return self._holders[holder]

    def _match(self, token_ids: Sequence[int], num_tokens: int, salt: str) -> list[Node]:
        if not self.prefix_cache:
            return []
        max_blocks = min(len(token_ids) - 1, num_tokens) // self.block_size
        return self._index.match(token_ids, max(0, max_blocks), salt)

    def _take(self, num_blocks: int) -> list[int]:
        """Make `num_blocks` blocks IN_USE, from the free list and, when it is short, by eviction."""
        for _ in range(num_blocks - len(self._free)):
            node = self._index.evict()
            self._node[node.block_id] = None
            self._free.append(node.block_id)
            self._num_cached -= 1
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block_id in taken:
            self._refer(block_id, holds=1)
        return taken

    def _is_referenced(self, block_id: int) -> bool:
        return self._num_holds[block_id] > 0 or self._num_leases[block_id] > 0

    def _refer(self, block_id: int, holds: int = 0, leases: int = 0) -> None:
        """Change a block's reference counts and move it to the state that follows from them (table at the top)."""
        was_held, was_leased = self._num_holds[block_id] > 0, self._num_leases[block_id] > 0
        self._num_holds[block_id] += holds
        self._num_leases[block_id] += leases
        is_held, is_leased = self._num_holds[block_id] > 0, self._num_leases[block_id] > 0
        self._num_in_use += is_held - was_held
        self._num_leased += (is_leased and not is_held) - (was_leased and not was_held)
        was_referenced, is_referenced = was_held or was_leased, is_held or is_leased
        if was_referenced == is_referenced:
            return
        node = self._node[block_id]
        if node is not None:
            if is_referenced:  # CACHED -> IN_USE or LEASED
                self._index.pin(node)
                self._num_cached -= 1
            else:  # -> CACHED
                self._index.unpin(node)
                self._num_cached += 1
        elif not is_referenced:  # -> FREE
            self._flushed.discard(block_id)
            self._free.append(block_id)
