"""Whole runs against candidates that behave, are wrong, hang, stall or never start: a score, or the reason for none.

Candidates are scripts of the standard library; the baseline's figures are given."""

import json
import sys
from pathlib import Path

import pytest

from bench.facts import collect_facts
from bench.speedrun import __main__ as command
from bench.speedrun import runner, settings
from bench.speedrun.baseline_cache import BaselineRecord, cache_path, identity, read_cached, write_cached
from bench.speedrun.gate.protocol import describe
from bench.speedrun.gate.questions import question_pool
from bench.speedrun.gate.record import Continuation, Gate, ScoredQuestion
from bench.speedrun.launch import Launch, LaunchError, run_setup
from bench.speedrun.model_files import model_hash
from bench.speedrun.scenarios import SIZES, scenarios
from bench.speedrun.score import ScenarioValue
from tests.bench.mock_chat import Chat, mock_chat

KEY = "B"
SERVER = """\
import http.server, json, os, sys, time
MODE = sys.argv[1]
asked = [0]
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(503 if MODE == "sick" else 200)
        self.send_header("content-length", "0")
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not body.get("stream"):
            text = "C" if MODE == "wrong" else "B"
            return self.answer(json.dumps({"choices": [{"message": {"content": text}}]}).encode())
        asked[0] += 1
        measured = asked[0] > 2
        if MODE == "hang" and measured:
            time.sleep(20)
        if MODE == "broken" and measured:
            return self.answer(b"no", 500)
        count = 1 if MODE == "short" and measured else body["max_tokens"]
        pieces = ["z"] * count
        if MODE == "one-piece":
            pieces = ["".join(pieces)]
        events = [{"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]} for piece in pieces]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        events.append({"choices": [], "usage": {"completion_tokens": count}})
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
            self.wfile.flush()
            time.sleep(0.005)
        self.wfile.write(b"data: [DONE]\\n\\n")
    def answer(self, data, status=200):
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.fixture
def run(tiny_model, tmp_path, monkeypatch):
    """run(mode, *options) -> (exit status, record). A baseline of 1 s a scenario, 5 tokens a request."""
    model_dir = tiny_model("qwen3")
    monkeypatch.setitem(SIZES, "cpu", scenarios((2, 40, 5), (1, 120, 5), (3, 40, 5)))
    monkeypatch.setattr(runner, "OUTPUT_DIR", tmp_path)
    monkeypatch.setattr(command, "gpu_is_there", lambda: False)
    values = {
        name: ScenarioValue(name, value, value, value, 1.0, 5, 5, 1)
        for name, value in (("chat", 50.0), ("long", 100.0), ("burst", 10.0))
    }
    tokens = {"chat": [10], "long": [5], "burst": [15]}
    monkeypatch.setattr(
        runner.Runner, "load_baseline", lambda self, fresh: (BaselineRecord(values, tokens, "then", {}), True)
    )
    gate = tmp_path / "gate.json"
    questions = [ScoredQuestion(question, KEY, 1.0) for question in question_pool()[:20]]
    continuation = Continuation([{"role": "user", "content": "Say B"}], 4, "B")
    Gate("tiny", model_hash(model_dir), "float32", 20, describe(), questions, [continuation], {}).write(gate)

    def start(mode: str, *options: str, script: str | None = None, setup: str | None = None):
        candidate = tmp_path / mode
        candidate.mkdir()
        (candidate / "server.py").write_text(SERVER)
        (candidate / "start_server.sh").write_text(script or f'exec "$PYTHON" server.py {mode}\n')
        if setup is not None:
            (candidate / "setup.sh").write_text(setup)
        record = tmp_path / "record.json"
        status = command.main(
            ["--model-dir", str(model_dir), "--candidate", str(candidate), "--gate", str(gate), "--repeats", "1"]
            + ["--json", str(record), *options]
        )
        return status, json.loads(record.read_text()) if record.exists() else None

    return start


def test_a_candidate_that_passes_gets_the_geometric_mean_of_its_speedups(run, tmp_path, capsys):
    status, record = run("good")
    assert (status, record["outcome"]) == (0, "SCORED"), record["reason"]
    speedups = record["speedups"]
    assert speedups["chat"] == pytest.approx(50.0 / record["candidate"]["chat"]["value"])
    assert speedups["long"] == pytest.approx(100.0 / record["candidate"]["long"]["value"])
    assert speedups["burst"] == pytest.approx(record["candidate"]["burst"]["value"] / 10.0)
    assert record["score"] == pytest.approx((speedups["chat"] * speedups["long"] * speedups["burst"]) ** (1 / 3))
    assert record["gate"]["passed"] and record["gate"]["agreed"] == 20
    assert [phase["name"].split(",")[0] for phase in record["timeline"]] == [
        *("start", "warm-up", "gate", "S1 chat", "S2 long prompt", "S3 burst")
    ]
    printed = capsys.readouterr().out
    assert f"score: {record['score']:.3f} x" in printed and "S3 burst" in printed
    page = (tmp_path / "record.html").read_text()
    assert f"score: {record['score']:.3f} x" in page
    assert (
        "data:image/svg+xml" in page and "http://" not in page.replace("http://127.0.0.1", "") and "<script" not in page
    )


@pytest.mark.parametrize(
    "mode, outcome, reason",
    [
        ("wrong", "INCORRECT", "0 of 20 answers agree, 19 needed"),
        ("hang", "TIMEOUT", "S1 chat took longer than its limit, 2.0 s"),
        ("broken", "FAIL", "requests failed: HTTP 500: no"),
        ("short", "FAIL", "short answers, 2 tokens where the baseline gave 10"),
        ("one-piece", "FAIL", "must be streamed"),
    ],
)
def test_a_candidate_that_does_not_do_its_work_gets_no_score(run, mode, outcome, reason):
    status, record = run(mode)
    assert (status, record["outcome"], record["score"]) == (1, outcome, None)
    assert reason in record["reason"]


def test_a_candidate_that_ends_at_once_fails_with_its_last_lines(run):
    status, record = run("ends", script="echo no such weights; exit 3\n")
    assert (status, record["outcome"]) == (1, "FAIL")
    assert "status 3" in record["reason"] and "no such weights" in record["reason"]


def test_a_candidate_that_never_gets_healthy_times_out(run):
    status, record = run("sick", "--start-limit-s", "1")
    assert (status, record["outcome"]) == (1, "TIMEOUT")
    assert "not healthy after 1 s" in record["reason"]


def test_setup_runs_before_the_server(run):
    script = 'test -e built || exit 9\nexec "$PYTHON" server.py good\n'
    status, record = run("good", script=script, setup="touch built\n")
    assert (status, record["outcome"]) == (0, "SCORED"), record["reason"]
    assert record["timeline"][0]["name"] == "setup"


def test_a_setup_that_fails_or_takes_too_long_is_no_score(tmp_path):
    launch = Launch("candidate", ["true"], tmp_path, tmp_path / "log")
    assert run_setup(launch) is False
    (tmp_path / "setup.sh").write_text("echo no compiler; exit 4\n")
    with pytest.raises(LaunchError, match=r"status 4(.|\n)*no compiler") as failed:
        run_setup(launch)
    assert not failed.value.timed_out
    (tmp_path / "setup.sh").write_text("exec sleep 30\n")
    with pytest.raises(LaunchError, match="did not end within 0.3 s") as late:
        run_setup(launch, limit_s=0.3)
    assert late.value.timed_out


def test_a_gate_of_another_model_is_refused(run, tmp_path, tiny_model, capsys):
    path = tmp_path / "gate.json"
    gate = json.loads(path.read_text())
    path.write_text(json.dumps(gate | {"model_hash": "0" * 64}))
    assert run("good") == (2, None)
    assert "another model" in capsys.readouterr().err


def test_a_cached_baseline_is_used_only_for_the_same_device_model_and_sizes(tmp_path):
    facts = collect_facts()
    first = settings.Settings(model_dir=tmp_path, size="cpu")
    known = identity(first, facts, "hash")
    record = BaselineRecord({"chat": ScenarioValue("chat", 1, 1, 1, 1, 1, None, 1)}, {"chat": [1]}, "then", known)
    path = cache_path(known, tmp_path)
    write_cached(path, record)
    assert read_cached(path, known) == record
    others = [
        identity(first, facts, "other hash"),
        identity(settings.Settings(model_dir=tmp_path, size="full"), facts, "hash"),
        identity(settings.Settings(model_dir=tmp_path, size="cpu", seed=1), facts, "hash"),
    ]
    facts.devices.append("another GPU")
    others.append(identity(first, facts, "hash"))
    for other in others:
        assert cache_path(other, tmp_path) != path and read_cached(path, other) is None


def test_quick_measures_a_running_server_and_writes_what_it_found(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SIZES, "quick-cpu", scenarios((1, 40, 5), (1, 120, 5), (2, 40, 5)))
    with mock_chat(Chat(words=5, gap_s=0.002)) as url:
        arguments = [
            "--quick",
            "--port",
            url.rpartition(":")[2],
            "--model-dir",
            str(tiny_model("qwen3")),
            "--device",
            "cpu",
        ]
        assert command.main([*arguments, "--weights", "random", "--json", str(tmp_path / "quick.json")]) == 0
    printed = capsys.readouterr().out
    assert "S1 chat: TPOT" in printed and "S2 long prompt: TTFT" in printed and "over 2 requests" in printed
    record = json.loads((tmp_path / "quick.json").read_text())
    assert record["count"] == "usage" and set(record["values"]) == {"chat", "long", "burst"}


def test_without_a_model_directory_the_command_says_what_to_give(tmp_path, capsys):
    assert command.main(["--model-dir", str(tmp_path), "--device", "cpu"]) == 2
    assert "--model-dir" in capsys.readouterr().err


def test_the_candidate_gets_the_contracts_variables_with_paths_that_hold_in_its_directory(tmp_path, monkeypatch):
    for name in ("model", "drafter", "candidate"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHON", raising=False)
    monkeypatch.setenv("CONFIG", "mine.yaml")
    monkeypatch.setenv("DRAFTER_BYO_DIR", "drafter")
    made = settings.Settings(model_dir=Path("model"), size="cpu", candidate=Path("candidate"))
    launch = made.candidate_launch(tmp_path / "log")
    assert launch.directory == tmp_path / "candidate" and launch.command == ["sh", "start_server.sh"]
    assert launch.environment == {
        "MODEL_DIR": str(tmp_path / "model"),
        "CONFIG": str(tmp_path / "mine.yaml"),
        "DRAFTER_BYO_DIR": str(tmp_path / "drafter"),
        "PYTHON": sys.executable,
    }
    monkeypatch.setenv("CONFIG", "auto")
    assert made.candidate_launch(tmp_path / "log").environment["CONFIG"] == "auto"
