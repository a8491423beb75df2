"""Answers of a whole disaggregated service over HTTP: what must not depend on streaming, n, or who prefilled."""

import json
import os
import random
import signal

import httpx
import pytest

from tests.server import Server, write_config

PROMPT = [random.Random(4).randrange(4, 500) for _ in range(45)]


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("answers")
    sections = {"model": {"dtype": "float32", "max_model_len": 256}, "prefill": {"chunk_tokens": 16}}
    config = write_config(directory, "tcp", **sections)
    with Server(config, tiny_model("qwen3"), directory / "log") as server:
        yield server


def stream(server: Server, path: str, body: dict) -> list[dict]:
    """The chunks of a stream that ends as it should."""
    answer = httpx.post(f"{server.url}{path}", json={**body, "stream": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_each_of_n_choices_is_the_answer_to_a_request_of_its_own(server) -> None:
    together = server.complete([PROMPT, PROMPT[:9]], n=3, seed=7, temperature=1.0, max_tokens=12, ignore_eos=True)
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    assert len({tuple(choice["token_ids"]) for choice in together["choices"]}) == 6
    for choice in together["choices"]:
        prompt, number = [PROMPT, PROMPT[:9]][choice["index"] // 3], choice["index"] % 3
        alone = server.complete(prompt, seed=7 + number, temperature=1.0, max_tokens=12, ignore_eos=True)
        assert choice["token_ids"] == alone["choices"][0]["token_ids"]
    assert together["usage"]["prompt_tokens"] == len(PROMPT) + 9
    assert together["usage"]["completion_tokens"] == 6 * 12


@pytest.mark.parametrize("max_tokens", [1, 10])
def test_logprobs_cover_every_token_from_the_first_whoever_computed_it(server, max_tokens) -> None:
    body = {"messages": [{"role": "user", "content": "Pass it on. 😀"}], "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 2, "max_tokens": max_tokens, "return_token_ids": True}
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    assert len(whole["token_ids"]) == max_tokens == len(whole["logprobs"]["content"])
    for entry in whole["logprobs"]["content"]:
        assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}
        assert entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2
    chunks = stream(server, "/v1/chat/completions", body)
    streamed = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"]


def test_text_is_what_detokenizing_the_tokens_gives_streamed_or_not(server) -> None:
    for seed in range(8):
        body = {"prompt": PROMPT[seed:], "seed": seed, "temperature": 1.5, "max_tokens": 30, "ignore_eos": True}
        body |= {"return_token_ids": True, "skip_special_tokens": False, "stream_options": {"include_usage": True}}
        *chunks, last = stream(server, "/v1/completions", body)
        tokens = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        spelled = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
        del body["stream_options"]
        whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert text == spelled == whole["choices"][0]["text"]
        assert tokens == whole["choices"][0]["token_ids"]
        assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 30


def test_a_stop_string_hides_itself_wherever_its_tokens_were_computed(server) -> None:
    """Every stop string that begins with the answer's first characters, so also in the token that prefill sampled."""
    text = server.complete(PROMPT, max_tokens=12, ignore_eos=True)["choices"][0]["text"]
    for start in range(6):
        stop = text[start : start + 3]
        choice = server.complete(PROMPT, max_tokens=12, ignore_eos=True, stop=stop)["choices"][0]
        assert choice["text"] == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_a_prompt_at_the_limit_is_served_and_one_token_more_is_refused_with_both_counts(server) -> None:
    prompt = (PROMPT * 6)[:256]
    assert server.complete(prompt[:255], max_tokens=1, ignore_eos=True)["usage"]["completion_tokens"] == 1
    assert server.complete(prompt[:254], ignore_eos=True)["usage"]["completion_tokens"] == 2
    for tokens, max_tokens in ((prompt, 1), (prompt[:255], 2)):
        body = {"prompt": tokens, "max_tokens": max_tokens}
        error = httpx.post(f"{server.url}/v1/completions", json=body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert str(len(tokens)) in error["message"] and "256" in error["message"]


def test_a_killed_prefill_worker_leaves_the_decode_worker_as_it_was(server) -> None:
    decode, [prefill] = server.worker_pids("decode"), server.worker_pids("prefill")
    expected = server.complete(PROMPT, max_tokens=20, ignore_eos=True)["choices"][0]["token_ids"]
    os.kill(prefill, signal.SIGKILL)
    answer = server.complete(PROMPT[::-1], max_tokens=20, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 20
    server.wait_healthy()
    assert server.complete(PROMPT, max_tokens=20, ignore_eos=True)["choices"][0]["token_ids"] == expected
    assert server.worker_pids("decode") == decode and server.worker_pids("prefill") != [prefill]
