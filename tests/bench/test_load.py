"""The load client: figures from arrival times, failures that are told, prompts that share nothing."""

import json
from pathlib import Path

import pytest

from bench.load.__main__ import main
from bench.load.answer import read_answer
from bench.load.run import Round, summarize_rounds
from bench.load.scenarios import Prompts, Scenario
from tests.bench.mock_server import Behaviour, mock_server

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(*events: dict | str) -> bytes:
    data = b"".join(b"data: " + (e if isinstance(e, str) else json.dumps(e)).encode() + b"\n\n" for e in events)
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def token(text: str = "x", finish_reason: str | None = None) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def usage(num_tokens: int, cached: int = 0) -> dict:
    return {
        "choices": [],
        "usage": {"completion_tokens": num_tokens, "prompt_tokens_details": {"cached_tokens": cached}},
    }


END = chunk("[DONE]") + b"0\r\n\r\n"
ANSWER = [(1.0, HEAD), (1.5, chunk(token())), (1.7, chunk(token())), (2.5, chunk(token("", "length"), usage(3)) + END)]


def test_times_count_from_the_request_and_between_first_and_last_token():
    answer = read_answer(ANSWER, 0.5, "", 3)
    assert answer.error == "" and (answer.output_tokens, answer.events) == (3, 3)
    assert answer.ttft_ms == pytest.approx(1000)
    assert answer.tpot_ms == pytest.approx((2.5 - 1.5) * 1000 / 2)
    assert answer.end_s == pytest.approx(2.0)


def test_a_finish_event_of_its_own_is_no_token():
    chunks = [(1.0, HEAD + chunk(token())), (1.2, chunk(token())), (9.0, chunk(token("", "stop"), usage(2)) + END)]
    answer = read_answer(chunks, 0.0, "", 2)
    assert answer.error == "" and answer.events == 2 and answer.last_s == pytest.approx(1.2)


def test_tokens_without_text_count_as_events():
    chunks = [(1.0, HEAD + chunk(token(""))), (1.4, chunk(token("x", "length"), usage(2)) + END)]
    assert read_answer(chunks, 0.0, "", 2).tpot_ms == pytest.approx(400)


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        (ANSWER[:-1], "closed before the end"),
        ([], "closed unanswered"),
        ([(1.0, b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nfull")], "HTTP 429: full"),
        ([(1.0, HEAD + chunk(token(), usage(1)) + END)], "without a finish reason"),
        ([(1.0, HEAD + chunk(token("x", "stop"), usage(1)) + END)], "1 tokens instead of 3"),
        ([(1.0, HEAD + chunk({"error": {"message": "lost"}}) + END)], "lost"),
        ([(1.0, HEAD + chunk("nonsense") + END)], "malformed event"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(chunks, error):
    assert error in read_answer(chunks, 0.0, "", 3).error


def test_a_burst_is_all_its_tokens_by_the_time_of_its_last_byte():
    scenario = Scenario("burst", "output_tokens_per_s", 2, 4, 3, repeats=1, warmups=1)
    good = read_answer(ANSWER, 0.0, "", 3)
    bad = read_answer(ANSWER[:-1], 0.0, "", 3)
    result = summarize_rounds(scenario, [Round([bad, good], 1.0, 0.1), Round([good, good], 2.5, 0.1)])
    assert (result.figure.n, result.figure.p50) == (1, 6 / 2.5)
    assert len(result.failures) == 1 and result.notes == []
    failed = summarize_rounds(scenario, [Round([good, good], 2.5, 0.1), Round([good, bad], 2.5, 0.1)])
    assert failed.figure.n == 0 and failed.failures


def test_a_busy_client_coalesced_tokens_and_cached_prompts_are_noted():
    scenario = Scenario("ttft", "ttft_ms", 1, 4, 3, repeats=1, warmups=0)
    chunks = [(1.0, HEAD + chunk(token("abc", "length"), usage(3, cached=64)) + END)]
    notes = "\n".join(summarize_rounds(scenario, [Round([read_answer(chunks, 0.0, "", 3)], 1.0, 0.95)]).notes)
    assert "95% of a core" in notes and "3 tokens came in 1 events" in notes and "64 prompt tokens were cached" in notes


def test_prompts_of_a_run_never_begin_alike_and_follow_from_the_seed():
    prompts = Prompts(1, 2000)
    drawn = [prompts.draw(6) for _ in range(500)]
    assert len({tuple(prompt[:4]) for prompt in drawn}) == 500
    assert all(1000 <= token_id < 2000 for prompt in drawn for token_id in prompt)
    again, other = Prompts(1, 2000), Prompts(2, 2000)
    assert again.draw(6) == drawn[0] != other.draw(6)


def test_a_run_writes_its_record_and_asks_for_exact_lengths(tmp_path: Path, capsys):
    behaviour = Behaviour()
    with mock_server(behaviour) as url:
        arguments = ["--url", url, "--scenario", "ttft-200", "burst-8", "--repeats", "2", "--seed", "3"]
        assert main([*arguments, "--json", str(tmp_path / "load.json")]) == 0
    assert "burst-8" in capsys.readouterr().out
    record = json.loads((tmp_path / "load.json").read_text())
    ttft, burst = record["results"]
    assert (ttft["figure"]["n"], burst["figure"]["n"]) == (2, 2) and burst["failures"] == []
    assert len(behaviour.bodies) == (2 + 2) + (1 + 2) * 8
    body = behaviour.bodies[-1]
    assert len(body["prompt"]) == 256 and body["ignore_eos"] and body["min_tokens"] == body["max_tokens"] == 128


def test_a_failed_and_a_short_answer_end_with_1_and_are_told(capsys):
    with mock_server(Behaviour(fail=frozenset({2}), short=frozenset({3}))) as url:
        assert main(["--url", url, "--scenario", "ttft-200", "--repeats", "3"]) == 1
    out = capsys.readouterr().out
    assert "HTTP 503" in out and "3 tokens instead of 4" in out


def test_a_server_that_is_not_there_ends_with_2(capsys):
    assert main(["--url", "http://127.0.0.1:9", "--scenario", "tpot"]) == 2
    assert "cannot reach" in capsys.readouterr().err
