"""Prompts of the three scenarios: written here, assembled by rule, the same for a seed on every machine.

A prompt is filled up to its size in tokens. There is no end of different ones: a run draws a few.
"""

import random
from collections.abc import Iterator

from tokenizers import Tokenizer

from bench.replay.codegen import session_text
from bench.speedrun.documents import document_text
from bench.speedrun.phrases import (
    CODE_REQUESTS,
    CONSTRAINTS,
    DOCUMENT_REQUESTS,
    FOLLOW_UPS,
    MATH_CLOSING,
    MATH_PROBLEMS,
    PLANS,
    REPLIES,
)

Message = dict[str, str]
KINDS = ("conversation", "code", "mathematics")


def chat_prompt(tokenizer: Tokenizer, seed: str, index: int, num_tokens: int) -> list[Message]:
    """About `num_tokens` tokens of text (the chat template's own come on top); kinds take turns with `index`."""
    rng = random.Random(f"chat/{seed}/{index}")
    kind = KINDS[index % len(KINDS)]
    if kind == "conversation":
        return conversation(tokenizer, rng, num_tokens)
    if kind == "code":
        question = rng.choice(CODE_REQUESTS)
        code = fill(tokenizer, source_lines(rng), num_tokens - length(tokenizer, question))
        return [user(f"{code}\n\n{question}")]
    problem = fill(tokenizer, math_steps(rng), num_tokens - length(tokenizer, MATH_CLOSING))
    return [user(f"{problem} {MATH_CLOSING}")]


def document_prompt(tokenizer: Tokenizer, seed: str, index: int, num_tokens: int) -> list[Message]:
    """A long report and a request about it, about `num_tokens` tokens together."""
    rng = random.Random(f"document/{seed}/{index}")
    question = rng.choice(DOCUMENT_REQUESTS)
    document = fill(tokenizer, document_text(rng), num_tokens - length(tokenizer, question))
    return [user(f"{document}\n\n{question}")]


def conversation(tokenizer: Tokenizer, rng: random.Random, num_tokens: int) -> list[Message]:
    """Two turns of the user with an answer between them; the first holds what fills it up."""
    reply, follow_up = rng.choice(REPLIES), rng.choice(FOLLOW_UPS)
    room = num_tokens - length(tokenizer, reply) - length(tokenizer, follow_up)
    opening = fill(tokenizer, plan_sentences(rng), max(room, num_tokens // 3))
    return [user(opening), {"role": "assistant", "content": reply}, user(follow_up)]


def plan_sentences(rng: random.Random) -> Iterator[str]:
    yield f"I am planning {rng.choice(PLANS)} for {rng.randint(3, 60)} people in {rng.randint(2, 20)} weeks."
    while True:
        for sentence in rng.sample(CONSTRAINTS, len(CONSTRAINTS)):
            yield " " + sentence.format(n=rng.randint(2, 90), m=rng.randint(100, 900))


def math_steps(rng: random.Random) -> Iterator[str]:
    while True:
        for problem in rng.sample(MATH_PROBLEMS, len(MATH_PROBLEMS)):
            yield problem.format(a=rng.randint(3, 40), b=rng.randint(41, 95), c=rng.randint(2, 9)) + " "


def source_lines(rng: random.Random) -> Iterator[str]:
    for module in session_text(rng.getrandbits(30), rng.randrange(8)):
        yield from module.splitlines(keepends=True)


def fill(tokenizer: Tokenizer, pieces: Iterator[str], num_tokens: int) -> str:
    """Pieces joined up to `num_tokens` tokens; the last one is cut."""
    text = ""
    while True:
        for _ in range(8):
            text += next(pieces)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) >= num_tokens:
            return tokenizer.decode(ids[: max(1, num_tokens)], skip_special_tokens=False).rstrip()


def length(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def user(text: str) -> Message:
    return {"role": "user", "content": text}
