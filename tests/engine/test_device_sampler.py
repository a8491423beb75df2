"""Sampling on the device makes the choices of engine/sampling.py: the torch path, and the Triton kernels on CPU."""

import copy
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.device_sampler import ROWS_AT_A_TIME, DeviceSampler
from engine.kernels.sampling import torch_draw
from engine.kernels.sampling.batch import parameter_row
from engine.philox import token_words
from engine.request import Request, SamplingParams, Sequence
from engine.sampling import sample

ROOT = Path(__file__).resolve().parent.parent.parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CHOICES = {
    "temperature": [0.0, 1e-300, 1e-31, 0.02, 0.6, 0.6, 1.0, 1.0, 1.7, 1e6, 1e300],
    "top_k": [0, 0, 0, 1, 2, 20, 200, 10**6],
    "top_p": [1.0, 1.0, 1.0, 0.0, 1e-9, 0.3, 0.8, 0.95, 0.999999],
    "min_p": [0.0, 0.0, 0.0, 1e-4, 0.2, 1.0],
    "repetition_penalty": [1.0, 1.0, 0.6, 1.3],
    "frequency_penalty": [0.0, 0.0, -0.4, 1.1],
    "presence_penalty": [0.0, 0.0, 0.9],
    "logprobs": [None, None, 0, 3, 20],
    "min_tokens": [0, 0, 1, 4],
    "seed": [0, 7, 2**32 + 1, 2**63 + 12_345, 2**64 - 1, -1, -(2**63)],
}
KINDS_OF_LOGITS = ["normal", "flat", "peaked", "coarse", "equal", "mostly impossible", "impossible", "nan", "infinite"]


def make_sequence(prompt=(1, 2, 3), output=(), **sampling) -> Sequence:
    sampling = {"max_tokens": 1000, **sampling}
    return Sequence(Request("r", list(prompt), SamplingParams(**sampling), output_token_ids=list(output)))


def make_row(kind: str, vocab: int, rng: np.random.Generator) -> np.ndarray:
    row = rng.standard_normal(vocab)
    row *= {"flat": 0.02, "peaked": 9.0, "equal": 0.0}.get(kind, 2.5)
    if kind == "coarse":
        row = np.round(row)
    if kind == "mostly impossible":
        row[rng.random(vocab) < 0.98] = -math.inf
    if kind == "impossible":
        row[:] = -math.inf
    if kind in ("nan", "infinite"):
        row[rng.integers(vocab)] = math.nan if kind == "nan" else math.inf
    return row


def make_case(count: int, vocab: int, number: int, **fixed) -> tuple[torch.Tensor, list[Sequence]]:
    """Logits float32 `[count, vocab]`, exact in float16 every other row, and as many sequences of mixed parameters."""
    rng = np.random.default_rng(number)
    kinds = [KINDS_OF_LOGITS[i % 12] if i % 12 < len(KINDS_OF_LOGITS) else "normal" for i in range(count)]
    logits = torch.from_numpy(np.stack([make_row(kind, vocab, rng) for kind in kinds])).float()
    logits[::2] = logits[::2].half().float()
    sequences = []
    for row in logits:
        sampling = {name: values[rng.integers(len(values))] for name, values in CHOICES.items()}
        likely = row.topk(min(8, vocab)).indices.tolist()
        if rng.random() < 0.3:
            ids = [likely[0], *rng.integers(vocab, size=4).tolist()]
            sampling["logit_bias"] = {token_id: float(rng.choice([-100.0, -1.5, 2.5, 100.0])) for token_id in ids}
        sampling["eos_token_ids"] = likely[:2]
        sampling["stop_token_ids"] = likely[1:3]
        output = rng.choice(likely, size=rng.integers(5)).tolist()
        sampling |= fixed
        if sampling["temperature"] == 1e300:
            sampling["min_p"] = 0.0  # all weights are equal, all scores differ: the reference may keep no token at all
        sequences.append(make_sequence(rng.integers(vocab, size=6).tolist(), output, **sampling))
    return logits, sequences


def admitted(sampler: DeviceSampler, sequences: list[Sequence]) -> list[int]:
    """A slot for each sequence, not in order."""
    slots = [(7 * i + 3) % sampler.num_slots for i in range(len(sequences))]
    assert len(set(slots)) == len(slots)
    for slot, sequence in zip(slots, sequences):
        sampler.admit(slot, sequence)
    return slots


def new_sampler(count: int, vocab: int, device: str, use_triton: bool) -> DeviceSampler:
    num_slots = next(n for n in range(count, 2 * count + 8) if math.gcd(n, 7) == 1)
    return DeviceSampler(vocab, num_slots, device, use_triton)


