"""POST /v1/completions."""

import math

import pytest

from engine.request import PrefillReport, Request, TokenLogprobs
from router.tokenizer import Tokenizer
from tests.router.api.conftest import Api, error_of, events
from tests.router.api.fake_dispatcher import deltas, model_info
from tests.router.api.piece_tokenizer import piece_tokenizer


def test_a_text_prompt_is_answered_in_openai_shape(make_api) -> None:
    api = make_api("The baton changes hands.")
    answer = api.complete("Where is it?", max_tokens=40, model="tiny").json()
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert isinstance(answer["created"], int)
    assert answer["choices"] == [
        {"index": 0, "text": "The baton changes hands.", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    prompt, output = len(api.encode("Where is it?")), len(api.encode("The baton changes hands.")) + 1
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        prompt,
        output,
        prompt + output,
    )
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [["text", "ab"]]),
        (["ab", "cd"], [["text", "ab"], ["text", "cd"]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_every_kind_of_prompt_reaches_the_dispatcher(make_api, prompt, expected) -> None:
    api = make_api()
    answer = api.complete(prompt).json()
    wanted = [api.encode(item[1]) if item[0] == "text" else item for item in expected]
    assert [request.prompt_token_ids for request in api.dispatcher.requests] == wanted
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(wanted)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, wanted))


def test_defaults_are_openais_and_complete(make_api) -> None:
    api = make_api()
    api.complete("ab")
    sampling = api.dispatcher.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 1.0, 1.0, 0)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.logprobs, sampling.prompt_logprobs) == (
        0,
        1,
        None,
        None,
    )
    assert sampling.eos_token_ids == [2, 0]


def test_sampling_fields_arrive_as_given(make_api) -> None:
    api = make_api()
    fields = {"max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 11}
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": -0.5, "presence_penalty": 0.25}
    api.complete("ab", **fields, **penalties, ignore_eos=True, stop_token_ids=[9], logit_bias={"7": -100, "8": 1})
    request = api.dispatcher.requests[0]
    for name, value in {**fields, **penalties}.items():
        assert getattr(request.sampling, name) == value
    assert request.sampling.logit_bias == {7: -100.0, 8: 1.0}
    assert request.sampling.ignore_eos and request.sampling.stop_token_ids == [9]


def test_edge_values_mean_what_clients_mean(make_api) -> None:
    api = make_api()
    api.complete("ab", temperature=1e-9, top_p=0, top_k=-1, seed=-1)
    sampling = api.dispatcher.requests[0].sampling
    assert (
        sampling.temperature == 0 and 0 < sampling.top_p < 1e-6 and sampling.top_k == 0 and sampling.seed == 2**64 - 1
    )


def test_choices_of_n_draw_with_consecutive_seeds_and_own_ids(make_api) -> None:
    api = make_api()
    answer = api.complete(["ab", "cd"], n=3, seed=2**64 - 2).json()
    requests = api.dispatcher.requests
    assert [request.sampling.seed for request in requests] == [2**64 - 2, 2**64 - 1, 0] * 2
    assert len({request.request_id for request in requests}) == 6
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))


def test_without_a_seed_no_two_choices_share_one(make_api) -> None:
    api = make_api()
    api.complete(["ab", "ab"], n=4)
    api.complete(["ab", "ab"], n=4)
    assert len({request.sampling.seed for request in api.dispatcher.requests}) == 16


def test_request_ids_are_the_servers_whatever_clients_send(make_api) -> None:
    api = make_api()
    for _ in range(2):
        api.complete("ab", request_id="mine", id="mine", user="mine")
    ids = [request.request_id for request in api.dispatcher.requests]
    assert len(set(ids)) == 2 and not any("mine" in request_id for request_id in ids)


def test_the_deadline_follows_from_the_arrival(make_api) -> None:
    api = make_api(request_timeout_s=12.5)
    api.complete("ab")
    request = api.dispatcher.requests[0]
    assert request.arrival > 0 and request.deadline == pytest.approx(request.arrival + 12.5)


def test_cached_tokens_are_counted_once_for_each_prompt(make_api) -> None:
    cached = {"ab": 3, "cd": 0, "ef": 5}

    def script(request: Request):
        text = api.tokenizer.decode(request.prompt_token_ids)
        return deltas(
            request, [9], prefill=PrefillReport("remote", 6, cached[text], num_bytes_sent=77, transfer_ms=1.5)
        )

    api = make_api(script)
    usage = api.complete(["ab", "cd", "ef"], n=2).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 8
    assert usage["prompt_tokens"] == sum(len(api.encode(text)) for text in cached)
    assert usage["completion_tokens"] == 6
    assert [entry["index"] for entry in usage["prefill"]] == list(range(6))
    assert usage["prefill"][0]["where"] == "remote" and usage["prefill"][0]["num_bytes_sent"] == 77


