"""Puts the gate's questions to a server and compares its answers with the unmodified model's."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import httpx
from tokenizers import Tokenizer

from bench.replay.server import one_line
from bench.speedrun.gate.protocol import MAX_TOKENS, Message, messages, read_letter
from bench.speedrun.gate.record import PASS_SHARE, Gate

AT_ONCE = 4
REQUEST_TIMEOUT_S = 120.0

OnStep = Callable[[int, str], None]


@dataclass
class GateResult:
    """agreed: answers equal to the unmodified model's. true: equal to the truth. Continuations: mean share of the
    unmodified model's tokens that came in the same order before the first other one, and how many were equal
    throughout; a figure beside the verdict, which is `passed`."""

    questions: int
    agreed: int
    true: int
    needed: int
    continuation_agreement: float | None = None
    continuations_equal: int = 0
    continuations: int = 0
    failures: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.agreed >= self.needed

    def line(self) -> str:
        agreement = (
            ""
            if self.continuation_agreement is None
            else (
                f"; continuations agree for {self.continuation_agreement:.1%} of their tokens, "
                f"{self.continuations_equal} of {self.continuations} throughout"
            )
        )
        failed = f"; {len(self.failures)} requests failed: {self.failures[0]}" if self.failures else ""
        verdict = "PASS" if self.passed else "FAIL"
        return f"{verdict}: {self.agreed} of {self.questions} answers agree, {self.needed} needed{agreement}{failed}"


async def check_gate(
    url: str, gate: Gate, tokenizer: Tokenizer, on_step: OnStep = lambda done, detail: None
) -> GateResult:
    """Every question and continuation, AT_ONCE at a time. A request that fails counts as a wrong answer."""
    result = GateResult(len(gate.questions), 0, 0, needed(len(gate.questions)))
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, trust_env=False) as http:
        ask = Asker(http, gate.model, result.failures)
        requests = [(messages(item.question), MAX_TOKENS) for item in gate.questions]
        answers = await in_turns(requests, ask, lambda done: on_step(done, "answered"))
        for item, text in zip(gate.questions, answers):
            letter = read_letter(text or "")
            result.agreed += letter == item.key
            result.true += letter == item.question.letter
            result.answers.append(letter or f"none: {one_line(text or '', 40)}")
        if not result.passed:
            return result
        requests = [(item.messages, item.max_tokens) for item in gate.continuations]
        texts = await in_turns(
            requests, ask, lambda done: on_step(len(answers), f"answered, {done} of {len(requests)} continuations")
        )
    shares = [agreement(tokenizer, item.text, text or "") for item, text in zip(gate.continuations, texts)]
    if shares:
        result.continuation_agreement = fmean(shares)
    result.continuations = len(shares)
    result.continuations_equal = sum(share == 1.0 for share in shares)
    return result


def needed(questions: int) -> int:
    """The least number of equal answers that is at least PASS_SHARE of all."""
    return -(-questions * round(PASS_SHARE * 100) // 100)


def agreement(tokenizer: Tokenizer, expected: str, text: str) -> float:
    """Tokens before the first difference, over the tokens of the longer text; both texts tokenized alike."""
    left = tokenizer.encode(expected, add_special_tokens=False).ids
    right = tokenizer.encode(text, add_special_tokens=False).ids
    same = 0
    for one, other in zip(left, right):
        if one != other:
            break
        same += 1
    longer = max(len(left), len(right))
    return same / longer if longer else 1.0


class Asker:
    """Sends one conversation and gives the text of the answer, None after noting why there is none."""

    def __init__(self, http: httpx.AsyncClient, model: str, failures: list[str]):
        self.http, self.model, self.failures = http, model, failures

    async def __call__(self, conversation: list[Message], max_tokens: int) -> str | None:
        body = {"model": self.model, "messages": conversation, "max_tokens": max_tokens, "temperature": 0}
        try:
            response = await self.http.post("/v1/chat/completions", json=body)
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}: {one_line(response.text, 80)}")
            answer: Any = response.json()
            return str(answer["choices"][0]["message"]["content"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            self.failures.append(one_line(f"{type(error).__name__}: {error}", 120))
            return None


async def in_turns(
    requests: list[tuple[list[Message], int]], ask: Asker, on_done: Callable[[int], None]
) -> list[str | None]:
    """Answers in the order of the requests (conversation, max_tokens), at most AT_ONCE running."""
    room, done = asyncio.Semaphore(AT_ONCE), 0

    async def one(conversation: list[Message], max_tokens: int) -> str | None:
        nonlocal done
        async with room:
            text = await ask(conversation, max_tokens)
        done += 1
        on_done(done)
        return text

    return await asyncio.gather(*(one(*request) for request in requests))
