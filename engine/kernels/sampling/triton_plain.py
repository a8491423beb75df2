"""Greedy and temperature sampling of a whole batch in two launches, for use inside a CUDA graph.

    chunks   grid (chunks of the vocabulary, rows): greatest logit of a chunk and the first token that has it; for rows
             with a temperature also the greatest score + noise, in float32
    rows     grid (rows): merges the chunks. Every token whose float32 sum comes within MARGIN of the greatest (as a
             rule one) is computed again in float64, which decides as engine/sampling.py does.

float64 runs at 1/32 of the float32 rate on Turing; this way it is needed for a token or two a row. Scores in a chunk
are relative to the chunk's own greatest logit, so that the logits are read once.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.sampling.batch import NUM_PARAMETERS, SEED, TEMPERATURE
from engine.kernels.sampling.triton_noise import gumbel, rough_gumbel, token_words

CHUNK = 1024
MARGIN = 1e-3
"""Far above the error of a float32 sum that can win: its score is in -26 .. 0, its noise in -3.2 .. 22.9."""

_TEMPERATURE = tl.constexpr(TEMPERATURE)
_SEED = tl.constexpr(SEED)
_WIDTH = tl.constexpr(NUM_PARAMETERS)


@triton.jit
def _load_logits(logits_row, ids, vocab):
    """float32 logits with NaN as infinity, so that a maximum cannot miss either."""
    x = tl.load(logits_row + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(x != x, float("inf"), x)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _chunks_kernel(
    logits, row_stride, slots, positions, table, bits, peaks, firsts, sums, vocab, num_chunks, CHUNK: tl.constexpr
):
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _load_logits(logits + row.to(tl.int64) * row_stride, ids, vocab)
    peak = tl.max(x, 0)
    tl.store(peaks + row * num_chunks + chunk, peak)
    tl.store(firsts + row * num_chunks + chunk, tl.min(tl.where(x == peak, ids, vocab), 0))
    temperature = tl.load(table + slot * _WIDTH + _TEMPERATURE).to(tl.float32)
    if temperature > 0:
        words = token_words(chunk, tl.load(bits + slot * _WIDTH + _SEED), tl.load(positions + row), CHUNK)
        noisy = (x - peak) / temperature + rough_gumbel(words)
        noisy = tl.where(x > -float("inf"), noisy, -float("inf"))
        tl.store(sums + row * num_chunks + chunk, tl.max(noisy, 0))


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "out"])
def _rows_kernel(
    logits,
    row_stride,
    slots,
    positions,
    table,
    bits,
    peaks,
    firsts,
    sums,
    out,
    vocab,
    num_chunks,
    margin,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        tl.store(out + row, -1)
        return
    chunks = tl.arange(0, CHUNKS)
    is_chunk = chunks < num_chunks
    chunk_peaks = tl.load(peaks + row * num_chunks + chunks, mask=is_chunk, other=-float("inf"))
    peak = tl.max(chunk_peaks, 0)
    if tl.abs(peak) == float("inf"):
        tl.store(out + row, -1)
        return
    temperature = tl.load(table + slot * _WIDTH + _TEMPERATURE)
    rough_temperature = temperature.to(tl.float32)
    if rough_temperature > 0:
        seed = tl.load(bits + slot * _WIDTH + _SEED)
        position = tl.load(positions + row)
        chunk_sums = tl.load(sums + row * num_chunks + chunks, mask=is_chunk, other=-float("inf"))
        chunk_sums = tl.where(
            chunk_peaks > -float("inf"), chunk_sums + (chunk_peaks - peak) / rough_temperature, -float("inf")
        )
        chunk_sum = tl.max(chunk_sums, 0)
        floor = chunk_sum - margin
        token = vocab
        best = tl.full([], -float("inf"), tl.float64)
        offsets = tl.arange(0, CHUNK)
        while chunk_sum >= floor:
            chunk = tl.argmax(chunk_sums, 0)
            x = _load_logits(logits + row.to(tl.int64) * row_stride, chunk * CHUNK + offsets, vocab)
            words = token_words(chunk, seed, position, CHUNK)
            noisy = tl.where(x > -float("inf"), (x - peak) / rough_temperature + rough_gumbel(words), -float("inf"))
            noisy_sum = tl.max(noisy, 0)
            while noisy_sum >= floor:
                offset = tl.argmax(noisy, 0)
                logit = tl.max(tl.where(offsets == offset, x, -float("inf")), 0)
                word = tl.sum(tl.where(offsets == offset, words.to(tl.int64), 0), 0)
                exact = (logit.to(tl.float64) - peak.to(tl.float64)) / temperature + gumbel(word)
                candidate = chunk * CHUNK + offset
                is_better = (exact > best) | ((exact == best) & (candidate < token))
                token = tl.where(is_better, candidate, token)
                best = tl.where(is_better, exact, best)
                noisy = tl.where(offsets == offset, -float("inf"), noisy)
                noisy_sum = tl.max(noisy, 0)
            chunk_sums = tl.where(chunks == chunk, -float("inf"), chunk_sums)
            chunk_sum = tl.max(chunk_sums, 0)
        tl.store(out + row, token)
    else:
        first = tl.load(firsts + row * num_chunks + chunks, mask=is_chunk, other=vocab)
        tl.store(out + row, tl.min(tl.where(chunk_peaks == peak, first, vocab), 0))


def draw_plain(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    margin: float = MARGIN,
) -> None:
    """Greedy or temperature only. logits `[B, V]` with stride 1 in the vocabulary; slots, positions, out int32 `[B]`;
    table float64 `[num_slots, NUM_PARAMETERS]`. out[b] = -1 for a row without a finite maximum, or of a negative slot.

    margin: how close a float32 sum must come to the greatest to be computed in float64; more only costs time.
    """
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1, f"logits have stride {logits.stride(1)} in the vocabulary, must be 1"
    if num_rows == 0:
        return
    num_chunks = triton.cdiv(vocab, CHUNK)
    peaks, sums = torch.empty((2, num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    firsts = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    bits = table.view(torch.int64)
    stride = logits.stride(0)
    _chunks_kernel[(num_chunks, num_rows)](
        logits, stride, slots, positions, table, bits, peaks, firsts, sums, vocab, num_chunks, CHUNK
    )
    _rows_kernel[(num_rows,)](
        logits,
        stride,
        slots,
        positions,
        table,
        bits,
        peaks,
        firsts,
        sums,
        out,
        vocab,
        num_chunks,
        margin,
        CHUNK,
        triton.next_power_of_2(num_chunks),
    )