def test_the_token_that_ends_a_sequence_has_no_text(make_api) -> None:
    def script(request: Request):
        return deltas(request, [*text, 99], finish_reason="stop", stop_token_id=99)

    api = make_api(script)
    text = api.encode("hello")
    choice = api.complete("ab", stop_token_ids=[99], return_token_ids=True).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", 99)
    assert choice["token_ids"] == [*text, 99]
    included = api.complete("ab", stop_token_ids=[99], include_stop_str_in_output=True).json()["choices"][0]
    assert included["text"] == "hello" + api.tokenizer.decode([99])


def test_special_tokens_show_on_request(make_api) -> None:
    api = make_api(lambda request: deltas(request, [1, 9]))
    letter = api.tokenizer.decode([9])
    assert api.complete("ab").json()["choices"][0]["text"] == letter
    assert api.complete("ab", skip_special_tokens=False).json()["choices"][0]["text"] == "<|im_start|>" + letter


def test_logprobs_have_one_entry_a_token_and_the_sampled_token_among_the_top(make_api) -> None:
    api = make_api("hello")
    ids = [*api.encode("hello"), 2]
    logprobs = api.complete("ab", logprobs=2).json()["choices"][0]["logprobs"]
    names = [api.tokenizer.decode([token_id]) for token_id in ids]
    assert logprobs["tokens"] == names
    assert logprobs["token_logprobs"] == [-0.25] * len(ids)
    tops = [api.tokenizer.decode([10]), api.tokenizer.decode([11])]
    assert logprobs["top_logprobs"][0] == {tops[0]: -1.0, tops[1]: -2.0, names[0]: -0.25}
    assert logprobs["text_offset"] == [len("".join(names[:position])) for position in range(len(ids))]
    assert api.dispatcher.requests[0].sampling.logprobs == 2


def test_logprobs_without_a_number_are_made_finite(make_api) -> None:
    def script(request: Request):
        steps = deltas(request, [9])
        steps[0].logprobs = [TokenLogprobs(9, -math.inf, [(10, math.nan)])]
        return steps

    response = make_api(script).complete("ab", logprobs=1)
    logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0] and set(logprobs["top_logprobs"][0].values()) == {-9999.0}


def test_tokens_that_are_no_characters_keep_apart(make_api) -> None:
    api = make_api("😀")
    ids = [*api.encode("😀"), 2]
    assert len(ids) > 2
    logprobs = api.complete("ab", logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][0].startswith("bytes:\\xf0") and len(set(logprobs["tokens"])) == len(ids)


def test_echo_returns_the_prompt_before_the_answer(make_api) -> None:
    api = make_api("hello")
    assert api.complete("say: ", echo=True).json()["choices"][0]["text"] == "say: hello"
    ids = api.encode("say: ")
    assert api.complete(ids, echo=True).json()["choices"][0]["text"] == "say: hello"
    assert all(request.sampling.prompt_logprobs is None for request in api.dispatcher.requests)


def scored(request: Request, token_ids: list[int]):
    """Each prompt token but the first with a logprob of minus its position."""
    assert request.sampling.prompt_logprobs == 1
    entries = [TokenLogprobs(token, -float(at), [(20, -0.5)]) for at, token in enumerate(request.prompt_token_ids)]
    return deltas(request, token_ids, prompt_logprobs=[None, *entries[1:]])


def test_echo_with_logprobs_scores_the_prompt(make_api) -> None:
    api = make_api(lambda request: scored(request, [9]))
    ids = api.encode("The baton")
    choice = api.complete("The baton", echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "The baton" + api.tokenizer.decode([9])
    assert logprobs["token_logprobs"] == [None, *(-float(at) for at in range(1, len(ids))), -0.25]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][-1] == len("The baton")
    joined = [choice["text"][begin:] for begin in logprobs["text_offset"]]
    assert all(rest.startswith(token) for rest, token in zip(joined, logprobs["tokens"], strict=True))


