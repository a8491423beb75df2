"""The whole service in its own processes, over HTTP: topologies, lost workers, aborts, drain."""

import asyncio
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
import transformers

from tests.server import TOPOLOGIES, Server, write_config

PROMPT = [random.Random(2).randrange(4, 500) for _ in range(45)]


@pytest.fixture
def start(tiny_model, tmp_path):
    def start(topology: str, environment: dict[str, str] | None = None, **sections) -> Server:
        config = write_config(tmp_path, topology, **sections)
        return Server(config, tiny_model("qwen3"), tmp_path / "log", **(environment or {}))

    return start


@pytest.fixture(scope="module")
def greedy(tiny_model):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32).eval()

    def continuation(prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    return continuation


def pools_whole(server: Server) -> bool:
    """No block of any pool is held or leased, and each pool's states add up to its size."""
    samples = server.metrics()
    blocks = {name: value for name, value in samples.items() if name.startswith("baton_kv_blocks{")}
    assert blocks, f"no block metrics among {sorted(samples)[:40]}"
    held = sum(value for name, value in blocks.items() if 'state="in_use"' in name or 'state="leased"' in name)
    return held == 0


def wait_for(condition, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition not reached in time"
        time.sleep(0.05)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_gives_the_tokens_of_transformers(start, greedy, topology):
    with start(topology) as server:
        cold = server.complete(PROMPT, max_tokens=24, ignore_eos=True)
        warm = server.complete(PROMPT, max_tokens=24, ignore_eos=True)
        assert cold["choices"][0]["token_ids"] == warm["choices"][0]["token_ids"] == greedy(PROMPT, 24)
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 40
        seeded = [server.complete(PROMPT, max_tokens=12, temperature=1.0, seed=11) for _ in range(2)]
        assert seeded[0]["choices"][0]["text"] == seeded[1]["choices"][0]["text"]
        assert httpx.post(f"{server.url}/flush_cache").status_code == 200
        again = server.complete(PROMPT, max_tokens=4, ignore_eos=True)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        wait_for(lambda: pools_whole(server))


def test_colocated_needs_nothing_beyond_the_pinned_stack(start, tmp_path):
    extras = ["zmq", "prometheus_client", "matplotlib", "gguf", "pytest", "hypothesis", "aiohttp"]
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {extras!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    with start("colocated", {"PYTHONPATH": str(tmp_path)}) as server:
        answer = server.complete(PROMPT, max_tokens=4, ignore_eos=True)
        assert len(answer["choices"][0]["token_ids"]) == 4
        metrics = httpx.get(f"{server.url}/metrics")
        assert metrics.status_code == 501 and "prometheus" in metrics.text


def test_a_missing_extra_is_named_in_one_line(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['zmq'] = None\n")
    server = start("tcp", {"PYTHONPATH": str(tmp_path)})
    with pytest.raises(AssertionError, match="exited with"):
        server.__enter__()
    assert "pyzmq" in server.log and "Traceback" not in server.log


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("topology", ["shm", "tcp"])
def test_a_killed_worker_is_replaced_and_streams_in_flight_keep_their_tokens(start, greedy, topology, role):
    prompts = [PROMPT[i:] + [20 + i] * 30 for i in range(6)]
    with start(topology, decode={"max_running": 4}) as server:
        answers: dict[int, dict] = {}

        def run(index: int) -> None:
            answers[index] = server.complete(prompts[index], max_tokens=150, ignore_eos=True)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.metrics().get("baton_generation_tokens_total", 0) > 20)
        [pid] = server.worker_pids(role)
        os.kill(pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
        for index, prompt in enumerate(prompts):
            assert answers[index]["choices"][0]["token_ids"] == greedy(prompt, 150), index
        server.wait_healthy()
        assert server.worker_pids(role) != [pid]
        wait_for(lambda: pools_whole(server))


def test_health_notices_a_frozen_engine_loop_and_its_recovery(start):
    with start("shm", router={"health_timeout_s": 0.5}) as server:
        for role in ("decode", "prefill"):
            [pid] = server.worker_pids(role)
            os.kill(pid, signal.SIGSTOP)
            try:
                wait_for(lambda: not server.healthy())
            finally:
                os.kill(pid, signal.SIGCONT)
            wait_for(server.healthy)
        assert server.complete(PROMPT, max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_sigterm_lets_running_requests_end_and_leaves_no_process(start):
    with start("shm") as server:
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(server.complete(PROMPT, max_tokens=300, ignore_eos=True))
        )
        thread.start()
        wait_for(lambda: server.metrics().get("baton_generation_tokens_total", 0) > 5)
        pids = server.worker_pids("prefill") + server.worker_pids("decode")
        assert len(pids) == 2
        assert server.stop() == 0
        thread.join()
        assert answers[0]["usage"]["completion_tokens"] == 300
        for pid in pids:
            assert not Path(f"/proc/{pid}").exists()


def storm_bodies(rng: random.Random, count: int) -> list[dict]:
    stems = [[rng.randrange(4, 500) for _ in range(40)] for _ in range(6)]
    bodies = []
    for index in range(count):
        stem = rng.choice(stems)[: rng.randrange(1, 41)]
        tail = [rng.randrange(4, 500) for _ in range(rng.randrange(1, 40))]
        body = {"prompt": stem + tail, "max_tokens": rng.randrange(1, 24), "seed": index, "ignore_eos": True}
        bodies.append(body | {"temperature": rng.choice([0, 1.0]), "return_token_ids": True})
    return bodies


async def storm(server: Server, count: int, abort_share: float, seed: int, kill: list[str]) -> tuple[dict, list]:
    """Bounded load of mixed requests. A share of them is dropped by the client at a random moment; a worker of each
    role in `kill` is killed on the way. Returns how requests ended, and (body, token ids) of those that were
    answered."""
    rng = random.Random(seed)
    bodies = storm_bodies(rng, 60)
    outcome = {"ok": 0, "aborted": 0, "failed": 0}
    answered: list[tuple[int, list[int]]] = []
    gate = asyncio.Semaphore(24)
    kill_at = {count * (index + 1) // (len(kill) + 1): role for index, role in enumerate(kill)}

    async def one(client: httpx.AsyncClient, index: int) -> None:
        which = rng.randrange(len(bodies))
        patience = rng.choice([0.0, 0.005, 0.02, 0.1, 0.3]) if rng.random() < abort_share else None
        async with gate:
            if index in kill_at:
                os.kill(rng.choice(server.worker_pids(kill_at[index])), signal.SIGKILL)
            request = client.post(f"{server.url}/v1/completions", json=bodies[which])
            try:
                answer = await (asyncio.wait_for(request, patience) if patience is not None else request)
            except (TimeoutError, asyncio.TimeoutError, httpx.ReadError) as error:
                # A client cancelled in mid-read may report its own closed socket.
                outcome["aborted" if patience is not None else "failed"] += 1
                assert patience is not None, error
                return
            if answer.status_code == 200:
                outcome["ok"] += 1
                answered.append((which, answer.json()["choices"][0]["token_ids"]))
            else:
                outcome["failed"] += 1

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=40), timeout=120) as client:
        await asyncio.gather(*(one(client, index) for index in range(count)))
    return outcome, [(bodies[which], tokens) for which, tokens in answered]


@pytest.mark.parametrize("topology", ["colocated", "shm", "tcp"])
def test_2000_requests_with_aborts_and_killed_workers_leave_pools_whole_and_tokens_unchanged(start, topology):
    kill = ["decode"] if topology == "colocated" else ["prefill", "decode"]
    with start(topology, decode={"max_running": 8}) as server:
        outcome, answered = asyncio.run(storm(server, 2000, abort_share=0.2, seed=3, kill=kill))
        assert outcome["failed"] == 0, outcome
        assert outcome["aborted"] > 100 and outcome["ok"] > 1500, outcome
        wait_for(server.healthy)
        wait_for(lambda: pools_whole(server))
        alone: dict[str, list[int]] = {}
        for body, tokens in answered:
            key = json.dumps(body)
            if key not in alone:
                assert httpx.post(f"{server.url}/flush_cache").status_code == 200
                alone[key] = server.complete(**body)["choices"][0]["token_ids"]
            assert tokens == alone[key], body
        assert len(alone) == 60


def test_more_requests_than_the_queue_holds_get_429_with_retry_after(start):
    with start("colocated", decode={"max_running": 2}, router={"max_waiting": 2}) as server:
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}

        async def burst() -> list[httpx.Response]:
            async with httpx.AsyncClient(timeout=120) as client:
                return await asyncio.gather(
                    *(client.post(f"{server.url}/v1/completions", json=body) for _ in range(12))
                )

        answers = asyncio.run(burst())
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 4 + [429] * 8
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert float(refused.headers["retry-after"]) > 0
        assert set(refused.json()["error"]) == {"message", "type", "param", "code"}


def test_a_stream_carries_the_same_text_as_the_answer_without_one(start):
    with start("tcp") as server:
        whole = server.complete("Once upon a", max_tokens=40, ignore_eos=True)["choices"][0]["text"]
        body = {"prompt": "Once upon a", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}
        text = ""
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == whole
