"""A pool that decode workers share: what the prefill worker, its owner, has lent them.

Block ids change owner by name in the KVCache:

    handoff     prefill task's holder      -> sequence holder of the decode worker
    grant       FREE                       -> the decode worker's stock
    append      stock                      -> sequence (no message; settled when the sequence is returned)
    return      sequence                   -> CACHED / FREE
    peer lost   all holders of that peer   -> CACHED / FREE
"""

from engine.kv_cache import KVCache
from kv_transfer.handoff import GrantBlocks, ReturnBlocks, TransferKey


class SharedPool:
    """Ledger of blocks lent to decode workers. One instance, in the engine loop of the pool's owner."""

    def __init__(self, cache: KVCache):
        self.cache = cache
        self.holders: dict[str, set[str]] = {}
        self.owed: dict[str, int] = {}

    def hand_over(self, task_holder: str, peer: str, key: TransferKey) -> list[int]:
        """The blocks of a finished prefill now belong to the decode worker; returns their table."""
        holder = _sequence_holder(peer, key)
        self.cache.rename(task_holder, holder)
        self.holders.setdefault(peer, set()).add(holder)
        return list(self.cache.table(holder))

    def ask(self, peer: str, num_blocks: int) -> GrantBlocks:
        """Grant what there is now; what is short stays owed and goes out by `settle`."""
        self.owed[peer] = num_blocks
        granted = self._grant(peer)
        return GrantBlocks(granted)

    def settle(self) -> list[tuple[str, GrantBlocks]]:
        """Grants for earlier asks that blocks have come free for. While anything is owed no new prompt should be
        admitted: running sequences come first, or they could starve."""
        grants = []
        for peer in list(self.owed):
            granted = self._grant(peer)
            if granted:
                grants.append((peer, GrantBlocks(granted)))
        return grants

    def give_back(self, peer: str, message: ReturnBlocks) -> None:
        """Take back a returned sequence, or surplus stock."""
        stock = _stock_holder(peer)
        if message.key is None:
            self.owed.pop(peer, None)
            scrap = f"{stock}/surplus"
            self.cache.move(message.block_table, stock, scrap)
            self.cache.release(scrap)
            return
        holder = _sequence_holder(peer, message.key)
        if holder not in self.holders.get(peer, ()):
            return  # reclaimed meanwhile
        handed_over = len(self.cache.table(holder))
        self.cache.move(message.block_table[handed_over:], stock, holder)
        if message.num_computed:
            self.cache.commit(holder, message.token_ids, message.num_computed, message.cache_salt)
        self.cache.release(holder)
        self.holders[peer].discard(holder)

    def drop_peer(self, peer: str) -> None:
        """A decode worker is gone: everything it held comes back. Idempotent."""
        self.owed.pop(peer, None)
        for holder in self.holders.pop(peer, set()):
            self.cache.release(holder)
        self.cache.release(_stock_holder(peer))

    def _grant(self, peer: str) -> list[int]:
        stock = _stock_holder(peer)
        wanted = self.owed.get(peer, 0)
        num_blocks = min(wanted, self.cache.num_available)
        granted: list[int] = []
        if num_blocks:
            self.cache.move([], stock, stock)
            granted = self.cache.grow(stock, num_blocks) or []
        remaining = wanted - len(granted)
        if remaining:
            self.owed[peer] = remaining
        else:
            self.owed.pop(peer, None)
        return granted


def _sequence_holder(peer: str, key: TransferKey) -> str:
    return f"{peer}/{key[0]}/{key[1]}"


def _stock_holder(peer: str) -> str:
    return f"{peer}/stock"
