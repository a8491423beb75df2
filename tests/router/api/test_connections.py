"""Over a real connection: when chunks leave, and what happens when the client does."""

import contextlib
import json
import re
import socket
import threading

import httpx
import pytest

from engine.request import Request
from router.http_protocol import StreamingProtocol
from tests.router.api.conftest import events
from tests.router.api.fake_dispatcher import deltas, model_info
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
    """Tokenization of a long text holds up its own request only."""
    held, long = threading.Event(), "slow " * 1000
    api = make_api("hello")
    api.dispatcher.model = model_info(max_model_len=8192)
    encode = api.tokenizer.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        if text == long:
            held.wait(20)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(api.tokenizer, "encode", slow)
    with serving(api.app) as url:
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json={"prompt": long}, timeout=30))
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


def by_choice(response: httpx.Response) -> dict[int, list]:
    """What the events of each choice hold; -1: those without one."""
    found: dict[int, list] = {}
    for event in events(response)[:-1]:
        index = event["choices"][0]["index"] if event["choices"] else -1
        found.setdefault(index, []).append((event["choices"], event.get("usage")))
    return found


@pytest.mark.parametrize("extra", [{}, {"return_token_ids": True}, {"logprobs": 1}, {"stop": "zz"}, {"n": 2}])
def test_a_connection_shows_the_same_events_as_the_application(make_api, extra) -> None:
    """On a connection tokens are written to the socket without waking the response; the events are the same."""
    api = make_api("The baton changes hands 😀.")
    body = {"prompt": "hello", "stream": True, "stream_options": {"include_usage": True}, **extra}
    with serving(api.app) as url:
        over_a_connection = httpx.post(f"{url}/v1/completions", json=body)
    assert by_choice(over_a_connection) == by_choice(api.post("/v1/completions", body))


def test_a_client_that_reads_slowly_gets_everything_in_order(make_api, monkeypatch) -> None:
    """What does not fit the connection waits in the server, and nothing later passes it."""
    paused = threading.Event()
    pause = StreamingProtocol.pause_writing

    def noting(self: StreamingProtocol) -> None:
        paused.set()
        pause(self)

    monkeypatch.setattr(StreamingProtocol, "pause_writing", noting)
    token_ids = [5 + number % 400 for number in range(20_000)]
    api = make_api(lambda request: deltas(request, token_ids))
    api.dispatcher.model = model_info(max_model_len=100_000)
    body = json.dumps(
        {"prompt": [5, 6], "max_tokens": len(token_ids), "stream": True, "return_token_ids": True}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serving(api.app) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(head + body)
        assert paused.wait(20)
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    got = [int(token_id) for token_id in re.findall(rb'"token_ids":\[(\d+)\]', received)]
    assert got == token_ids and b"data: [DONE]" in received and received.endswith(b"0\r\n\r\n")


def test_a_client_of_http_1_0_gets_events_without_chunk_sizes(make_api) -> None:
    api = make_api("hello")
    body = b'{"prompt": "a", "stream": true}'
    with serving(api.app) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    events = received.partition(b"\r\n\r\n")[2].split(b"\n\n")
    assert events.pop() == b"" and events.pop() == b"data: [DONE]"
    assert events and all(json.loads(event.removeprefix(b"data: ")) for event in events)
