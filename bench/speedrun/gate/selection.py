"""Which of the scored questions become the gate."""

from collections.abc import Sequence

from bench.speedrun.gate.questions import LETTERS
from bench.speedrun.gate.record import GateError, ScoredQuestion

MIN_GAP = 0.4
"""In logits. Closer pairs of choices change places by rounding alone, which is no damage."""


def select(scored: Sequence[ScoredQuestion], number: int) -> list[ScoredQuestion]:
    """`number` of those that the model answers with a letter by a gap of at least MIN_GAP.

    Letters take turns as long as they last, so that a constant answer reaches little; of each letter, questions that
    the model answers truly come first. Raises GateError when there are too few.
    """
    usable = [item for item in scored if item.is_letter and item.gap >= MIN_GAP]
    if len(usable) < number:
        raise GateError(
            f"the model answers {len(usable)} of {len(scored)} questions with a letter and a gap of at least "
            f"{MIN_GAP}; the gate needs {number}: is this an instruction-tuned model with its own chat template?"
        )
    queues = [
        sorted((item for item in usable if item.key == letter), key=lambda item: not item.is_true) for letter in LETTERS
    ]
    chosen: list[ScoredQuestion] = []
    while len(chosen) < number:
        for queue in queues:
            if queue and len(chosen) < number:
                chosen.append(queue.pop(0))
    return chosen
