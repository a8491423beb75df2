"""Server-sent events: what every chunk holds, and in which order they come."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.request import PrefillReport, Request
from router.dispatcher import GenerationError
from tests.router.api.conftest import error_of, events
from tests.router.api.fake_dispatcher import deltas

TEXT = 'Grüße 😀 "quoted"\n\u2028 end'


def text_of(chunks, index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)


@pytest.mark.parametrize("send", ["chat", "complete"])
def test_the_stream_joins_to_the_whole_answer(make_api, send) -> None:
    api = make_api(TEXT)
    *chunks, done = events(getattr(api, send)(stream=True))
    assert done == "[DONE]" and text_of(chunks) == TEXT
    whole = getattr(api, send)().json()["choices"][0]
    assert (whole["text"] if send == "complete" else whole["message"]["content"]) == TEXT
    assert len({chunk["id"] for chunk in chunks}) == 1
    kind = {"chat": "chat.completion.chunk", "complete": "text_completion"}[send]
    assert {chunk["object"] for chunk in chunks} == {kind}


def test_every_delta_of_a_worker_is_one_chunk(make_api) -> None:
    api = make_api(lambda request: deltas(request, [9] * 12, sizes=[1, 4, 2, 5]))
    chunks = events(api.chat(stream=True))[:-1]
    letter = api.tokenizer.decode([9])
    assert [text_of([chunk]) for chunk in chunks] == [letter, letter * 4, letter * 2, letter * 5]


def test_the_role_comes_with_the_first_token_and_only_then(make_api) -> None:
    chunks = events(make_api("hello").chat(stream=True))[:-1]
    first, *rest = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert first["role"] == "assistant" and first["content"] != ""
    assert all("role" not in delta for delta in rest)


def test_finish_reason_is_null_until_one_final_chunk_of_each_index(make_api) -> None:
    def script(request: Request):
        number = int(request.request_id[-1])
        return deltas(request, [9] * (number + 1), finish_reason=["length", "stop", "length"][number])

    chunks = events(make_api(script).chat(stream=True, n=3))[:-1]
    for index, reason in enumerate(["length", "stop", "length"]):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in mine] == [None] * index + [reason]
        assert ["role" in choice["delta"] for choice in mine] == [True] + [False] * index


def test_usage_is_one_chunk_without_choices_before_done_and_only_on_request(make_api) -> None:
    api = make_api(lambda request: deltas(request, [9] * 3, prefill=PrefillReport(num_cached_tokens=2)))
    *chunks, last, done = events(api.chat(stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]" and last["choices"] == [] and all("usage" not in chunk for chunk in chunks)
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        *chunks, done = events(api.chat(stream=True, stream_options=options))
        assert done == "[DONE]" and all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_usage_of_a_stream_is_the_usage_of_the_whole_answer(make_api) -> None:
    api = make_api("hello")
    streamed = events(api.complete(["ab", "c"], n=2, stream=True, stream_options={"include_usage": True}))[-2]["usage"]
    assert streamed == api.complete(["ab", "c"], n=2).json()["usage"]


def test_logprobs_and_token_ids_come_with_their_chunks(make_api) -> None:
    api = make_api("hello😀")
    ids = [*api.encode("hello😀"), 2]
    chunks = events(api.chat(stream=True, logprobs=True, top_logprobs=1, return_token_ids=True))[:-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == [[token_id] for token_id in ids]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [1] * len(ids)
    assert chunks[0]["prompt_token_ids"] == api.dispatcher.requests[0].prompt_token_ids
    chunks = events(api.complete(stream=True, logprobs=1))[:-1]
    offsets = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == api.complete(logprobs=1).json()["choices"][0]["logprobs"]["text_offset"]


def test_the_echoed_prompt_comes_with_the_first_token(make_api) -> None:
    chunks = events(make_api("hello").complete("say: ", echo=True, stream=True))[:-1]
    assert chunks[0]["choices"][0]["text"].startswith("say: h") and text_of(chunks) == "say: hello"


FAILURES = [
    ("deadline", 504, "timeout_error"),
    ("worker_lost", 503, "server_error"),
    ("too_long", 400, "invalid_request_error"),
    ("internal", 500, "server_error"),
]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("code", "status", "kind"), FAILURES)
def test_a_failure_before_the_first_token_is_a_status(make_api, code, status, kind, stream, n) -> None:
    api = make_api(lambda request: [GenerationError(code, "what happened")])
    response = api.chat(stream=stream, n=n)
    assert error_of(response, status)["type"] == kind
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("code", "status", "kind"), FAILURES)
def test_a_failure_after_the_first_token_is_an_error_event_and_the_end(make_api, code, status, kind, n) -> None:
    def script(request: Request):
        if request.request_id.endswith("-0"):
            return [*deltas(request, [9, 9, 9], finish_reason=None), 0.02, GenerationError(code, "what happened")]
        return [*deltas(request, [9], finish_reason=None), 60.0]

    api = make_api(script)
    response = api.chat(stream=True, n=n, stream_options={"include_usage": True})
    *chunks, last = events(response)
    assert response.status_code == 200 and last["error"]["type"] == kind and last["error"]["message"] == "what happened"
    assert chunks and all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    assert api.dispatcher.closed == [request.request_id for request in api.dispatcher.requests[1:]]


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_is_never_a_success(make_api, stream) -> None:
    def script(request: Request):
        *steps, last = deltas(request, [9, 9])
        return [*steps, GenerationError("worker_lost", "gone")]

    response = make_api(script).chat(stream=stream)
    if stream:
        assert "error" in events(response)[-1]
    else:
        error_of(response, 503)


class CutShort:
    """A token stream that stops without a finish reason."""

    def __init__(self, request: Request):
        self._steps = iter(deltas(request, [9, 9], finish_reason=None))

    def __aiter__(self):
        return self

    async def __anext__(self):
        for delta in self._steps:
            return delta
        raise StopAsyncIteration

    def close(self) -> None:
        pass


def test_a_stream_without_a_finish_reason_is_an_error_not_an_answer(make_api, monkeypatch) -> None:
    api = make_api()
    monkeypatch.setattr(api.dispatcher, "submit", lambda requests: [CutShort(request) for request in requests])
    for n in (1, 2):
        error_of(api.chat(n=n), 500)
        assert events(api.chat(n=n, stream=True))[-1]["error"]["code"] == "internal"


def test_an_unexpected_error_in_a_stream_is_an_error_event(make_api) -> None:
    def script(request: Request):
        steps = deltas(request, [9, 9])
        steps[1].logprobs = None
        steps[1].token_ids = ["not an id"]
        return steps

    *_, last = events(make_api(script).chat(stream=True))
    assert last["error"]["code"] == "internal" and "not an id" not in last["error"]["message"]


@given(
    text=st.text(alphabet='abc é😀日"\\\n', min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 6), max_size=10),
    stops=st.lists(st.text(alphabet="abc é😀", min_size=1, max_size=3), max_size=3),
)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_streamed_or_not_the_answer_is_the_same(make_api, text, sizes, stops) -> None:
    api = make_api(
        lambda request: deltas(request, [*api.encode(text), 2], sizes=sizes, finish_reason="stop", stop_token_id=2)
    )
    whole = api.complete(stop=stops, return_token_ids=True).json()
    *chunks, _, _ = chunked = events(
        api.complete(stop=stops, return_token_ids=True, stream=True, stream_options={"include_usage": True})
    )
    choice = whole["choices"][0]
    assert text_of(chunks) == choice["text"]
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert chunked[-2]["usage"] == whole["usage"]
    assert not any(stop in choice["text"] for stop in stops)
