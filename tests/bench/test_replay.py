"""The whole command against a server whose behaviour is known."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.replay.__main__ import main
from bench.replay.server import OPTIONAL_PARAMETERS
from tests.bench.mock_server import Behaviour, mock_server

SIZES = (
    "--prefix-tokens 64 --new-tokens 16 --output-tokens 8 --requests 12 --warmup-gap-s 0.02 --code generated".split()
)


def replay(tmp_path: Path, behaviour: Behaviour, *options: str) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """(exit status, JSON record, request records)."""
    path = tmp_path / "result.json"
    with mock_server(behaviour) as url:
        status = main(["--url", url, *SIZES, "--qps", "20", "--json", str(path), *options])
    if not path.exists():
        return status, {}, []
    lines = (tmp_path / "result.requests.jsonl").read_text().splitlines()
    return status, json.loads(path.read_text()), [json.loads(line) for line in lines]


@pytest.fixture(autouse=True)
def without_matplotlib(request, monkeypatch):
    """Drawing takes most of a small replay's time; tests that ask for `charts` draw."""
    if "charts" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def charts():
    """Asks for the real charts."""


def test_requests_go_out_as_planned_with_length_and_sampling_fixed(tmp_path: Path):
    behaviour = Behaviour()
    status, record, requests = replay(tmp_path, behaviour)
    assert status == 0
    assert len(behaviour.bodies) == len(requests) == 12
    for body in behaviour.bodies:
        assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("mock", 8, 0, True)
        assert (body["ignore_eos"], body["min_tokens"], body["return_token_ids"]) == (True, 8, True)
        assert body["stream_options"] == {"include_usage": True}
        assert len(body["prompt"]) == 80
    assert len({tuple(body["prompt"][:64]) for body in behaviour.bodies}) == 8
    assert len({tuple(body["prompt"]) for body in behaviour.bodies}) == 12
    assert [request["scheduled_s"] for request in requests[:3]] == [0.0, 0.02, 0.04]
    assert [request["scheduled_s"] for request in requests[8:10]] == pytest.approx([0.16, 0.21])


def test_measured_times_agree_with_the_servers_own(tmp_path: Path):
    behaviour = Behaviour(ttft_s=0.2, gap_s=0.05)
    status, _, requests = replay(tmp_path, behaviour)
    assert status == 0
    spans = sorted(times[-1] - times[0] for times in behaviour.sent)
    measured = sorted(request["token_times_s"][-1] - request["token_times_s"][0] for request in requests)
    assert measured == pytest.approx(spans, rel=0.05, abs=0.1)
    for request in requests:
        assert request["ttft_ms"] == pytest.approx(
            (request["token_times_s"][0] - request["scheduled_s"]) * 1e3, abs=0.01
        )
        assert request["ttft_ms"] >= 200.0
        assert request["tpot_ms"] * 7 >= 300.0
        assert len(request["token_times_s"]) == request["output_tokens"] == 8


def test_arrivals_do_not_wait_for_a_slow_server(tmp_path: Path):
    behaviour = Behaviour(ttft_s=1.0)
    _, _, requests = replay(tmp_path, behaviour)
    last_sent = max(request["sent_s"] for request in requests)
    first_ended = min(request["ended_s"] for request in requests)
    assert last_sent < first_ended


def test_several_tokens_in_one_event_are_counted_one_by_one(tmp_path: Path):
    status, _, requests = replay(tmp_path, Behaviour(tokens_per_event=4, gap_s=0.01))
    assert status == 0
    assert all(request["token_ids"] == list(range(8)) for request in requests)


def test_failed_requests_are_kept_counted_and_make_the_exit_status_nonzero(tmp_path: Path, capsys):
    status, record, requests = replay(tmp_path, Behaviour(fail=frozenset({2, 9}), short=frozenset({10})))
    assert status == 1
    assert len(requests) == 12
    assert [request["index"] for request in requests if request["outcome"] == "failed"] == [2, 9, 10]
    warmup, measured = record["levels"][0]["classes"]
    assert (warmup["requests"], warmup["failed"], measured["requests"], measured["failed"]) == (8, 1, 4, 2)
    assert not record["levels"][0]["passed"] and record["best_effective_qps"] == 0.0
    printed = capsys.readouterr().out
    assert "no room today" in printed and "7 tokens instead of 8" in printed and "FAIL" in printed


