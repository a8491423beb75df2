"""Where a decode engine's KV blocks come from: a pool of its own, or a stock granted by the owner of a shared one."""

from abc import ABC, abstractmethod

from engine.kv_cache import Allocation, KVCache
from kv_transfer.channel import DecodeEnd
from kv_transfer.handoff import AskBlocks, ReturnBlocks, TransferKey


class BlockSource(ABC):
    """What the decode engine does with blocks. A sequence's blocks are named by its TransferKey."""

    @abstractmethod
    def grow(self, key: TransferKey, block_table: list[int]) -> bool | None:
        """Append one block to the table. True: done. False: there is none, something must be preempted. None: one is
        on its way, try again at the next step."""

    @abstractmethod
    def release(
        self, key: TransferKey, block_table: list[int], token_ids: list[int], num_computed: int, cache_salt: str
    ) -> None:
        """The sequence lets go. Full blocks of the first `num_computed` tokens become CACHED, the others FREE."""


class OwnBlocks(BlockSource):
    """Blocks of the worker's own pool."""

    def __init__(self, cache: KVCache):
        self.cache = cache

    def reserve(self, key: TransferKey, token_ids: list[int], cache_salt: str, reuse: bool) -> Allocation | None:
        """Room for the sequence and its next token, with what the prefix cache has of it. None: not now."""
        return self.cache.acquire(_holder(key), token_ids, len(token_ids) + 1, salt=cache_salt, reuse=reuse)

    def commit(self, key: TransferKey, token_ids: list[int], num_computed: int, cache_salt: str) -> None:
        self.cache.commit(_holder(key), token_ids, num_computed, cache_salt)

    def grow(self, key, block_table):
        blocks = self.cache.grow(_holder(key), 1)
        if not blocks:
            return False
        block_table += blocks
        return True

    def release(self, key, block_table, token_ids, num_computed, cache_salt):
        if num_computed:
            self.commit(key, token_ids, num_computed, cache_salt)
        self.cache.release(_holder(key))


class GrantedBlocks(BlockSource):
    """Append blocks granted ahead of need by the prefill worker that owns the shared pool."""

    def __init__(self, end: DecodeEnd):
        self.end = end
        self.stock: list[int] = []
        self.asked = False
        self.denied = False
        self.short = False
        """The pool is exhausted: nothing new should be prefilled until running sequences got what they asked for."""
        self.returned = False
        """Blocks went back since the last ask: that its answer is empty says nothing about the pool as it is now."""

    def granted(self, block_ids: list[int]) -> None:
        """An answer to `AskBlocks` arrived. An empty one means the pool is exhausted for now."""
        self.stock += block_ids
        self.asked = False
        self.denied = self.short = not block_ids and not self.returned

    def restock(self, num_running: int) -> None:
        """Keep between one and two blocks a running sequence; give everything back when nothing runs."""
        if num_running == 0:
            if self.stock or self.short:
                self.end.send(ReturnBlocks(self.stock))
                self.stock, self.denied, self.short = [], False, False
        elif len(self.stock) < num_running and not self.asked:
            self.end.send(AskBlocks(2 * num_running - len(self.stock)))
            self.asked, self.returned = True, False
        elif len(self.stock) > 4 * num_running:
            self.end.send(ReturnBlocks(self.stock[2 * num_running :]))
            self.stock = self.stock[: 2 * num_running]
            self.denied = self.short = False

    def grow(self, key, block_table):
        if self.stock:
            block_table.append(self.stock.pop())
            return True
        if self.denied:
            self.denied = False
            return False
        return None

    def release(self, key, block_table, token_ids, num_computed, cache_salt):
        self.returned = True
        self.end.send(
            ReturnBlocks(
                block_table=block_table,
                key=key,
                token_ids=token_ids,
                num_computed=num_computed,
                cache_salt=cache_salt,
            )
        )


def _holder(key: TransferKey) -> str:
    return f"decode/{key[0]}/{key[1]}"
