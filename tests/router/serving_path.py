"""What the router costs by itself: a real server process, a decode worker without an engine, a client.

    python3 -m tests.router.serving_path --model models/smollm2-135m-instruct --json build/serving_path.json

The worker sends one message a step with one token of every running request, as a GPU engine would, at a fixed rate. A
load of many streams gives the router's processor time for each token and each request (from the kernel's account of its
threads); one stream at a time gives how long a request takes from the client's socket to the worker's, and a token
from the worker's socket to the client's. The kernel's share of both is included.
"""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.facts import collect_facts
from bench.progress import say
from bench.replay.transport import Endpoint, decode_http, exchange
from engine.protocol import Abort, Outputs, Ping, Pong, PoolCounts, Register, Submit, ToRouter, ToWorker, WorkerStats
from engine.request import PrefillReport, Request, TokenDelta
from engine.wire import Codec, Connection, WireError, connect
from tests.router.fake_worker import make_model
from tests.server import ROOT, free_port

MAX_RUNNING = 256
VOCAB_SIZE = 49152
SINGLE_TOKENS = 16
CONNECT_ATTEMPTS = 600
STATS_PERIOD_S = 0.1


class PacedWorker:
    """A decode worker whose engine is a clock. Times are perf_counter's, which all processes of a host share."""

    def __init__(self, control: str, step_s: float):
        self._step_s = step_s
        self._arrived: deque[Request] = deque()
        self._news = threading.Event()
        self._running: dict[str, Request] = {}
        self._sent: dict[str, int] = {}
        self._draws = random.Random(0)
        self.submitted_at: dict[str, float] = {}
        self.sent_at: dict[str, list[float]] = {}
        self.stopped = threading.Event()
        self._connection = self._connect(control)
        self._connection.send(
            Register(
                name="paced",
                role="decode",
                epoch="1",
                pid=1,
                model=make_model(vocab_size=VOCAB_SIZE, max_model_len=8192),
                num_blocks=1000,
                max_running=MAX_RUNNING,
                channel="local",
                hosts_prefill=True,
            )
        )

    def _connect(self, control: str) -> Connection:
        """The server may still be starting."""
        for attempt in range(CONNECT_ATTEMPTS):
            try:
                return connect(control, Codec(ToRouter | ToWorker), self._on_message, lambda _: self.stopped.set())
            except WireError:
                if attempt + 1 == CONNECT_ATTEMPTS:
                    raise
                time.sleep(0.1)
        raise AssertionError("not reached")

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Submit):
            self.submitted_at[message.request.request_id] = time.perf_counter()
            self._arrived.append(message.request)
            self._news.set()
        elif isinstance(message, Ping):
            self._connection.send(Pong(message.nonce))
        elif isinstance(message, Abort):
            self._running.pop(message.request_id, None)

    def run(self) -> None:
        """Step until SIGTERM or the router's end; a step waits for the first request when there is none."""
        next_step, next_stats = time.perf_counter(), 0.0
        while not self.stopped.is_set():
            if not self._running and not self._arrived:
                self._news.wait(STATS_PERIOD_S)
                next_step = time.perf_counter()
            self._news.clear()
            while self._arrived:
                request = self._arrived.popleft()
                self._running[request.request_id] = request
            if time.perf_counter() >= next_stats:
                self._connection.send(WorkerStats(len(self._running), 0, PoolCounts(1000, 1000, 0, 0, 0)))
                next_stats = time.perf_counter() + STATS_PERIOD_S
            self._step()
            next_step = max(next_step + self._step_s, time.perf_counter() - 4 * self._step_s)
            time.sleep(max(0.0, next_step - time.perf_counter()))

    def _step(self) -> None:
        deltas = [self._delta(request) for request in list(self._running.values())]
        if deltas:
            now = time.perf_counter()
            for delta in deltas:
                self.sent_at.setdefault(delta.request_id, []).append(now)
            self._connection.send(Outputs(deltas))

    def _delta(self, request: Request) -> TokenDelta:
        request_id = request.request_id
        num_sent = self._sent.get(request_id, 0)
        self._sent[request_id] = num_sent + 1
        delta = TokenDelta(request_id, request.generation, [self._draws.randrange(VOCAB_SIZE)])
        if num_sent == 0:
            delta.prefill = PrefillReport(num_prompt_tokens=len(request.prompt_token_ids))
        if num_sent + 1 == request.sampling.max_tokens:
            delta.finish_reason = "length"
            self._running.pop(request_id, None)
        return delta


