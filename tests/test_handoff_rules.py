"""What the two sides owe each other when one of them is full, fails, is silent or no longer wanted."""

import random

import pytest
import torch

from tests.cluster import TOPOLOGIES, Cluster, make_request, run_alone

SPLIT = [name for name, topology in TOPOLOGIES.items() if topology.get("local_prefill_max_tokens") == 0]


def prompt_of(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 500) for _ in range(length)]


def prefill_counter(cluster: Cluster, name: str) -> int:
    engines = [worker.engine for worker in cluster.prefill]
    engines += [worker.prefill for worker in cluster.decode if worker.prefill is not None]
    return sum(engine.counters[name] for engine in engines)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_prompt_that_nobody_waits_for_is_not_prefilled_to_its_end(start_cluster, topology):
    cluster = start_cluster(topology, chunk_tokens=1)
    cluster.submit(make_request("r", prompt_of(120)))
    cluster.step_until(lambda: prefill_counter(cluster, "prefill_tokens_total") > 3)
    cluster.abort("r")
    cluster.check_whole()
    computed = prefill_counter(cluster, "prefill_tokens_total")
    assert computed < 120
    for _ in range(5):
        cluster.step()
    assert prefill_counter(cluster, "prefill_tokens_total") == computed


@pytest.mark.parametrize("topology", SPLIT)
def test_no_prompt_is_prefilled_before_decode_has_a_slot_for_it(start_cluster, topology):
    cluster = start_cluster(topology, max_running=2)
    names = [f"r{index}" for index in range(7)]
    for index, name in enumerate(names):
        cluster.submit(make_request(name, prompt_of(20, index), max_tokens=5 + index))
    while not all(map(cluster.finished, names)):
        cluster.step()
        ended = sum(map(cluster.finished, names))
        assert prefill_counter(cluster, "prefills_total") <= ended + 2
    assert not cluster.failures


@pytest.mark.parametrize("topology", SPLIT)
def test_a_prefill_that_fails_gives_the_decode_side_its_slot_back(start_cluster, topology, monkeypatch):
    cluster = start_cluster(topology, max_running=1)
    runner = cluster.prefill[0].runner
    compute = runner.run
    monkeypatch.setattr(runner, "run", lambda *args, **options: torch.full_like(compute(*args, **options), torch.nan))
    cluster.submit(make_request("broken", prompt_of(20)))
    cluster.run()
    assert cluster.failures["broken"].code == "internal" and not cluster.tokens("broken")
    monkeypatch.undo()
    cluster.check_whole()
    request = make_request("next", prompt_of(20))
    cluster.submit(request)
    cluster.run()
    assert cluster.tokens("next") == run_alone(cluster.model_dir, request)


@pytest.mark.parametrize("topology", ["shm", "tcp"])
def test_a_silent_decode_worker_holds_nothing_past_its_lease_but_what_it_may_be_writing(start_cluster, topology):
    cluster = start_cluster(topology, lease_s=1.0)
    [prefill], [decode] = cluster.prefill, cluster.decode
    request = make_request("r", prompt_of(20), max_tokens=6)
    cluster.submit(request)
    decode.turn()  # it asks for the prefill, and then says nothing more

    def held() -> int:
        for item in prefill.inbox.take(0.01):
            prefill.handle(item)
        prefill.turn()
        counts = prefill.cache.counts()
        return counts.leased + counts.in_use

    while prefill.engine.counters["prefills_total"] == 0:
        held()
    assert held() > 0
    while prefill.num_reclaimed == 0:
        held()
    if topology == "shm":
        assert held() > 0  # frozen in the middle of a step it would still write there
    else:
        while held():
            pass
    cluster.run()  # it is back: told to drop what it had, it is asked again
    assert cluster.tokens("r") == run_alone(cluster.model_dir, request)
