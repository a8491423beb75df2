"""What a model runner computes for its engine, and when the result can be had."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from engine.request import SampledToken, Sequence


@dataclass
class DecodeRow:
    """One running sequence's next token.

    slot         where its last token and its block table are kept
    position     of its last token, whose KV this step computes
    num_outputs  output tokens so far, those included that are still being computed
    block_table  covers `position`
    """

    slot: int
    sequence: Sequence
    position: int
    num_outputs: int
    block_table: list[int]


class Step(ABC):
    """Work that was launched. `logits` holds, for prompt chunks that asked for all of them, float32 `[n, vocab]` by
    the chunk's index."""

    logits: dict[int, torch.Tensor]

    @abstractmethod
    def wait(self) -> list[SampledToken | None]:
        """The sampled token of each row or chunk, once it is there. None: nothing was to be sampled, or the row had no
        finite maximum."""


@dataclass
class FinishedStep(Step):
    """A step that was computed when it was asked for."""

    tokens: list[SampledToken | None]
    logits: dict[int, torch.Tensor] = field(default_factory=dict)

    def wait(self) -> list[SampledToken | None]:
        return self.tokens
