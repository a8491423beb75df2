"""Sampling on a GPU makes the choices of engine/sampling.py, at the size of a real vocabulary and inside a CUDA graph.
Needs a CUDA device."""

import pytest
import torch

from engine.device_sampler import DeviceSampler
from tests.engine.test_device_sampler import (
    CHOICES,
    admitted,
    assert_same,
    check_filtered,
    check_one_parameter,
    check_plain,
    check_steps_ahead_of_the_host,
    make_case,
    make_plain_case,
    make_sequence,
    new_sampler,
    sample_all_plain,
    sample_everything,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB = 151_936


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("vocab", [1, 1025, 32_000, VOCAB])
def test_mixed_parameters_give_the_tokens_and_logprobs_of_the_reference(vocab, number):
    check_filtered(72, vocab, number, "cuda", True)


@pytest.mark.parametrize("name", CHOICES)
def test_each_parameter_alone_gives_the_tokens_of_the_reference(name):
    check_one_parameter(name, VOCAB, "cuda", True)


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("top_k", [0, 3, 50, 1000, 20_000])
def test_filters_together_give_the_tokens_of_the_reference(top_k, top_p):
    check_filtered(24, VOCAB, 3, "cuda", True, temperature=0.8, top_k=top_k, top_p=top_p)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 1025, VOCAB])
def test_plain_rows_give_the_tokens_of_the_reference(vocab, dtype):
    check_plain(96, vocab, 7, "cuda", True, dtype)


@pytest.mark.parametrize("vocab", [97, VOCAB])
def test_penalties_count_tokens_that_the_host_does_not_know_yet(vocab):
    check_steps_ahead_of_the_host(vocab, "cuda", True)


def test_plain_sampling_in_a_graph_follows_new_logits_positions_and_sequences():
    count = 33
    sampler = new_sampler(count, VOCAB, "cuda", True)
    logits = torch.zeros(count, VOCAB, dtype=torch.float16, device="cuda")
    slots, positions, out = torch.zeros(3, count, dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        sampler.sample_plain(logits, slots, positions, out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample_plain(logits, slots, positions, out)
    for seed in range(4):
        case, sequences = make_plain_case(count, VOCAB, seed)
        case = case.half()
        slots.copy_(torch.tensor(admitted(sampler, sequences)))
        positions.copy_(torch.tensor([len(sequence.output_token_ids) for sequence in sequences]))
        logits.copy_(case)
        out.fill_(-77)
        graph.replay()
        assert_same([(token, None) for token in out.tolist()], case, sequences)


def test_no_call_waits_for_the_device():
    logits, sequences = make_case(24, 4000, 1)
    sampler = new_sampler(24, 4000, "cuda", True)
    admitted(sampler, sequences)  # allocates the counts
    device_logits = logits.cuda()
    out = torch.zeros(24, dtype=torch.int32, device="cuda")
    indices = torch.arange(24, dtype=torch.int32, device="cuda")
    positions = [len(sequence.output_token_ids) for sequence in sequences]
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots = admitted(sampler, sequences)
        sampler.sample_plain(device_logits, indices, indices, out)
        sampler.sample_rest(device_logits, list(range(24)), slots, positions, sequences, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_after_warm_up_nothing_is_compiled(dtype):
    from engine.kernels.sampling import triton_filtered

    sampler = DeviceSampler(VOCAB, 64, "cuda", True)
    sampler.warm_up(dtype)

    def num_compiled() -> int:
        kernels = [triton_filtered._adjust_kernel, triton_filtered._top_k_kernel, triton_filtered._weigh_kernel]
        kernels.append(triton_filtered._choose_kernel)
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    before = num_compiled()
    for count in (1, 2, 3, 8):
        logits, sequences = make_case(count, VOCAB, count)
        sample_everything(sampler, logits.to(dtype), admitted(sampler, sequences), sequences)
    assert num_compiled() == before


def test_triton_and_torch_agree_on_many_draws():
    logits = torch.randn(256, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    sequences = [make_sequence(seed=seed, temperature=1.0) for seed in range(256)]
    tokens = []
    for use_triton in (True, False):
        sampler = new_sampler(256, VOCAB, "cuda", use_triton)
        slots = admitted(sampler, sequences)
        parts = [
            sample_all_plain(sampler, logits[i : i + 32], slots[i : i + 32], sequences[i : i + 32])
            for i in range(0, 256, 32)
        ]
        tokens.append(sum(parts, []))
    assert tokens[0] == tokens[1]