def test_max_tokens_0_with_echo_scores_the_prompt_and_shows_no_token(make_api) -> None:
    api = make_api(lambda request: scored(request, [9]))
    ids = api.encode("The baton")
    for stream in (False, True):
        response = api.complete("The baton", echo=True, logprobs=1, max_tokens=0, stream=stream)
        choice = (events(response)[0] if stream else response.json())["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("The baton", "length")
        assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert response.status_code == 200 and api.dispatcher.requests[0].sampling.max_tokens == 1
    assert api.complete("ab", echo=True, logprobs=1, max_tokens=0).json()["usage"]["completion_tokens"] == 0


def test_a_completion_goes_on_with_the_prompts_text_and_a_chat_begins_a_new_one(tmp_path) -> None:
    inner = piece_tokenizer()
    inner.chat_template = "{{ messages[0].content }}"
    word = inner.convert_tokens_to_ids("▁ab")
    api = Api(Tokenizer(inner, tmp_path), lambda request: deltas(request, [word, word]))
    assert api.complete("ab", echo=True).json()["choices"][0]["text"] == "ab ab ab"
    assert api.chat("ab").json()["choices"][0]["message"]["content"] == "ab ab"


def test_token_ids_come_back_on_request(make_api) -> None:
    api = make_api("hello")
    choice = api.complete([5, 6], return_token_ids=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6] and choice["token_ids"] == [*api.encode("hello"), 2]


@pytest.mark.parametrize("sizes", [[], [2], [3, 1, 5], [100]])
def test_a_stop_string_over_tokens_cuts_the_answer_and_ends_the_request(make_api, sizes) -> None:
    text = "one two three four five"
    api = make_api(lambda request: deltas(request, api.encode(text), sizes=sizes))
    cut_at = next(n for n in range(100) if "three f" in api.tokenizer.decode(api.encode(text)[:n]))
    for stream in (False, True):
        response = api.complete("ab", stop=["nope", "three f"], stream=stream, return_token_ids=True)
        parts = [event["choices"][0] for event in events(response)[:-1]] if stream else [response.json()["choices"][0]]
        assert "".join(part["text"] for part in parts) == "one two "
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        assert parts[-1]["stop_reason"] == "three f"
        assert sum(len(part["token_ids"]) for part in parts) == cut_at
    sent_whole = sizes == [100]
    assert api.dispatcher.closed == ([] if sent_whole else [r.request_id for r in api.dispatcher.requests])


def test_the_head_of_a_stop_string_is_text_when_the_answer_ends_there(make_api) -> None:
    api = make_api("one two thr")
    for stream in (False, True):
        response = api.complete("ab", stop="three", stream=stream)
        parts = [event["choices"][0] for event in events(response)[:-1]] if stream else [response.json()["choices"][0]]
        assert "".join(part["text"] for part in parts) == "one two thr"
        assert parts[-1]["finish_reason"] == "stop" and parts[-1]["stop_reason"] is None


def test_stop_strings_wait_for_min_tokens(make_api) -> None:
    text = "aXbXcX"
    api = make_api(text)
    ids = api.encode(text)
    assert len(ids) == 6
    assert api.complete("ab", stop="X").json()["choices"][0]["text"] == "a"
    assert api.complete("ab", stop="X", min_tokens=3).json()["choices"][0]["text"] == "aXb"


@pytest.mark.parametrize("stop_is_on", [True, False])
def test_usage_counts_up_to_the_token_that_completes_the_stop_string(make_api, stop_is_on) -> None:
    api = make_api(lambda request: deltas(request, api.encode("aXbXcX"), sizes=[6]))
    answer = api.complete("ab", stop="X" if stop_is_on else None, logprobs=0).json()
    assert answer["usage"]["completion_tokens"] == (2 if stop_is_on else 6)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == (2 if stop_is_on else 6)


def test_a_prompt_beyond_the_context_is_refused_with_both_counts_before_dispatch(make_api) -> None:
    api = make_api()
    api.dispatcher.model = model_info(max_model_len=16)
    error = error_of(api.complete(list(range(4, 20)), max_tokens=1), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    assert "16" in error["message"]
    assert error_of(api.complete([5] * 16), 400)["code"] == "context_length_exceeded"
    error = error_of(api.complete([5] * 10, max_tokens=7), 400)
    assert all(number in error["message"] for number in ("10", "7", "17", "16"))
    assert api.dispatcher.requests == []
    assert api.complete([5] * 10, max_tokens=6).status_code == 200
    assert api.complete([5] * 15).status_code == 200
    assert [request.sampling.max_tokens for request in api.dispatcher.requests] == [6, 1]


def test_a_text_that_cannot_fit_is_refused_without_tokenizing_it(make_api, monkeypatch) -> None:
    api = make_api()
    text = "relay " * 200_000
    whole = api.post("/tokenize", {"prompt": text}).json()["count"]
    monkeypatch.setattr(api.tokenizer, "encode", None)
    for response, param in ((api.complete(text), "prompt"), (api.complete(["x", text]), "prompt")):
        error = error_of(response, 400)
        assert error["code"] == "context_length_exceeded" and error["param"] == param
    error = error_of(api.chat(text), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    fewest = int(error["message"].split()[5])
    assert 256 < fewest <= whole and "256" in error["message"]
    assert api.dispatcher.requests == []


def test_stop_token_ids_are_passed_on_once_each(make_api) -> None:
    api = make_api()
    api.complete(stop_token_ids=[7, 5, 7] * 1000)
    assert api.dispatcher.requests[0].sampling.stop_token_ids == [7, 5]


def test_one_bad_prompt_of_a_list_dispatches_none(make_api) -> None:
    api = make_api()
    error_of(api.complete([[5], [5, 100000]]), 400)
    assert api.dispatcher.requests == []
