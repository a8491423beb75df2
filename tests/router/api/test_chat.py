"""POST /v1/chat/completions."""

import pytest

from engine.request import PrefillReport, Request
from tests.router.api.conftest import error_of
from tests.router.api.fake_dispatcher import deltas, model_info


def test_a_chat_is_answered_in_openai_shape(make_api) -> None:
    api = make_api("The baton changes hands.")
    answer = api.chat("Where is it?").json()
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The baton changes hands."},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_prompt_is_what_the_models_template_makes_of_the_messages(make_api) -> None:
    api = make_api()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    api.chat(messages=messages)
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(api.tokenizer.model_dir).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert api.dispatcher.requests[0].prompt_token_ids == expected


def test_content_parts_are_flattened(make_api) -> None:
    api = make_api()
    api.chat([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])
    assert "<|im_start|>user\none\ntwo<|im_end|>" in api.prompt_text()


def test_the_developer_role_is_the_system_role(make_api) -> None:
    api = make_api()
    api.chat(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hello"}])
    assert api.prompt_text().startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_null_content_is_fine_beside_tool_calls_and_refused_alone(make_api) -> None:
    api = make_api()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    user = {"role": "user", "content": "hello"}
    tool = {"role": "tool", "tool_call_id": "1", "content": "2"}
    response = api.chat(messages=[user, {"role": "assistant", "content": None, "tool_calls": [call]}, tool])
    assert response.status_code == 200 and "<|im_start|>tool\n2<|im_end|>" in api.prompt_text()
    for message in ({"role": "user", "content": None}, {"role": "assistant"}, {"role": "assistant", "tool_calls": []}):
        assert error_of(api.chat(messages=[message]), 400)["param"] == "messages.0.content"


def test_max_tokens_defaults_to_the_rest_of_the_context(make_api) -> None:
    api = make_api()
    api.chat("hello")
    request = api.dispatcher.requests[0]
    assert request.sampling.max_tokens == 256 - len(request.prompt_token_ids)


def test_max_completion_tokens_wins_over_max_tokens(make_api) -> None:
    api = make_api()
    api.chat("hello", max_tokens=9)
    api.chat("hello", max_tokens=9, max_completion_tokens=3)
    assert [request.sampling.max_tokens for request in api.dispatcher.requests] == [9, 3]


def test_a_chat_beyond_the_context_is_refused_with_both_counts(make_api) -> None:
    api = make_api()
    api.dispatcher.model = model_info(max_model_len=40)
    api.chat("hello")
    length = len(api.dispatcher.requests.pop().prompt_token_ids)
    error = error_of(api.chat("hello", max_completion_tokens=40), 400)
    assert error["param"] == "messages" and str(length) in error["message"] and "40" in error["message"]
    error_of(api.chat("hello " * 50), 400)
    assert api.dispatcher.requests == []


@pytest.mark.parametrize("top", [None, 0, 2])
def test_logprobs_have_one_entry_a_token(make_api, top) -> None:
    api = make_api("h😀")
    ids = [*api.encode("h😀"), 2]
    content = api.chat(logprobs=True, top_logprobs=top).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.25] * len(ids)
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "h😀<|im_end|>".encode()
    assert [len(entry["top_logprobs"]) for entry in content] == [top or 0] * len(ids)
    assert api.dispatcher.requests[0].sampling.logprobs == (top or 0)


def test_n_counts_the_prompt_and_its_cached_tokens_once(make_api) -> None:
    def script(request: Request):
        cached = 4 if request.request_id.endswith("-0") else 9  # later choices find what the first one left
        return deltas(request, [9, 9], prefill=PrefillReport(num_cached_tokens=cached))

    api = make_api(script)
    answer = api.chat(n=3).json()
    usage = answer["usage"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert usage["prompt_tokens"] == len(api.dispatcher.requests[0].prompt_token_ids)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4 and usage["completion_tokens"] == 6


def test_a_final_assistant_message_can_be_continued(make_api) -> None:
    api = make_api()
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well,"}]
    api.chat(messages=messages, continue_final_message=True)
    assert api.prompt_text().endswith("<|im_start|>assistant\nWell,")
    api.chat(messages=messages, add_generation_prompt=False)
    assert api.prompt_text().endswith("Well,<|im_end|>\n")
    error_of(api.chat(messages=messages[:1], continue_final_message=True), 400)
    error_of(api.chat(messages=messages, continue_final_message=True, add_generation_prompt=True), 400)


def test_token_ids_come_back_on_request(make_api) -> None:
    api = make_api("hello")
    answer = api.chat(return_token_ids=True).json()
    assert answer["prompt_token_ids"] == api.dispatcher.requests[0].prompt_token_ids
    assert answer["choices"][0]["token_ids"] == [*api.encode("hello"), 2]


def test_a_cache_salt_reaches_the_request(make_api) -> None:
    api = make_api()
    api.chat(cache_salt="tenant-7")
    assert api.dispatcher.requests[0].cache_salt == "tenant-7"


USER = {"role": "user", "content": "hello"}
UNSUPPORTED = [
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {"type": "json_object"}),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("web_search_options", {}),
    ("guided_json", {}),
    ("structured_outputs", {"regex": "a"}),
    ("use_beam_search", True),
    ("reasoning_effort", "high"),
    ("verbosity", "low"),
    ("best_of", 2),
    ("top_logprobs", 2),
    ("stream_options", {"include_usage": True}),
    ("chat_template", "{{ messages }}"),
    ("chat_template_kwargs", {"tokenize": True}),
]


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED, ids=lambda value: str(value)[:30])
def test_what_would_change_the_answer_and_is_not_supported_is_refused(make_api, field, value) -> None:
    api = make_api()
    error = error_of(api.chat(**{field: value}), 400)
    assert error["param"] == field
    assert api.dispatcher.requests == []


def test_tools_cannot_be_limited_to_one_call(make_api) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert error_of(make_api().chat(tools=tools, parallel_tool_calls=False), 400)["param"] == "parallel_tool_calls"


def test_what_has_no_effect_or_is_unknown_is_accepted(make_api) -> None:
    api = make_api()
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "best_of": 1,
        "prediction": {"type": "content", "content": "x"},
        "something_new": [1, 2],
        "audio": None,
        "n": None,
        "temperature": None,
        "stop": None,
    }
    assert api.chat(**harmless).status_code == 200


@pytest.mark.parametrize("field", ["suffix", "best_of", "guided_regex", "prompt_logprobs", "response_format"])
def test_completions_refuse_what_they_do_not_support(make_api, field) -> None:
    value = {"best_of": 3, "response_format": {"type": "json_object"}}.get(field, "x")
    assert error_of(make_api().complete("ab", **{field: value}), 400)["param"] == field
