"""Requests nobody thought of against a whole service, in two processes besides the router: none is answered with a bug,
and no worker dies of one. tests/router/api/test_fuzz.py does the same in more depth to the API with scripted engines.
"""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.server import Server, write_config

PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
EXAMPLES = 12


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzz")
    config = write_config(directory, "tcp", model={"dtype": "float32", "max_model_len": 128})
    with Server(config, tiny_model("qwen3"), directory / "log") as server:
        workers = server.worker_pids("prefill") + server.worker_pids("decode")
        yield server
        assert server.worker_pids("prefill") + server.worker_pids("decode") == workers, server.log
        assert "Traceback" not in server.log
        assert server.healthy()


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
@pytest.mark.parametrize("path", PATHS)
def test_requests_from_the_schema_are_answered_without_a_bug(server, schema, path, mode) -> None:
    @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def try_it(case) -> None:
        check(case.call(timeout=60))

    try_it()


def check(response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < 1000


TOKEN_IDS = st.lists(st.integers(0, 511), min_size=1, max_size=40)
FIELDS = {
    "n": st.integers(1, 3),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "max_tokens": st.integers(1, 30) | st.just(100),
    "min_tokens": st.integers(0, 8),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.sampled_from([-1, 0, 1, 5, 511, 512, 10**6]),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 10),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 511).map(str), st.floats(-100, 100), max_size=20)
    | st.just({str(token_id): -100.0 for token_id in range(512)}),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=2), max_size=4),
    "stop_token_ids": st.lists(st.integers(0, 511), max_size=5) | st.just(list(range(512))),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "logprobs": st.integers(0, 20),
    "cache_salt": st.text(max_size=3),
}


def test_any_mix_of_allowed_fields_generates_what_was_asked(server) -> None:
    prompts = TOKEN_IDS | st.lists(TOKEN_IDS, min_size=1, max_size=3) | st.text(min_size=1, max_size=30)

    @given(prompt=prompts, fields=st.fixed_dictionaries({}, optional=FIELDS))
    @settings(max_examples=4 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def try_it(prompt, fields) -> None:
        body = {"prompt": prompt, "return_token_ids": True, **fields}
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        check(response)
        max_tokens, min_tokens = fields.get("max_tokens", 16), fields.get("min_tokens", 0)
        if min_tokens > max_tokens:
            assert response.status_code == 400
        elif response.status_code == 200 and fields.get("stream"):
            assert response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text
        elif response.status_code == 200:
            answer = response.json()
            for choice in answer["choices"]:
                assert min_tokens <= len(choice["token_ids"]) <= max_tokens
                assert choice["finish_reason"] in ("stop", "length")
            generated = sum(len(choice["token_ids"]) for choice in answer["choices"])
            assert generated == answer["usage"]["completion_tokens"]
        else:
            assert response.json()["error"]["code"] == "context_length_exceeded"

    try_it()
