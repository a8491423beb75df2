"""How a question is put to a server, and how its answer is read: few-shot, direct, greedy, one token.

The shots are the same for every question and use each letter once, so that they suggest none.
"""

import re

from bench.speedrun.gate.questions import LETTERS, Question

PROTOCOL_VERSION = 1
MAX_TOKENS = 1
INSTRUCTION = (
    "Answer each multiple-choice question with the letter of the right choice: A, B, C or D. Write nothing else."
)
SHOTS = (
    Question("shot", "Which of these is a fruit?", ("stone", "chair", "apple", "river"), 2),
    Question("shot", "What is 2 + 3?", ("5", "4", "7", "6"), 0),
    Question("shot", "Which of these can fly?", ("horse", "table", "whale", "sparrow"), 3),
    Question("shot", "What colour is fresh snow?", ("black", "white", "green", "red"), 1),
)

Message = dict[str, str]


def messages(question: Question) -> list[Message]:
    """The conversation that ends with `question`."""
    turns = [{"role": "system", "content": INSTRUCTION}]
    for shot in SHOTS:
        turns += [{"role": "user", "content": shot.render()}, {"role": "assistant", "content": shot.letter}]
    return [*turns, {"role": "user", "content": question.render()}]


def read_letter(text: str) -> str | None:
    """The letter that an answer begins with; None when it begins with anything else."""
    found = re.match(rf"\s*\(?([{LETTERS}])(?![A-Za-z])", text)
    return found[1] if found else None


def describe() -> dict[str, object]:
    """What a gate file says of the protocol it was made for."""
    shots = [f"{shot.render()} {shot.letter}" for shot in SHOTS]
    return {"version": PROTOCOL_VERSION, "max_tokens": MAX_TOKENS, "instruction": INSTRUCTION, "shots": shots}
