"""The gate's pool of multiple-choice questions: facts, definitions, arithmetic, reading code, ordering.

All are made from tables written here (knowledge.py) and from rules whose answers are computed. The same seed gives the
same pool on every machine.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.speedrun.gate import knowledge

LETTERS = "ABCD"
NUM_CHOICES = len(LETTERS)


@dataclass(frozen=True)
class Question:
    """`answer` is the index of the true choice in `choices`, which has four different entries."""

    topic: str
    text: str
    choices: tuple[str, ...]
    answer: int

    def __post_init__(self) -> None:
        if len(set(self.choices)) != NUM_CHOICES or not 0 <= self.answer < NUM_CHOICES:
            raise ValueError(f"not a question with {NUM_CHOICES} different choices: {self}")

    @property
    def letter(self) -> str:
        return LETTERS[self.answer]

    def render(self) -> str:
        """As one user message."""
        choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices))
        return f"{self.text}\n{choices}\nAnswer:"


def make_question(rng: random.Random, topic: str, text: str, true: object, wrong: Sequence[object]) -> Question:
    """`wrong` may be long and may hold doubles and the truth: three others are drawn from it."""
    others = list(dict.fromkeys(str(choice) for choice in wrong if str(choice) != str(true)))
    choices = [str(true), *rng.sample(others, NUM_CHOICES - 1)]
    rng.shuffle(choices)
    return Question(topic, text, tuple(choices), choices.index(str(true)))


def question_pool(seed: int = 0) -> list[Question]:
    """Every question, topics interleaved, no text with the same choices twice."""
    rng = random.Random(f"pool/{seed}")
    questions = [question for make in MAKERS for question in make(rng)]
    rng.shuffle(questions)
    return list({(question.text, frozenset(question.choices)): question for question in questions}.values())


TABLES = (
    (knowledge.CAPITALS, "What is the capital of {}?"),
    (knowledge.ELEMENT_SYMBOLS, "What is the chemical symbol of {}?"),
    (knowledge.YOUNG_ANIMALS, "What is a young {} called?"),
    (knowledge.OPPOSITES, 'Which word is the opposite of "{}"?'),
    (knowledge.CLASSES, "To which group of animals does the {} belong?"),
    (knowledge.LANGUAGES, "Which language is official in {}?"),
    (knowledge.WORK_PLACES, "Where does this person work: {}?"),
)


def table_questions(rng: random.Random) -> Iterator[Question]:
    for table, text in TABLES:
        rows = knowledge.pairs(table)
        for asked, answer in rows:
            yield make_question(rng, "facts", text.format(asked), answer, [other for _, other in rows])


def definition_questions(rng: random.Random) -> Iterator[Question]:
    terms = list(knowledge.DEFINITIONS)
    meanings = list(knowledge.DEFINITIONS.values())
    for term, meaning in knowledge.DEFINITIONS.items():
        yield make_question(rng, "definitions", f"What is {term}?", meaning, meanings)
        yield make_question(rng, "definitions", f"What is this: {meaning}?", term, terms)


def arithmetic_questions(rng: random.Random) -> Iterator[Question]:
    for _ in range(24):
        left, right = rng.randint(12, 99), rng.randint(12, 99)
        yield number_question(rng, f"What is {left} + {right}?", left + right)
        yield number_question(rng, f"What is {left + right} - {right}?", left)
        small, times = rng.randint(3, 12), rng.randint(3, 12)
        yield number_question(rng, f"What is {small} x {times}?", small * times)
        yield number_question(rng, f"What is {small * times} divided by {times}?", small)
        percent, whole = rng.choice((5, 10, 20, 25, 50)), 20 * rng.randint(2, 30)
        yield number_question(rng, f"What is {percent} percent of {whole}?", percent * whole // 100)
        boxes, each, taken = rng.randint(3, 9), rng.randint(4, 12), rng.randint(2, 11)
        text = f"{boxes} boxes hold {each} pens each. {taken} pens are taken out. How many pens are left?"
        yield number_question(rng, text, boxes * each - taken)


def number_question(rng: random.Random, text: str, value: int, topic: str = "arithmetic") -> Question:
    """Wrong answers are the slips one makes: one off, ten off, doubled."""
    return make_question(rng, topic, text, value, [value + slip for slip in (-10, -2, -1, 1, 2, 10)] + [2 * value + 3])


def code_questions(rng: random.Random) -> Iterator[Question]:
    for _ in range(14):
        numbers = [rng.randint(1, 9) for _ in range(4)]
        start, stop, step = rng.randint(0, 3), rng.randint(8, 15), rng.randint(2, 4)
        word = rng.choice(("relay", "baton", "runner", "lantern", "harbour", "copper"))
        for source in (
            f"values = {numbers}\nresult = sum(values)",
            f"values = {numbers}\nresult = max(values) - min(values)",
            f"result = 0\nfor i in range({start}, {stop}, {step}):\n    result += 1",
            f'result = len("{word}") * {step}',
            f"x = {stop}\nwhile x > {step + 1}:\n    x = x - {step}\nresult = x",
            f"values = {numbers}\nresult = len([v for v in values if v > {numbers[0]}])",
            f"def f(a, b={step}):\n    return a * b\nresult = f({stop})",
        ):
            text = f"What is result after this Python code?\n{source}"
            yield number_question(rng, text, evaluate(source), "code")


def evaluate(source: str) -> int:
    """`result` after running one of the snippets above."""
    names: dict[str, int] = {}
    exec(source, names)
    return names["result"]


def sequence_questions(rng: random.Random) -> Iterator[Question]:
    for what, table in knowledge.SEQUENCES:
        names = table.split()
        for index in rng.sample(range(1, len(names)), min(9, len(names) - 1)):
            before, after = names[index - 1], names[index]
            yield make_question(rng, "ordering", f"Which {what} comes directly after {before}?", after, names)
            yield make_question(rng, "ordering", f"Which {what} comes directly before {after}?", before, names)


def extreme_questions(rng: random.Random) -> Iterator[Question]:
    for what, table in knowledge.SIZES.items():
        names = table.split(", ")
        for _ in range(5):
            chosen = sorted(rng.sample(range(len(names)), NUM_CHOICES))
            choices = [names[index] for index in chosen]
            yield make_question(rng, "ordering", f"Which of these {what}?", choices[-1], choices)


def event_questions(rng: random.Random) -> Iterator[Question]:
    for _ in range(40):
        chosen = sorted(rng.sample(knowledge.EVENTS, NUM_CHOICES))
        choices = [event for _, event in chosen]
        yield make_question(rng, "ordering", "Which of these happened first?", choices[0], choices)


def number_order_questions(rng: random.Random) -> Iterator[Question]:
    for _ in range(20):
        choices = rng.sample(range(100, 1000), NUM_CHOICES)
        yield make_question(rng, "ordering", "Which number is the largest?", max(choices), choices)
        yield make_question(rng, "ordering", "Which number is the smallest?", min(choices), choices)


MAKERS: tuple[Callable[[random.Random], Iterator[Question]], ...] = (
    table_questions,
    definition_questions,
    arithmetic_questions,
    code_questions,
    sequence_questions,
    extreme_questions,
    event_questions,
    number_order_questions,
)
