"""The gate's file: 200 questions with the unmodified model's own answers, and its continuations of a few prompts."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.facts import ROOT
from bench.speedrun.gate.protocol import Message, describe
from bench.speedrun.gate.questions import LETTERS, Question

NUM_QUESTIONS = 200
PASS_SHARE = 0.95
CONTINUATION_TOKENS = 128


class GateError(RuntimeError):
    """The gate cannot be built or used; the message says why and what to do."""


@dataclass(frozen=True)
class ScoredQuestion:
    """key: the unmodified model's greedy letter. gap: logit of its best letter minus that of its second best.
    is_letter: the greedy token is a letter at all."""

    question: Question
    key: str
    gap: float
    is_letter: bool = True

    @property
    def is_true(self) -> bool:
        return self.key == self.question.letter


@dataclass(frozen=True)
class Continuation:
    """Text of the unmodified model's first `max_tokens` greedy tokens, or fewer where it ended."""

    messages: list[Message]
    max_tokens: int
    text: str


@dataclass
class Gate:
    """`facts` say which model, on what and how it was made; `pool_size` questions were asked."""

    model: str
    model_hash: str
    dtype: str
    pool_size: int
    protocol: dict[str, Any]
    questions: list[ScoredQuestion]
    continuations: list[Continuation]
    facts: dict[str, Any]

    @property
    def mean_gap(self) -> float:
        return fmean(item.gap for item in self.questions)

    @property
    def true_share(self) -> float:
        return fmean(item.is_true for item in self.questions)

    @property
    def constant_share(self) -> float:
        """What a server that always answers with one letter reaches."""
        return max(sum(item.key == letter for item in self.questions) for letter in LETTERS) / len(self.questions)

    def summary(self) -> dict[str, float | int]:
        return {
            "questions": len(self.questions),
            "mean_gap": self.mean_gap,
            "true_share": self.true_share,
            "constant_answer_share": self.constant_share,
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self) | {"summary": self.summary()}, indent=1) + "\n")


def gate_path(digest: str) -> Path:
    """Where the gate of a model lies unless one says otherwise."""
    return ROOT / "build" / "speedrun" / f"gate-{digest[:12]}.json"


def read_gate(path: Path) -> Gate:
    """Raises GateError when the file is none, or was made under another protocol."""
    try:
        values = json.loads(path.read_text())
        values.pop("summary")
        values["questions"] = [read_question(item) for item in values["questions"]]
        values["continuations"] = [Continuation(**item) for item in values["continuations"]]
        gate = Gate(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise GateError(f"{path} is no gate file ({reason}); build one: python3 -m bench.speedrun.gate build") from None
    if gate.protocol != describe():
        raise GateError(
            f"{path} was built under another protocol; build it again: python3 -m bench.speedrun.gate build"
        )
    return gate


def read_question(item: dict[str, Any]) -> ScoredQuestion:
    question = item.pop("question")
    return ScoredQuestion(Question(**question | {"choices": tuple(question["choices"])}), **item)
