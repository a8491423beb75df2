import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.philox import gumbel, token_words
from engine.request import Request, SamplingParams, Sequence
from engine.sampling import MIN_LOGPROB, adjust, choose, draw, filter_tokens, prompt_logprobs, sample

VOCAB = 512


def make_sequence(prompt=(1, 2, 3), output=(), **sampling) -> Sequence:
    sampling = {"max_tokens": 1000, **sampling}
    return Sequence(Request("r", list(prompt), SamplingParams(**sampling), output_token_ids=list(output)))


def make_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def kept_by(row: torch.Tensor, **sampling) -> set[int]:
    scores = row.numpy().astype(np.float64)
    scores = (scores - scores.max()) / sampling.get("temperature", 1.0)
    return set(filter_tokens(scores, make_sequence(**sampling).sampling).tolist())


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    total = sum(counts)
    return sum((count - total * p) ** 2 / (total * p) for count, p in zip(counts, probabilities))


# Filters, against transformers


@pytest.mark.parametrize(
    "sampling, warpers",
    [
        ({"top_k": 1}, [TopKLogitsWarper(1)]),
        ({"top_k": 40}, [TopKLogitsWarper(40)]),
        ({"top_k": 5000}, [TopKLogitsWarper(5000)]),
        ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
        ({"top_p": 0.5}, [TopPLogitsWarper(0.5)]),
        ({"top_p": 0.01}, [TopPLogitsWarper(0.01)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"min_p": 1.0}, [MinPLogitsWarper(1.0)]),
        ({"temperature": 0.3, "top_p": 0.9}, [TemperatureLogitsWarper(0.3), TopPLogitsWarper(0.9)]),
        ({"temperature": 2.5, "min_p": 0.2}, [TemperatureLogitsWarper(2.5), MinPLogitsWarper(0.2)]),
        ({"top_k": 20, "top_p": 0.7}, [TopKLogitsWarper(20), TopPLogitsWarper(0.7)]),
        (
            {"temperature": 1.7, "top_k": 50, "top_p": 0.95, "min_p": 0.05},
            [TemperatureLogitsWarper(1.7), TopKLogitsWarper(50), TopPLogitsWarper(0.95), MinPLogitsWarper(0.05)],
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.2, 3.0])
def test_filters_keep_the_tokens_that_transformers_keeps(sampling, warpers, scale):
    logits = make_logits(20, scale=scale)
    expected = LogitsProcessorList(warpers)(torch.zeros(20, 1, dtype=torch.long), logits.double())
    for row, wanted in zip(logits, expected):
        assert kept_by(row, **sampling) == set(torch.nonzero(wanted > -torch.inf)[:, 0].tolist())


def test_top_k_keeps_all_tokens_tied_with_the_kth_as_transformers_does():
    row = torch.tensor([1.0, 5.0, 3.0, 3.0, 3.0, 0.0])
    expected = TopKLogitsWarper(2)(torch.zeros(1, 1, dtype=torch.long), row[None])[0]
    assert kept_by(row, top_k=2) == set(torch.nonzero(expected > -torch.inf)[:, 0].tolist()) == {1, 2, 3, 4}


def test_top_p_keeps_the_lowest_ids_of_equally_likely_tokens():
    assert kept_by(torch.zeros(10), top_p=0.35) == {0, 1, 2, 3}


def test_top_p_of_zero_keeps_the_most_likely_token():
    assert kept_by(torch.tensor([0.0, 2.0, 1.0]), top_p=0.0) == {1}


# Penalties, bias and bans


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_over_prompt_and_output_equals_transformers(penalty):
    logits = make_logits(1)
    prompt, output = [3, 3, 7, 500], [9, 7, 11]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.double().clone())
    got = adjust(logits[0].numpy(), make_sequence(prompt, output, repetition_penalty=penalty))
    np.testing.assert_allclose(got, expected[0].numpy(), rtol=1e-6)


def test_frequency_and_presence_penalties_count_output_tokens_only():
    row = make_logits(1)[0]
    output = [5, 5, 5, 8]
    got = adjust(row.numpy(), make_sequence([5, 6, 6], output, frequency_penalty=0.4, presence_penalty=-0.7))
    for token_id in range(VOCAB):
        count = output.count(token_id)
        expected = row[token_id].item() - count * 0.4 - (count > 0) * -0.7
        assert got[token_id] == pytest.approx(expected, abs=1e-9)


def test_logit_bias_is_added_before_the_repetition_penalty():
    row = torch.tensor([1.0, -3.0, 2.0])
    got = adjust(row.numpy(), make_sequence([1], logit_bias={1: 5.0, 2: -1.0}, repetition_penalty=2.0))
    assert got.tolist() == [1.0, (-3.0 + 5.0) / 2.0, 1.0]