def sample_everything(
    sampler: DeviceSampler, logits: torch.Tensor, slots: list[int], sequences: list[Sequence]
) -> list[tuple]:
    """(token, logprobs) of each row, all through sample_rest. The rows are sampled in reverse order."""
    out = torch.full((len(sequences) + 1,), -77, dtype=torch.int32, device=sampler.device)
    rows = list(range(len(sequences)))[::-1]
    pending = sampler.sample_rest(
        logits.to(sampler.device),
        rows,
        [slots[row] for row in rows],
        [len(sequences[row].output_token_ids) for row in rows],
        [sequences[row] for row in rows],
        out,
    )
    entries = [None] * len(rows) if pending is None else pending.read()
    *tokens, untouched = out.tolist()
    assert untouched == -77
    return list(zip(tokens, entries[::-1]))


def assert_same(got: list[tuple], logits: torch.Tensor, sequences: list[Sequence]) -> None:
    """The tokens and log-probabilities that engine.sampling gives."""
    for i, (wanted, (token, entry)) in enumerate(zip(sample(logits.float(), sequences), got)):
        assert token == (-1 if wanted is None else wanted.token_id), f"row {i}: {sequences[i].sampling}"
        assert (entry is None) == (wanted is None or wanted.logprobs is None)
        if entry is not None:
            assert entry.token_id == wanted.logprobs.token_id
            assert entry.logprob == pytest.approx(wanted.logprobs.logprob, abs=1e-5)
            assert [token_id for token_id, _ in entry.top] == [token_id for token_id, _ in wanted.logprobs.top]
            values = [logprob for _, logprob in wanted.logprobs.top]
            assert [logprob for _, logprob in entry.top] == pytest.approx(values, abs=1e-5)


def check_filtered(count: int, vocab: int, number: int, device: str, use_triton: bool, **fixed) -> None:
    logits, sequences = make_case(count, vocab, number, **fixed)
    sampler = new_sampler(count, vocab, device, use_triton)
    slots = admitted(sampler, sequences)
    assert_same(sample_everything(sampler, logits, slots, sequences), logits, sequences)


def check_one_parameter(name: str, vocab: int, device: str, use_triton: bool) -> None:
    """Every value of one parameter, the others (but the seed) left at what changes nothing."""
    neutral = vars(SamplingParams(max_tokens=1))
    fixed = {other: neutral[other] for other in CHOICES if other != "seed"} | {"logit_bias": {}}
    for value in CHOICES[name]:
        check_filtered(12, vocab, 11, device, use_triton, **{**fixed, name: value})


def sample_all_plain(
    sampler: DeviceSampler, logits: torch.Tensor, slots: list[int], sequences: list[Sequence]
) -> list[tuple]:
    """(token, None) of each row; a padding row stands before the first."""
    padded = torch.cat([logits[:1], logits]).to(sampler.device)
    positions = [0, *(len(sequence.output_token_ids) for sequence in sequences)]
    indices = torch.tensor([[-1, *slots], positions], dtype=torch.int32).to(sampler.device)
    out = torch.full((len(padded),), -77, dtype=torch.int32, device=sampler.device)
    sampler.sample_plain(padded, indices[0], indices[1], out)
    padding, *tokens = out.tolist()
    assert padding == -1
    return [(token, None) for token in tokens]


def make_plain_case(count: int, vocab: int, number: int) -> tuple[torch.Tensor, list[Sequence]]:
    logits, mixed = make_case(count, vocab, number)
    temperatures = [0.6, 1.0, 1e-6, 0.0, 0.0, 1.7, 1e6]  # greedy for rows with ties among the first
    sequences = [
        make_sequence(
            output=sequence.output_token_ids,
            seed=sequence.sampling.seed,
            temperature=temperatures[i % len(temperatures)],
        )
        for i, sequence in enumerate(mixed)
    ]
    return logits, sequences


def check_plain(count: int, vocab: int, number: int, device: str, use_triton: bool, dtype=torch.float32) -> None:
    logits, sequences = make_plain_case(count, vocab, number)
    logits = logits.to(dtype)
    sampler = new_sampler(count, vocab, device, use_triton)
    assert all(sampler.is_plain(sequence) for sequence in sequences)
    slots = admitted(sampler, sequences)
    assert_same(sample_all_plain(sampler, logits, slots, sequences), logits, sequences)


