"""The report of where prompts diverge."""

from hypothesis import given
from hypothesis import strategies as st

from engine.request import PrefillReport
from router.divergence import common_prefix
from tests.router.api.conftest import error_of
from tests.router.api.fake_dispatcher import deltas


@given(
    shared=st.lists(st.integers(0, 2), max_size=200),
    left=st.lists(st.integers(0, 2)),
    right=st.lists(st.integers(0, 2)),
)
def test_common_prefix_is_what_counting_gives(shared, left, right) -> None:
    a, b = shared + left, shared + right
    expected = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(a, b) == expected


def test_the_report_shows_the_text_where_a_prompt_leaves_the_closest_earlier_one(make_api) -> None:
    api = make_api(lambda request: deltas(request, [9], prefill=PrefillReport(num_cached_tokens=3)), prompt_history=3)
    for prompt in ("something else", "line aaa\nYou are an agent.", "line bbb\nYou are an agent."):
        api.complete(prompt)
    newest, _, oldest = api.get("/prompts").json()["prompts"]
    shared = common_prefix(*[request.prompt_token_ids for request in api.dispatcher.requests[1:]])
    assert newest["num_shared_tokens"] == shared > 0 and newest["num_cached_tokens"] == 3
    assert newest["text"] == api.tokenizer.decode(api.encode("line bbb\nYou are an agent.")[shared : shared + 16])
    assert newest["other_text"] == api.tokenizer.decode(api.encode("line aaa\nYou are an agent.")[shared : shared + 16])
    assert oldest["num_shared_tokens"] == 0
    api.complete("a fourth")
    assert len(api.get("/prompts").json()["prompts"]) == 3


def test_prompts_of_another_salt_are_not_compared(make_api) -> None:
    api = make_api("hello", prompt_history=3)
    api.complete("the same", cache_salt="a")
    api.complete("the same", cache_salt="b")
    assert api.get("/prompts").json()["prompts"][0]["num_shared_tokens"] == 0


def test_n_choices_are_one_prompt_and_no_history_is_kept_unasked(make_api) -> None:
    api = make_api("hello", prompt_history=5)
    api.complete(["ab", "cd"], n=2)
    assert len(api.get("/prompts").json()["prompts"]) == 2
    error_of(make_api().get("/prompts"), 501)
