"""Each cause of a cache miss is found where it was made to happen, at the position where it was made."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.replay.misses import Explainer, Miss, Served, common_prefix, summarize_misses
from bench.replay.oracle import Oracle

BLOCK = 16
RNG = random.Random(5)
SYSTEM, TOOLS, FILES, TASK = ([RNG.randrange(1000) for _ in range(size)] for size in (160, 320, 640, 96))
PROMPT = SYSTEM + TOOLS + FILES


def fresh(size: int) -> list[int]:
    return [RNG.randrange(1000, 2000) for _ in range(size)]


def explain(
    prompt: list[int],
    cached: int | None,
    *earlier: list[int],
    ready_s: float = 1.0,
    sent_s: float = 10.0,
    worker: str = "",
    earlier_worker: str = "",
    session: int = 0,
    earlier_output: list[int] | None = None,
) -> Miss:
    """What becomes of `prompt`, with these prompts before it."""
    explainer = Explainer(BLOCK)
    for index, tokens in enumerate(earlier):
        served = Served((0, index), 0, tokens, earlier_output or [], 0.0, ready_s, 0, earlier_worker)
        explainer.add(served)
    return explainer.explain(Served((0, 9), session, prompt, [], sent_s, sent_s + 1, cached, worker))


def test_new_input_behind_a_cached_prefix_loses_nothing():
    miss = explain(PROMPT + fresh(96), len(PROMPT), PROMPT + TASK)
    assert (miss.cause, miss.position, miss.lost_tokens, miss.oracle_tokens) == ("new_input", 1120, 0, 1120)


def test_a_prompt_that_goes_on_after_an_earlier_one_is_new_input():
    miss = explain(PROMPT + fresh(300), len(PROMPT), PROMPT)
    assert (miss.cause, miss.lost_tokens) == ("new_input", 0)


def test_a_prompt_like_nothing_before_is_cold():
    assert explain(PROMPT, 0).cause == "cold"
    assert explain(fresh(500), 0, PROMPT).cause == "cold"


def test_a_changed_header_line_is_found_with_what_it_hides():
    earlier = SYSTEM[:5] + fresh(7) + SYSTEM[5:] + TOOLS + FILES + TASK
    prompt = SYSTEM[:5] + fresh(9) + SYSTEM[5:] + TOOLS + FILES + fresh(96)
    miss = explain(prompt, 0, earlier)
    assert (miss.cause, miss.position, miss.other) == ("header_line", 5, (0, 0))
    assert len(PROMPT) - 200 < miss.lost_tokens <= len(PROMPT)


@pytest.mark.parametrize("added", [0, 6])
def test_a_line_that_is_there_only_in_one_prompt_is_a_changed_line(added: int):
    earlier, prompt = SYSTEM + fresh(added) + TOOLS + FILES, SYSTEM + fresh(6 - added) + TOOLS + FILES
    miss = explain(prompt, len(SYSTEM), earlier)
    assert (miss.cause, miss.position) == ("header_line", len(SYSTEM))


def test_parts_that_changed_places_are_found():
    miss = explain(SYSTEM + FILES + TOOLS, len(SYSTEM), SYSTEM + TOOLS + FILES)
    assert (miss.cause, miss.position) == ("reordered", len(SYSTEM))
    assert miss.lost_tokens > 800


def test_what_was_cached_once_and_was_not_found_was_evicted():
    miss = explain(PROMPT + fresh(96), 320, PROMPT + TASK)
    assert (miss.cause, miss.position, miss.lost_tokens, miss.oracle_tokens) == ("evicted", 320, 800, 1120)


def test_a_prefix_that_was_still_being_computed_is_not_called_evicted():
    miss = explain(PROMPT + fresh(96), 0, PROMPT + TASK, ready_s=10.5, sent_s=10.0)
    assert (miss.cause, miss.lost_tokens) == ("in_flight", 1120)
    assert explain(PROMPT + fresh(96), 0, PROMPT + TASK, ready_s=9.5, sent_s=10.0).cause == "evicted"


@pytest.mark.parametrize(
    ("worker", "earlier_worker", "cause"),
    [("p0", "p1", "other_worker"), ("p1", "p1", "evicted"), ("", "", "evicted"), ("p0", "", "evicted")],
)
def test_a_prefix_on_another_worker_is_told_from_an_evicted_one(worker: str, earlier_worker: str, cause: str):
    miss = explain(PROMPT, 0, PROMPT + TASK, worker=worker, earlier_worker=earlier_worker)
    assert miss.cause == cause


def test_a_server_that_reports_nothing_leaves_the_cause_open():
    miss = explain(PROMPT, None, PROMPT + TASK)
    assert (miss.cause, miss.lost_tokens, miss.oracle_tokens) == ("unreported", 0, 1104)


def test_the_text_shown_is_that_around_the_divergence():
    explainer = Explainer(BLOCK)
    explainer.add(Served((0, 0), 0, PROMPT + TASK, [], 0.0, 1.0, 0))
    request = Served((0, 1), 0, PROMPT + [1] * 50, [], 5.0, 6.0, len(PROMPT))
    own, other = explainer.texts(request, explainer.explain(request))
    assert own == PROMPT[-8:] + [1] * 24
    assert other == PROMPT[-8:] + TASK[:24]


def test_after_a_flush_everything_is_cold_again():
    explainer = Explainer(BLOCK)
    explainer.add(Served((0, 0), 0, PROMPT, [], 0.0, 1.0, 0))
    explainer.clear()
    miss = explainer.explain(Served((1, 0), 0, PROMPT, [], 5.0, 6.0, 0))
    assert (miss.cause, miss.oracle_tokens) == ("cold", 0)


def test_causes_are_summed_with_the_worst_as_example():
    misses = [Miss("evicted", 0, 10, 20), Miss("evicted", 0, 30, 40), Miss("new_input", 5, 0, 0), Miss("cold", 0, 0, 0)]
    first, *others = summarize_misses([*misses, Miss("new_input", 5, 0, 0)])
    assert (first.cause, first.requests, first.lost_tokens, first.example) == ("evicted", 2, 40, misses[1])
    assert [(entry.cause, entry.requests) for entry in others] == [("new_input", 2), ("cold", 1)]


def test_the_oracle_never_counts_the_last_token_and_knows_generated_ones():
    oracle = Oracle(4)
    oracle.add([1, 2, 3, 4, 5, 6, 7] + [8, 9], (0, 0))
    assert oracle.count([1, 2, 3, 4]) == 0  # its last token must be computed
    assert oracle.count([1, 2, 3, 4, 5]) == 4
    assert oracle.count([1, 2, 3, 4, 5, 6, 7, 8, 1]) == 8
    assert oracle.count([1, 2, 3, 5, 5, 6, 7, 8, 1]) == 0
    assert oracle.count([]) == 0


@given(st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=8), st.lists(st.integers(0, 1), max_size=14))
def test_the_oracle_agrees_with_comparing_every_prompt(earlier: list[list[int]], prompt: list[int]):
    oracle = Oracle(3)
    for index, tokens in enumerate(earlier):
        oracle.add(tokens, (0, index))
    shared = 0
    for tokens in earlier:
        length = 0
        while (
            length + 3 <= min(len(tokens), len(prompt)) and tokens[length : length + 3] == prompt[length : length + 3]
        ):
            length += 3
        shared = max(shared, length)
    assert oracle.count(prompt) == min(shared, max(0, len(prompt) - 1) // 3 * 3)


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_common_prefix_agrees_with_counting(left: list[int], right: list[int]):
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    assert common_prefix(left, right) == length
