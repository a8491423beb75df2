"""Sampling in plain torch, the reference of the Triton kernels: every row sorted, noise for every token, all float64.

Nothing here waits for the device, so it can be captured in a CUDA graph as well.
"""

import torch

from engine.kernels.sampling.batch import (
    FREQUENCY,
    LOG_MIN_P,
    ONE_OUTPUT,
    PRESENCE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    FilteredBatch,
)

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_WORD_MASK = 0xFFFFFFFF


def draw_plain(
    logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, out: torch.Tensor
) -> None:
    """Greedy or temperature only. logits `[B, V]`; slots, positions, out int32 `[B]`; table float64
    `[num_slots, NUM_PARAMETERS]`. out[b] = -1 for a row without a finite maximum, and for a negative slot."""
    parameters = table[slots.clamp(min=0).long()]
    peak = logits.amax(-1)
    scores = logits.double()
    drawn = _scale(scores, parameters) + gumbel(token_words(parameters, positions, logits.shape[1]))
    is_greedy = parameters[:, TEMPERATURE] == 0
    tokens = _first_of_greatest(torch.where(is_greedy[:, None], scores, drawn))
    out.copy_(torch.where(peak.isfinite() & (slots >= 0), tokens, -1))


def draw_filtered(logits: torch.Tensor, batch: FilteredBatch, table: torch.Tensor, out: torch.Tensor) -> None:
    """Everything a request may ask for. logits `[B, V]`; out int32 `[B]`, written at batch.rows."""
    parameters = table[batch.slots]
    raw = logits.index_select(0, batch.rows)
    scores = adjust(raw.double(), batch, parameters)
    peak = scores.amax(-1)
    scaled = _scale(scores, parameters)
    kept = filter_tokens(scaled, parameters)
    drawn = scaled + gumbel(token_words(parameters, batch.positions, logits.shape[1]))
    drawn = torch.where(kept, drawn, -torch.inf)
    takes_best = (parameters[:, TEMPERATURE] == 0) | (peak == -torch.inf)  # -inf: every token is banned
    tokens = _first_of_greatest(torch.where(takes_best[:, None], scores, drawn))
    is_sound = raw.amax(-1).isfinite() & ~peak.isnan() & (peak != torch.inf)
    tokens = torch.where(is_sound, tokens, -1)
    out.index_copy_(0, batch.rows, tokens.to(out.dtype))
    if batch.history is not None:
        where = batch.slots * batch.history.shape[1] + tokens.clamp(min=0)
        batch.history.view(-1).index_add_(0, where, is_sound.int() * ONE_OUTPUT)


def adjust(scores: torch.Tensor, batch: FilteredBatch, parameters: torch.Tensor) -> torch.Tensor:
    """Bias, bans and penalties on scores float64 `[R, V]`, which may be overwritten."""
    where = batch.edits.rows * scores.shape[1] + batch.edits.ids
    scores.view(-1).index_add_(0, where, batch.edits.values)
    if batch.history is not None:
        history = batch.history[batch.slots]
        repetition = parameters[:, REPETITION, None]
        repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
        scores = torch.where((history != 0) & (repetition != 1), repeated, scores)
        counts = history // ONE_OUTPUT
        lowered = scores - (counts * parameters[:, FREQUENCY, None] + parameters[:, PRESENCE, None])
        scores = torch.where(counts > 0, lowered, scores)
    return scores


def filter_tokens(scaled: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """Which tokens top_k, top_p and min_p leave, bool `[R, V]`; scaled: greatest value 0, float64 `[R, V]`."""
    vocab_size = scaled.shape[1]
    top_k = parameters[:, TOP_K, None].long()
    kth = scaled.sort(dim=-1, descending=True).values.gather(-1, (top_k - 1).clamp(0, vocab_size - 1))
    kept = (scaled > -torch.inf) & ((top_k == 0) | (scaled >= kth))
    weights = torch.where(kept, scaled.exp(), 0.0)
    heaviest, order = weights.sort(dim=-1, descending=True, stable=True)
    before = heaviest.cumsum(-1) - heaviest
    in_nucleus = before < parameters[:, TOP_P, None] * weights.sum(-1, keepdim=True)
    in_nucleus[:, 0] = True
    in_nucleus |= parameters[:, TOP_P, None] >= 1
    kept &= torch.zeros_like(kept).scatter_(-1, order, in_nucleus)
    return kept & (scaled >= parameters[:, LOG_MIN_P, None])


def token_words(parameters: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The random word of every token (engine/philox.py), int64 `[R, vocab_size]`."""
    seeds = parameters.view(torch.int64)[:, SEED, None]
    keys = [seeds & _WORD_MASK, (seeds >> 32) & _WORD_MASK]
    quads = torch.arange((vocab_size + 3) // 4, device=parameters.device)[None]
    zero = torch.zeros_like(quads)
    c0, c1, c2, c3 = quads, positions.long()[:, None], zero, zero
    for _ in range(_NUM_ROUNDS):
        # The products wrap at 64 bits, signed: the bits are those of the unsigned ones.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) & _WORD_MASK) ^ c1 ^ keys[0], ((p0 >> 32) & _WORD_MASK) ^ c3 ^ keys[1]
        c1, c3 = p1 & _WORD_MASK, p0 & _WORD_MASK
        keys = [(key + step) & _WORD_MASK for key, step in zip(keys, _KEY_STEPS)]
    return torch.stack([c0, c1, c2, c3], -1).flatten(1)[:, :vocab_size]


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise from random words, float64."""
    return -torch.log(-torch.log((words + 0.5) * 2.0**-32))


def _scale(scores: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """Log-probabilities up to a constant at the row's temperature; greatest value 0. Greedy rows are not scaled."""
    temperature = parameters[:, TEMPERATURE, None]
    return (scores - scores.amax(-1, keepdim=True)) / torch.where(temperature == 0, 1.0, temperature)


def _first_of_greatest(values: torch.Tensor) -> torch.Tensor:
    """Index of the greatest value of each row, of equal ones the first; int64 `[R]`."""
    vocab_size = values.shape[1]
    ids = torch.arange(vocab_size, device=values.device)
    first = torch.where(values == values.amax(-1, keepdim=True), ids, vocab_size).amin(-1)
    return first.clamp(max=vocab_size - 1)