def check_steps_ahead_of_the_host(vocab: int, device: str, use_triton: bool, steps: int = 5) -> None:
    """Several steps without telling the sampler's sequence about the tokens, against sequences that know them."""
    rng = np.random.default_rng(4)
    penalties = [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.7, "frequency_penalty": 0.3, "presence_penalty": -0.2},
    ]
    for round_number in range(2):  # the second round finds the slots used
        known = [
            make_sequence(
                rng.integers(vocab, size=5).tolist(), [3], temperature=t, min_tokens=3, eos_token_ids=[5], **p
            )
            for p in penalties
            for t in (0.0, 0.8)
        ]
        if round_number == 0:
            sampler = new_sampler(len(known), vocab, device, use_triton)
        lagging = copy.deepcopy(known)
        slots = admitted(sampler, lagging)
        base = torch.from_numpy(rng.standard_normal((len(known), vocab))).float()
        base[:, 5] = 6.0  # what min_tokens bans is the most likely, and then what penalties push down
        for _ in range(steps):
            out = torch.full((len(known),), -77, dtype=torch.int32, device=sampler.device)
            positions = [len(sequence.output_token_ids) for sequence in known]
            sampler.sample_rest(base.to(device), list(range(len(known))), slots, positions, lagging, out)
            assert_same([(token, None) for token in out.tolist()], base, known)
            for sequence, token in zip(known, out.tolist()):
                sequence.output_token_ids.append(token)
        for slot in slots:
            sampler.release(slot)


# The torch path


@pytest.mark.parametrize("vocab", [1, 5, 301, 1024, 1025, 4000])
def test_mixed_parameters_give_the_tokens_and_logprobs_of_the_reference(vocab):
    check_filtered(ROWS_AT_A_TIME + 8, vocab, vocab, "cpu", False)


@pytest.mark.parametrize("name", CHOICES)
def test_each_parameter_alone_gives_the_tokens_of_the_reference(name):
    check_one_parameter(name, 301, "cpu", False)


@pytest.mark.parametrize("vocab", [1, 301, 4000])
def test_plain_rows_give_the_tokens_of_the_reference(vocab):
    check_plain(36, vocab, vocab, "cpu", False)


def test_penalties_count_tokens_that_the_host_does_not_know_yet():
    check_steps_ahead_of_the_host(97, "cpu", False)


def test_torch_words_are_those_of_philox():
    seeds = [0, -1, 2**63 + 17, 2**40]
    table = torch.stack([parameter_row(SamplingParams(max_tokens=1, seed=seed), 99) for seed in seeds])
    words = torch_draw.token_words(table, torch.tensor([0, 1, 2, 3]), 99)
    for i, seed in enumerate(seeds):
        np.testing.assert_array_equal(words[i].numpy(), token_words(seed, i, np.arange(99)))


def test_a_ban_outweighs_a_bias():
    sequence = make_sequence(temperature=0, logit_bias={2: 100.0}, min_tokens=1, eos_token_ids=[2])
    logits = torch.tensor([[0.0, 1.0, 5.0]])
    sampler = DeviceSampler(3, 1, "cpu", False)
    assert sample_everything(sampler, logits, admitted(sampler, [sequence]), [sequence]) == [(1, None)]


def test_banning_the_whole_vocabulary_yields_the_first_token_as_the_reference_does():
    sequences = [make_sequence(temperature=t, min_tokens=1, stop_token_ids=list(range(8))) for t in (0.0, 1.0)]
    logits = torch.arange(16.0).view(2, 8)
    sampler = DeviceSampler(8, 2, "cpu", False)
    got = sample_everything(sampler, logits, admitted(sampler, sequences), sequences)
    assert got == [(0, None), (0, None)]
    assert_same(got, logits, sequences)


def test_a_slots_next_sequence_does_not_inherit_anything():
    logits = torch.zeros(1, 4)
    sampler = DeviceSampler(4, 1, "cpu", False)
    sampler.admit(0, make_sequence([0, 0], [0], temperature=0, logit_bias={0: -50.0}, presence_penalty=9.0))
    sampler.release(0)
    sequence = make_sequence([1], temperature=0, presence_penalty=1.0)
    assert sample_everything(sampler, logits, admitted(sampler, [sequence]), [sequence]) == [(0, None)]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "top_k": 5, "top_p": 0.1, "min_p": 0.5},
        {"temperature": 0.7, "seed": 9},
        {"temperature": 0.7, "top_k": 1000},
        {"temperature": 0.7, "min_tokens": 2, "eos_token_ids": [1]},
    ],
    ids=str,
)
def test_plain_is_what_needs_no_more_than_a_temperature(sampling):
    assert DeviceSampler(1000, 1, "cpu", False).is_plain(make_sequence(output=[5, 5], **sampling))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "logprobs": 0},
        {"temperature": 0, "logit_bias": {3: 1.0}},
        {"temperature": 0, "repetition_penalty": 1.1},
        {"temperature": 0, "frequency_penalty": -0.1},
        {"temperature": 0, "presence_penalty": 0.1},
        {"temperature": 0, "min_tokens": 3, "eos_token_ids": [1]},
        {"temperature": 0.7, "top_k": 999},
        {"temperature": 0.7, "top_p": 0.99},
        {"temperature": 0.7, "min_p": 0.01},
        {"temperature": 1e-300},
    ],
    ids=str,
)
def test_what_must_be_adjusted_filtered_or_reported_is_not_plain(sampling):
    assert not DeviceSampler(1000, 1, "cpu", False).is_plain(make_sequence(output=[5, 5], **sampling))