def run_worker(control: str, step_s: float, record: Path) -> None:
    worker = PacedWorker(control, step_s)
    signal.signal(signal.SIGTERM, lambda *_: worker.stopped.set())
    worker.run()
    record.write_text(json.dumps({"submitted_at": worker.submitted_at, "sent_at": worker.sent_at}))


@dataclass
class Load:
    """`cpu_s` of all the router's threads; `wall_s` from the first request to the last byte; `reads`: how often the
    client found data, less than the tokens where some came together."""

    streams: int
    output_tokens: int
    wall_s: float
    cpu_s: float
    reads: int
    failures: int

    @property
    def tokens(self) -> int:
        return self.streams * self.output_tokens


def process_cpu_s(pid: int) -> float:
    """Processor seconds of a process, user and system, from the scheduler's own account."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


class Server:
    """The server and its worker, each a process of its own."""

    def __init__(self, model: Path, step_ms: float, directory: Path):
        port, control = free_port(), f"127.0.0.1:{free_port()}"
        self.record = directory / "worker.json"
        command = [sys.executable, "-m", "router", "--model-dir", str(model), "--port", str(port)]
        command += ["--control", control, "--no-workers", "--config", "colocated-cpu"]
        self.router = subprocess.Popen(command, cwd=ROOT)
        self.endpoint = Endpoint.of(f"http://127.0.0.1:{port}", "/v1/completions", {})
        self.url = f"http://127.0.0.1:{port}"
        worker = [sys.executable, "-m", "tests.router.serving_path", "--worker", control]
        self.worker = subprocess.Popen([*worker, "--step-ms", str(step_ms), "--record", str(self.record)], cwd=ROOT)

    def wait_healthy(self) -> None:
        for _ in range(600):
            try:
                if httpx.get(f"{self.url}/health", timeout=10).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise SystemExit("the server did not get healthy within 60 s; its log is above")

    def stop(self) -> dict[str, Any]:
        """What the worker noted."""
        for process in (self.worker, self.router):
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        return json.loads(self.record.read_text())


def body(prompt: list[int], output_tokens: int) -> bytes:
    values = {"prompt": prompt, "max_tokens": output_tokens, "stream": True, "ignore_eos": True, "seed": 1}
    return json.dumps({**values, "stream_options": {"include_usage": True}}).encode()


async def run_load(server: Server, streams: int, prompt_tokens: int, output_tokens: int) -> Load:
    draws = random.Random(streams * output_tokens)
    requests = [
        server.endpoint.request(body(draws.choices(range(VOCAB_SIZE), k=prompt_tokens), output_tokens))
        for _ in range(streams)
    ]
    chunks: list[list[tuple[float, bytes]]] = [[] for _ in requests]
    before, start = process_cpu_s(server.router.pid), time.perf_counter()
    await asyncio.gather(*(exchange(server.endpoint, r, start, c) for r, c in zip(requests, chunks)))
    wall_s = time.perf_counter() - start
    cpu_s = process_cpu_s(server.router.pid) - before
    answers = [b"".join(data for _, data in decode_http(received).body) for received in chunks]
    good = [text.count(b'"finish_reason":null') == output_tokens - 1 and b"[DONE]" in text for text in answers]
    return Load(streams, output_tokens, wall_s, cpu_s, sum(map(len, chunks)), good.count(False))


@dataclass
class Latencies:
    """Medians in milliseconds over single streams. `to_worker`: client's connect -> request decoded in the worker;
    `first`, `later`: token message sent -> its event at the client."""

    prompt_tokens: int
    repeats: int
    to_worker: float
    first: float
    later: float


async def run_single(server: Server, prompt_tokens: int, repeats: int) -> list[tuple[str, float, list[float]]]:
    """(response id, when the request was sent, when each token came) of one stream after another."""
    draws = random.Random(prompt_tokens)
    results = []
    for _ in range(repeats):
        request = server.endpoint.request(body(draws.choices(range(VOCAB_SIZE), k=prompt_tokens), SINGLE_TOKENS))
        chunks: list[tuple[float, bytes]] = []
        start = time.perf_counter()
        await exchange(server.endpoint, request, 0.0, chunks)
        events = decode_http(chunks).body
        response_id = json.loads(events[0][1].split(b"\n\n")[0].removeprefix(b"data: "))["id"]
        token_times = [at for at, data in events if b'"finish_reason":' in data]
        results.append((response_id, start, token_times))
        await asyncio.sleep(0.005)
    return results


def latencies(
    prompt_tokens: int, runs: list[tuple[str, float, list[float]]], noted: dict[str, dict[str, Any]]
) -> Latencies:
    to_worker, first, later = [], [], []
    for response_id, start, times in runs:
        request_id = f"{response_id}-0"
        sent = noted["sent_at"][request_id]
        to_worker.append(noted["submitted_at"][request_id] - start)
        first.append(times[0] - sent[0])
        later += [at - sent_at for at, sent_at in zip(times[1:-1], sent[1:-1])]
    figures = [round(median(values) * 1e3, 3) for values in (to_worker, first, later)]
    return Latencies(prompt_tokens, len(runs), *figures)


def codec_us() -> dict[str, float]:
    """Processor microseconds a token to encode and to decode a message of 128 tokens, best of five."""
    codec = Codec(ToRouter | ToWorker)
    outputs = Outputs([TokenDelta(f"cmpl-{index:032x}-0", 0, [index * 300]) for index in range(128)])
    data = codec.encode(outputs)

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            start = time.process_time()
            for _ in range(100):
                work()
            times.append(time.process_time() - start)
        return round(min(times) * 1e6 / 100 / 128, 2)

    return {"encode": best(lambda: codec.encode(outputs)), "decode": best(lambda: codec.decode(data))}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.router.serving_path",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2-135m-instruct", help="for its tokenizer")
    parser.add_argument("--streams", type=int, default=128, help="at once (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=512, help="of each (%(default)s)")
    parser.add_argument("--step-ms", type=float, default=6.4, help="one token of every stream (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each load (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--worker", metavar="CONTROL", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        run_worker(given.worker, given.step_ms / 1e3, given.record)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        server = Server(given.model, given.step_ms, Path(directory))
        try:
            server.wait_healthy()
            asyncio.run(run_single(server, 200, 5))
            say("one stream at a time")
            singles = {size: asyncio.run(run_single(server, size, 40)) for size in (200, 4096)}
            say(f"{given.streams} streams at once, answers of 2 and of {given.output_tokens} tokens in turn")
            asyncio.run(run_load(server, given.streams, 256, 2))
            loads = [
                [asyncio.run(run_load(server, given.streams, 256, size)) for size in (2, given.output_tokens)]
                for _ in range(given.repeats)
            ]
        finally:
            noted = server.stop()
    short, long = [pair[0] for pair in loads], [pair[1] for pair in loads]
    per_request = [1e6 * load.cpu_s / load.streams for load in short]
    per_token = [1e6 * (b.cpu_s - a.cpu_s) / (b.tokens - a.tokens) for a, b in loads]
    rates = [load.tokens / load.wall_s for load in long]
    singles_ms = [latencies(size, runs, noted) for size, runs in singles.items()]
    failures = sum(load.failures for load in [*short, *long])
    print(f"router processor time a token    {spread(per_token)} us")
    print(f"router processor time a request  {spread(per_request)} us")
    print(f"output tokens/s                  {spread(rates)}, of {given.streams / given.step_ms * 1e3:.0f} offered")
    for one in singles_ms:
        print(
            f"{one.prompt_tokens:4d} tokens, one stream: request -> worker {one.to_worker} ms, first token -> client "
            f"{one.first} ms, later tokens {one.later} ms"
        )
    wire = codec_us()
    print(f"wire, a token: encode {wire['encode']} us, decode {wire['decode']} us; failed streams: {failures}")
    if given.json:
        record = {"facts": collect_facts(), "per_token_us": per_token, "per_request_us": per_request, "tokens_s": rates}
        record |= {"singles": singles_ms, "wire_us": wire, "loads": [*short, *long]}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(record, default=vars, indent=1) + "\n")
    return 1 if failures else 0


def spread(values: list[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f} - {max(values):.1f})"


if __name__ == "__main__":
    sys.exit(main())
