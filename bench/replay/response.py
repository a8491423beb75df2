"""Reads a streamed completion: from bytes and their arrival times to one request's record."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.replay.client import RawResponse
from bench.replay.misses import Miss
from bench.replay.plan import Phase, PlannedRequest
from bench.replay.server import one_line
from bench.replay.transport import decode_http

Outcome = Literal["ok", "failed", "timeout"]


@dataclass
class RequestRecord:
    """One request, measured. `_s` fields count seconds from the start of the level.

    ttft_ms        first token - scheduled arrival
    tpot_ms        (last token - first token) / (output_tokens - 1)
    token_times_s  arrival of each token (of each piece of text, where the server gives no token ids)
    output_tokens  the server's own count where it gives one
    cached_tokens  prompt tokens the server says it did not compute; None: it says nothing
    usage          the server's own account, as sent
    oracle_tokens  what an infinite cache would have held of the prompt; miss: why the server held less, or no more
    """

    index: int
    session: int
    phase: Phase
    outcome: Outcome
    error: str
    scheduled_s: float
    sent_s: float
    ended_s: float
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    turn: int = 0
    oracle_tokens: int | None = None
    miss: Miss | None = None

    @property
    def send_lag_ms(self) -> float:
        return (self.sent_s - self.scheduled_s) * 1e3

    @property
    def worker(self) -> str:
        """The worker that prefilled the prompt, "" where the server does not say."""
        prefills = self.usage.get("prefill")
        first = prefills[0] if isinstance(prefills, list) and prefills else {}
        return str(first.get("worker") or "") if isinstance(first, dict) else ""


@dataclass
class Completion:
    """What the events of one stream add up to."""

    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    text_times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def add(self, time_s: float, event: dict[str, Any]) -> None:
        if error := event.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            self.error = f"error event: {one_line(str(message))}"
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or []:
            token_ids = choice.get("token_ids") or []
            self.token_ids += token_ids
            self.token_times += [time_s] * len(token_ids)
            if choice.get("text"):
                self.text_times.append(time_s)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def read_response(request: PlannedRequest, raw: RawResponse, length_is_forced: bool) -> RequestRecord:
    """The record of a request. With `length_is_forced` (the server took ignore_eos), an answer of any other length than
    planned is a failure; so are a missing finish reason, counts that disagree and tokens that are none."""
    completion, answer = Completion(), decode_http(raw.chunks)
    error = raw.failure
    if answer.status == 200:
        try:
            for time_s, event in sse_events(answer.body):
                completion.add(time_s, event)
        except ValueError as broken:
            error = error or f"malformed event: {one_line(str(broken))}"
    elif answer.status is not None:
        error = f"HTTP {answer.status}: {one_line(b''.join(data for _, data in answer.body).decode(errors='replace'))}"
    times = completion.token_times or completion.text_times
    counted = completion.usage.get("completion_tokens")
    num_tokens = counted if counted is not None else len(times)
    error = (
        error
        or completion.error
        or answer.error
        or incompleteness(completion, num_tokens, request.output_tokens, length_is_forced)
    )
    cached = (completion.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return RequestRecord(
        index=request.index,
        session=request.session,
        phase=request.phase,
        outcome="timeout" if raw.timed_out else "failed" if error else "ok",
        error=error,
        scheduled_s=raw.scheduled,
        sent_s=raw.sent,
        ended_s=raw.ended,
        ttft_ms=(times[0] - raw.scheduled) * 1e3 if times else None,
        tpot_ms=(times[-1] - times[0]) * 1e3 / (num_tokens - 1) if times and num_tokens > 1 else None,
        prompt_tokens=completion.usage.get("prompt_tokens", len(request.prompt_token_ids)),
        cached_tokens=cached,
        output_tokens=num_tokens,
        finish_reason=completion.finish_reason,
        token_ids=completion.token_ids,
        token_times_s=times,
        usage=completion.usage,
        turn=request.turn,
    )


def incompleteness(completion: Completion, num_tokens: int, output_tokens: int, length_is_forced: bool) -> str:
    """Why a stream that ended without an error is still no complete answer; "" when it is one."""
    if completion.finish_reason is None:
        return "the stream ended without a finish reason"
    if any(not isinstance(token_id, int) or token_id < 0 for token_id in completion.token_ids):
        return "token_ids holds something that is no token id"
    if completion.token_ids and len(completion.token_ids) != num_tokens:
        return f"the server counted {num_tokens} tokens and sent {len(completion.token_ids)}"
    if length_is_forced and num_tokens != output_tokens:
        return f"{num_tokens} tokens instead of {output_tokens}"
    if not num_tokens:
        return "no tokens"
    return ""


def sse_events(chunks: list[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Decoded `data:` events, each with the time its last byte came; `[DONE]` is left out.

    Source: WHATWG HTML, server-sent events (an event ends at a blank line). Raises ValueError on data that is no JSON
    object.
    """
    buffer = b""
    for time_s, data in chunks:
        *events, buffer = (buffer + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            payload = b"\n".join(lines)
            if not payload or payload == b"[DONE]":
                continue
            value = json.loads(payload)
            if not isinstance(value, dict):
                raise ValueError(f"not an object: {one_line(payload.decode(errors='replace'), 60)}")
            yield time_s, value
