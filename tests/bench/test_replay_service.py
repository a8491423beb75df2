"""The replay against the real service on the CPU: on every recorded session the server's hits are the oracle's."""

import json
from pathlib import Path

import pytest

from bench.replay import run
from bench.replay.__main__ import main
from tests.server import Server, write_config
from tests.test_cached_tokens import BLOCK, Oracle

SESSIONS = Path(__file__).resolve().parents[1] / "data" / "coding_agent"


def test_hits_on_every_recorded_session_equal_an_independent_oracle(tiny_model, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("bench.replay.page.draw_charts", lambda result: [])
    prompts: list[list[int]] = []
    request_body = run.request_body

    def remember(model: str, prompt: list[int], *arguments) -> bytes:
        prompts.append(prompt)
        return request_body(model, prompt, *arguments)

    monkeypatch.setattr(run, "request_body", remember)
    config = write_config(
        tmp_path,
        "shm",
        kv={"block_size": BLOCK, "pool_tokens": 131072},
        model={"dtype": "float32", "max_model_len": 8192},
        prefill={"chunk_tokens": 1024},
        decode={"max_running": 4},
    )
    options = "--concurrency 1 --think-scale 0 --output-tokens 2 --code generated --tokenizer".split()
    model_dir = tiny_model("llama", max_position_embeddings=8192)
    with Server(config, model_dir, tmp_path / "server.log") as server:
        path = tmp_path / "replay.json"
        scale = ["--trace", str(SESSIONS), "--block-tokens", str(BLOCK)]
        assert main(["--url", server.url, "--json", str(path), *scale, *options, str(model_dir)]) == 0
    requests = [json.loads(line) for line in path.with_suffix(".requests.jsonl").read_text().splitlines()]
    record = json.loads(path.read_text())
    assert record["server"]["block_size"] == BLOCK
    assert len({request["session"] for request in requests}) == 14
    assert len(requests) == len(prompts) == 338
    oracle, totals = Oracle(), {}
    for request, prompt in zip(requests, prompts):
        expected = oracle.count(prompt)
        assert request["cached_tokens"] == request["oracle_tokens"] == expected, request["index"]
        hits, total = totals.get(request["session"], (0, 0))
        totals[request["session"]] = (hits + expected, total + len(prompt))
        assert request["usage"]["prefill"][0]["worker"] == "p0"
    rates = {session: hits / total for session, (hits, total) in totals.items()}
    assert all(0.8 < rate < 0.99 for rate in rates.values()), rates
    assert sum(hits for hits, _ in totals.values()) / sum(total for _, total in totals.values()) == pytest.approx(
        record["trace"]["hit_rate"], abs=0.005
    )
