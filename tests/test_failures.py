"""Pools that are just large enough, workers that freeze, leave or share a pool: no request pays for it."""

import math
import random
import time

import pytest

from engine.protocol import Peers
from tests.cluster import TOPOLOGIES, make_request, run_alone

BLOCK = 4


def prompt_of(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 500) for _ in range(length)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("num_output", [1, 2, 24, 31])
def test_a_request_exactly_as_large_as_the_pool_is_served(start_cluster, topology, num_output):
    cluster = start_cluster(topology, pool_tokens=32)
    assert {worker.model.max_model_len for worker in cluster.decode} == {32}
    request = make_request("r", prompt_of(32 - num_output), max_tokens=num_output)
    for _ in range(2):
        cluster.submit(request)
        cluster.run()
        assert not cluster.failures
        assert cluster.tokens("r") == run_alone(cluster.model_dir, request, block_size=BLOCK)
        cluster.deltas["r"] = []


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_request_that_began_like_another_may_still_fill_the_pool(start_cluster, topology):
    """Computed at once, its first block is a private copy of the other's, which its second keeps from being evicted."""
    cluster = start_cluster(topology, pool_tokens=32)
    prompt = prompt_of(9)
    requests = [
        make_request("short", prompt[:BLOCK] + [7], max_tokens=5),
        make_request("long", prompt, max_tokens=32 - 9),
    ]
    for request in requests:
        cluster.submit(request)
    cluster.run()
    assert not cluster.failures
    for request in requests:
        assert cluster.tokens(request.request_id) == run_alone(cluster.model_dir, request, block_size=BLOCK)


@pytest.mark.parametrize("topology", ["shm-2d", "shm-2d-conditional"])
def test_decode_workers_that_exhaust_a_shared_pool_together_both_finish(start_cluster, topology):
    cluster = start_cluster(topology, pool_tokens=48)
    requests = [make_request(f"r{i}", prompt_of(8, i), max_tokens=40) for i in range(6)]
    for index, request in enumerate(requests):
        cluster.submit(request, decode=index % 2)
    cluster.run()
    assert not cluster.failures
    for request in requests:
        assert cluster.tokens(request.request_id) == run_alone(cluster.model_dir, request, block_size=BLOCK)


def test_a_request_goes_on_at_another_prefill_worker_when_the_chosen_one_has_left_for_good(start_cluster):
    cluster = start_cluster("tcp-2p2d")
    gone, stays = cluster.prefill
    request = make_request("r", prompt_of(20), max_tokens=12)
    cluster.submit(request, prefill=0)
    cluster.step_until(lambda: len(cluster.tokens("r")) > 2)
    for decode in cluster.decode:
        decode.handle(Peers([link.peer for name, link in decode.links.items() if name == stays.name]))
    cluster.decode[0].engine._preempt_youngest()
    cluster.run()
    assert cluster.tokens("r") == run_alone(cluster.model_dir, request, block_size=BLOCK)
    assert (gone.engine.counters["prefills_total"], stays.engine.counters["prefills_total"]) == (1, 1)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_workers_count_each_prefill_and_its_cached_tokens_once(start_cluster, topology):
    cluster = start_cluster(topology)
    for attempt in range(2):
        cluster.submit(make_request(f"r{attempt}", prompt_of(21), max_tokens=1))
        cluster.run()
    engines = [worker.engine for worker in cluster.prefill]
    engines += [worker.prefill for worker in cluster.decode if worker.prefill is not None]
    assert sum(engine.counters["prefills_total"] for engine in engines) == 2
    # Where decode prefills from two pools, its engine is told of blocks that its own cache had.
    assert sum(engine.counters["prefill_cached_tokens_total"] for engine in engines) == 20


def test_the_prefill_workers_lease_time_counts_whatever_the_decode_worker_is_configured_for(start_cluster):
    cluster = start_cluster("shm", lease_s=30.0)
    prefill, [decode] = cluster.prefill[0], cluster.decode
    prefill.welcome.lease_s = 2.0
    cluster.restart_decode()
    [decode] = cluster.decode
    cluster.step_until(lambda: decode.links["p0"].ready)
    decode.links["p0"].heard -= 1.7  # past 80 % of 2 s
    cluster.step()
    assert not decode.links["p0"].ready
    cluster.step_until(lambda: decode.links["p0"].ready)


@pytest.mark.parametrize("topology", ["shm", "shm-2d", "shm-conditional"])
def test_what_a_frozen_decode_worker_may_still_write_is_nobody_elses_until_it_lets_go(start_cluster, topology):
    cluster = start_cluster(topology)
    prefill, frozen = cluster.prefill[0], cluster.decode[0]
    request = make_request("r", prompt_of(20), max_tokens=30)
    cluster.submit(request)
    cluster.step_until(lambda: len(cluster.tokens("r")) > 3)
    frozen.next_heartbeat = math.inf
    [entry] = frozen.engine.running
    prefill.turn()
    prefill.leases._clock = lambda: time.monotonic() + 60
    prefill.turn()
    prefill.leases._clock = time.monotonic
    assert prefill.num_reclaimed == len(cluster.decode)
    available = prefill.cache.acquire("other", [], prefill.cache.num_available * BLOCK)
    assert available is not None and not set(available.block_table) & set(entry.block_table)
    prefill.cache.release("other")
    frozen.next_heartbeat = 0.0
    cluster.run()
    assert cluster.requests["r"].generation == 1
    assert cluster.tokens("r") == run_alone(cluster.model_dir, request, block_size=BLOCK)
