"""The measuring client: what a scenario takes, seen from outside.

The clock of a request starts when it is sent and is read when a piece of its answer arrives. While requests run, only
bytes and times are noted; HTTP and events are read afterwards. Tokens are counted by tokenizing the returned text.

    TTFT   first piece - sent
    TPOT   (last piece - first piece) / (tokens - tokens in the first piece)
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenizers import Tokenizer

from bench.replay.client import probe_loop_lag
from bench.replay.response import sse_events
from bench.replay.server import one_line
from bench.replay.transport import Endpoint, decode_http, exchange
from bench.speedrun.model_files import count_tokens
from bench.speedrun.prompts import Message
from bench.speedrun.scenarios import Scenario
from bench.stats import nearest_rank

CountMode = Literal["text", "usage"]
"""text: tokens of the returned text. usage: the server's own count, for random weights, whose text does not tokenize
to the tokens it was made of; such requests ask the server to ignore end-of-sequence."""

TOO_MANY = 1.1
"""Text may tokenize to a few tokens more than it was made of, but not to this many times max_tokens."""

OnStep = Callable[[int, str], None]


@dataclass
class RawAnswer:
    """One request as it went over the wire: (arrival time, bytes) of the connection. Times in seconds from the start
    of the scenario."""

    index: int
    sent_s: float
    ended_s: float = 0.0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str = ""
    timed_out: bool = False


@dataclass
class Answer:
    """One request as measured. Times in seconds from the start of the scenario; `tokens` as the count mode says,
    `usage_tokens` as the server says (None: it says nothing)."""

    index: int
    sent_s: float
    ended_s: float
    error: str = ""
    timed_out: bool = False
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    first_tokens: int = 0
    usage_tokens: int | None = None
    pieces: int = 0
    text: str = ""

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_s is None else (self.first_s - self.sent_s) * 1e3

    @property
    def decode_tokens(self) -> int:
        """Tokens that came after the first piece."""
        return self.tokens - self.first_tokens

    @property
    def tpot_ms(self) -> float | None:
        if self.first_s is None or self.last_s is None or self.decode_tokens < 1:
            return None
        return (self.last_s - self.first_s) * 1e3 / self.decode_tokens


@dataclass
class Measurement:
    """One run of a scenario. timed_out: its wall-clock limit passed before all answers had come. client_lag_ms: 99th
    percentile of how late this client itself woke, sampled every 5 ms; what a server sends is seen no sooner."""

    scenario: str
    wall_s: float
    timed_out: bool
    answers: list[Answer] = field(default_factory=list)
    client_lag_ms: float = 0.0

    @property
    def tokens(self) -> int:
        """Of answers that came whole."""
        return sum(answer.tokens for answer in self.answers if not answer.error)

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error]


def request_body(model: str, messages: list[Message], max_tokens: int, count: CountMode) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if count == "usage":
        body |= {"ignore_eos": True, "return_token_ids": True}
    return json.dumps(body).encode()


async def run_scenario(
    url: str,
    model: str,
    scenario: Scenario,
    prompts: list[list[Message]],
    tokenizer: Tokenizer,
    count: CountMode,
    limit_s: float,
    on_step: OnStep = lambda done, detail: None,
) -> Measurement:
    """Send every prompt, one after another or all at once, and wait at most `limit_s` seconds for all answers.

    Never raises for what the server does: failures are in the answers.
    """
    endpoint = Endpoint.of(url, "/v1/chat/completions", {})
    bodies = [request_body(model, messages, scenario.output_tokens, count) for messages in prompts]
    lags: list[float] = []
    probe = asyncio.create_task(probe_loop_lag(lags))
    start = time.perf_counter()
    ended = 0

    async def send(index: int) -> RawAnswer:
        nonlocal ended
        raw = await send_request(endpoint, index, bodies[index], start, limit_s)
        ended += 1
        on_step(ended, raw.failure or "answered")
        return raw

    if scenario.at_once:
        received = list(await asyncio.gather(*map(send, range(len(bodies)))))
    else:
        received = []
        for index in range(len(bodies)):
            received.append(await send(index))
            if received[-1].timed_out:
                break
    wall_s = time.perf_counter() - start
    probe.cancel()
    lag_ms = nearest_rank(lags, 99) if lags else 0.0
    answers = [read_answer(raw, tokenizer, scenario.output_tokens, count) for raw in received]
    return Measurement(scenario.name, wall_s, any(raw.timed_out for raw in received), answers, lag_ms)


async def send_request(endpoint: Endpoint, index: int, body: bytes, start: float, limit_s: float) -> RawAnswer:
    """Send now and receive until `limit_s` seconds after `start`. Never raises for server or network."""
    request = endpoint.request(body)
    raw = RawAnswer(index, time.perf_counter() - start)
    try:
        await asyncio.wait_for(exchange(endpoint, request, start, raw.chunks), max(0.0, limit_s - raw.sent_s))
    except asyncio.TimeoutError:
        raw.timed_out = True
        raw.failure = f"no end before the limit of {limit_s:.1f} s"
    except OSError as error:
        raw.failure = f"connection: {error or type(error).__name__}"
    raw.ended_s = time.perf_counter() - start
    return raw


def read_answer(raw: RawAnswer, tokenizer: Tokenizer, max_tokens: int, count: CountMode) -> Answer:
    """The measurements of one request from its bytes and their arrival times."""
    answer = Answer(raw.index, raw.sent_s, raw.ended_s, raw.failure, raw.timed_out)
    http = decode_http(raw.chunks)
    if http.status not in (None, 200):
        message = b"".join(data for _, data in http.body).decode(errors="replace")
        answer.error = answer.error or f"HTTP {http.status}: {one_line(message, 120)}"
        return answer
    pieces: list[str] = []
    finished = False
    try:
        for time_s, event in sse_events(http.body):
            if event.get("error"):
                answer.error = answer.error or f"error event: {one_line(json.dumps(event['error']), 120)}"
            answer.usage_tokens = (event.get("usage") or {}).get("completion_tokens", answer.usage_tokens)
            for choice in event.get("choices") or []:
                text = (choice.get("delta") or {}).get("content") or ""
                finished = finished or choice.get("finish_reason") is not None
                if text or (count == "usage" and choice.get("token_ids")):
                    answer.first_s = time_s if answer.first_s is None else answer.first_s
                    answer.last_s = time_s
                    pieces.append(text)
    except (ValueError, AttributeError, TypeError) as error:
        answer.error = answer.error or f"malformed event: {one_line(str(error), 120)}"
    answer.text, answer.pieces = "".join(pieces), len(pieces)
    if count == "usage":
        answer.tokens, answer.first_tokens = answer.usage_tokens or 0, min(1, len(pieces))
    elif pieces:
        answer.tokens, answer.first_tokens = count_tokens(tokenizer, answer.text), count_tokens(tokenizer, pieces[0])
    answer.error = answer.error or http.error or fault(answer, finished, max_tokens, count)
    return answer


def fault(answer: Answer, finished: bool, max_tokens: int, count: CountMode) -> str:
    """Why an answer that came without an error is not one; "" when it is."""
    if not finished:
        return "the stream ended without a finish reason"
    if answer.usage_tokens is None and count == "usage":
        return "the server sent no usage, which is what tokens are counted by"
    if not answer.pieces or not answer.tokens:
        return "no text"
    if answer.tokens > max_tokens * TOO_MANY + 1:
        return f"{answer.tokens} tokens, max_tokens was {max_tokens}"
    if count == "usage" and answer.tokens < max_tokens:
        return f"{answer.tokens} tokens instead of {max_tokens} with end-of-sequence ignored"
    return ""
