"""Refusals: the right status, a small envelope, nothing of the input in it, and a server that goes on."""

import json

import pytest

from router.body import MAX_BODY_BYTES
from router.dispatcher import Draining, Overloaded, Unavailable
from tests.router.api.conftest import error_of

PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
USER = {"role": "user", "content": "hello"}

NOT_JSON = [
    b"",
    b"{",
    b"nonsense",
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b'{"messages": [{"role": "user", "content": "\\udc00 x"}]}',
    b"[" * 200_000,
    b'{"a":' * 100_000,
]
NOT_AN_OBJECT = [b"[]", b"null", b'"text"', b"5", b"NaN"]


@pytest.mark.parametrize("path", PATHS)
def test_malformed_bodies_are_refused(make_api, path) -> None:
    api = make_api()
    for body in NOT_JSON:
        assert error_of(api.post(path, body), 400)["code"] == "invalid_json", body[:40]
    for body in NOT_AN_OBJECT:
        error_of(api.post(path, body), 400)
    assert api.dispatcher.requests == []


BAD_COMPLETIONS = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", ["x", ""]),
    ("prompt", None),
    ("prompt", 5),
    ("prompt", {"a": 1}),
    ("prompt", [1.5]),
    ("prompt", [True]),
    ("prompt", [5, "x"]),
    ("prompt", [[5], "x"]),
    ("prompt", [-1]),
    ("prompt", [512]),
    ("prompt", [10**30]),
    ("stop_token_ids", [512]),
    ("stop_token_ids", [-1]),
    ("logit_bias", {"512": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1.5": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"²": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", [5]),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "16"),
    ("max_tokens", 10**30),
    ("max_tokens", True),
    ("min_tokens", 17),
    ("min_tokens", 10**9),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 1.5),
    ("top_k", -2),
    ("min_p", 2),
    ("n", 0),
    ("n", 100000),
    ("seed", 10**30),
    ("seed", 1.5),
    ("logprobs", 21),
    ("logprobs", True),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-308),
    ("frequency_penalty", 3),
    ("presence_penalty", -3),
    ("stop", ""),
    ("stop", ["x", ""]),
    ("stop", ["x"] * 65),
    ("stop", 5),
    ("stop", ["y" * 2000]),
    ("stream", "yes"),
    ("cache_salt", "s" * 1000),
    ("model", 5),
]


@pytest.mark.parametrize(("field", "value"), BAD_COMPLETIONS, ids=lambda value: str(value)[:20])
def test_a_bad_value_is_refused_by_name(make_api, field, value) -> None:
    api = make_api()
    error = error_of(api.post("/v1/completions", {"prompt": "hello", field: value}), 400)
    assert (error["param"] or "").split(".")[0] == field
    assert api.dispatcher.requests == []
    assert api.complete().status_code == 200


@pytest.mark.parametrize("value", [5, [], True])
def test_a_value_of_no_possible_type_is_refused_by_its_fields_own_name(make_api, value) -> None:
    error = error_of(make_api().chat(tool_choice=value), 400)
    assert error["param"] == "tool_choice" and "string or an object" in error["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(make_api, number) -> None:
    for field in ("temperature", "top_p", "frequency_penalty"):
        error_of(make_api().post("/v1/completions", f'{{"prompt": "x", "{field}": {number}}}'.encode()), 400)
    error_of(make_api().post("/v1/completions", f'{{"prompt": "x", "logit_bias": {{"5": {number}}}}}'.encode()), 400)


BAD_MESSAGES = [
    [],
    None,
    "hello",
    [{}],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": None}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
    [{"role": "user", "content": [{"text": "no type"}]}],
    [{"role": "robot", "content": "hello"}],
    [{"content": "hello"}],
    [USER, {"role": "assistant", "content": None, "tool_calls": [5]}],
]


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=lambda value: str(value)[:40])
def test_bad_messages_are_refused_by_place(make_api, messages) -> None:
    api = make_api()
    error = error_of(api.post("/v1/chat/completions", {"messages": messages}), 400)
    assert error["param"].startswith("messages")
    assert api.dispatcher.requests == [] and api.chat().status_code == 200


def test_errors_never_repeat_the_input(make_api) -> None:
    api = make_api()
    secret = "S3CRET"
    for body in (
        {"prompt": {"a": secret}},
        {"prompt": [secret, 5]},
        {"prompt": "x", "stop": [secret * 1000]},
        {"prompt": "x", "model": secret},
        {"prompt": "x", "logit_bias": {secret: 1}},
        {"prompt": "x", "temperature": secret},
    ):
        response = api.post("/v1/completions", body)
        assert response.status_code in (400, 404) and secret not in response.text
    response = api.chat(messages=[{"role": secret, "content": "x"}])
    assert response.status_code == 400 and secret not in response.text
    assert secret not in api.get(f"/v1/models/{secret}").text


def test_a_million_bad_values_are_one_small_error(make_api) -> None:
    error_of(make_api().post("/v1/completions", {"prompt": [[1]] * 1000 + [["x"] * 100_000]}), 400)
    error_of(make_api().post("/v1/completions", {"prompt": [-1] * 200_000}), 400)


def test_a_body_beyond_the_limit_is_413_whether_its_length_is_told_or_not(make_api) -> None:
    api = make_api()

    async def endless():
        for _ in range(MAX_BODY_BYTES // 2**20 + 2):
            yield b" " * 2**20

    told = {"content-type": "application/json", "content-length": str(MAX_BODY_BYTES + 1)}
    for options in ({"content": b"{}", "headers": told}, {"content": endless()}):
        error_of(api.request("POST", "/v1/chat/completions", **options), 413)
    large = {"messages": [USER], "metadata": {"a": "x" * (MAX_BODY_BYTES - 1000)}}
    assert api.post("/v1/chat/completions", json.dumps(large).encode()).status_code == 200


def test_other_content_types_are_415_and_none_is_json(make_api) -> None:
    api = make_api()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        error_of(
            api.request("POST", "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind}), 415
        )
    for headers in ({}, {"content-type": "application/json; charset=utf-8"}):
        response = api.request("POST", "/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert response.status_code == 200


def test_unknown_paths_methods_and_models_have_envelopes(make_api) -> None:
    api = make_api()
    error_of(api.get("/v2/nothing"), 404)
    response = api.get("/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    for response in (
        api.complete(model="other"),
        api.chat(model="other"),
        api.post("/tokenize", {"prompt": "x", "model": "o"}),
    ):
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    error_of(api.get("/v1/models/other"), 404)


def test_any_model_name_is_taken_when_the_configuration_gives_none(make_api) -> None:
    api = make_api(served_model_name=None)
    assert api.complete(model="whatever").status_code == 200


def test_more_sequences_than_the_queue_ever_holds_are_a_400_and_not_a_429_for_ever(make_api) -> None:
    api = make_api(max_waiting=3)
    assert api.complete(prompt=["a"] * 35).status_code == 200
    error = error_of(api.complete(prompt=["a"] * 36), 400)
    assert error["param"] == "n" and "36" in error["message"] and "35" in error["message"]


REFUSALS = [
    (Overloaded("300 in flight", 2.2), 429, "3"),
    (Draining("shutting down", 30), 503, "30"),
    (Unavailable("no decode worker is up", 0.1), 503, "1"),
]


@pytest.mark.parametrize(("refusal", "status", "retry_after"), REFUSALS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_request_is_told_when_to_retry(make_api, refusal, status, retry_after, stream) -> None:
    api = make_api()
    api.dispatcher.refusal = refusal
    response = api.chat(stream=stream)
    assert error_of(response, status)["message"] == refusal.message
    assert response.headers["retry-after"] == retry_after


def test_before_a_worker_is_up_requests_are_told_to_retry(make_api) -> None:
    api = make_api()
    api.dispatcher.model = None
    for response in (api.complete(), api.chat(), api.post("/detokenize", {"tokens": [5]})):
        error_of(response, 503)
        assert "retry-after" in response.headers
    assert api.post("/tokenize", {"prompt": "x"}).json()["max_model_len"] is None
    assert api.get("/v1/models").json()["data"][0]["max_model_len"] is None


def test_a_bug_is_a_500_with_an_envelope(make_api) -> None:
    api = make_api()
    api.dispatcher.refusal = KeyError("SECRET")
    assert "SECRET" not in error_of(api.chat(), 500)["message"]
