import pytest

from engine import prefix_index
from engine.block_hash import hash_blocks
from engine.kv_cache import KVCache
from engine.protocol import PoolCounts

PROMPT = list(range(100, 120))  # 5 blocks of 4


def make_cache(num_blocks: int = 16, **options) -> KVCache:
    return KVCache(num_blocks, 4, **options)


def compute(cache: KVCache, holder: str, tokens, num_tokens: int | None = None, **options) -> list[int]:
    """A request that comes, computes all its tokens and stays."""
    salt = options.get("salt", "")
    allocation = cache.acquire(holder, tokens, num_tokens or len(tokens), **options)
    assert allocation is not None
    cache.commit(holder, tokens, len(tokens), salt)
    cache.check()
    return allocation.block_table


def fill(cache: KVCache, tokens, **options) -> list[int]:
    """A request that came, computed and went, so that its full blocks are cached."""
    table = compute(cache, "filler", tokens, **options)
    cache.release("filler")
    cache.check()
    return table


def counts(cache: KVCache) -> tuple[int, int, int, int]:
    now = cache.counts()
    assert now.free + now.cached + now.leased + now.in_use == now.total == cache.num_blocks
    return now.free, now.cached, now.leased, now.in_use


# Matching


@pytest.mark.parametrize(
    "num_tokens, cached", [(0, 0), (1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_a_match_leaves_at_least_the_last_token_to_compute(num_tokens, cached):
    cache = make_cache()
    fill(cache, PROMPT)
    assert cache.match(PROMPT[:num_tokens]) == cached
    if num_tokens:
        assert cache.acquire("r", PROMPT[:num_tokens], num_tokens).num_cached_tokens == cached
        cache.check()


def test_match_takes_nothing_and_is_no_use():
    cache = make_cache(4)
    fill(cache, [1, 1, 1, 1, 9])
    fill(cache, [2, 2, 2, 2, 9])
    assert cache.match([1, 1, 1, 1, 9]) == 4
    assert counts(cache) == (2, 2, 0, 0)
    cache.acquire("r", [3] * 12, 12)
    assert cache.match([1, 1, 1, 1, 9]) == 0 and cache.match([2, 2, 2, 2, 9]) == 4


def test_the_cached_blocks_lead_the_table_in_order():
    cache = make_cache()
    table = fill(cache, PROMPT)
    allocation = cache.acquire("r", PROMPT[:10] + [0, 0, 0], 20)
    assert allocation.block_table[:2] == table[:2] and len(allocation.block_table) == 5
    assert allocation.num_cached_tokens == 8
    assert cache.table("r") == allocation.block_table
    assert counts(cache) == (16 - 5 - 3, 3, 0, 5)


def test_reuse_false_computes_everything_into_blocks_of_its_own():
    cache = make_cache()
    table = fill(cache, PROMPT)
    allocation = cache.acquire("r", PROMPT, 20, reuse=False)
    assert allocation.num_cached_tokens == 0 and not set(allocation.block_table) & set(table)


def test_without_prefix_cache_nothing_is_ever_cached():
    cache = make_cache(prefix_cache=False)
    fill(cache, PROMPT)
    assert cache.match(PROMPT) == 0 and counts(cache) == (16, 0, 0, 0)
    assert cache.acquire("r", PROMPT, 20).num_cached_tokens == 0


def test_salts_isolate():
    cache = make_cache()
    fill(cache, PROMPT, salt="tenant-a")
    assert cache.match(PROMPT, "tenant-a") == 16
    assert cache.match(PROMPT) == cache.match(PROMPT, "tenant-b") == 0
    fill(cache, PROMPT, salt="tenant-b")
    assert counts(cache) == (6, 10, 0, 0)


def test_a_commit_under_another_salt_is_refused():
    cache = make_cache()
    cache.acquire("r", PROMPT, 20, salt="tenant-a")
    with pytest.raises(AssertionError, match="cache_salt"):
        cache.commit("r", PROMPT, 20)
    assert cache.match(PROMPT) == cache.match(PROMPT, "tenant-a") == 0


def test_colliding_hashes_never_give_another_prompts_blocks(monkeypatch):
    monkeypatch.setattr(prefix_index, "hash_block", lambda parent, tokens: bytes([tokens[0] % 2]) * 16)
    cache = make_cache()
    fill(cache, [1, 2, 3, 4, 0])
    assert cache.match([1, 2, 3, 4, 0]) == 4
    assert cache.match([3, 2, 3, 4, 0]) == cache.match([1, 2, 3, 5, 0]) == 0
    fill(cache, [3, 2, 3, 4, 8, 8, 8, 8, 0])
    assert cache.match([3, 2, 3, 4, 8, 8, 8, 8, 0]) == 0 and cache.match([1, 2, 3, 4, 0]) == 4


# Allocation


def test_acquire_is_all_or_nothing():
    cache = make_cache(4)
    fill(cache, PROMPT[:9])
    before = counts(cache)
    assert cache.acquire("r", PROMPT, 17) is None
    assert counts(cache) == before and cache.match(PROMPT) == 8
    with pytest.raises(AssertionError, match="'r'"):
        cache.table("r")
    assert cache.acquire("r", PROMPT, 16) is not None
    cache.check()


def test_blocks_about_to_be_reused_do_not_count_as_evictable():
    cache = make_cache(4)
    fill(cache, PROMPT[:16])  # 4 cached, none free
    tokens = PROMPT[:12] + [0]
    assert cache.match(tokens) == 12
    assert cache.acquire("r", tokens, 17) is None  # 3 reused + 2 new of the 1 other
    assert counts(cache) == (0, 4, 0, 0)
    assert cache.acquire("r", tokens, 16).num_cached_tokens == 12
    assert counts(cache) == (0, 0, 0, 4)
    cache.check()


def test_blocks_in_use_are_never_given_away():
    cache = make_cache(4)
    compute(cache, "a", PROMPT[:8])
    fill(cache, [1] * 8)
    assert cache.acquire("b", [2] * 12, 12) is None
    table = cache.acquire("b", [2] * 8, 8).block_table
    assert not set(table) & set(cache.table("a"))
    cache.check()


def test_grow_appends_and_evicts_but_changes_nothing_when_short():
    cache = make_cache(4)
    fill(cache, PROMPT[:8])
    first = cache.acquire("r", [1, 2], 2).block_table
    assert cache.num_available == 3
    assert cache.grow("r", 4) is None and counts(cache) == (1, 2, 0, 1)
    more = cache.grow("r", 2)
    assert cache.table("r") == first + more and counts(cache) == (0, 1, 0, 3)
    assert cache.match(PROMPT[:9]) == 4  # leaf first: the head of the chain is still there
    cache.check()


def test_a_holder_is_acquired_once():
    cache = make_cache()
    cache.acquire("r", PROMPT, 20)
    with pytest.raises(AssertionError, match="'r' already has blocks"):
        cache.acquire("r", PROMPT, 20)


def test_blocks_freed_together_come_back_as_an_ascending_run():
    cache = make_cache()
    cache.acquire("a", [], 16)
    cache.acquire("b", [], 16)
    cache.release("a")
    assert cache.acquire("c", [], 12).block_table == [0, 1, 2]


# Eviction order


def test_the_tail_of_a_released_prompt_goes_before_its_head():
    cache = make_cache(5)
    fill(cache, PROMPT)
    for left in (20, 16, 12, 8, 4):
        assert cache.match(PROMPT + [0]) == left
        cache.acquire(f"new{left}", [left], 1)
    assert cache.match(PROMPT + [0]) == 0


def test_eviction_is_least_recently_used_first_and_spares_a_prefix_that_others_share():
    cache = make_cache(6)
    system = [7, 7, 7, 7]
    fill(cache, system + [1] * 4)
    fill(cache, system + [2] * 4)
    fill(cache, [3] * 8)
    # Cached, oldest first: [1], [2], system (used again by the second), then tail and head of the third. One is free.
    cache.acquire("x", [], 8)
    assert [cache.match([*system, *[n] * 4, 0]) for n in (1, 2)] == [4, 8]
    cache.grow("x", 1)
    assert [cache.match([*system, *[n] * 4, 0]) for n in (1, 2)] == [4, 4]
    cache.grow("x", 1)
    assert cache.match([*system, 0]) == 0 and cache.match([3] * 9) == 8
    cache.grow("x", 1)
    assert cache.match([3] * 9) == 4
    cache.check()


def test_a_reused_prompt_becomes_the_most_recently_used():
    cache = make_cache(3)
    for n in (1, 2, 3):
        fill(cache, [n] * 4)
    cache.acquire("again", [1] * 5, 5)  # evicts [2] for its second block
    cache.release("again")
    cache.acquire("x", [], 8)
    assert [cache.match([n] * 5) for n in (1, 2, 3)] == [4, 0, 0]


# Committing


def test_commit_is_incremental_and_idempotent():
    cache = make_cache()
    cache.acquire("r", PROMPT, 20)
    for num_computed, cached in ((3, 0), (4, 4), (4, 4), (11, 8), (5, 8), (20, 16)):
        cache.commit("r", PROMPT, num_computed)
        assert cache.match(PROMPT) == cached
        cache.check()


def test_a_block_is_matched_by_others_only_once_it_is_computed():
    cache = make_cache()
    cache.acquire("a", PROMPT, 20)
    cache.commit("a", PROMPT, 10)
    assert cache.acquire("b", PROMPT, 20).num_cached_tokens == 8
    assert cache.table("b")[:2] == cache.table("a")[:2]
    assert not set(cache.table("b")[2:]) & set(cache.table("a"))
    cache.check()


def test_blocks_filled_while_decoding_are_reused_by_the_next_turn():
    cache = make_cache()
    compute(cache, "r", PROMPT[:6], 7)
    tokens = PROMPT[:6]
    for token in range(50, 57):
        tokens.append(token)
        if len(tokens) % 4 == 1:
            cache.grow("r", 1)
        cache.commit("r", tokens, len(tokens) - 1)
    cache.release("r")
    assert cache.match([*tokens, 1, 2, 3]) == 12
    cache.check()


def test_a_duplicate_of_an_indexed_block_stays_private_and_later_blocks_continue_the_indexed_path():
    cache = make_cache()
    a = compute(cache, "a", PROMPT[:8], reuse=False)
    b = compute(cache, "b", PROMPT[:8] + [1, 2, 3, 4], reuse=False)
    assert counts(cache) == (11, 0, 0, 5)
    cache.release("b")
    assert counts(cache) == (13, 1, 0, 2)  # b's two duplicates are free, its third block is cached
    reader = cache.acquire("reader", PROMPT[:8] + [1, 2, 3, 4, 5], 13)
    assert reader.block_table[:3] == [*a[:2], b[2]] and reader.num_cached_tokens == 12
    cache.check()


def test_the_indexed_path_above_a_referenced_block_is_kept_even_if_nobody_holds_it():
    cache = make_cache(6)
    compute(cache, "a", PROMPT[:8], reuse=False)
    compute(cache, "b", PROMPT[:12], reuse=False)
    cache.release("a")  # a's two blocks are cached; b's third block hangs below them
    assert counts(cache) == (1, 2, 0, 3) and cache.num_available == 1
    assert cache.acquire("x", [], 8) is None
    assert cache.match(PROMPT) == 12
    cache.release("b")
    assert cache.num_available == 6
    cache.check()


def test_a_private_block_takes_the_place_of_the_equal_block_that_was_evicted():
    cache = make_cache(4)
    compute(cache, "a", PROMPT[:4], reuse=False)
    cache.acquire("b", PROMPT[:8], 8, reuse=False)
    cache.commit("b", PROMPT[:8], 4)
    cache.release("a")
    cache.acquire("x", [], 8)  # takes the free block and evicts a's
    assert cache.match(PROMPT) == 0
    cache.commit("b", PROMPT[:8], 8)
    assert cache.match(PROMPT) == 8
    cache.check()


def test_committing_more_than_there_is_is_refused():
    cache = make_cache()
    cache.acquire("r", PROMPT, 8)
    with pytest.raises(AssertionError, match="commits 3 blocks"):
        cache.commit("r", PROMPT, 12)
    with pytest.raises(AssertionError, match="commits 2 blocks"):
        cache.commit("r", PROMPT[:7], 8)
    cache.check()


# Holders


def test_release_is_idempotent_and_keeps_only_full_computed_blocks():
    cache = make_cache()
    cache.acquire("r", PROMPT, 20)
    cache.commit("r", PROMPT, 11)
    cache.release("r")
    cache.release("r")
    cache.release("never seen")
    assert counts(cache) == (14, 2, 0, 0)


def test_a_shared_block_is_in_use_until_its_last_holder_goes():
    cache = make_cache()
    compute(cache, "a", PROMPT[:8])
    cache.acquire("b", PROMPT[:9], 9)
    cache.release("a")
    assert counts(cache) == (13, 0, 0, 3)
    cache.release("b")
    assert counts(cache) == (14, 2, 0, 0)


def test_rename_hands_a_table_over():
    cache = make_cache()
    table = compute(cache, "prefill", PROMPT[:9])
    cache.rename("prefill", "decode")
    assert cache.table("decode") == table
    cache.release("prefill")
    assert counts(cache) == (13, 0, 0, 3)
    cache.grow("decode", 1)
    cache.commit("decode", PROMPT[:12], 12)
    cache.release("decode")
    assert cache.match(PROMPT) == 12
    cache.acquire("x", PROMPT, 20)
    with pytest.raises(AssertionError, match="'x' already has blocks"):
        cache.acquire("y", [], 4), cache.rename("y", "x")
    with pytest.raises(AssertionError, match="'prefill' has no blocks"):
        cache.rename("prefill", "z")
    cache.check()


def test_move_takes_blocks_from_a_stock_in_the_order_given():
    cache = make_cache()
    stock = cache.acquire("stock", [], 16).block_table
    sequence = compute(cache, "sequence", PROMPT[:4])
    cache.move([stock[2], stock[0]], "stock", "sequence")
    assert cache.table("sequence") == [*sequence, stock[2], stock[0]]
    assert cache.table("stock") == [stock[1], stock[3]]
    cache.commit("sequence", PROMPT[:12], 12)
    cache.release("sequence")
    assert cache.match(PROMPT) == 12 and counts(cache) == (11, 3, 0, 2)
    cache.move([stock[1]], "stock", "made here")
    assert cache.table("made here") == [stock[1]]
    cache.check()


def test_move_of_a_block_that_is_not_the_sources_changes_nothing():
    cache = make_cache()
    stock = cache.acquire("stock", [], 8).block_table
    other = cache.acquire("other", [], 4).block_table
    for block_ids, src in (([stock[0], other[0]], "stock"), ([stock[0], stock[0]], "stock"), ([stock[0]], "nobody")):
        with pytest.raises(AssertionError, match="not in the table"):
            cache.move(block_ids, src, "dst")
        assert cache.table("stock") == stock
    cache.check()


def test_a_table_that_lost_a_block_before_its_end_cannot_be_committed_beyond_it():
    cache = make_cache()
    table = cache.acquire("r", PROMPT, 20).block_table
    cache.move([table[2]], "r", "elsewhere")
    cache.commit("r", PROMPT, 8)
    with pytest.raises(AssertionError, match="commits 3 blocks but has tokens and blocks for 2"):
        cache.commit("r", PROMPT, 12)
    assert cache.match(PROMPT) == 8
    cache.check()


def test_a_table_that_gave_its_tail_away_goes_on():
    cache = make_cache()
    table = compute(cache, "r", PROMPT[:8], 16)
    cache.move(table[2:], "r", "spare")
    cache.grow("r", 1)
    cache.commit("r", PROMPT, 12)
    assert cache.match(PROMPT) == 12
    cache.check()


def test_a_holder_whose_blocks_were_all_moved_away_starts_anew():
    cache = make_cache()
    table = compute(cache, "r", PROMPT[:8])
    cache.move(table, "r", "next")
    cache.grow("r", 2)
    cache.commit("r", [5] * 8, 8)
    assert cache.match(PROMPT) == cache.match([5] * 9) == 8
    cache.check()


# Leases


def test_a_block_with_holder_and_lease_is_in_use_then_leased_then_cached_or_free():
    cache = make_cache()
    table = compute(cache, "r", PROMPT[:10])  # two indexed blocks and a partial one
    cache.lease("transfer", table)
    assert counts(cache) == (13, 0, 0, 3)
    cache.release("r")
    assert counts(cache) == (13, 0, 3, 0) and cache.match(PROMPT) == 8
    cache.check()
    cache.end_lease("transfer")
    assert counts(cache) == (14, 2, 0, 0)
    cache.end_lease("transfer")
    cache.check()


def test_a_holder_outlives_a_lease():
    cache = make_cache()
    table = compute(cache, "r", PROMPT[:10])
    cache.lease("transfer", table)
    cache.end_lease("transfer")
    assert counts(cache) == (13, 0, 0, 3)


def test_a_leased_block_is_not_evicted_nor_is_what_is_above_it():
    cache = make_cache(4)
    table = fill(cache, PROMPT[:12])
    cache.lease("transfer", [table[1]])
    assert counts(cache) == (1, 2, 1, 0) and cache.num_available == 2
    assert cache.acquire("x", [], 12) is None
    cache.acquire("x", [], 8)
    assert cache.match(PROMPT) == 8
    cache.check()
    cache.end_lease("transfer")
    assert cache.num_available == 2


def test_two_leases_on_one_block_both_count():
    cache = make_cache()
    table = compute(cache, "r", [1, 2])
    cache.lease("one", table)
    cache.lease("two", table)
    cache.release("r")
    cache.end_lease("one")
    assert counts(cache) == (15, 0, 1, 0)
    cache.end_lease("two")
    assert counts(cache) == (16, 0, 0, 0)


def test_a_lease_grows_with_the_chunks_of_a_prompt_and_counts_a_block_once():
    cache = make_cache()
    table = compute(cache, "r", PROMPT)
    cache.lease("transfer", table[:2])
    cache.lease("transfer", iter(table[1:4]))
    cache.release("r")
    assert counts(cache) == (11, 1, 4, 0)
    cache.end_lease("transfer")
    assert counts(cache) == (11, 5, 0, 0)
    cache.check()


def test_a_leased_cached_block_can_be_matched():
    cache = make_cache()
    table = fill(cache, PROMPT[:8])
    cache.lease("transfer", table)
    assert cache.acquire("r", PROMPT[:9], 9).block_table[:2] == table
    assert counts(cache) == (13, 0, 0, 3)


def test_a_free_block_cannot_be_leased():
    cache = make_cache()
    table = compute(cache, "r", [1])
    with pytest.raises(AssertionError, match="block 9 is free"):
        cache.lease("transfer", [*table, 9])
    cache.release("r")
    assert counts(cache) == (16, 0, 0, 0)


# Flushing


def test_flush_frees_idle_blocks_and_hides_those_in_use():
    cache = make_cache()
    fill(cache, [9] * 8)
    table = compute(cache, "r", PROMPT[:12])
    cache.lease("transfer", table[:1])
    assert cache.flush() == 2
    assert counts(cache) == (13, 0, 0, 3) and cache.match(PROMPT) == cache.match([9] * 9) == 0
    assert cache.table("r") == table
    cache.check()
    cache.release("r")
    assert counts(cache) == (15, 0, 1, 0)
    cache.end_lease("transfer")
    assert counts(cache) == (16, 0, 0, 0)
    assert cache.flush() == 0


def test_what_was_flushed_never_comes_back_through_its_holder():
    cache = make_cache()
    compute(cache, "original", PROMPT[:12], 20, reuse=False)
    compute(cache, "duplicate", PROMPT[:12], 20, reuse=False)
    cache.flush()
    for holder in ("original", "duplicate"):
        cache.commit(holder, PROMPT, 20)
        assert cache.match(PROMPT + [0]) == 0
        cache.check()


def test_what_was_flushed_never_comes_back_through_a_holder_it_was_moved_to():
    cache = make_cache()
    table = compute(cache, "r", PROMPT[:8])
    cache.move(table, "r", "next")
    cache.flush()
    cache.commit("next", PROMPT, 8)
    assert cache.match(PROMPT) == 0
    cache.check()


def test_a_request_from_before_a_flush_continues_the_path_of_one_from_after():
    cache = make_cache()
    compute(cache, "before", PROMPT[:8], 12)
    cache.flush()
    compute(cache, "after", PROMPT[:8])
    cache.commit("before", PROMPT[:12], 12)
    assert cache.match(PROMPT) == 12
    cache.release("before")
    assert counts(cache) == (13, 1, 0, 2)
    cache.check()


def test_a_flushed_block_is_indexed_again_when_it_was_freed_and_refilled():
    cache = make_cache(2)
    compute(cache, "r", PROMPT[:8])
    cache.flush()
    cache.release("r")
    fill(cache, PROMPT[:8])
    assert cache.match(PROMPT) == 8


# Events


def test_events_are_hex_hashes_of_what_entered_and_left():
    cache = make_cache(4)
    fill(cache, PROMPT[:10])
    assert cache.drain_events() == ([key.hex() for key in hash_blocks(PROMPT[:8], 4)], [])
    cache.acquire("x", [], 12)
    assert cache.drain_events() == ([], [hash_blocks(PROMPT, 4)[1].hex()])
    cache.flush()
    assert cache.drain_events() == ([], [hash_blocks(PROMPT, 4)[0].hex()])


def test_the_indexed_hashes_are_the_state_from_which_later_events_go_on():
    cache = make_cache(4)
    fill(cache, [9] * 4)
    cache.flush()
    fill(cache, PROMPT[:10])
    keys = [key.hex() for key in hash_blocks(PROMPT[:8], 4)]
    assert sorted(cache.indexed_hashes()) == sorted(keys)
    assert cache.drain_events() == ([], [])
    cache.acquire("x", [], 12)
    assert cache.drain_events() == ([], keys[1:])
    assert cache.indexed_hashes() == keys[:1]


# The integrity check


def corrupt_free_twice(cache):
    cache._free.append(cache._free[0])


def corrupt_lost(cache):
    cache._free.pop()


def corrupt_free_in_use(cache):
    cache._free.append(cache.table("r")[0])


def corrupt_two_writers(cache):
    cache._holders["other"].table.append(cache.table("r")[-1])
    cache._num_holds[cache.table("r")[-1]] += 1


def corrupt_in_use_counter(cache):
    cache._num_in_use += 1


def corrupt_cached_counter(cache):
    cache._num_cached -= 1


def corrupt_reference_count(cache):
    cache._num_holds[cache.table("r")[0]] += 1


def corrupt_pins(cache):
    cache._node[cache.table("r")[0]].num_pins -= 1


def corrupt_children(cache):
    cache._node[cache.table("r")[0]].num_children += 1


def corrupt_tokens(cache):
    cache._node[cache.table("r")[0]].tokens = b"x" * 16


def corrupt_evictable(cache):
    cache._index.num_evictable += 1


def corrupt_eviction_queue(cache):
    cache._index._leaves.clear()


def corrupt_block_of_node(cache):
    cache._node[cache.table("r")[0]] = None


def corrupt_foreign_block(cache):
    cache._holders["r"].table.append(99)


@pytest.mark.parametrize("corrupt", [f for name, f in list(globals().items()) if name.startswith("corrupt_")])
def test_check_finds(corrupt):
    cache = make_cache(12)
    fill(cache, [9] * 8)
    compute(cache, "r", PROMPT[:10])
    cache.acquire("other", [1, 2], 2)
    cache.check()
    corrupt(cache)
    with pytest.raises(AssertionError):
        cache.check()


def test_check_names_the_block():
    cache = make_cache()
    table = compute(cache, "r", PROMPT)
    cache._free.append(table[3])
    with pytest.raises(AssertionError, match=f"block {table[3]}: .*more than one owns it"):
        cache.check()


def test_counts_of_a_new_cache():
    assert make_cache(3).counts() == PoolCounts(total=3, free=3, cached=0, leased=0, in_use=0)


@pytest.mark.parametrize("num_blocks, block_size", [(0, 4), (4, 0)])
def test_an_empty_cache_is_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match="at least 1"):
        KVCache(num_blocks, block_size)
