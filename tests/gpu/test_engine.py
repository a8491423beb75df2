"""The engines on a GPU: graphs, overlap and shared prefixes change no token. Needs a CUDA device."""

import random

import pytest
import torch
import transformers

from tests.cluster import Cluster, make_config, make_request
from tests.test_exactness import random_requests
from tests.tiny_models import FAMILIES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def gpu_cluster(model_dir, **options) -> Cluster:
    options = {
        "device": "cuda",
        "dtype": "float16",
        "block_size": 16,
        "pool_tokens": 4096,
        "overlap": True,
        "max_model_len": 256,
        **options,
    }
    return Cluster(str(model_dir), make_config(**options))


def alone(model_dir, requests, **options) -> dict[str, list[int]]:
    """Each request's tokens when nothing else runs and nothing is cached."""
    cluster = gpu_cluster(model_dir, prefix_cache=False, **options)
    try:
        for request in requests:
            cluster.submit(request)
            cluster.run()
        assert not cluster.failures
        return {request.request_id: cluster.tokens(request.request_id) for request in requests}
    finally:
        cluster.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("second_stream", [True, False])
def test_deterministic_any_mix_gives_each_request_the_tokens_it_gets_alone(tiny_model, seed, graphs, second_stream):
    rng = random.Random(seed)
    model_dir = tiny_model("qwen3")
    requests = random_requests(rng, 16)
    decode = {"cuda_graphs": graphs}
    expected = alone(model_dir, requests, deterministic=True, chunk_tokens=512, decode=decode)
    pool_tokens = rng.choice([256, 4096])
    cluster = gpu_cluster(
        model_dir,
        deterministic=True,
        chunk_tokens=rng.choice([16, 40]),
        pool_tokens=pool_tokens,
        decode=decode,
        prefill={"second_stream": second_stream},
    )
    try:
        aborted = set()
        for request in requests:
            cluster.submit(request)
            for _ in range(rng.randrange(4)):
                cluster.step()
            if rng.random() < 0.2:
                victim = rng.choice(list(cluster.requests))
                aborted.add(victim)
                cluster.abort(victim)
        cluster.run()
        assert not cluster.failures
        for name, tokens in expected.items():
            given = cluster.tokens(name)
            assert given == (tokens[: len(given)] if name in aborted else tokens), name
        cluster.check_whole()
    finally:
        cluster.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_equal_transformers(tiny_model, family):
    directory = tiny_model(family)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rng = random.Random(8)
    prompts = {f"r{n}": [rng.randrange(4, 500) for _ in range(n)] for n in (1, 3, 15, 16, 17, 31, 70)}
    cluster = gpu_cluster(directory, dtype="float32", chunk_tokens=32)
    try:
        for name, prompt in prompts.items():
            cluster.submit(make_request(name, prompt, max_tokens=24))
        cluster.run()
        for name, prompt in prompts.items():
            tokens = list(prompt)
            with torch.no_grad():
                for _ in range(24):
                    tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
            assert cluster.tokens(name) == tokens[len(prompt) :], name
        cluster.check_whole()
    finally:
        cluster.close()


def test_sessions_that_share_a_prefix_read_it_once_and_stay_right(tiny_model):
    """Float32, so that rounding cannot hide a wrong block: grouped and ungrouped decoding give the same tokens."""
    directory = tiny_model("qwen3")
    rng = random.Random(3)
    stems = [[rng.randrange(4, 500) for _ in range(200)] for _ in range(2)]
    requests = [
        make_request(f"r{i}", stems[i % 2] + [rng.randrange(4, 500) for _ in range(1 + i)], max_tokens=20)
        for i in range(14)
    ]
    given = []
    for share in (True, False):
        cluster = gpu_cluster(
            directory, dtype="float32", max_model_len=512, max_running=16, decode={"shared_prefix": share}
        )
        try:
            for stem in stems:
                cluster.submit(make_request(f"warm{stem[0]}", stem, max_tokens=1))
            cluster.run()
            for request in requests:
                cluster.submit(request)
            cluster.run()
            batch = cluster.decode[0].runner.decode_batch
            assert (batch.groups is not None and batch.num_grouped_steps > 0) == share
            given.append({request.request_id: cluster.tokens(request.request_id) for request in requests})
        finally:
            cluster.close()
    assert given[0] == given[1]
