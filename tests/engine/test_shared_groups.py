"""Groups of sequences that share leading blocks: what they contain, and what they never contain."""

import random

import numpy as np

from engine.shared_groups import MIN_SHARED_BLOCKS, SharedGroups


def groups_of(tables: dict[int, list[int]], group: int = 4) -> SharedGroups:
    groups = SharedGroups(group, block_size=64)
    for slot, table in tables.items():
        groups.join(slot, table)
    return groups


def test_sessions_form_groups_and_others_stay_out():
    stem, other = list(range(10, 20)), list(range(30, 38))
    groups = groups_of({0: [*stem, 1], 1: [*other, 2], 2: [*stem, 3, 4], 3: [5, 6, 7, 8, 9], 4: [*other, 21]})
    plan = groups.plan([0, 1, 2, 3, 4])
    assert plan is not None
    assert plan.lens == [10 * 64, 8 * 64, 10 * 64, 0, 8 * 64]
    assert {tuple(plan.members[first : first + count]): keys for first, count, keys in plan.tiles} == {
        (0, 2): 640,
        (1, 4): 512,
    }


def test_a_block_that_may_still_be_written_is_not_shared():
    table = list(range(8))
    plan = groups_of({0: table, 1: table}).plan([0, 1])
    assert plan is not None and plan.lens == [7 * 64, 7 * 64]


def test_few_shared_blocks_and_single_sequences_are_not_worth_a_launch():
    few = list(range(MIN_SHARED_BLOCKS - 1))
    groups = groups_of({0: [*few, 90, 91], 1: [*few, 92, 93], 2: list(range(40, 60))})
    assert groups.plan([0, 1, 2]) is None
    assert groups.plan([2]) is None


def test_plans_follow_sequences_that_come_and_go():
    stem = list(range(10))
    groups = groups_of({0: [*stem, 10], 1: [*stem, 11]})
    assert groups.plan([0, 1]) is not None
    groups.leave(1)
    groups.join(1, list(range(50, 61)))
    assert groups.plan([0, 1]) is None


def test_any_plan_is_sound():
    rng = random.Random(2)
    for _ in range(200):
        stems = [[100 * s + i for i in range(rng.randrange(0, 9))] for s in range(3)]
        fresh = iter(range(10_000, 20_000))
        tables = {
            slot: rng.choice(stems) + [next(fresh) for _ in range(rng.randrange(1, 4))]
            for slot in range(rng.randrange(1, 40))
        }
        slots = list(tables)
        rng.shuffle(slots)
        groups = groups_of(tables, group=rng.choice([1, 4, 8]))
        plan = groups.plan(slots)
        if plan is None:
            continue
        assert len(plan.tiles) <= SharedGroups.most_tiles(len(slots))
        assert sorted(plan.members) == [row for row, keys in enumerate(plan.lens) if keys]
        for first, count, keys in plan.tiles:
            rows = plan.members[first : first + count]
            assert 1 <= count <= groups.members_per_tile
            leading = {tuple(tables[slots[row]][: keys // 64]) for row in rows}
            assert len(leading) == 1 and keys >= MIN_SHARED_BLOCKS * 64
            assert all(keys // 64 < len(tables[slots[row]]) and plan.lens[row] == keys for row in rows)
        size = len(slots)
        buffer = np.full(2 * size + 3 * SharedGroups.most_tiles(size), -1, dtype=np.int32)
        plan.write(buffer, size)
        assert buffer[size : 2 * size].tolist() == plan.lens
        assert (buffer[2 * size :].reshape(-1, 3)[len(plan.tiles) :, 1] == 0).all()
