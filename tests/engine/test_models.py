"""What the families can switch on, against transformers on the same directory; chunks and batches change nothing.

Plain prompts of every family, and the embedded model, are in test_parity.py.
"""

import random

import pytest
import torch
import transformers

from engine.kv_pool import KVPool
from engine.runner import ModelRunner, SequenceChunk
from tests.reproducible import reproducible_products
from tests.tiny_models import FAMILIES, VOCAB_SIZE

BLOCK = 16
NUM_BLOCKS = 80
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 70)

VARIANTS = {
    "qwen3-untied": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-epsilon": ("qwen3", {"rms_norm_eps": 0.05}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
        },
    ),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2-yarn": (
        "qwen2",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 8, "num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "mistral-tied": ("mistral", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 13}),
    "mistral-window-of-a-block": ("mistral", {"sliding_window": BLOCK}),
}


def load(directory, num_blocks: int = NUM_BLOCKS) -> ModelRunner:
    runner = ModelRunner.load(directory, block_size=BLOCK, max_model_len=num_blocks * BLOCK)
    runner.pool = KVPool.allocate(runner.layout, num_blocks)
    runner.pool.tensor.normal_()
    return runner


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(VOCAB_SIZE), k=length)


def tables(*lengths: int) -> list[list[int]]:
    """Block tables for sequences of these lengths, in no order, without a common block."""
    ids = random.Random(5).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [[ids.pop() for _ in range(-(-length // BLOCK))] for length in lengths]


def in_chunks(runner: ModelRunner, token_ids: list[int], table: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits of every token, computed in chunks of these sizes, the last one repeated."""
    parts, start = [], 0
    while start < len(token_ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        parts.append(runner.run([SequenceChunk(token_ids[start : start + size], start, table, "all")]))
        start += size
    return torch.cat(parts)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_gives_the_logits_and_64_greedy_tokens_of_transformers(tiny_model, name):
    family, options = VARIANTS[name]
    directory = tiny_model(family, **options)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    runner = load(directory)
    (table,) = tables(70 + 64)
    for length in LENGTHS:
        tokens = prompt(length)
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        given = runner.run([SequenceChunk(tokens, 0, table, "all")])
        torch.testing.assert_close(given, expected, atol=1e-4, rtol=0)
    while len(tokens) < 70 + 64:
        tokens.append(int(given[-1].argmax()))
        given = runner.run([SequenceChunk(tokens[-1:], len(tokens) - 1, table)])
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0, 69:-1].argmax(-1)
    assert tokens[70:] == expected.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [[1], [7], [BLOCK], [BLOCK + 1], [64], [3, 90, 1]])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(tiny_model, family, sizes):
    runner = load(tiny_model(family))
    tokens = prompt(100)
    whole, chunked = tables(100, 100)
    expected = runner.run([SequenceChunk(tokens, 0, whole, "all")])
    torch.testing.assert_close(in_chunks(runner, tokens, chunked, list(sizes)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3-layer-types", "qwen2-window", "mistral-window", "mistral-window-of-a-block"])
def test_windows_hold_across_chunks(tiny_model, name):
    family, options = VARIANTS[name]
    runner = load(tiny_model(family, **options))
    tokens = prompt(300)
    whole, chunked = tables(300, 300)
    expected = runner.run([SequenceChunk(tokens, 0, whole, "all")])
    given = in_chunks(runner, tokens, chunked, [50, 1, 200, 1])
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=0)


def mixed_batch(runner: ModelRunner) -> tuple[torch.Tensor, torch.Tensor]:
    """The same chunks in one batch and one by one: a whole prompt, later chunks, single tokens far and near."""
    ranges = [(0, 30), (64, 100), (99, 100), (5, 6), (16, 17), (0, 1), (250, 251), (20, 85)]
    sequences = [prompt(end, seed) for seed, (_, end) in enumerate(ranges)]
    blocks = tables(*(end for _, end in ranges))
    for (start, _), tokens, table in zip(ranges, sequences, blocks, strict=True):
        if start:
            runner.run([SequenceChunk(tokens[:start], 0, table, "none")])
    chunks = [
        SequenceChunk(tokens[start:], start, table, "all")
        for (start, _), tokens, table in zip(ranges, sequences, blocks, strict=True)
    ]
    together = runner.run(chunks)
    return together, torch.cat([runner.run([chunk]) for chunk in chunks])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_gives_each_chunk_what_it_gets_alone(tiny_model, family):
    together, alone = mixed_batch(load(tiny_model(family)))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@reproducible_products
@pytest.mark.parametrize("name", ["qwen3-bias", "qwen2-window", "llama-biases", "mistral-window"])
def test_neither_batch_nor_chunks_change_a_bit_of_the_logits(tiny_model, name):
    family, options = VARIANTS[name]
    runner = load(tiny_model(family, **options))
    together, alone = mixed_batch(runner)
    assert torch.equal(together, alone)
    tokens = prompt(600)
    whole, chunked = tables(600, 600)
    expected = runner.run([SequenceChunk(tokens, 0, whole, "all")])
    for sizes in ([190, 3, 1, 1, 1, 64], [511, 1]):
        assert torch.equal(in_chunks(runner, tokens, chunked, sizes), expected)
