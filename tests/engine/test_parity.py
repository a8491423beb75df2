"""Logits and greedy tokens equal transformers' on the same directory, for every family and the embedded model."""

import random

import pytest
import torch
import transformers

from engine.kv_pool import KVPool
from engine.runner import ModelRunner, SequenceChunk
from tests.tiny_models import FAMILIES

BLOCK = 8
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1)


class Pair:
    """Our runner and transformers' model, loaded from one directory."""

    def __init__(self, directory, block_size: int = BLOCK, num_blocks: int = 64):
        self.reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.runner = ModelRunner.load(str(directory), block_size=block_size, max_model_len=block_size * num_blocks)
        self.runner.pool = KVPool.allocate(self.runner.layout, num_blocks)
        # Blocks are handed out in no order, and what they held before must not matter.
        self.runner.pool.tensor.normal_()
        self.table = random.Random(4).sample(range(num_blocks), num_blocks)
        self.vocab_size = self.reference.config.vocab_size

    def prompt(self, length: int) -> list[int]:
        rng = random.Random(length)
        return [rng.randrange(self.vocab_size) for _ in range(length)]

    def check_logits(self, prompt: list[int]) -> None:
        ours = self.runner.run([SequenceChunk(prompt, 0, self.table, logits="all")])
        with torch.no_grad():
            theirs = self.reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        logits = self.runner.run([SequenceChunk(tokens, 0, self.table)])
        for _ in range(count):
            tokens.append(int(logits[-1].argmax()))
            logits = self.runner.run([SequenceChunk(tokens[-1:], len(tokens) - 1, self.table)])
        return tokens[len(prompt) :]

    def reference_greedy(self, prompt: list[int], count: int) -> list[int]:
        with torch.no_grad():
            output = self.reference.generate(
                torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
            )
        return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tiny_model):
    return Pair(tiny_model(request.param))


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_of_tiny_models_are_within_1e_4(tiny, length):
    tiny.check_logits(tiny.prompt(length))


@pytest.mark.parametrize("length", LENGTHS)
def test_64_greedy_tokens_of_tiny_models_are_equal(tiny, length):
    prompt = tiny.prompt(length)
    assert tiny.greedy(prompt, 64) == tiny.reference_greedy(prompt, 64)


@pytest.fixture(scope="module")
def embedded(embedded_model_dir):
    return Pair(embedded_model_dir, block_size=64, num_blocks=4)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128])
def test_the_embedded_model_gives_the_logits_and_64_greedy_tokens_of_transformers(embedded, length):
    prompt = embedded.prompt(length)
    embedded.check_logits(prompt)
    assert embedded.greedy(prompt, 64) == embedded.reference_greedy(prompt, 64)
