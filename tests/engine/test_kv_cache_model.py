"""KVCache against a model without counters, tree or queue: dictionaries of whole prefixes, searched by brute force."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_hash import hash_blocks
from engine.kv_cache import KVCache

BLOCK = 2
NUM_BLOCKS = 9
SALTS = ("", "tenant")

Prefix = tuple[str, tuple[int, ...]]
tokens_strategy = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@dataclass
class Holder:
    tokens: list[int]
    salt: str
    table: list[int]
    seen: int


class NaiveCache:
    """What each operation should do. `indexed` maps (salt, all tokens up to a block's end) to that block."""

    def __init__(self):
        self.holders: dict[str, Holder] = {}
        self.leases: dict[str, list[int]] = {}
        self.indexed: dict[Prefix, int] = {}
        self.last_used: dict[int, int] = {}
        self.flushed: set[int] = set()
        self.clock = 0

    def prefix(self, tokens, salt, num_blocks) -> Prefix:
        return (salt, tuple(tokens[: num_blocks * BLOCK]))

    def held(self, block_id) -> bool:
        return any(block_id in holder.table for holder in self.holders.values())

    def leased(self, block_id) -> bool:
        return any(block_id in lease for lease in self.leases.values())

    def referenced(self, block_id) -> bool:
        return self.held(block_id) or self.leased(block_id)

    def states(self) -> dict[str, set[int]]:
        states: dict[str, set[int]] = {"free": set(), "cached": set(), "leased": set(), "in_use": set()}
        for block_id in range(NUM_BLOCKS):
            if self.held(block_id):
                states["in_use"].add(block_id)
            elif self.leased(block_id):
                states["leased"].add(block_id)
            else:
                states["cached" if block_id in self.indexed.values() else "free"].add(block_id)
        return states

    def match(self, tokens, salt, num_tokens) -> list[int]:
        best: list[int] = []
        for num_blocks in range(1, min(len(tokens) - 1, num_tokens) // BLOCK + 1):
            block_id = self.indexed.get(self.prefix(tokens, salt, num_blocks))
            if block_id is None:
                break
            best.append(block_id)
        return best

    def extensions(self, prefix: Prefix) -> list[Prefix]:
        salt, tokens = prefix
        return [p for p in self.indexed if p[0] == salt and len(p[1]) > len(tokens) and p[1][: len(tokens)] == tokens]

    def evictable(self) -> set[int]:
        return {
            block_id
            for prefix, block_id in self.indexed.items()
            if not any(self.referenced(self.indexed[p]) for p in [prefix, *self.extensions(prefix)])
        }

    def evict(self) -> None:
        leaves = [p for p, block in self.indexed.items() if not self.referenced(block) and not self.extensions(p)]
        del self.indexed[min(leaves, key=lambda p: self.last_used[self.indexed[p]])]

    def let_go(self, blocks) -> None:
        """Blocks that just lost a reference, in this order."""
        for block_id in blocks:
            if not self.referenced(block_id):
                self.clock += 1
                self.last_used[block_id] = self.clock
                self.flushed.discard(block_id)

    def release(self, name) -> None:
        holder = self.holders[name]
        while holder.table:
            self.let_go([holder.table.pop()])
        del self.holders[name]

    def commit(self, name, num_computed) -> None:
        holder = self.holders[name]
        if num_computed // BLOCK <= holder.seen:
            return
        holder.seen = num_computed // BLOCK
        for position in range(holder.seen):
            prefix = self.prefix(holder.tokens, holder.salt, position + 1)
            if prefix not in self.indexed:
                if holder.table[position] in self.flushed:
                    return
                self.indexed[prefix] = holder.table[position]

    def flush(self) -> int:
        idle = [block_id for block_id in self.indexed.values() if not self.referenced(block_id)]
        self.flushed |= {block_id for block_id in self.indexed.values() if self.referenced(block_id)}
        for holder in self.holders.values():
            self.flushed |= set(holder.table[: holder.seen])
        self.indexed = {}
        return len(idle)


class KVCacheMachine(RuleBasedStateMachine):
    """Requests, stocks of blank blocks, transfers and flushes in any order. `memory` is what KV each block holds."""

    def __init__(self):
        super().__init__()
        self.cache = KVCache(NUM_BLOCKS, BLOCK)
        self.model = NaiveCache()
        self.memory: dict[int, Prefix] = {}
        self.router: set[str] = set()
        self.num_names = 0

    def new_name(self, kind: str) -> str:
        self.num_names += 1
        return f"{kind}{self.num_names}"

    def pick(self, data, kind: str) -> str:
        return data.draw(st.sampled_from(sorted(name for name in self.model.holders if name.startswith(kind))))

    def has(self, kind: str) -> bool:
        return any(name.startswith(kind) for name in self.model.holders)

    def take(self, num_blocks: int, reused: list[int]) -> bool:
        """Model of allocation: False when there are too few, else evicts as needed."""
        states = self.model.states()
        free = len(states["free"])
        if num_blocks > free + len(self.model.evictable() - set(reused)):
            return False
        self.model.holders["reusing"] = Holder([], "", reused, 0)
        for _ in range(num_blocks - free):
            self.model.evict()
        del self.model.holders["reusing"]
        return True

    @rule(
        tokens=tokens_strategy,
        extra=st.integers(0, 4),
        salt=st.sampled_from(SALTS),
        reuse=st.sampled_from([True, True, False]),
    )
    def acquire(self, tokens, extra, salt, reuse):
        num_tokens = len(tokens) + extra
        reused = self.model.match(tokens, salt, num_tokens) if reuse else []
        num_new = -(-num_tokens // BLOCK) - len(reused)
        expected = self.take(num_new, reused)
        name = self.new_name("request")
        allocation = self.cache.acquire(name, tokens, num_tokens, salt, reuse)
        assert (allocation is not None) == expected
        if allocation is None:
            return
        assert allocation.block_table[: len(reused)] == reused
        assert allocation.num_cached_tokens == len(reused) * BLOCK <= max(0, len(tokens) - 1)
        for position, block_id in enumerate(reused):
            assert self.memory[block_id] == self.model.prefix(tokens, salt, position + 1), "KV of another prefix"
        new = allocation.block_table[len(reused) :]
        assert len(new) == num_new and set(new) <= self.model.states()["free"], "a new block had an owner"
        self.model.holders[name] = Holder(list(tokens), salt, list(allocation.block_table), len(reused))

    @rule(num_blocks=st.integers(0, 3))
    def acquire_stock(self, num_blocks):
        expected = self.take(num_blocks, [])
        name = self.new_name("stock")
        allocation = self.cache.acquire(name, [], num_blocks * BLOCK)
        assert (allocation is not None) == expected
        if allocation is not None:
            assert set(allocation.block_table) <= self.model.states()["free"]
            self.model.holders[name] = Holder([], "", list(allocation.block_table), 0)

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data(), num_blocks=st.integers(0, 2))
    def grow(self, data, num_blocks):
        name = self.pick(data, "")
        expected = self.take(num_blocks, [])
        new = self.cache.grow(name, num_blocks)
        assert (new is not None) == expected
        if new is not None:
            assert len(new) == num_blocks and set(new) <= self.model.states()["free"]
            self.model.holders[name].table += new

    @precondition(lambda self: self.has("request"))
    @rule(data=st.data(), new_tokens=st.lists(st.integers(0, 1), max_size=4))
    def compute_and_commit(self, data, new_tokens):
        """Compute some of the tokens there is room for, first appending generated ones; write their KV, then commit."""
        name = self.pick(data, "request")
        holder = self.model.holders[name]
        room = len(holder.table) * BLOCK
        holder.tokens = (holder.tokens + new_tokens)[: max(room, len(holder.tokens))]
        num_computed = data.draw(st.integers(0, min(room, len(holder.tokens))))
        for position in range(holder.seen, num_computed // BLOCK):
            block_id = holder.table[position]
            others = [other for other in self.model.holders.values() if other is not holder and block_id in other.table]
            assert not others and block_id not in self.model.indexed.values(), "wrote a block that others may read"
            self.memory[block_id] = self.model.prefix(holder.tokens, holder.salt, position + 1)
        self.model.commit(name, num_computed)
        self.cache.commit(name, holder.tokens, num_computed, holder.salt)

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data())
    def release(self, data):
        name = self.pick(data, "")
        self.model.release(name)
        self.cache.release(name)
        self.cache.release(name)

    @precondition(lambda self: self.has("request"))
    @rule(data=st.data())
    def rename(self, data):
        old, new = self.pick(data, "request"), self.new_name("request")
        self.model.holders[new] = self.model.holders.pop(old)
        self.cache.rename(old, new)

    @precondition(lambda self: self.has("request") and self.has("stock"))
    @rule(data=st.data())
    def move_from_stock(self, data):
        stock, name = self.pick(data, "stock"), self.pick(data, "request")
        source = self.model.holders[stock]
        moved = data.draw(st.permutations(source.table)) if source.table else []
        moved = moved[: data.draw(st.integers(0, len(moved)))]
        source.table = [block_id for block_id in source.table if block_id not in moved]
        self.model.holders[name].table += moved
        self.cache.move(moved, stock, name)

    @precondition(lambda self: self.has("request"))
    @rule(data=st.data())
    def move_the_tail_away(self, data):
        name, new = self.pick(data, "request"), self.new_name("stock")
        holder = self.model.holders[name]
        num_kept = data.draw(st.integers(holder.seen, len(holder.table)))
        moved = holder.table[num_kept:]
        self.model.holders[new] = Holder([], "", moved, 0)
        holder.table = holder.table[:num_kept]
        holder.tokens = holder.tokens[: max(num_kept * BLOCK, 1)]
        self.cache.move(moved, name, new)

    @rule(data=st.data())
    def lease(self, data):
        owned = [block_id for kind, blocks in self.model.states().items() if kind != "free" for block_id in blocks]
        blocks = data.draw(st.lists(st.sampled_from(sorted(owned)), max_size=4)) if owned else []
        lease_id = data.draw(st.sampled_from(["transfer a", "transfer b"]))
        lease = self.model.leases.setdefault(lease_id, [])
        lease += [block_id for block_id in dict.fromkeys(blocks) if block_id not in lease]
        self.cache.lease(lease_id, blocks)

    @rule(lease_id=st.sampled_from(["transfer a", "transfer b"]))
    def end_lease(self, lease_id):
        lease = self.model.leases.get(lease_id, [])
        while lease:
            self.model.let_go([lease.pop()])
        self.model.leases.pop(lease_id, None)
        self.cache.end_lease(lease_id)

    @rule()
    def flush(self):
        assert self.cache.flush() == self.model.flush()

    @rule(tokens=tokens_strategy, salt=st.sampled_from(SALTS))
    def match(self, tokens, salt):
        assert self.cache.match(tokens, salt) == len(self.model.match(tokens, salt, len(tokens))) * BLOCK

    @rule()
    def drain_events(self):
        added, removed = self.cache.drain_events()
        assert len(set(added) | set(removed)) == len(added) + len(removed)
        assert not set(added) & self.router and set(removed) <= self.router
        self.router = (self.router | set(added)) - set(removed)
        keys = {hash_blocks(tokens, BLOCK, salt)[-1].hex() for salt, tokens in self.model.indexed}
        assert self.router == keys

    @invariant()
    def the_cache_is_whole_and_agrees_with_the_model(self):
        self.cache.check()
        counts = self.cache.counts()
        expected = {state: len(blocks) for state, blocks in self.model.states().items()}
        assert {state: getattr(counts, state) for state in expected} == expected
        assert counts.free + counts.cached + counts.leased + counts.in_use == counts.total == NUM_BLOCKS
        assert self.cache.num_available == expected["free"] + len(self.model.evictable())
        for name, holder in self.model.holders.items():
            assert self.cache.table(name) == holder.table


TestKVCacheAgainstModel = KVCacheMachine.TestCase
TestKVCacheAgainstModel.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
