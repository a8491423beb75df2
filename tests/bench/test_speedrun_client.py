import asyncio
import json
from statistics import median

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.speedrun.client import RawAnswer, read_answer, run_scenario
from bench.speedrun.scenarios import Scenario
from bench.speedrun.score import value_of
from tests.bench.mock_chat import Chat, mock_chat

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """One token a word."""
    tokenizer = Tokenizer(models.WordLevel({"word": 0, "other": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def content(text: str, **choice) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, **choice}]})


def event(value: dict) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


FINISH = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})


def raw(*chunks: tuple[float, bytes], sent_s: float = 1.0) -> RawAnswer:
    return RawAnswer(0, sent_s, chunks[-1][0], [(chunks[0][0], HEAD), *chunks])


def test_times_and_tokens_of_a_stream_are_those_of_its_pieces(words):
    answer = read_answer(
        raw((1.5, content("word")), (1.6, content(" word other")), (2.0, content(" word")), (2.1, FINISH)),
        words,
        8,
        "text",
    )
    assert (answer.error, answer.tokens, answer.pieces) == ("", 4, 3)
    assert answer.ttft_ms == pytest.approx(500)
    assert answer.tpot_ms == pytest.approx((2.0 - 1.5) * 1e3 / 3)


def test_tokens_that_came_with_the_first_piece_do_not_flatter_the_time_per_token(words):
    answer = read_answer(
        raw((2.0, content("word word word")), (3.0, content(" word")), (3.0, FINISH)), words, 8, "text"
    )
    assert answer.tpot_ms == pytest.approx(1000)


def test_an_empty_first_piece_is_not_the_first_token(words):
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    answer = read_answer(raw((1.1, role), (1.7, content("word")), (1.8, FINISH)), words, 8, "text")
    assert answer.ttft_ms == pytest.approx(700)


def test_an_event_counts_when_its_last_byte_came(words):
    whole = content("word")
    answer = read_answer(raw((1.2, whole[:20]), (1.9, whole[20:]), (2.0, FINISH)), words, 8, "text")
    assert answer.ttft_ms == pytest.approx(900)


def test_random_weights_are_counted_by_usage_and_timed_by_token_ids(words):
    silent = event({"choices": [{"index": 0, "delta": {"content": ""}, "token_ids": [7]}]})
    usage = event({"choices": [], "usage": {"completion_tokens": 3}})
    answer = read_answer(
        raw((1.5, silent), (1.7, content("?", token_ids=[8])), (1.9, silent), (2.0, FINISH), (2.0, usage)),
        words,
        3,
        "usage",
    )
    assert (answer.error, answer.tokens, answer.first_tokens) == ("", 3, 1)
    assert answer.tpot_ms == pytest.approx(200)


def answer_of(words, *chunks, mode="text", limit=2):
    return read_answer(raw(*chunks), words, limit, mode).error


def test_what_is_no_answer_is_an_error_that_says_why(words):
    assert "without a finish reason" in answer_of(words, (1.5, content("word")))
    assert answer_of(words, (1.5, FINISH)) == "no text"
    assert "max_tokens was 2" in answer_of(words, (1.5, content("word " * 9)), (1.6, FINISH))
    assert "out of memory" in answer_of(words, (1.5, event({"error": {"message": "out of memory"}})))
    assert "malformed" in answer_of(words, (1.5, b"data: {broken\n\n"))
    assert "no usage" in answer_of(words, (1.5, content("word")), (1.6, FINISH), mode="usage")
    refused = RawAnswer(0, 0.0, 1.0, [(0.5, b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nfull")])
    assert read_answer(refused, words, 2, "text").error == "HTTP 429: full"
    cut = RawAnswer(0, 0.0, 1.0, [(0.5, b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\n"), (0.6, content("word"))])
    assert "closed before the end" in read_answer(cut, words, 2, "text").error


def run(url: str, scenario: Scenario, words: Tokenizer, limit_s: float = 60.0):
    prompts = [[{"role": "user", "content": f"prompt {index}"}] for index in range(scenario.requests)]
    return asyncio.run(run_scenario(url, "mock", scenario, prompts, words, "text", limit_s))


@pytest.mark.parametrize("at_once", [False, True])
def test_figures_are_within_five_percent_of_a_mock_servers_own_times(words, at_once):
    """Compared with when the mock really sent, which is at least its 600 ms and 80 ms; medians, since a busy machine
    may hold up any one request."""
    chat = Chat(words=12, ttft_s=0.6, gap_s=0.08)
    scenario = Scenario("burst" if at_once else "chat", "mock", 3, 10, 12, at_once)
    with mock_chat(chat) as url:
        measurement = run(url, scenario, words)
    assert not measurement.errors and not measurement.timed_out
    assert [answer.tokens for answer in measurement.answers] == [12] * 3
    assert [answer.usage_tokens for answer in measurement.answers] == [12] * 3
    ttft_ms = median((sent[0] - arrived) * 1e3 for arrived, sent in zip(chat.arrived, chat.sent))
    tpot_ms = median((sent[-1] - sent[0]) * 1e3 / 11 for sent in chat.sent)
    assert ttft_ms >= 600 and tpot_ms >= 79
    assert median(answer.ttft_ms for answer in measurement.answers) == pytest.approx(ttft_ms, rel=0.05)
    assert median(answer.tpot_ms for answer in measurement.answers) == pytest.approx(tpot_ms, rel=0.05)
    if at_once:
        seconds = max(sent[-1] for sent in chat.sent) - min(chat.arrived)
        assert value_of(scenario, measurement) == pytest.approx(36 / seconds, rel=0.05)
    else:
        assert value_of(scenario, measurement) == pytest.approx(tpot_ms, rel=0.05)


def test_requests_are_greedy_streamed_and_ask_for_usage(words):
    chat = Chat(words=2)
    with mock_chat(chat) as url:
        run(url, Scenario("chat", "mock", 2, 10, 2), words)
    assert [body["messages"][0]["content"] for body in chat.bodies] == ["prompt 0", "prompt 1"]
    for body in chat.bodies:
        assert body["temperature"] == 0 and body["stream"] is True and body["max_tokens"] == 2
        assert body["stream_options"] == {"include_usage": True}
        assert "ignore_eos" not in body


def test_one_after_another_or_all_at_once_is_what_the_scenario_says(words):
    for at_once in (False, True):
        chat = Chat(words=2, ttft_s=0.1)
        with mock_chat(chat) as url:
            run(url, Scenario("burst", "mock", 3, 10, 2, at_once), words)
        overlap = max(chat.arrived) < min(sent[0] for sent in chat.sent)
        assert overlap is at_once


def test_a_hanging_server_is_a_timeout_and_later_requests_are_not_sent(words):
    chat = Chat(hangs=True)
    with mock_chat(chat) as url:
        measurement = run(url, Scenario("chat", "mock", 3, 10, 8), words, limit_s=0.3)
    assert measurement.timed_out and len(chat.bodies) == 1
    assert "limit of 0.3 s" in measurement.errors[0]


def test_a_server_that_is_not_there_is_an_error_of_each_request(words):
    with mock_chat(Chat()) as url:
        pass
    measurement = run(url, Scenario("burst", "mock", 2, 10, 8, True), words)
    assert not measurement.timed_out and len(measurement.errors) == 2
    assert all(error.startswith("connection") for error in measurement.errors)