def test_logit_bias_forces_and_forbids_tokens():
    row = torch.tensor([[1.0, 4.0, 2.0]])
    assert sample(row, [make_sequence(temperature=0, logit_bias={2: 100.0})])[0].token_id == 2
    assert sample(row, [make_sequence(temperature=0, logit_bias={1: -100.0})])[0].token_id == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bans_what_would_end_the_sequence_until_then(temperature):
    row = torch.full((1, 8), -5.0)
    row[0, 4] = row[0, 6] = 50.0
    row[0, 1] = 10.0
    rules = {"temperature": temperature, "min_tokens": 2, "eos_token_ids": [4], "stop_token_ids": [6]}
    assert sample(row, [make_sequence(output=[], **rules)])[0].token_id == 1
    assert sample(row, [make_sequence(output=[1], **rules)])[0].token_id == 1
    assert sample(row, [make_sequence(output=[1, 1], **rules)])[0].token_id in (4, 6)


def test_banning_the_whole_vocabulary_still_yields_a_token():
    for temperature in (0.0, 1.0):
        sequence = make_sequence(temperature=temperature, min_tokens=1, stop_token_ids=list(range(8)))
        assert 0 <= sample(torch.zeros(1, 8), [sequence])[0].token_id < 8


# Greedy


@pytest.mark.parametrize("logprobs", [None, 2])
def test_greedy_takes_the_lowest_id_of_equals(logprobs):
    row = torch.zeros(1, 40_000)
    row[0, [31_999, 17, 39_999, 17_000]] = 2.0
    token = sample(row, [make_sequence(temperature=0, logprobs=logprobs)])[0]
    assert token.token_id == 17
    if logprobs:
        assert [token_id for token_id, _ in token.logprobs.top] == [17, 17_000]


def test_greedy_equals_argmax_in_a_mixed_batch():
    logits = make_logits(16)
    kinds = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0, "logprobs": 0}, {"temperature": 0, "seed": 7}]
    tokens = sample(logits, [make_sequence(**kinds[i % 4]) for i in range(16)])
    for i in range(16):
        if kinds[i % 4]["temperature"] == 0:
            assert tokens[i].token_id == logits[i].argmax().item()


def test_the_smallest_temperature_is_greedy():
    logits = make_logits(8)
    tokens = sample(logits, [make_sequence(temperature=1e-300, seed=i) for i in range(8)])
    assert [token.token_id for token in tokens] == logits.argmax(-1).tolist()


# The seeded draw

CHI_SQUARE_999 = {5: 20.515, 15: 37.697}
"""0.999 quantiles by degrees of freedom, from the usual table."""


def test_draws_over_seeds_follow_the_softmax():
    logits = make_logits(1, vocab=16, scale=1.0)
    num_draws = 6000
    tokens = sample(
        logits.expand(num_draws, -1), [make_sequence(seed=seed, temperature=1.3) for seed in range(num_draws)]
    )
    counts = np.bincount([token.token_id for token in tokens], minlength=16)
    assert chi_square(counts, torch.softmax(logits[0] / 1.3, -1).tolist()) < CHI_SQUARE_999[15]


def test_draws_over_positions_of_one_seed_follow_the_filtered_softmax():
    logits = make_logits(1, vocab=16, scale=1.0)
    row = logits[0].numpy()
    kept = TopKLogitsWarper(6)(torch.zeros(1, 1, dtype=torch.long), logits)
    sequence = make_sequence(seed=2**40 + 5, top_k=6)
    counts = np.zeros(16, dtype=int)
    for _ in range(4000):
        token_id = choose(row, sequence)
        sequence.output_token_ids.append(token_id)
        counts[token_id] += 1
    chosen = torch.nonzero(kept[0] > -torch.inf)[:, 0].tolist()
    assert sorted(np.flatnonzero(counts).tolist()) == chosen and len(chosen) == 6
    assert chi_square(counts[chosen], torch.softmax(kept[0], -1)[chosen].tolist()) < CHI_SQUARE_999[5]


def test_a_draw_is_the_argmax_of_log_probabilities_plus_gumbel_noise_of_seed_position_and_token():
    logits = make_logits(50, vocab=300)
    log_p = torch.log_softmax(logits.double() / 0.8, -1).numpy()
    for i in range(50):
        noise = gumbel(token_words(1000 + i, i, np.arange(300)))
        sequence = make_sequence(seed=1000 + i, temperature=0.8, output=[0] * i)
        assert sample(logits[i : i + 1], [sequence])[0].token_id == int(np.argmax(log_p[i] + noise))


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 12.0])
def test_the_shortcut_for_many_candidates_makes_the_same_draws_as_noise_on_every_token(scale):
    rng = np.random.default_rng(1)
    token_ids = np.sort(rng.choice(49_152, 8_000, replace=False))
    for seed in range(150):
        scores = rng.standard_normal(8_000) * scale
        everywhere = scores + gumbel(token_words(seed, 4, token_ids))
        assert draw(scores - scores.max(), token_ids, seed, 4) == token_ids[everywhere.argmax()]


