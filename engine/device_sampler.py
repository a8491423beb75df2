"""The next tokens of the running batch, chosen on the device by the rules of engine/sampling.py.

The decode loop launches a step before the tokens of the one before have reached the host. So what a choice depends on
lives on the device, by slot: parameters from `admit`, and for penalties a count of every token, which sampling itself
keeps up to date. From the host comes only what it knows in advance: which rows, and how many tokens each has so far.

Plain rows (greedy or a temperature, nothing else) are sampled inside the CUDA graph by `sample_plain`. The others
follow outside it, in `sample_rest`, which replaces what `sample_plain` made of them.
"""

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.sampling import torch_draw
from engine.kernels.sampling.batch import (
    IN_PROMPT,
    NUM_PARAMETERS,
    ONE_OUTPUT,
    Edits,
    FilteredBatch,
    has_penalties,
    parameter_row,
)
from engine.kernels.sampling.logprobs import chosen_and_top
from engine.request import Request, SamplingParams, Sequence, TokenLogprobs
from engine.sampling import MIN_LOGPROB

PLAIN_TEMPERATURES = (1e-30, 1e30)
"""Within these, plain sampling may look for the best tokens in float32 first."""

ROWS_AT_A_TIME = 32
"""Rows of `sample_rest` that share a launch; each needs 16 bytes a token of the vocabulary meanwhile."""

LOGPROB_ROWS_AT_A_TIME = 16
"""The same for log-probabilities; each row needs about 32 bytes a token."""


@dataclass
class PendingLogprobs:
    """Log-probabilities on their way to the host.

    tops    for each row that was sampled, how many most likely tokens it wants; None: no log-probabilities at all
    ready   recorded behind the copies; None where nothing is asynchronous

    The tensors hold the rows that want some, in order.
    """

    tops: list[int | None]
    tokens: torch.Tensor
    chosen: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor
    ready: torch.cuda.Event | None

    def read(self) -> list[TokenLogprobs | None]:
        """One entry for each row that was sampled, in the order given to `sample_rest`: None for a row that did not ask
        and for one whose logits were broken. Waits for the device if it is not there yet."""
        if self.ready is not None:
            self.ready.synchronize()
        chosen = self.chosen.clamp(min=MIN_LOGPROB).tolist()
        values = self.top_values.clamp(min=MIN_LOGPROB).tolist()
        wanted = zip(self.tokens.tolist(), chosen, self.top_ids.tolist(), values)
        found: list[TokenLogprobs | None] = []
        for top in self.tops:
            entry = None
            if top is not None:
                token_id, logprob, ids, logprobs = next(wanted)
                if token_id >= 0:
                    entry = TokenLogprobs(token_id, logprob, list(zip(ids[:top], logprobs[:top])))
            found.append(entry)
        return found