def test_token_counts_take_memory_only_once_a_request_has_penalties():
    sampler = DeviceSampler(1000, 4, "cpu", False)
    sampler.admit(0, make_sequence(temperature=0.5, top_k=3, logprobs=2, logit_bias={1: 1.0}))
    assert sampler._history is None
    sampler.admit(1, make_sequence([1, 2, 2], [7, 7], frequency_penalty=0.5))
    assert sampler._history.shape == (4, 1000)


# The Triton kernels, interpreted on CPU


def interpreted(*statements: str) -> None:
    code = "; ".join(["import tests.engine.test_device_sampler as t", *statements])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def check_that_every_token_in_float64_gives_the_same_choice() -> None:
    from engine.kernels.sampling import triton_plain

    logits, sequences = make_plain_case(12, 24, 5)
    sampler = new_sampler(12, 24, "cpu", True)
    sampler._draw_plain = lambda *args: triton_plain.draw_plain(*args, margin=1e6)
    assert_same(sample_all_plain(sampler, logits, admitted(sampler, sequences), sequences), logits, sequences)


def check_groups_of_small_chunks() -> None:
    """As many chunks and groups of them as a large vocabulary has, without its size."""
    from engine.kernels.sampling import triton_filtered

    triton_filtered.CHUNK, triton_filtered.GROUP = 16, 2
    check_filtered(12, 90, 8, "cpu", True, top_p=0.7)
    triton_filtered.CHUNK, triton_filtered.GROUP = 1024, 8


@needs_triton
def test_triton_kernels_give_the_tokens_of_the_reference():
    interpreted(
        "t.check_groups_of_small_chunks()",
        "t.check_filtered(10, 1100, 1, 'cpu', True)",
        "t.check_plain(10, 1100, 2, 'cpu', True)",
        "t.check_that_every_token_in_float64_gives_the_same_choice()",
        "t.check_steps_ahead_of_the_host(23, 'cpu', True, steps=2)",
    )


@needs_triton
def test_triton_kernels_compile_for_turing_within_its_shared_memory():
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.kernels.sampling import triton_filtered, triton_plain

    float32, float64, int32, int64 = "*fp32", "*fp64", "*i32", "*i64"
    common = {"table": float64, "bits": int64, "out": int32, "vocab": "i32", "num_chunks": "i32", "row_stride": "i32"}
    plain = {"logits": "*fp16", "slots": int32, "positions": int32, "peaks": float32, "firsts": int32, "sums": float32}
    plain["margin"] = "fp32"
    filtered = dict.fromkeys(["rows", "slots", "positions", "edit_starts", "edit_ids", "order"], int64)
    filtered |= {"logits": "*fp16", "history": int32, "raw_peaks": float32, "sum_ids": int32}
    names = ["edit_values", "scores", "peaks", "sorted_peaks", "thresholds", "weights", "weight_sums", "sums", "noisy"]
    filtered |= dict.fromkeys(names, float64)
    constants = {"CHUNK": 1024, "CHUNKS": 256, "GROUP": 8}
    kernels = [
        (triton_plain._chunks_kernel, plain, 4),
        (triton_plain._rows_kernel, plain, 4),
        (triton_filtered._adjust_kernel, filtered, 4),
        (triton_filtered._top_k_kernel, filtered, 16),
        (triton_filtered._weigh_kernel, filtered, 4),
        (triton_filtered._choose_kernel, filtered, 16),
    ]
    for kernel, types, num_warps in kernels:
        types = {**types, **common}
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        constexprs = {name: value for name, value in constants.items() if name in kernel.arg_names}
        source = ASTSource(kernel, signature=signature, constexprs=constexprs)
        built = triton.compile(source, target=GPUTarget("cuda", 75, 32), options={"num_warps": num_warps})
        assert ".target sm_75" in built.asm["ptx"]
        assert built.metadata.shared <= 64 * 1024
