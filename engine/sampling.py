"""From logits to tokens: penalties, filters, the seeded draw and log-probabilities.

A row's result is a function of that row's logits, its sequence's parameters and tokens, and (seed, position): never of
the other rows, their order or their number. So batching, topology and speculation cannot change a draw.

The draw is Gumbel-max: the token with the greatest s_i + g_i, lowest id on a tie, where s_i are the adjusted logits
over the temperature (log-probabilities up to a constant) of the tokens that pass the filters, and g_i is Gumbel noise
made from one 32-bit word per token (engine/philox.py). Everything is float64. A GPU kernel that computes the same word
and evaluates -log(-log((word + 0.5) * 2**-32)) makes the same choice unless the two best sums are closer than its
rounding.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from engine.philox import gumbel, token_words
from engine.request import SampledToken, SamplingParams, Sequence, TokenLogprobs

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

MIN_LOGPROB = -9999.0
"""What an impossible token's logprob is reported as: JSON has no infinity."""

_MAX_GUMBEL = 22.88  # just above the noise of the largest word, 33 ln 2
_PILOT_SIZE = 1024


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken | None]:
    """Choose the next token of each sequence.

    logits: float32 `[B, vocab]`, row i for sequences[i]. None for a row without a finite maximum (NaN or infinity in
    the model's output, or made by absurd parameters): that request cannot go on, the others can.
    """
    assert logits.shape[0] == len(sequences), f"{logits.shape[0]} rows of logits for {len(sequences)} sequences"
    if not sequences:
        return []
    logits = logits.detach()
    best = torch.argmax(logits, dim=-1)
    best_logits = logits.gather(-1, best[:, None])[:, 0].tolist()
    best_ids = best.tolist()
    tokens: list[SampledToken | None] = []
    for i, sequence in enumerate(sequences):
        if not math.isfinite(best_logits[i]):
            tokens.append(None)
            continue
        if is_plain_greedy(sequence):
            tokens.append(SampledToken(best_ids[i]))
            continue
        row = logits[i].cpu().numpy()
        token_id = choose(row, sequence)
        if token_id is None:
            tokens.append(None)
            continue
        wanted = sequence.sampling.logprobs
        tokens.append(SampledToken(token_id, None if wanted is None else token_logprobs(row, token_id, wanted)))
    return tokens


