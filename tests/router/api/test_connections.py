"""Over a real connection: when chunks leave, and what happens when the client does."""

import contextlib
import json
import threading

import httpx
import pytest

from engine.request import Request
from tests.router.api.fake_dispatcher import deltas
from tests.router.api.live import serving, wait_until

BODY = {"messages": [{"role": "user", "content": "hello"}]}


def never_ends(request: Request):
    return [*deltas(request, [9, 9, 9], finish_reason=None), 300.0]


def never_begins(request: Request):
    return [300.0]


def test_the_first_chunk_leaves_with_the_first_token(make_api) -> None:
    api = make_api(never_ends)
    with (
        serving(api.app) as url,
        httpx.stream("POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True}) as r,
    ):
        lines = r.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["choices"][0]["delta"]["role"] == "assistant" and first["choices"][0]["delta"]["content"]


def test_no_byte_leaves_before_the_first_token(make_api) -> None:
    go = threading.Event()

    def script(request: Request):
        while not go.is_set():
            yield 0.01
        yield from deltas(request, [9])

    api = make_api(script)
    with serving(api.app) as url:
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/chat/completions", json={**BODY, "stream": True}, timeout=httpx.Timeout(5, read=0.3))
            pytest.fail("an answer before the first token")
        go.set()
        assert httpx.post(f"{url}/v1/chat/completions", json={**BODY, "stream": True}).status_code == 200


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_ends_all_its_sequences(make_api, n) -> None:
    api = make_api(never_ends)
    with serving(api.app) as url:
        body = {**BODY, "stream": True, "n": n}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()  # held: a generator that is dropped closes the connection
            next(lines)
            assert api.dispatcher.closed == []
        wait_until(lambda: len(api.dispatcher.closed) == n)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("stream", "script"), [(True, never_begins), (False, never_begins), (False, never_ends)])
def test_a_client_that_leaves_before_its_answer_ends_the_request(make_api, stream, script, n) -> None:
    api = make_api(script)
    with serving(api.app) as url:
        with contextlib.suppress(httpx.ReadTimeout):
            body = {**BODY, "stream": stream, "n": n}
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=httpx.Timeout(5, read=0.2))
            pytest.fail("an answer without an end")
        wait_until(lambda: len(api.dispatcher.closed) == n)
        metrics = httpx.get(f"{url}/metrics").text
        assert f'baton_request_finished_total{{finish_reason="abort"}} {n}.0' in metrics


def test_an_answered_request_is_not_aborted(make_api) -> None:
    api = make_api("hello")
    with serving(api.app) as url:
        for stream in (True, False):
            assert httpx.post(f"{url}/v1/chat/completions", json={**BODY, "stream": stream}).status_code == 200
    assert len(api.dispatcher.requests) == 2 and api.dispatcher.closed == []


def test_a_server_that_stops_ends_open_streams(make_api) -> None:
    api = make_api(never_ends)
    with serving(api.app) as url, httpx.Client() as client:
        request = client.build_request("POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True})
        response = client.send(request, stream=True)
        lines = response.iter_lines()
        next(lines)
    assert len(api.dispatcher.closed) == 1


def test_a_slow_prompt_does_not_stop_other_requests(make_api, monkeypatch) -> None:
    """Tokenization holds up its own request only."""
    held = threading.Event()
    api = make_api("hello")
    encode = api.tokenizer.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        if text == "slow":
            held.wait(20)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(api.tokenizer, "encode", slow)
    with serving(api.app) as url:
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json={"prompt": "slow"}, timeout=30))
        )
        thread.start()
        try:
            assert httpx.get(f"{url}/health").status_code == 200
            assert httpx.post(f"{url}/v1/completions", json={"prompt": [5, 6]}).status_code == 200
            assert answers == []
        finally:
            held.set()
            thread.join()
        assert answers[0].status_code == 200