def test_seed_and_position_fix_the_draw_and_both_change_it():
    logits = make_logits(1, scale=0.1)

    def drawn(seed, position):
        return sample(logits, [make_sequence(seed=seed, output=[0] * position)])[0].token_id

    assert drawn(3, 0) == drawn(3, 0)
    assert len({drawn(seed, 0) for seed in (3, 4, 3 + 2**32, 2**63, 2**64 - 1)}) > 1
    assert len({drawn(3, position) for position in range(5)}) > 1


def test_a_rows_token_and_logprobs_do_not_depend_on_the_batch_it_is_in():
    rng = np.random.default_rng(5)
    logits = make_logits(24, vocab=5000)
    sequences = [
        make_sequence(
            prompt=rng.integers(5000, size=9).tolist(),
            output=rng.integers(5000, size=i % 4).tolist(),
            seed=int(rng.integers(2**63)),
            temperature=[0.0, 1.0, 0.6][i % 3],
            top_p=[1.0, 0.9][i % 2],
            top_k=[0, 0, 30][i % 3],
            min_p=[0.0, 0.0, 0.0, 0.02][i % 4],
            repetition_penalty=[1.0, 1.2][i // 2 % 2],
            frequency_penalty=[0.0, 0.5][i // 3 % 2],
            logprobs=[None, 3, 0][i // 2 % 3],
            min_tokens=i % 5,
            eos_token_ids=[int(logits[i].argmax())],
        )
        for i in range(24)
    ]
    alone = [sample(logits[i : i + 1].clone(), [sequences[i]])[0] for i in range(24)]
    for size in (2, 7, 24):
        rows = rng.permutation(24)[:size].tolist()
        assert sample(logits[rows], [sequences[i] for i in rows]) == [alone[i] for i in rows]


def test_sampling_does_not_change_the_logits():
    logits = make_logits(2)
    before = logits.clone()
    sample(logits, [make_sequence(repetition_penalty=2.0, logit_bias={1: 3.0}, logprobs=2)] * 2)
    assert torch.equal(logits, before)


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, 8), []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_broken_logits_gives_no_token_and_harms_no_other_row(bad, temperature):
    logits = make_logits(2)
    expected = sample(logits[:1], [make_sequence(temperature=temperature)])
    logits[1, 40] = bad
    assert sample(logits, [make_sequence(temperature=temperature)] * 2) == [*expected, None]


def test_a_penalty_that_overflows_gives_no_token_instead_of_an_error():
    broken = make_sequence(range(VOCAB), temperature=1.0, repetition_penalty=1e-308)
    assert sample(make_logits(1), [broken]) == [None]


# Log-probabilities


def test_logprobs_are_those_of_the_unmodified_logits():
    logits = make_logits(4)
    expected = torch.log_softmax(logits.double(), -1)
    rules = {"temperature": 0.7, "top_k": 3, "repetition_penalty": 3.0, "logit_bias": {9: 60.0}, "logprobs": 5}
    for i, token in enumerate(sample(logits, [make_sequence(seed=i, **rules) for i in range(4)])):
        entry = token.logprobs
        values, ids = expected[i].topk(5)
        assert entry.token_id == token.token_id
        assert entry.logprob == pytest.approx(expected[i, token.token_id].item(), abs=1e-9)
        assert [token_id for token_id, _ in entry.top] == ids.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(values.tolist(), abs=1e-9)


@pytest.mark.parametrize("top", [0, 1, 20, VOCAB, VOCAB + 50])
def test_top_logprobs_are_the_n_most_likely(top):
    logits = make_logits(3)
    expected = torch.log_softmax(logits.double(), -1)
    for i, entry in enumerate(prompt_logprobs(logits, [7, 0, 511], top)):
        wanted = expected[i].topk(min(top, VOCAB))
        assert [token_id for token_id, _ in entry.top] == wanted.indices.tolist()
        assert entry.logprob == pytest.approx(expected[i, [7, 0, 511][i]].item(), abs=1e-9)


def test_top_logprobs_of_equally_likely_tokens_are_the_lowest_ids_in_order():
    row = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 2.0]])
    assert [token_id for token_id, _ in prompt_logprobs(row, [0], 4)[0].top] == [5, 1, 3, 0]


def test_an_impossible_token_gets_a_finite_logprob():
    row = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    entry = prompt_logprobs(row, [3], 4)[0]
    assert entry.logprob == MIN_LOGPROB
    assert all(math.isfinite(logprob) for _, logprob in entry.top) and [t for t, _ in entry.top] == [2, 0, 1, 3]
    token = sample(row, [make_sequence(logprobs=4)])[0]
    assert token.token_id in (0, 2) and all(math.isfinite(logprob) for _, logprob in token.logprobs.top)


def test_logprobs_are_built_in_numbers_so_that_they_serialize_to_json():
    entry = prompt_logprobs(make_logits(1), [3], 2)[0]
    token = sample(make_logits(1), [make_sequence(logprobs=1)])[0]
    values = [entry.token_id, entry.logprob, *entry.top[0], token.token_id, token.logprobs.logprob]
    assert [type(value) for value in values] == [int, float, int, float, int, float]