def prompt_logprobs(logits: torch.Tensor, next_token_ids: list[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens that followed, with the `top` most likely ones at each position.

    logits: float32 `[n, vocab]`, row i predicts next_token_ids[i].
    """
    assert logits.shape[0] == len(next_token_ids), f"{logits.shape[0]} rows of logits for {len(next_token_ids)} tokens"
    rows = logits.detach().cpu().numpy()
    return [token_logprobs(row, token_id, top) for row, token_id in zip(rows, next_token_ids)]


def is_plain_greedy(sequence: Sequence) -> bool:
    """Whether the next token is simply the most likely one, with nothing to adjust and nothing to report."""
    sampling = sequence.sampling
    return (
        sampling.temperature == 0
        and sampling.logprobs is None
        and not sampling.logit_bias
        and sampling.repetition_penalty == 1
        and sampling.frequency_penalty == 0
        and sampling.presence_penalty == 0
        and not sequence.banned_token_ids
    )


def choose(row: npt.NDArray[np.float32], sequence: Sequence) -> int | None:
    """The next token of one sequence from its logits, `[vocab]`. None when no score is finite for want of range."""
    sampling = sequence.sampling
    scores = adjust(row, sequence)
    peak = scores.max()
    if math.isnan(peak) or peak == math.inf:
        return None
    if sampling.temperature == 0 or peak == -math.inf:  # -inf: every token is banned
        return int(scores.argmax())
    scores -= peak
    with np.errstate(over="ignore"):  # a tiny temperature leaves only the best
        scores /= sampling.temperature
    kept = filter_tokens(scores, sampling)
    return draw(scores[kept], kept, sampling.seed, len(sequence.output_token_ids))


def adjust(row: npt.NDArray[np.float32], sequence: Sequence) -> Floats:
    """Logits after bias, penalties and bans, float64 `[vocab]`.

    Repetition penalty: over prompt and output, a positive logit is divided by it, a negative one multiplied (Keskar et
    al., CTRL, 2019). Frequency and presence: logit - count * frequency - (count > 0) * presence, over the output
    (OpenAI API reference).
    """
    sampling = sequence.sampling
    scores = row.astype(np.float64)
    if sampling.logit_bias:
        scores[list(sampling.logit_bias)] += list(sampling.logit_bias.values())
    if sampling.repetition_penalty != 1:
        seen = np.unique(sequence.token_ids)
        values = scores[seen]
        penalty = sampling.repetition_penalty
        with np.errstate(over="ignore"):
            scores[seen] = np.where(values < 0, values * penalty, values / penalty)
    if (sampling.frequency_penalty or sampling.presence_penalty) and sequence.output_token_ids:
        ids, counts = np.unique(sequence.output_token_ids, return_counts=True)
        scores[ids] -= counts * sampling.frequency_penalty + sampling.presence_penalty
    banned = sequence.banned_token_ids
    if banned:
        scores[banned] = -math.inf
    return scores


def filter_tokens(scores: Floats, sampling: SamplingParams) -> Ids:
    """Token ids that top_k, top_p and min_p, applied in this order, leave; ascending. At least one.

    scores: log-probabilities up to a constant, greatest value 0. The rules are those of transformers' logits warpers:
    tokens tied with the k-th stay; a token goes when the more likely ones already make up top_p of what top_k left (of
    equally likely tokens the lowest ids stay); a token goes when it is less than min_p times as likely as the best one.
    """
    kept: Ids = np.flatnonzero(scores > -math.inf)
    if 0 < sampling.top_k < len(kept):
        values = scores[kept]
        threshold = np.partition(values, len(values) - sampling.top_k)[len(values) - sampling.top_k]
        kept = kept[values >= threshold]
    if sampling.top_p < 1:
        kept = _nucleus(scores, kept, sampling.top_p)
    if sampling.min_p > 0:
        kept = kept[scores[kept] >= math.log(sampling.min_p)]
    return kept


def draw(scores: Floats, token_ids: Ids, seed: int, position: int) -> int:
    """The token with the greatest score + Gumbel noise, of equals the lowest id. `token_ids` ascend.

    For many candidates the noise is only evaluated where it can matter: a pilot group sets a bound, and with the others
    the random word itself tells whether its noise is large enough to pass it. The result is the same.
    """
    if len(token_ids) <= _PILOT_SIZE:
        return int(token_ids[np.argmax(scores + gumbel(token_words(seed, position, token_ids)))])
    pilot = np.argpartition(scores, len(scores) - _PILOT_SIZE)[len(scores) - _PILOT_SIZE :]
    best_others = scores[pilot].min()
    pilot.sort()
    sums = scores[pilot] + gumbel(token_words(seed, position, token_ids[pilot]))
    leader, bound = pilot[sums.argmax()], sums.max()
    possible = np.flatnonzero(scores >= bound - _MAX_GUMBEL)
    words = token_words(seed, position, token_ids[possible])
    # Outside the pilot a token needs noise of at least bound - best_others: a word of at least what gives that noise.
    rivals = possible[words >= math.exp(-math.exp(best_others - bound)) * 2.0**32 - 2.0]
    finalists = np.union1d(rivals, leader)
    noise = gumbel(token_words(seed, position, token_ids[finalists]))
    return int(token_ids[finalists[np.argmax(scores[finalists] + noise)]])


def token_logprobs(row: npt.NDArray[np.float32], token_id: int, top: int) -> TokenLogprobs:
    """Log-softmax of the unmodified logits `[vocab]` at `token_id` and at the `top` most likely tokens (of equally
    likely ones the lowest ids), no value below MIN_LOGPROB."""
    peak = float(row.max())
    shifted = row.astype(np.float64)
    shifted -= peak
    log_total = math.log(np.exp(shifted).sum())

    def logprob(index: int) -> float:
        return max(float(shifted[index]) - log_total, MIN_LOGPROB)

    return TokenLogprobs(token_id, logprob(token_id), [(index, logprob(index)) for index in _most_likely(row, top)])


def _most_likely(row: npt.NDArray[np.float32], count: int) -> list[int]:
    if count == 0:
        return []
    ids = _greatest(row, min(count, len(row)))
    return ids[np.argsort(-row[ids], kind="stable")].tolist()


def _nucleus(scores: Floats, kept: Ids, top_p: float) -> Ids:
    weights = np.exp(scores[kept])
    total = weights.sum()
    # All tokens below this weight together weigh less than 1 - top_p: they go, and need no sorting.
    descending = np.sort(weights[weights >= total * (1 - top_p) / len(weights)])[::-1]
    before = np.cumsum(descending) - descending
    num_kept = max(1, int(np.count_nonzero(before < top_p * total)))
    return kept[_greatest(weights, num_kept)]


def _greatest(values: npt.NDArray[np.floating], count: int) -> Ids:
    """Indices of the `count` greatest values, of equal ones the first; ascending."""
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    chosen = values > threshold
    tied = np.flatnonzero(values == threshold)
    chosen[tied[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)
