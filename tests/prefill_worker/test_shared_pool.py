"""The ledger of a pool that decode workers share."""

import pytest

from engine.kv_cache import KVCache
from kv_transfer.handoff import ReturnBlocks
from prefill_worker.shared_pool import SharedPool

TOKENS = list(range(10, 22))


@pytest.fixture
def pool():
    return SharedPool(KVCache(8, 4))


def finish_prefill(pool: SharedPool, peer: str = "d0", name: str = "r") -> list[int]:
    pool.cache.acquire(f"task-{name}", TOKENS, len(TOKENS) + 1)
    pool.cache.commit(f"task-{name}", TOKENS, len(TOKENS))
    return pool.hand_over(f"task-{name}", peer, (name, 1))


def in_use(pool: SharedPool) -> int:
    pool.cache.check()
    return pool.cache.counts().in_use


def test_handed_over_blocks_and_appended_ones_come_back_cached(pool):
    table = finish_prefill(pool)
    granted = pool.ask("d0", 2).block_ids
    assert len(granted) == 2 and in_use(pool) == 6
    generated = TOKENS + [30, 31, 32, 33, 34]
    pool.give_back("d0", ReturnBlocks(table + granted[:1], ("r", 1), generated, 16))
    pool.give_back("d0", ReturnBlocks(granted[1:]))
    assert in_use(pool) == 0
    assert pool.cache.match(generated + [1] * 4) == 16


def test_an_ask_beyond_the_pool_is_owed_and_settled_when_blocks_come_free(pool):
    table = finish_prefill(pool)
    assert len(pool.ask("d0", 6).block_ids) == 4
    assert pool.owed == {"d0": 2} and pool.settle() == []
    pool.give_back("d0", ReturnBlocks(table, ("r", 1), TOKENS, 12))
    [(peer, grant)] = pool.settle()
    assert peer == "d0" and len(grant.block_ids) == 2
    assert pool.owed == {}


def test_surplus_given_back_cancels_what_is_owed(pool):
    granted = pool.ask("d0", 20).block_ids
    pool.give_back("d0", ReturnBlocks(granted))
    assert pool.owed == {} and in_use(pool) == 0


def test_a_lost_peer_gives_everything_back_and_others_keep_theirs(pool):
    finish_prefill(pool, "d0", "a")
    pool.ask("d0", 1)
    finish_prefill(pool, "d1", "b")
    pool.drop_peer("d0")
    pool.drop_peer("d0")
    assert in_use(pool) == 4


def test_a_return_after_the_blocks_were_reclaimed_changes_nothing(pool):
    table = finish_prefill(pool)
    pool.drop_peer("d0")
    before = pool.cache.counts()
    pool.give_back("d0", ReturnBlocks(table, ("r", 1), TOKENS, 12))
    assert pool.cache.counts() == before
    pool.cache.check()