class DeviceSampler:
    """Sampling for the slots of one running batch. All calls belong on one stream."""

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device | str, use_triton: bool):
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self.device = torch.device(device)
        self._table = torch.zeros((num_slots, NUM_PARAMETERS), dtype=torch.float64, device=self.device)
        self._history: torch.Tensor | None = None
        self._biases: dict[int, tuple[list[int], list[float]]] = {}
        self._draw_plain, self._draw_filtered = torch_draw.draw_plain, torch_draw.draw_filtered
        if use_triton:
            from engine.kernels.sampling import triton_filtered, triton_plain

            self._draw_plain, self._draw_filtered = triton_plain.draw_plain, triton_filtered.draw_filtered

    def admit(self, slot: int, sequence: Sequence) -> None:
        """Give a slot to a sequence, with all its tokens so far; from here on sampling counts its tokens itself."""
        sampling = sequence.sampling
        self._table[slot].copy_(self._staged(parameter_row(sampling, self.vocab_size)), non_blocking=True)
        self._biases.pop(slot, None)
        if sampling.logit_bias:
            self._biases[slot] = (list(sampling.logit_bias), list(sampling.logit_bias.values()))
        if has_penalties(sampling):
            if self._history is None:
                shape = (self.num_slots, self.vocab_size)
                self._history = torch.zeros(shape, dtype=torch.int32, device=self.device)
            history = self._history[slot].zero_()
            history.index_fill_(0, self._uploaded(sequence.prompt_token_ids, np.int64), IN_PROMPT)
            outputs = self._uploaded(sequence.output_token_ids, np.int64)
            history.index_add_(0, outputs, torch.full_like(outputs, ONE_OUTPUT, dtype=torch.int32))

    def release(self, slot: int) -> None:
        """The slot's sequence has left; steps already launched may still sample it."""
        self._biases.pop(slot, None)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what `sample_rest` needs for logits of this dtype, so that no request waits for it. Uses slot 0."""
        logits = torch.zeros((1, self.vocab_size), dtype=dtype, device=self.device)
        out = torch.zeros(1, dtype=torch.int32, device=self.device)
        sequence = Sequence(Request("warm-up", [0], SamplingParams(max_tokens=1, top_k=2, top_p=0.5, logprobs=1)))
        self.admit(0, sequence)
        self.sample_rest(logits, [0], [0], [0], [sequence], out)
        self.release(0)

    def is_plain(self, sequence: Sequence) -> bool:
        """Whether `sample_plain` alone serves the sequence: greedy or a temperature, nothing to adjust or report."""
        sampling = sequence.sampling
        if sampling.logprobs is not None or sampling.logit_bias or has_penalties(sampling):
            return False
        if sequence.banned_token_ids:
            return False
        if sampling.temperature == 0:
            return True
        coldest, hottest = PLAIN_TEMPERATURES
        filters_nothing = (
            (sampling.top_k <= 0 or sampling.top_k >= self.vocab_size) and sampling.top_p >= 1 and sampling.min_p <= 0
        )
        return filters_nothing and coldest <= sampling.temperature <= hottest

    def sample_plain(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Sample every row by its slot's temperature and seed. Never waits for the device; can be captured in a graph.

        logits     float16, bfloat16 or float32 `[B, vocab]`
        slots      int32 `[B]`; negative: a padding row
        positions  int32 `[B]`, number of output tokens so far
        out        int32 `[B]`, written: the token; -1 for a padding row and for one without a finite maximum
        """
        self._draw_plain(logits, slots, positions, self._table, out)

    def sample_rest(
        self,
        logits: torch.Tensor,
        rows: list[int],
        slots: list[int],
        positions: list[int],
        sequences: Items[Sequence],
        out: torch.Tensor,
    ) -> PendingLogprobs | None:
        """Sample the rows that are not plain, and count the chosen tokens in their histories. Does not wait for the
        device.

        rows       indices into logits `[B, vocab]` and out int32 `[B]`; each with its slot, its number of output
                   tokens so far (which may be ahead of sequence.output_token_ids) and its sequence
        Returns what becomes the log-probabilities of these rows, None when none asked for them.
        """
        for start in range(0, len(rows), ROWS_AT_A_TIME):
            part = slice(start, start + ROWS_AT_A_TIME)
            batch = self._batch(rows[part], slots[part], positions[part], sequences[part])
            self._draw_filtered(logits, batch, self._table, out)
        return self._logprobs(logits, rows, sequences, out)

    def _batch(
        self, rows: list[int], slots: list[int], positions: list[int], sequences: Items[Sequence]
    ) -> FilteredBatch:
        samplings = [sequence.sampling for sequence in sequences]
        drawn = [sampling for sampling in samplings if sampling.temperature != 0]
        starts, edited_rows, ids, values = self._edits(slots, positions, samplings)
        columns = (rows, slots, positions, starts, edited_rows, ids)
        indices = self._uploaded([index for column in columns for index in column], np.int64)
        parts = indices.split([len(column) for column in columns])
        return FilteredBatch(
            rows=parts[0],
            slots=parts[1],
            positions=parts[2],
            edits=Edits(parts[3], parts[4], parts[5], self._uploaded(values, np.float64)),
            history=self._history if any(map(has_penalties, samplings)) else None,
            any_top_k=any(0 < sampling.top_k < self.vocab_size for sampling in drawn),
            any_top_p=any(sampling.top_p < 1 for sampling in drawn),
        )

    def _edits(
        self, slots: list[int], positions: list[int], samplings: list[SamplingParams]
    ) -> tuple[list[int], list[int], list[int], list[float]]:
        """Fields of `Edits`: bias, and what min_tokens bans at these positions."""
        starts: list[int] = [0]
        rows: list[int] = []
        ids: list[int] = []
        values: list[float] = []
        for i, (slot, position, sampling) in enumerate(zip(slots, positions, samplings)):
            if slot in self._biases:
                biased, amounts = self._biases[slot]
                ids += biased
                values += amounts
            if position < sampling.min_tokens:
                banned = set(sampling.stop_token_ids) | set(sampling.eos_token_ids)
                ids += banned
                values += [-math.inf] * len(banned)
            rows += [i] * (len(ids) - len(rows))
            starts.append(len(ids))
        return starts, rows, ids, values

    def _logprobs(
        self, logits: torch.Tensor, rows: list[int], sequences: Items[Sequence], out: torch.Tensor
    ) -> PendingLogprobs | None:
        tops = [sequence.sampling.logprobs for sequence in sequences]
        asked = [row for row, top in zip(rows, tops) if top is not None]
        if not asked:
            return None
        most = min(max(top for top in tops if top is not None), self.vocab_size)
        indices = self._uploaded(asked, np.int64)
        tokens = out.index_select(0, indices).long()
        parts = [
            chosen_and_top(logits.index_select(0, some_rows), some_tokens, most)
            for some_rows, some_tokens in zip(
                indices.split(LOGPROB_ROWS_AT_A_TIME), tokens.split(LOGPROB_ROWS_AT_A_TIME)
            )
        ]
        chosen, top_ids, top_values = (torch.cat(pieces) for pieces in zip(*parts))
        ready = None
        if self.device.type == "cuda":
            tokens, chosen, top_ids, top_values = map(self._downloading, (tokens, chosen, top_ids, top_values))
            ready = torch.cuda.Event()
            ready.record()
        return PendingLogprobs(tops, tokens, chosen, top_ids, top_values, ready)

    def _staged(self, values: torch.Tensor) -> torch.Tensor:
        """Where a copy to the device can start without waiting for it: pinned memory, for CUDA."""
        return values.pin_memory() if self.device.type == "cuda" else values

    def _uploaded(self, values: list, dtype: type) -> torch.Tensor:
        return self._staged(torch.from_numpy(np.asarray(values, dtype=dtype))).to(self.device, non_blocking=True)

    def _downloading(self, values: torch.Tensor) -> torch.Tensor:
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
