import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.replay.client import RawResponse
from bench.replay.plan import PlannedRequest
from bench.replay.response import RequestRecord, read_response, sse_events
from bench.replay.transport import decode_http

REQUEST = PlannedRequest(
    index=9, session=1, phase="measured", arrival_s=10.0, prompt_token_ids=[1] * 80, output_tokens=4, turn=1
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(value: Any) -> bytes:
    return chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


def tokens(*token_ids: int, finish: str | None = None) -> bytes:
    return event(
        {"choices": [{"index": 0, "text": "a" * len(token_ids), "token_ids": token_ids, "finish_reason": finish}]}
    )


def usage(completion_tokens: int, cached_tokens: int | None) -> bytes:
    values: dict[str, Any] = {"prompt_tokens": 80, "completion_tokens": completion_tokens}
    if cached_tokens is not None:
        values["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return event({"choices": [], "usage": values})


def read(*pieces: tuple[float, bytes], output_tokens: int = 4, forced: bool = True, **raw: Any) -> RequestRecord:
    response = RawResponse(index=9, scheduled=10.0, sent=10.5, ended=20.0, chunks=list(pieces), **raw)
    return read_response(replace(REQUEST, output_tokens=output_tokens), response, forced)


WHOLE = (
    (11.0, HEAD + tokens(5)),
    (11.5, tokens(6, 7)),
    (12.5, tokens(8) + tokens(finish="length")),
    (12.6, usage(4, 64) + chunk(b"data: [DONE]\n\n") + END),
)


def test_latencies_are_those_computed_by_hand():
    record = read(*WHOLE)
    assert record.outcome == "ok", record.error
    assert record.ttft_ms == pytest.approx(1000.0)  # 11.0 - the scheduled 10.0, not the sent 10.5
    assert record.tpot_ms == pytest.approx(500.0)  # (12.5 - 11.0) / (4 - 1)
    assert record.send_lag_ms == pytest.approx(500.0)
    assert record.token_times_s == [11.0, 11.5, 11.5, 12.5]
    assert (record.token_ids, record.output_tokens, record.finish_reason) == ([5, 6, 7, 8], 4, "length")


@pytest.mark.parametrize("cached", [0, 64])
def test_cached_tokens_are_the_servers_and_zero_is_not_unknown(cached: int):
    record = read(*WHOLE[:3], (12.6, usage(4, cached) + END))
    assert (record.cached_tokens, record.prompt_tokens) == (cached, 80)


def test_a_server_that_reports_no_cached_tokens_leaves_them_unknown():
    assert read(*WHOLE[:3], (12.6, usage(4, None) + END)).cached_tokens is None


def test_without_token_ids_pieces_of_text_are_timed_and_usage_counts():
    def text(piece: str) -> bytes:
        return event({"choices": [{"index": 0, "text": piece, "finish_reason": None}]})

    finish = event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    record = read((11.0, HEAD + text("ab")), (12.0, text("c") + finish + usage(5, 0) + END), output_tokens=5)
    assert record.outcome == "ok", record.error
    assert record.token_times_s == [11.0, 12.0]
    assert record.tpot_ms == pytest.approx(250.0)  # 1000 ms over the 5 - 1 tokens that usage counts


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ((), "the connection closed unanswered"),
        (WHOLE[:2], "the connection closed before the end of the answer"),
        (((11.0, HEAD + tokens(5, 6, 7, 8) + usage(4, 0) + END),), "without a finish reason"),
        (((11.0, HEAD + tokens(5, 6, finish="stop") + usage(2, 0) + END),), "2 tokens instead of 4"),
        (((11.0, HEAD + tokens(5, 6, 7, finish="length") + usage(4, 0) + END),), "counted 4 tokens and sent 3"),
        (((11.0, HEAD + tokens(5, -1, 7, 8, finish="length") + usage(4, 0) + END),), "no token id"),
        (((11.0, HEAD + tokens(5) + event({"error": {"message": "worker lost"}}) + END),), "worker lost"),
        (((11.0, HEAD + chunk(b"data: {nope\n\n") + END),), "malformed event"),
        (((11.0, HEAD + chunk(b"data: [1]\n\n") + END),), "malformed event"),
        (((11.0, b"HTTP/1.1 429 Busy\r\ncontent-length: 4\r\n\r\nfull"),), "HTTP 429: full"),
        (((11.0, b"not http at all\r\n\r\n"),), "before the end"),
    ],
)
def test_every_incomplete_answer_is_a_failure_that_says_why(pieces: tuple[tuple[float, bytes], ...], error: str):
    record = read(*pieces)
    assert record.outcome == "failed"
    assert error in record.error


def test_an_early_end_is_no_failure_when_the_length_could_not_be_forced():
    record = read((11.0, HEAD + tokens(5, 6, finish="stop") + usage(2, 0) + END), forced=False)
    assert (record.outcome, record.output_tokens, record.finish_reason) == ("ok", 2, "stop")


def test_a_request_given_up_by_the_client_is_a_timeout_and_keeps_its_tokens():
    record = read(*WHOLE[:2], timed_out=True, failure="no end within 300 s")
    assert (record.outcome, record.error) == ("timeout", "no end within 300 s")
    assert record.token_ids == [5, 6, 7]


@given(st.lists(st.integers(1, 120), max_size=40))
def test_events_and_their_times_do_not_depend_on_how_the_bytes_were_split(sizes: list[int]):
    stream = (
        HEAD + tokens(5) + chunk(b": comment\r\n\r\n") + tokens(6, 7) + chunk(b'data: {"choices"') + chunk(b": []}\n\n")
    )
    stream += chunk(b"data: [DONE]\n\n") + END
    ends = [stream.index(b"\n\n", stream.index(mark)) + 2 for mark in (b"[5]", b"[6, 7]", b": []}")]
    pieces, rest, offset = [], stream, 0
    for size in [*sizes, len(stream)]:
        piece, rest = rest[:size], rest[size:]
        offset += len(piece)
        if piece:
            pieces.append((float(offset), piece))  # an arrival time that says how many bytes have come
    answer = decode_http(pieces)
    assert (answer.status, answer.error) == (200, "")
    events = list(sse_events(answer.body))
    assert [value["choices"][0]["token_ids"] if value["choices"] else None for _, value in events] == [
        [5],
        [6, 7],
        None,
    ]
    for (time_s, _), end in zip(events, ends):
        assert time_s == next(arrival for arrival, _ in pieces if arrival >= end)
