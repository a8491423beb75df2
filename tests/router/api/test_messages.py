"""What of a chat reaches the template, with a template that prints all it is given."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from router.tokenizer import Tokenizer
from tests.router.api.conftest import Api, error_of
from tests.router.api.fake_dispatcher import deltas, model_info

SHOW_ALL = (
    "{%- for message in messages -%}{%- if message.role == 'function' -%}{{ raise_exception('no functions here') }}"
    "{%- endif -%}{%- if message.content == 'break' -%}{{ 1 + message }}{%- endif -%}{%- endfor -%}"
    "{{ {'messages': messages, 'tools': tools or [], 'thinking': enable_thinking | default(none),"
    " 'effort': reasoning_effort | default(none)} | tojson }}"
)


@pytest.fixture(scope="module")
def show_all(model_dir: Path) -> Callable[..., Api]:
    """make_api with a template that shows what it was given."""
    inner = AutoTokenizer.from_pretrained(model_dir)
    inner.chat_template = SHOW_ALL
    tokenizer = Tokenizer(inner, model_dir)
    return lambda **router: Api(tokenizer, lambda request: deltas(request, [9]), **router)


def seen(api: Api) -> dict:
    return json.loads(api.prompt_text())


USER = {"role": "user", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def test_tools_reach_the_template_unless_tool_choice_is_none(show_all) -> None:
    api = show_all()
    api.chat(tools=TOOLS, tool_choice="auto")
    assert seen(api)["tools"] == TOOLS
    api.chat(tools=TOOLS, tool_choice="none")
    assert seen(api)["tools"] == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"x": 1}', {"x": 1}), ("{broken", "{broken"), ("[1]", "[1]"), ({"x": 1}, {"x": 1})],
)
def test_tool_call_arguments_become_objects_where_they_are(show_all, arguments, expected) -> None:
    api = show_all()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    api.chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
    message = seen(api)["messages"][1]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}
    assert message["content"] == ""


@pytest.mark.parametrize(
    "arguments",
    ['{"x": "\\ud800"}', '{"x": ' * 100_000, '{"x": ' * 20_000 + "1" + "}" * 20_000, '{"x": 1' + "0" * 5000 + "}"],
    ids=["lone surrogate", "unclosed", "deep", "long number"],
)
def test_arguments_that_no_body_may_hold_stay_the_text_they_were(show_all, arguments) -> None:
    api = show_all()
    api.dispatcher.model = model_info(max_model_len=10**6)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    response = api.chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]}], max_tokens=1)
    assert response.status_code == 200, response.text
    assert seen(api)["messages"][1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_other_keys_of_a_message_pass_through(show_all) -> None:
    api = show_all()
    api.chat(messages=[USER, {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"}])
    assert seen(api)["messages"][1] == {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"}


def test_template_variables_reach_the_template(show_all) -> None:
    api = show_all()
    api.chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert (seen(api)["thinking"], seen(api)["effort"]) == (False, "low")


def test_what_the_template_refuses_is_a_400_with_its_reason(show_all) -> None:
    api = show_all()
    error = error_of(api.chat(messages=[{"role": "function", "content": "x"}]), 400)
    assert "no functions here" in error["message"] and error["param"] == "messages"
    error_of(api.chat("break"), 400)
    assert api.dispatcher.requests == []


def test_a_model_without_a_template_still_completes(model_dir: Path) -> None:
    inner = AutoTokenizer.from_pretrained(model_dir)
    inner.chat_template = None
    api = Api(Tokenizer(inner, model_dir), lambda request: deltas(request, [9]))
    assert "template" in error_of(api.chat(), 400)["message"]
    assert api.complete().status_code == 200


def test_lines_that_differ_in_every_request_can_be_stripped_from_system_messages(show_all) -> None:
    api = show_all(strip_system_lines=[r"x-request-line: \w+", "Today is .*"])
    system = "x-request-line: {0}\nYou are an agent.\n  Today is {0}.  \nKeep x-request-line: {0} here."
    for role in ("system", "developer"):
        prompts = []
        for stamp in ("aaa", "bbb"):
            api.chat(messages=[{"role": role, "content": system.format(stamp)}, USER])
            prompts.append(seen(api)["messages"][0]["content"])
        assert prompts == [f"You are an agent.\nKeep x-request-line: {stamp} here." for stamp in ("aaa", "bbb")]
    api.chat("x-request-line: aaa")
    assert seen(api)["messages"][0]["content"] == "x-request-line: aaa"
