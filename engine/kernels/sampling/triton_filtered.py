"""Everything a request may ask for, in Triton: penalties, filters and the draw, without sorting the vocabulary.

    adjust   grid (chunks, R): bias, bans and penalties; float64 scores, and the greatest of each chunk
             (then the chunks of each row are put in descending order of that, a sort of V / 1024 values)
    top_k    grid (R): the k-th greatest score. Bisection between two scores of the row; each step looks only at chunks
             that reach the lower one, and moves a bound onto the next existing score, so it ends with the exact value
    weigh    grid (chunks, R): score over temperature; weight of the tokens that top_k leaves, and their sum; score +
             noise of those that could win, and the greatest of each chunk
    choose   grid (R): the greatest score + noise of the row. With top_p it counts only if the more likely tokens do not
             already make up top_p; else it and all less likely tokens are out, and the best of the rest is looked at.

The last step gives the same token as filtering first: the nucleus holds every token more likely than any of its own.
On average at most 1 + ln(1 / top_p) tokens are looked at, whatever the shape of the distribution.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.sampling.batch import (
    FREQUENCY,
    LOG_MIN_P,
    NUM_PARAMETERS,
    ONE_OUTPUT,
    PRESENCE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    FilteredBatch,
)
from engine.kernels.sampling.triton_noise import gumbel, token_words

CHUNK = 1024
GROUP = 8
"""Chunks that a one-program-a-row kernel reads at a time."""

_TEMPERATURE = tl.constexpr(TEMPERATURE)
_SEED = tl.constexpr(SEED)
_TOP_K = tl.constexpr(TOP_K)
_TOP_P = tl.constexpr(TOP_P)
_LOG_MIN_P = tl.constexpr(LOG_MIN_P)
_REPETITION = tl.constexpr(REPETITION)
_FREQUENCY = tl.constexpr(FREQUENCY)
_PRESENCE = tl.constexpr(PRESENCE)
_WIDTH = tl.constexpr(NUM_PARAMETERS)
_ONE_OUTPUT = tl.constexpr(ONE_OUTPUT)
_UNALIGNED = ["rows", "slots", "positions", "history", "edit_starts", "edit_ids", "edit_values", "out"]
"""Slices and stand-ins: a kernel compiled for one alignment of them would have to be compiled again for another."""
_LEAST_SCORE = tl.constexpr(-26.1)  # of the best score + noise is at least -3.14, noise at most 22.88


@triton.jit
def _penalties(table, slot):
    row = table + slot * _WIDTH
    return tl.load(row + _REPETITION), tl.load(row + _FREQUENCY), tl.load(row + _PRESENCE)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _adjust_kernel(
    logits,
    row_stride,
    rows,
    slots,
    table,
    history,
    edit_starts,
    edit_ids,
    edit_values,
    scores,
    raw_peaks,
    peaks,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + r)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    is_token = ids < vocab
    x = tl.load(logits + tl.load(rows + r) * row_stride + ids, mask=is_token, other=-float("inf")).to(tl.float32)
    tl.store(raw_peaks + r * num_chunks + chunk, tl.max(tl.where(x != x, float("inf"), x), 0))
    score = x.to(tl.float64)
    edit = tl.load(edit_starts + r)
    end = tl.load(edit_starts + r + 1)
    while edit < end:
        score = tl.where(ids == tl.load(edit_ids + edit), score + tl.load(edit_values + edit), score)
        edit += 1
    repetition, frequency, presence = _penalties(table, slot)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        entry = tl.load(history + slot * vocab + ids, mask=is_token, other=0)
        repeated = tl.where(score < 0, score * repetition, score / repetition)
        score = tl.where(entry != 0, repeated, score)
        count = entry // _ONE_OUTPUT
        score = tl.where(count > 0, score - (count.to(tl.float64) * frequency + presence), score)
    tl.store(scores + r * vocab + ids, score, mask=is_token)
    tl.store(peaks + r * num_chunks + chunk, tl.max(tl.where(score != score, float("inf"), score), 0))


@triton.jit
def _load_group(values, order, first, num_chunks, vocab, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Token ids `[GROUP, CHUNK]` of the chunks at first .. first + GROUP - 1 in descending order, and their values."""
    places = first + tl.arange(0, GROUP)
    chunks = tl.load(order + places, mask=places < num_chunks, other=num_chunks).to(tl.int32)
    ids = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return ids, tl.load(values + ids, mask=ids < vocab, other=-float("inf"))


