"""From the bytes of an answer and their arrival times to what one request measured."""

from dataclasses import dataclass
from typing import Any

from bench.replay.response import sse_events
from bench.replay.server import one_line
from bench.replay.transport import decode_http


@dataclass
class Answer:
    """Times in seconds after the request was sent (before the connection was opened). error: "" for a whole answer.

    output_tokens   the server's count in `usage`; without one, of events with a choice
    events          events with a choice: where they are fewer than the tokens, some came together
    cached_tokens   prompt tokens the server did not compute; None: it says nothing
    """

    error: str = ""
    first_s: float = 0.0
    last_s: float = 0.0
    end_s: float = 0.0
    output_tokens: int = 0
    events: int = 0
    cached_tokens: int | None = None

    @property
    def ttft_ms(self) -> float:
        return self.first_s * 1e3

    @property
    def tpot_ms(self) -> float:
        return (self.last_s - self.first_s) * 1e3 / (self.output_tokens - 1)


def read_answer(chunks: list[tuple[float, bytes]], sent_s: float, failure: str, output_tokens: int) -> Answer:
    """`failure`: why the transfer ended early, "" otherwise. An answer of another length than `output_tokens`, or
    without a finish reason, is an error."""
    http = decode_http(chunks)
    if failure or http.status != 200:
        body = b"".join(data for _, data in http.body).decode(errors="replace")
        return Answer(error=failure or http.error or f"HTTP {http.status}: {one_line(body)}")
    times: list[float] = []
    usage: dict[str, Any] = {}
    finish_reason, bare_finish_s, error = None, None, http.error
    try:
        for time_s, event in sse_events(http.body):
            if "error" in event:
                error = f"error event: {one_line(str(event['error']))}"
            usage = event.get("usage") or usage
            for choice in event.get("choices") or []:
                finish_reason = choice.get("finish_reason") or finish_reason
                if choice.get("text") or not choice.get("finish_reason"):
                    times.append(time_s)
                else:
                    bare_finish_s = time_s
    except ValueError as broken:
        error = error or f"malformed event: {one_line(str(broken))}"
    num_tokens = usage.get("completion_tokens", len(times))
    if bare_finish_s is not None and len(times) < num_tokens:
        times.append(bare_finish_s)  # the last token came with it, and had no text
    if not error and finish_reason is None:
        error = "the stream ended without a finish reason"
    if not error and num_tokens != output_tokens:
        error = f"{num_tokens} tokens instead of {output_tokens}"
    return Answer(
        error=error,
        first_s=times[0] - sent_s if times else 0.0,
        last_s=times[-1] - sent_s if times else 0.0,
        end_s=chunks[-1][0] - sent_s,
        output_tokens=num_tokens,
        events=len(times),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )
