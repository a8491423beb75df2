"""Requests made from the OpenAPI schema, right and wrong ones: the server answers each, and none with a bug."""

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from router.schemas import ChatBody, CompletionBody
from tests.router.api.conftest import Api
from tests.router.api.fake_dispatcher import deltas

OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/flush_cache"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/prompts"),
]
DELIBERATE = {501, 503}


@pytest.fixture(scope="module")
def fuzzed_api(tokenizer):
    return Api(tokenizer, lambda request: deltas(request, [9, 10]))


@pytest.fixture(scope="module")
def schema(fuzzed_api):
    return schemathesis.openapi.from_asgi("/openapi.json", fuzzed_api.app)


def test_every_operation_is_tried(schema) -> None:
    found = {(op.ok().method.upper(), op.ok().path) for op in schema.get_all_operations()}
    assert found == set(OPERATIONS)


CASES = [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS] + [
    (*operation, GenerationMode.NEGATIVE) for operation in OPERATIONS[:4]
]


@pytest.mark.parametrize(
    ("method", "path", "mode"), CASES, ids=[f"{path}-{mode.name.lower()}" for _, path, mode in CASES]
)
def test_no_request_is_answered_with_a_bug(schema, method, path, mode) -> None:
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    def try_it(case) -> None:
        check(case.call())

    try_it()


def check(response) -> None:
    assert response.status_code < 500 or response.status_code in DELIBERATE, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < 1000


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([0, 1, -1, "0", "5", 1e300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
GOOD = {
    "/v1/completions": (CompletionBody, {"prompt": "x"}),
    "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "x"}]}),
}


@pytest.mark.parametrize("path", sorted(GOOD))
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_good_request_with_any_value_in_any_field_is_answered(fuzzed_api, path, data) -> None:
    model, good = GOOD[path]
    body = dict(good)
    for field in data.draw(st.lists(st.sampled_from(sorted(model.model_fields)), min_size=1, max_size=2)):
        body[field] = data.draw(JSON)
    check(fuzzed_api.post(path, json.dumps(body).encode()))


def test_the_server_still_answers(fuzzed_api) -> None:
    assert fuzzed_api.chat().status_code == 200