@triton.jit
def _peak_at(sorted_peaks, place, num_chunks):
    """Greatest score of the chunk at a place of the order. NaN, which no bound lets pass, behind the last one."""
    return tl.load(sorted_peaks + place, mask=place < num_chunks, other=float("nan"))


@triton.jit
def _split(values, sorted_peaks, order, lowest, middle, num_chunks, vocab, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Of a row's values from `lowest` up: how many are above middle, the greatest up to it, the least above it."""
    above = tl.full([], 0, tl.int32)
    under = tl.full([], -float("inf"), tl.float64)
    over = tl.full([], float("inf"), tl.float64)
    first = 0
    while _peak_at(sorted_peaks, first, num_chunks) >= lowest:
        ids, value = _load_group(values, order, first, num_chunks, vocab, GROUP, CHUNK)
        is_above = value > middle
        above += tl.sum(tl.sum(is_above.to(tl.int32), 1), 0)
        under = tl.maximum(under, tl.max(tl.max(tl.where(is_above, -float("inf"), value), 1), 0))
        over = tl.minimum(over, tl.min(tl.min(tl.where(is_above, value, float("inf")), 1), 0))
        first += GROUP
    return above, under, over


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _top_k_kernel(
    slots, table, scores, sorted_peaks, order, thresholds, vocab, num_chunks, GROUP: tl.constexpr, CHUNK: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + r)
    top_k = tl.load(table + slot * _WIDTH + _TOP_K).to(tl.int32)
    scores += r * vocab
    sorted_peaks += r * num_chunks
    order += r * num_chunks
    none = tl.full([], -float("inf"), tl.float64)
    high = tl.load(sorted_peaks)
    low = high
    if (top_k > 0) & (tl.abs(high) < float("inf")):
        # k chunks reach the k-th greatest of their peaks, so k tokens do.
        low = tl.load(sorted_peaks + top_k - 1, mask=top_k <= num_chunks, other=-float("inf"))
        if low == -float("inf"):
            finite, nothing, least = _split(scores, sorted_peaks, order, none, none, num_chunks, vocab, GROUP, CHUNK)
            low = least
            high = tl.where(finite <= top_k, least, high)
        while low < high:
            middle = low + (high - low) / 2
            middle = tl.where(middle < high, middle, low)
            above, under, over = _split(scores, sorted_peaks, order, low, middle, num_chunks, vocab, GROUP, CHUNK)
            high = tl.where(above > top_k, high, tl.where(above == top_k, over, under))
            low = tl.where(above >= top_k, over, low)
        tl.store(thresholds + r, low)
    else:
        tl.store(thresholds + r, none)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _weigh_kernel(
    slots,
    positions,
    table,
    bits,
    scores,
    peaks,
    thresholds,
    weights,
    weight_sums,
    sums,
    sum_ids,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """`scores` become score + noise in place where the row has top_p."""
    chunk = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + r)
    chunks = tl.arange(0, CHUNKS)
    peak = tl.max(tl.load(peaks + r * num_chunks + chunks, mask=chunks < num_chunks, other=-float("inf")), 0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    is_token = ids < vocab
    value = tl.load(scores + r * vocab + ids, mask=is_token, other=-float("inf"))
    temperature = tl.load(table + slot * _WIDTH + _TEMPERATURE)
    if (temperature > 0) & (tl.abs(peak) < float("inf")):
        scaled = (value - peak) / temperature
        kept = scaled > -float("inf")
        if tl.load(table + slot * _WIDTH + _TOP_K) > 0:
            kept = kept & (scaled >= (tl.load(thresholds + r) - peak) / temperature)
        may_win = kept & (scaled >= tl.load(table + slot * _WIDTH + _LOG_MIN_P)) & (scaled > _LEAST_SCORE)
        value = tl.full([CHUNK], -float("inf"), tl.float64)
        if tl.max(may_win.to(tl.int32), 0) > 0:
            words = token_words(chunk, tl.load(bits + slot * _WIDTH + _SEED), tl.load(positions + r), CHUNK)
            value = tl.where(may_win, scaled + gumbel(words), -float("inf"))
        if tl.load(table + slot * _WIDTH + _TOP_P) < 1:
            weight = tl.where(kept, tl.exp(scaled), 0.0)
            tl.store(weights + r * vocab + ids, weight, mask=is_token)
            tl.store(weight_sums + r * num_chunks + chunk, tl.sum(weight, 0))
            tl.store(scores + r * vocab + ids, value, mask=is_token)
    best = tl.max(value, 0)
    tl.store(sums + r * num_chunks + chunk, best)
    tl.store(sum_ids + r * num_chunks + chunk, tl.min(tl.where((value == best) & is_token, ids, vocab), 0))


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _choose_kernel(
    rows,
    slots,
    table,
    noisy,
    raw_peaks,
    peaks,
    sorted_peaks,
    order,
    weights,
    weight_sums,
    sums,
    sum_ids,
    history,
    out,
    vocab,
    num_chunks,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + r)
    slot = tl.load(slots + r)
    chunks = tl.arange(0, CHUNKS)
    is_chunk = chunks < num_chunks
    places = r * num_chunks + chunks
    raw_peak = tl.max(tl.load(raw_peaks + places, mask=is_chunk, other=-float("inf")), 0)
    peak = tl.max(tl.load(peaks + places, mask=is_chunk, other=-float("inf")), 0)
    if (tl.abs(raw_peak) == float("inf")) | (peak == float("inf")):
        tl.store(out + row, -1)
        return
    chunk_sums = tl.load(sums + places, mask=is_chunk, other=-float("inf"))
    firsts = tl.load(sum_ids + places, mask=is_chunk, other=vocab)
    token = tl.min(tl.where(chunk_sums == tl.max(chunk_sums, 0), firsts, vocab), 0)
    temperature = tl.load(table + slot * _WIDTH + _TEMPERATURE)
    top_p = tl.load(table + slot * _WIDTH + _TOP_P)
    if (top_p < 1) & (temperature > 0) & (peak > -float("inf")):
        noisy += r * vocab
        weights += r * vocab
        sorted_peaks += r * num_chunks
        order += r * num_chunks
        limit = top_p * tl.sum(tl.load(weight_sums + places, mask=is_chunk, other=0.0), 0)
        is_chosen = False
        while not is_chosen:
            weight = tl.load(weights + token)
            mass = tl.full([], 0.0, tl.float64)
            num_equal = tl.full([], 0, tl.int32)
            next_sum = tl.full([], -float("inf"), tl.float64)
            next_token = vocab
            first = 0
            # A chunk that cannot reach the weight needs no look; the bound allows for the rounding of exp.
            while tl.exp((_peak_at(sorted_peaks, first, num_chunks) - peak) / temperature) >= weight * 0.999999:
                ids, other = _load_group(weights, order, first, num_chunks, vocab, GROUP, CHUNK)
                is_heavier = other > weight
                is_equal = (other == weight) & (ids < token)
                mass += tl.sum(tl.sum(tl.where(is_heavier, other, 0.0), 1), 0)
                num_equal += tl.sum(tl.sum(is_equal.to(tl.int32), 1), 0)
                is_before = is_heavier | is_equal
                value = tl.load(noisy + ids, mask=is_before, other=-float("inf"))
                group_sum = tl.max(tl.max(value, 1), 0)
                group_token = tl.min(tl.min(tl.where(is_before & (value == group_sum), ids, vocab), 1), 0)
                is_better = (group_sum > next_sum) | ((group_sum == next_sum) & (group_token < next_token))
                next_token = tl.where(is_better, group_token, next_token)
                next_sum = tl.where(is_better, group_sum, next_sum)
                first += GROUP
            before = mass + num_equal.to(tl.float64) * weight
            is_chosen = (before < limit) | (next_sum == -float("inf"))
            token = tl.where(is_chosen, token, next_token)
    tl.store(out + row, token)
    repetition, frequency, presence = _penalties(table, slot)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        entry = history + slot * vocab + token
        tl.store(entry, tl.load(entry) + _ONE_OUTPUT)


def draw_filtered(logits: torch.Tensor, batch: FilteredBatch, table: torch.Tensor, out: torch.Tensor) -> None:
    """logits `[B, V]` with stride 1 in the vocabulary; table float64 `[num_slots, NUM_PARAMETERS]`; out int32 `[B]`,
    written at batch.rows: -1 where no score is finite or some logit is NaN or infinite."""
    assert logits.stride(1) == 1, f"logits have stride {logits.stride(1)} in the vocabulary, must be 1"
    num_rows, vocab = len(batch.rows), logits.shape[1]
    num_chunks = triton.cdiv(vocab, CHUNK)
    chunks = triton.next_power_of_2(num_chunks)
    device = logits.device
    history = out if batch.history is None else batch.history  # rows without penalties never look at it
    needs_order = batch.any_top_k or batch.any_top_p

    def per_chunk(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((num_rows, num_chunks), dtype=dtype, device=device)

    scores = torch.empty((num_rows, vocab), dtype=torch.float64, device=device)
    raw_peaks, peaks = per_chunk(torch.float32), per_chunk(torch.float64)
    _adjust_kernel[(num_chunks, num_rows)](
        logits,
        logits.stride(0),
        batch.rows,
        batch.slots,
        table,
        history,
        batch.edits.starts,
        batch.edits.ids,
        batch.edits.values,
        scores,
        raw_peaks,
        peaks,
        vocab,
        num_chunks,
        CHUNK,
        enable_fp_fusion=False,
    )
    sorted_peaks, order = peaks.sort(dim=-1, descending=True) if needs_order else (peaks, batch.rows)
    thresholds = torch.empty(num_rows, dtype=torch.float64, device=device)
    if batch.any_top_k:
        _top_k_kernel[(num_rows,)](
            batch.slots,
            table,
            scores,
            sorted_peaks,
            order,
            thresholds,
            vocab,
            num_chunks,
            GROUP,
            CHUNK,
            enable_fp_fusion=False,
            num_warps=16,
        )
    weights = torch.empty_like(scores) if batch.any_top_p else scores
    weight_sums, sums, sum_ids = per_chunk(torch.float64), per_chunk(torch.float64), per_chunk(torch.int32)
    _weigh_kernel[(num_chunks, num_rows)](
        batch.slots,
        batch.positions,
        table,
        table.view(torch.int64),
        scores,
        peaks,
        thresholds,
        weights,
        weight_sums,
        sums,
        sum_ids,
        vocab,
        num_chunks,
        CHUNK,
        chunks,
        enable_fp_fusion=False,
    )
    _choose_kernel[(num_rows,)](
        batch.rows,
        batch.slots,
        table,
        scores,
        raw_peaks,
        peaks,
        sorted_peaks,
        order,
        weights,
        weight_sums,
        sums,
        sum_ids,
        history,
        out,
        vocab,
        num_chunks,
        GROUP,
        CHUNK,
        chunks,
        enable_fp_fusion=False,
        num_warps=16,
    )
