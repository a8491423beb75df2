"""What a sampling kernel is told: the parameters of every slot, and which rows to sample with which of them."""

import math
from dataclasses import dataclass

import torch

from engine.request import SamplingParams

TEMPERATURE, SEED, TOP_K, TOP_P, LOG_MIN_P, REPETITION, FREQUENCY, PRESENCE = range(8)
NUM_PARAMETERS = 8
"""Columns of the parameter table, float64 `[num_slots, NUM_PARAMETERS]`; SEED holds the bits of an int64."""

IN_PROMPT = 1
ONE_OUTPUT = 2
"""A history entry, int32: bit 0 says that the token is in the prompt, the bits above count it in the output."""

_INT64_RANGE = 2**64


def parameter_row(sampling: SamplingParams, vocab_size: int) -> torch.Tensor:
    """The parameters as one row of the table, float64 `[NUM_PARAMETERS]` on CPU. Filters that cannot change the choice
    are written as absent."""
    is_greedy = sampling.temperature == 0
    row = torch.zeros(NUM_PARAMETERS, dtype=torch.float64)
    row[TEMPERATURE] = sampling.temperature
    row[TOP_K] = 0 if is_greedy or sampling.top_k >= vocab_size else max(0, sampling.top_k)
    row[TOP_P] = 1.0 if is_greedy else sampling.top_p
    row[LOG_MIN_P] = math.log(sampling.min_p) if sampling.min_p > 0 and not is_greedy else -math.inf
    row[REPETITION] = sampling.repetition_penalty
    row[FREQUENCY] = sampling.frequency_penalty
    row[PRESENCE] = sampling.presence_penalty
    row.view(torch.int64)[SEED] = (sampling.seed + _INT64_RANGE // 2) % _INT64_RANGE - _INT64_RANGE // 2
    return row


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether the choice depends on the tokens so far."""
    penalties = (sampling.frequency_penalty, sampling.presence_penalty)
    return sampling.repetition_penalty != 1 or any(penalty != 0 for penalty in penalties)


@dataclass
class Edits:
    """What is added to single logits before anything else: a bias, or -inf for a banned token.

    starts  int64 `[R + 1]`, row i's edits are starts[i] .. starts[i + 1]
    rows    int64 `[n]`, the row of each edit
    ids     int64 `[n]`
    values  float64 `[n]`
    """

    starts: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


@dataclass
class FilteredBatch:
    """Rows to sample with everything a request may ask for.

    rows, slots, positions  int64 `[R]`: row of the logits, row of the parameter table, number of output tokens so far
    history                 int32 `[num_slots, vocab]`, where the choice is counted; None when no row has penalties
    any_top_k, any_top_p    whether a row has that filter
    """

    rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    edits: Edits
    history: torch.Tensor | None
    any_top_k: bool
    any_top_p: bool
