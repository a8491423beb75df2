import math

import pytest

from bench.speedrun.client import Answer, Measurement
from bench.speedrun.scenarios import SIZES, Scenario
from bench.speedrun.score import NoValue, geometric_mean, judge, speedup, summarize, value_of

CHAT = Scenario("chat", "S1 chat", 2, 10, 5)
LONG = Scenario("long", "S2 long prompt", 3, 10, 5)
BURST = Scenario("burst", "S3 burst", 2, 10, 5, at_once=True)


def answer(sent: float, first: float, last: float, tokens: int, **values) -> Answer:
    return Answer(0, sent, last, first_s=first, last_s=last, tokens=tokens, first_tokens=1, pieces=tokens, **values)


def measurement(*answers: Answer, timed_out: bool = False) -> Measurement:
    return Measurement("any", 1.0, timed_out, list(answers))


def test_chat_is_all_decode_time_over_all_later_tokens():
    value = value_of(CHAT, measurement(answer(0, 1, 2, 11), answer(2, 3, 6, 31)))  # 1 s for 10 tokens, 3 s for 30
    assert value == pytest.approx(100)
    uneven = value_of(CHAT, measurement(answer(0, 1, 2, 3), answer(2, 3, 6, 39)))  # 4 s for 2 + 38 tokens
    assert uneven == pytest.approx(100)


def test_long_is_the_median_time_to_the_first_piece():
    value = value_of(LONG, measurement(answer(0, 1, 2, 2), answer(10, 14, 15, 2), answer(20, 22, 23, 2)))
    assert value == pytest.approx(2000)


def test_burst_is_tokens_of_whole_answers_over_the_time_of_all():
    failed = Answer(1, 0.0, 8.0, error="HTTP 500", tokens=3)
    assert value_of(BURST, measurement(answer(0, 1, 4, 40))) == pytest.approx(10)
    assert value_of(BURST, measurement(answer(0, 1, 4, 40), failed)) == pytest.approx(5)


def test_an_answer_in_one_piece_has_no_time_per_token():
    whole = Answer(0, 0.0, 5.0, first_s=5.0, last_s=5.0, tokens=9, first_tokens=9, pieces=1)
    with pytest.raises(NoValue, match="one piece"):
        value_of(CHAT, measurement(whole))
    assert judge(CHAT, measurement(whole), None)[0] == "FAIL"


def test_median_least_and_most_of_repeats():
    runs = [measurement(answer(0, 1, 2, tokens)) for tokens in (11, 6, 3)]  # 100, 200, 500 ms
    summary = summarize(CHAT, runs)
    assert [summary.least, summary.value, summary.most] == pytest.approx([100, 200, 500])
    assert (summary.tokens, summary.usage_tokens, summary.repeats) == (20, None, 3)


def test_usage_is_a_cross_check_beside_the_counted_tokens():
    assert summarize(CHAT, [measurement(answer(0, 1, 2, 11, usage_tokens=12))]).usage_tokens == 12


@pytest.mark.parametrize(
    "change, outcome, reason",
    [
        ({}, "SCORED", ""),
        ({"timed_out": True}, "TIMEOUT", "longer than its limit"),
        ({"error": "HTTP 500: no"}, "FAIL", "1 of 2 requests failed: HTTP 500: no"),
        ({"baseline": 23}, "FAIL", "20 tokens where the baseline gave 23"),
        ({"baseline": 22}, "SCORED", ""),
    ],
)
def test_what_may_score(change, outcome, reason):
    answers = [answer(0, 1, 2, 10), answer(0, 1, 2, 10, error=change.get("error", ""))]
    got, why = judge(BURST, measurement(*answers, timed_out=change.get("timed_out", False)), change.get("baseline", 20))
    assert got == outcome and reason in why


def test_speedups_are_above_one_where_the_candidate_is_better():
    assert speedup(CHAT, 100, 50) == 2 and speedup(LONG, 100, 200) == 0.5 and speedup(BURST, 100, 300) == 3


def test_the_score_is_the_third_root_of_the_product():
    assert geometric_mean([2.0, 4.0, 1.0]) == pytest.approx(2.0)
    assert geometric_mean([1.5, 2.5, 3.5]) == pytest.approx(math.pow(13.125, 1 / 3))
    with pytest.raises(ValueError):
        geometric_mean([])
    with pytest.raises(ValueError):
        geometric_mean([2.0, 0.0])


def test_full_sizes_are_those_of_the_assignment():
    chat, long, burst = SIZES["full"]
    assert (chat.prompt_tokens, chat.output_tokens, chat.at_once) == (250, 256, False)
    assert (long.prompt_tokens, long.at_once) == (4096, False)
    assert (burst.requests, burst.output_tokens, burst.at_once) == (32, 128, True)
    assert SIZES["kit"][2].requests == 8


def test_pieces_that_all_came_at_once_are_no_measurement_and_the_clients_own_lag_is_told():
    stalled = measurement(answer(0, 1, 1, 10))
    stalled.client_lag_ms = 300.0
    outcome, reason = judge(CHAT, stalled, None)
    assert outcome == "FAIL" and "same time" in reason and "300 ms late" in reason
    assert summarize(LONG, [stalled, measurement(answer(0, 1, 2, 10))]).client_lag_ms == 300.0