def test_requests_that_never_end_are_timeouts(tmp_path: Path):
    status, record, requests = replay(tmp_path, Behaviour(hang=frozenset({9})), "--timeout-s", "1")
    assert status == 1
    assert [request["index"] for request in requests if request["outcome"] == "timeout"] == [9]
    assert record["levels"][0]["classes"][1]["timeouts"] == 1


def test_cached_tokens_are_carried_from_the_server(tmp_path: Path):
    _, record, requests = replay(tmp_path, Behaviour(cached_tokens=48))
    assert all(request["cached_tokens"] == 48 for request in requests)
    assert record["levels"][0]["classes"][1]["hit_rate"] == pytest.approx(48 / 80)


@pytest.mark.parametrize("refused", OPTIONAL_PARAMETERS)
def test_a_parameter_the_server_refuses_is_left_out_and_said(tmp_path: Path, refused: str):
    behaviour = Behaviour(refused=frozenset({refused}))
    status, record, _ = replay(tmp_path, behaviour)
    assert status == 0
    assert all(refused not in body for body in behaviour.bodies)
    assert all(other in body for body in behaviour.bodies for other in OPTIONAL_PARAMETERS if other != refused)
    assert record["server"]["accepted_parameters"] == [name for name in OPTIONAL_PARAMETERS if name != refused]
    assert [refused in note for note in record["notes"] if "refuses" in note] == [True]


def test_each_level_starts_with_a_flush_when_asked(tmp_path: Path):
    behaviour = Behaviour()
    status, record, requests = replay(tmp_path, behaviour, "--qps", "20", "40", "--flush-cache")
    assert (status, behaviour.flushes, record["flushed_between_levels"]) == (0, 2, True)
    assert [level["offered_qps"] for level in record["levels"]] == [20, 40]
    assert len(requests) == 24


def test_the_record_says_how_it_was_made(tmp_path: Path):
    _, record, _ = replay(tmp_path, Behaviour(), "--seed", "5")
    assert record["kind"] == "measured"
    assert record["workload"] == {
        "prefix_tokens": 64,
        "new_tokens": 16,
        "output_tokens": 8,
        "requests": 12,
        "warmup_gap_s": 0.02,
        "seed": 5,
        "code": "generated",
    }
    assert record["server"]["version"] == {"version": "0-mock"}
    assert record["server"]["models"]["data"][0]["id"] == "mock"
    assert record["facts"]["python"] and record["facts"]["versions"]["httpx"]
    assert record["slo"] == {"ttft_ms": 2000.0, "tpot_ms": 50.0}


def test_the_page_stands_alone(tmp_path: Path, charts):
    replay(tmp_path, Behaviour(fail=frozenset({9})), "--qps", "20", "40")
    page = (tmp_path / "result.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert len(sources) == 7  # five charts over the levels, a timeline of each
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "<script" not in page and "@import" not in page and "url(" not in page
    assert "no room today" in page


def test_without_matplotlib_the_page_names_the_extra(tmp_path: Path):
    status, _, _ = replay(tmp_path, Behaviour())
    assert status == 0
    assert "baton-inference[bench]" in (tmp_path / "result.html").read_text()


@pytest.mark.parametrize(
    ("behaviour", "options", "words"),
    [
        (Behaviour(max_model_len=80), [], "needs 88 tokens, the model holds 80"),
        (Behaviour(has_tokenize=False), [], "--tokenizer DIR"),
        (Behaviour(), ["--model", "other"], "'other' is not served"),
        (Behaviour(), ["--requests", "8"], "requests must be above 8"),
        (Behaviour(refused=frozenset({"prompt"})), [], "answers 400 to a prompt of token ids"),
    ],
)
def test_a_replay_that_cannot_run_says_why_in_one_line(
    tmp_path: Path, capsys, behaviour: Behaviour, options: list[str], words: str
):
    status, record, _ = replay(tmp_path, behaviour, *options)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("replay:")]
    assert (status, record, len(lines)) == (2, {}, 1)
    assert words in lines[0]


def test_an_unreachable_server_is_an_error_of_one_line(capsys):
    assert main(["--url", "http://127.0.0.1:9", *SIZES]) == 2
    assert "is it up?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--qps", "0"],
        ["--qps", "2", "2"],
        ["--slo-ttft-ms", "-1"],
        ["--qps", "2", "--concurrency", "2"],
        ["--qps", "2", "--trace", "x.json"],
        ["--speed", "2"],
        ["--concurrency", "0"],
        ["--think-s", "-1"],
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str]):
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == 2
