"""A request gives the same token ids in every topology, cold or warm, alone or in a batch, chunked or not, preempted
or not.

The expected ids come from each request run alone on a cold colocated worker with one-shot prefill.
"""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cluster import TOPOLOGIES, Cluster, make_config, make_request, run_alone

VOCAB = 500


def random_requests(rng: random.Random, count: int) -> list:
    """Prompts that share prefixes, greedy and seeded, with every sampling parameter in use somewhere."""
    stems = [[rng.randrange(4, VOCAB) for _ in range(rng.choice([4, 8, 16, 24]))] for _ in range(2)]
    requests = []
    for index in range(count):
        prompt = rng.choice(stems)[: rng.choice([1, 3, 4, 8, 12, 99])]
        prompt = prompt + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(0, 20))]
        sampling: dict = {"max_tokens": rng.choice([1, 2, 5, 12])}
        if rng.random() < 0.6:
            sampling |= {"temperature": rng.choice([0.5, 1.0, 1.5]), "seed": rng.getrandbits(64)}
            sampling |= rng.choice([{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}])
        sampling |= rng.choice([{}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.7, "presence_penalty": 0.3}])
        sampling |= rng.choice([{}, {"logit_bias": {7: 3.0}}, {"eos_token_ids": list(range(4, 60)), "min_tokens": 2}])
        sampling["min_tokens"] = min(sampling.get("min_tokens", 0), sampling["max_tokens"])
        requests.append(make_request(f"r{index}", prompt, **sampling))
    return requests


@pytest.mark.parametrize("topology", TOPOLOGIES)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    chunk_tokens=st.sampled_from([3, 16, 64]),
    pool_tokens=st.sampled_from([128, 1024]),
    overlap=st.booleans(),
)
def test_any_mix_gives_each_request_the_tokens_it_gets_alone(
    tiny_model, topology, seed, chunk_tokens, pool_tokens, overlap
):
    rng = random.Random(seed)
    model_dir = str(tiny_model("qwen3"))
    requests = random_requests(rng, 10)
    expected = {r.request_id: run_alone(model_dir, r, chunk_tokens=512, prefix_cache=False) for r in requests}
    config = make_config(topology, chunk_tokens=chunk_tokens, pool_tokens=pool_tokens, overlap=overlap)
    cluster = Cluster(model_dir, config)
    try:
        aborted = set()
        for request in requests:
            cluster.submit(request, rng.randrange(len(cluster.decode)), rng.randrange(max(1, len(cluster.prefill))))
            for _ in range(rng.randrange(4)):
                cluster.step()
            if rng.random() < 0.2:
                victim = rng.choice(list(cluster.requests))
                aborted.add(victim)
                cluster.abort(victim)
        cluster.run()
        assert not cluster.failures
        for request in requests:
            tokens = cluster.tokens(request.request_id)
            if request.request_id in aborted:
                assert tokens == expected[request.request_id][: len(tokens)]
            else:
                assert tokens == expected[request.request_id], request
        cluster.check_whole()
    finally:
        cluster.close()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_warm_cache_changes_no_token_at_block_boundaries(tiny_model, topology):
    model_dir = str(tiny_model("llama"))
    rng = random.Random(5)
    cluster = Cluster(model_dir, make_config(topology, block_size=8, chunk_tokens=8))
    try:
        for length in (1, 7, 8, 9, 15, 16, 17, 24):
            prompt = [rng.randrange(4, VOCAB) for _ in range(length)]
            expected = run_alone(model_dir, make_request("x", prompt), block_size=8)
            for attempt in range(2):
                name = f"{length}-{attempt}"
                cluster.submit(make_request(name, prompt))
                cluster.run()
                assert cluster.tokens(name) == expected
                report = cluster.deltas[name][0].prefill
                assert report is not None
                assert report.num_cached_tokens == (0 if attempt == 0 else (length - 1) // 8 * 8)
        cluster.check_whole()
    finally:
        cluster.close()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_preemption_recomputes_and_changes_no_token(tiny_model, topology):
    model_dir = str(tiny_model("qwen2"))
    rng = random.Random(6)
    requests = [
        make_request(f"r{i}", [rng.randrange(4, VOCAB) for _ in range(12)], max_tokens=40, temperature=1.0, seed=i)
        for i in range(6)
    ]
    expected = {r.request_id: run_alone(model_dir, r) for r in requests}
    cluster = Cluster(model_dir, make_config(topology, pool_tokens=128))
    try:
        for request in requests:
            cluster.submit(request, decode=0, prefill=0)
        cluster.run()
        assert not cluster.failures
        assert {name: cluster.tokens(name) for name in expected} == expected
        assert cluster.decode[0].engine.counters["preemptions_total"] > 0
        cluster.check_whole()
    finally:
        cluster.close()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "colocated"])
def test_a_worker_lost_in_mid_flight_costs_no_token(tiny_model, topology, side):
    model_dir = str(tiny_model("mistral"))
    rng = random.Random(7)
    requests = [
        make_request(f"r{i}", [rng.randrange(4, VOCAB) for _ in range(40)], max_tokens=20, temperature=0.8, seed=i)
        for i in range(6)
    ]
    expected = {r.request_id: run_alone(model_dir, r) for r in requests}
    cluster = Cluster(model_dir, make_config(topology, pool_tokens=1024, chunk_tokens=16, max_running=4))
    try:
        for request in requests:
            cluster.submit(request)
        cluster.step_until(lambda: len(cluster.tokens("r1")) > 3)
        (cluster.restart_prefill if side == "prefill" else cluster.restart_decode)()
        cluster.run()
        assert not cluster.failures
        assert {name: cluster.tokens(name) for name in expected} == expected
        cluster.check_whole()
    finally:
        cluster.close()
