"""The whole command with a server that keeps a prefix cache, in closed loop, and with recorded traces."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.replay.__main__ import main
from bench.replay.client import run_level
from tests.bench.mock_server import Behaviour, mock_server

DATA = Path(__file__).resolve().parents[1] / "data"
SIZES = "--prefix-tokens 64 --new-tokens 16 --output-tokens 4 --warmup-gap-s 0.04 --code generated".split()


@pytest.fixture(autouse=True)
def without_charts(monkeypatch):
    monkeypatch.setattr("bench.replay.page.draw_charts", lambda result: [])


def replay(tmp_path: Path, behaviour: Behaviour, *options: str) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """(exit status, JSON record, request records)."""
    path = tmp_path / "result.json"
    with mock_server(behaviour) as url:
        status = main(["--url", url, "--json", str(path), *options])
    if not path.exists():
        return status, {}, []
    lines = (tmp_path / "result.requests.jsonl").read_text().splitlines()
    return status, json.loads(path.read_text()), [json.loads(line) for line in lines]


@pytest.mark.parametrize("block_size", [16, 8, 1])
def test_the_block_size_is_measured_and_ideal_hits_equal_the_servers(tmp_path: Path, block_size: int):
    _, record, requests = replay(
        tmp_path, Behaviour(block_size=block_size), *SIZES, "--requests", "24", "--qps", "25", "--flush-cache"
    )
    assert record["server"]["block_size"] == block_size
    assert [request["oracle_tokens"] for request in requests] == [request["cached_tokens"] for request in requests]
    warmup, measured = record["levels"][0]["classes"]
    assert measured["cached_tokens"] == measured["oracle_tokens"] >= 16 * 64
    assert {hits["turn"]: hits["requests"] for hits in record["levels"][0]["hits_by_turn"]} == {0: 8, 1: 8, 2: 8}


def test_what_the_server_lost_is_explained_with_the_text_there(tmp_path: Path, capsys):
    _, record, requests = replay(
        tmp_path, Behaviour(block_size=16, forget=frozenset({9, 10})), *SIZES, "--requests", "16", "--qps", "50"
    )
    evicted = [request for request in requests if request["miss"]["cause"] == "evicted"]
    assert [(request["index"], request["miss"]["lost_tokens"]) for request in evicted] == [(9, 64), (10, 64)]
    assert evicted[0]["miss"]["position"] == 0
    assert evicted[0]["miss"]["text"].startswith("# ") and "service" in evicted[0]["miss"]["text"]
    causes = {cause["cause"]: cause["requests"] for cause in record["levels"][0]["misses"]}
    assert causes == {"evicted": 2, "new_input": 6, "cold": 8}
    printed = capsys.readouterr().out
    assert "its prefix was evicted" in printed and "128" in printed
    assert "its prefix was evicted" in (tmp_path / "result.html").read_text()


def test_a_prefix_on_another_worker_is_named(tmp_path: Path):
    _, record, _ = replay(tmp_path, Behaviour(block_size=16, workers=3), *SIZES, "--requests", "16", "--qps", "25")
    causes = {cause["cause"]: cause["requests"] for cause in record["levels"][0]["misses"]}
    assert causes == {
        "other_worker": 8,
        "cold": 8,
    }  # request i went to worker i % 3, its session's first to (i - 8) % 3


def test_a_prefix_that_was_not_ready_yet_is_named(tmp_path: Path):
    behaviour = Behaviour(block_size=16, ttft_s=1.2, slow_fill=True)
    _, record, _ = replay(tmp_path, behaviour, *SIZES, "--requests", "10", "--qps", "100")
    causes = {cause["cause"]: cause["requests"] for cause in record["levels"][0]["misses"]}
    assert causes == {"in_flight": 2, "cold": 8}


def test_without_detokenize_the_token_ids_are_shown(tmp_path: Path):
    _, _, requests = replay(
        tmp_path, Behaviour(block_size=16, has_detokenize=False), *SIZES, "--requests", "9", "--qps", "50"
    )
    prompt_start = [int(token) for token in requests[0]["miss"]["text"].split()]
    assert bytes(prompt_start).decode().startswith("# ")


def test_the_servers_counters_are_recorded_as_differences(tmp_path: Path):
    _, record, _ = replay(tmp_path, Behaviour(), *SIZES, "--requests", "9", "--qps", "50", "60")
    assert [level["counters"] for level in record["levels"]] == [{'mock_prompts_total{kind="all"}': 9.0}] * 2


def test_closed_loop_never_runs_more_at_once_and_goes_on_when_one_ends(tmp_path: Path):
    status, record, requests = replay(
        tmp_path, Behaviour(gap_s=0.02), *SIZES, "--requests", "20", "--concurrency", "3", "--think-s", "0.05"
    )
    assert status == 0
    measured = [request for request in requests if request["phase"] == "measured"]
    warm_end = max(request["ended_s"] for request in requests if request["phase"] == "warmup")
    for request in measured:
        running = [r for r in measured if r["sent_s"] <= request["sent_s"] < r["ended_s"]]
        assert len(running) <= 3
        assert request["scheduled_s"] >= warm_end
    for earlier, later in zip(measured, measured[3:]):
        assert later["scheduled_s"] >= earlier["ended_s"] + 0.05
        first_token = later["token_times_s"][0]
        assert later["ttft_ms"] == pytest.approx((first_token - later["scheduled_s"]) * 1e3, abs=0.01)
    assert (record["levels"][0]["concurrency"], record["levels"][0]["offered_qps"]) == (3, None)


def test_a_failed_request_does_not_stop_those_that_wait_for_it(tmp_path: Path):
    status, _, requests = replay(
        tmp_path, Behaviour(fail=frozenset({8})), *SIZES, "--requests", "12", "--concurrency", "1"
    )
    assert status == 1
    assert [request["outcome"] for request in requests] == ["ok"] * 8 + ["failed"] + ["ok"] * 3


def test_a_recorded_session_is_replayed_with_its_hits(tmp_path: Path):
    session = DATA / "coding_agent" / "trace_0057.json"
    status, record, requests = replay(
        tmp_path,
        Behaviour(block_size=16, max_model_len=4096),
        *("--trace", str(session), "--concurrency", "1", "--think-scale", "0", "--output-tokens", "4"),
        *("--fit", "thin", "--code", "generated"),
    )
    assert status == 0
    assert record["workload"] is None and record["trace"]["context"] == 4096
    assert [request["turn"] for request in requests] == list(range(8))
    assert all(request["prompt_tokens"] + 4 <= 4096 for request in requests)
    assert [request["oracle_tokens"] for request in requests] == [request["cached_tokens"] for request in requests]
    cached, total = (sum(request[name] for request in requests) for name in ("cached_tokens", "prompt_tokens"))
    assert cached / total == pytest.approx(record["trace"]["hit_rate"], abs=0.01)


def test_a_mooncake_trace_is_replayed_at_the_asked_speed(tmp_path: Path):
    trace = DATA / "mooncake" / "conversation_head.jsonl"
    status, record, requests = replay(
        tmp_path,
        Behaviour(block_size=16, max_model_len=2048),
        *("--trace", str(trace), "--speed", "60", "--requests", "12", "--output-tokens", "3", "--code", "generated"),
    )
    assert status == 0
    rows = [json.loads(line) for line in trace.read_text().splitlines()[:12]]
    assert [request["scheduled_s"] for request in requests] == pytest.approx([row["timestamp"] / 60e3 for row in rows])
    assert {request["phase"] for request in requests} == {"measured"}
    assert len(record["levels"][0]["classes"]) == 1


def test_a_replay_that_breaks_off_writes_the_levels_that_ended(tmp_path: Path, monkeypatch, capsys):
    behaviour = Behaviour()
    calls = []

    async def breaks_in_the_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return await run_level(*arguments)

    monkeypatch.setattr("bench.replay.run.run_level", breaks_in_the_second)
    status, record, requests = replay(tmp_path, behaviour, *SIZES, "--requests", "9", "--qps", "50", "60")
    assert (status, len(record["levels"]), len(requests)) == (130, 1, 9)
    assert "interrupted, 1 load levels had ended" in capsys.readouterr().err


def test_answers_are_compared_with_those_of_a_reference_run(tmp_path: Path, capsys):
    load = [*SIZES, "--requests", "12", "--qps", "50"]
    replay(tmp_path, Behaviour(), *load)
    reference = tmp_path / "reference.jsonl"
    lines = (tmp_path / "result.requests.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert answers[3]["token_ids"] == [0, 1, 2, 3]
    answers[3]["token_ids"] = [0, 1, 9, 3]
    answers[5]["token_ids"] = [0, 1, 2, 9]
    answers[7]["outcome"] = "failed"
    reference.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    _, record, _ = replay(tmp_path, Behaviour(), *load, "--reference", str(reference))
    assert record["levels"][0]["agreement"] == {
        "compared": 11,
        "identical": 9,
        "median_divergence": 2.5,
        "earliest_divergence": 2,
    }
    assert "9 of 11 answers equal the reference" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}\n", "not json\n"])
def test_a_reference_that_is_none_is_refused_before_anything_is_sent(tmp_path: Path, capsys, text: str):
    (tmp_path / "reference.jsonl").write_text(text)
    behaviour = Behaviour()
    status, _, _ = replay(tmp_path, behaviour, *SIZES, "--reference", str(tmp_path / "reference.jsonl"))
    assert (status, behaviour.bodies) == (2, [])
    assert "--reference" in capsys.readouterr().err


RULES = "".join(f"Rule {number}: keep change {number * 7919 % 1000} small and tested.\n" for number in range(12))
TOOLS = "".join(f"Tool {number} takes a path and returns {number * 6007 % 1000} lines.\n" for number in range(12))


def captured(path: Path, systems: list[str]) -> str:
    """Captured prompts, one session, a second apart."""
    rows = [
        {"t": turn, "session": "a", "output_tokens": 2, "messages": [{"role": "system", "content": system}]}
        for turn, system in enumerate(systems)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_header_line_that_changes_is_found_in_captured_prompts(tmp_path: Path, capsys):
    systems = [f"You are an agent. Time: 12:0{minute}:00\n{RULES}{TOOLS}" for minute in range(4)]
    trace = captured(tmp_path / "prompts.jsonl", systems)
    status, record, requests = replay(
        tmp_path, Behaviour(block_size=16), "--trace", trace, "--concurrency", "1", "--output-tokens", "4"
    )
    assert status == 0
    assert [request["miss"]["cause"] for request in requests] == ["cold"] + ["header_line"] * 3
    assert [request["miss"]["position"] for request in requests[1:]] == [len("\nYou are an agent. Time: 12:0")] * 3
    assert requests[2]["miss"]["text"].startswith("me: 12:0") and "2:00\n" in requests[2]["miss"]["text"]
    assert [request["output_tokens"] for request in requests] == [2] * 4
    assert record["trace"]["hit_rate"] < 0.05
    assert "a line changed and hides what follows it" in capsys.readouterr().out


def test_parts_that_changed_places_are_found_in_captured_prompts(tmp_path: Path):
    trace = captured(tmp_path / "prompts.jsonl", [f"Agent.\n{RULES}{TOOLS}", f"Agent.\n{TOOLS}{RULES}"])
    _, _, requests = replay(tmp_path, Behaviour(block_size=16), "--trace", trace, "--concurrency", "1")
    assert [request["miss"]["cause"] for request in requests] == ["cold", "reordered"]
    assert requests[1]["miss"]["lost_tokens"] > len(RULES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a", "messages": []}\n', "line 1: give either messages or prompt"),
        ('{"prompt": "abc"}\n[1]\n', "line 2: give either"),
        (json.dumps({"prompt": "x" * 9000}) + "\n", "needs 9128 tokens, the model holds 8192"),
    ],
)
def test_captured_prompts_that_cannot_be_sent_are_refused(tmp_path: Path, capsys, text: str, words: str):
    (tmp_path / "prompts.jsonl").write_text(text)
    status, _, _ = replay(tmp_path, Behaviour(), "--trace", str(tmp_path / "prompts.jsonl"))
    assert status == 2
    assert words in capsys.readouterr().err
