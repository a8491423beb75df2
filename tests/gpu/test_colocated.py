"""The colocated service on a GPU: the same tokens as transformers gives on the CPU. Needs a CUDA device."""

import random

import pytest
import torch
import transformers

from tests.cluster import Cluster, make_config, make_request
from tests.tiny_models import FAMILIES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_on_the_gpu_equal_transformers_on_the_cpu(tiny_model, family):
    directory = tiny_model(family)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rng = random.Random(8)
    prompts = {f"r{n}": [rng.randrange(4, 500) for _ in range(n)] for n in (1, 3, 4, 5, 31, 40)}
    cluster = Cluster(str(directory), make_config(device="cuda", chunk_tokens=16))
    try:
        for name, prompt in prompts.items():
            cluster.submit(make_request(name, prompt, max_tokens=32))
        cluster.run()
        for name, prompt in prompts.items():
            tokens = list(prompt)
            with torch.no_grad():
                for _ in range(32):
                    tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
            assert cluster.tokens(name) == tokens[len(prompt) :], name
        cluster.check_whole()
    finally:
        cluster.close()
