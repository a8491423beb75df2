"""A server that answers the OpenAI completion API at known times, on 127.0.0.1 in a thread."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """What the server does. `fail`, `hang` and `short` (one token too few) pick prompts by their count, from 0.
    `sent` collects, for each prompt, when each event left (perf_counter).

    With `block_size` it keeps every prompt's blocks and reports what it finds of the next; prompts in `forget` find
    nothing. `workers` of them are named in turn, each with a cache of its own. With `slow_fill` a prompt is in the
    cache only when its answer begins.
    """

    ttft_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_event: int = 1
    fail: frozenset[int] = frozenset()
    hang: frozenset[int] = frozenset()
    short: frozenset[int] = frozenset()
    cached_tokens: int | None = 0
    refused: frozenset[str] = frozenset()
    has_tokenize: bool = True
    max_model_len: int = 8192
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)
    flushes: int = 0
    block_size: int | None = None
    forget: frozenset[int] = frozenset()
    workers: int = 0
    slow_fill: bool = False
    caches: list[set[tuple[int, ...]]] = field(default_factory=lambda: [set()])
    has_detokenize: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, prompt: list[int], count: int) -> int | None:
        """Cached tokens of a prompt; its blocks are cached from now on."""
        if self.block_size is None:
            return self.cached_tokens
        size = self.block_size
        while len(self.caches) < self.workers:
            self.caches.append(set())
        cache = self.caches[count % max(1, self.workers)]
        prefixes = [tuple(prompt[:end]) for end in range(size, len(prompt) + 1, size)]
        found = 0
        for prefix in prefixes:
            if prefix not in cache or len(prefix) >= len(prompt):
                break
            found = len(prefix)
        if not self.slow_fill:
            cache.update(prefixes)
        return 0 if count in self.forget else found

    def fill(self, prompt: list[int], count: int) -> None:
        size = self.block_size or len(prompt)
        cache = self.caches[count % max(1, self.workers)]
        cache.update(tuple(prompt[:end]) for end in range(size, len(prompt) + 1, size))


@contextmanager
def mock_server(behaviour: Behaviour) -> Iterator[str]:
    """The server's URL while it runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.answer(200, {"data": [{"id": "mock", "max_model_len": behaviour.max_model_len}]})
            elif self.path == "/version":
                self.answer(200, {"version": "0-mock"})
            elif self.path == "/metrics":
                text = f'# HELP mock_prompts_total prompts\nmock_prompts_total{{kind="all"}} {len(behaviour.bodies)}\n'
                self.send(200, "text/plain", (text + 'mock_running 3\nmock_wait_bucket{le="1"} 4\n').encode())
            else:
                self.answer(404, {"error": {"message": "no such route"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
            if self.path == "/tokenize" and behaviour.has_tokenize:
                texts = [body.get("prompt", ""), *(message["content"] for message in body.get("messages", []))]
                self.answer(200, {"tokens": list("\n".join(texts).encode())})
            elif self.path == "/detokenize" and behaviour.has_detokenize:
                self.answer(200, {"prompt": bytes(body["tokens"]).decode(errors="replace")})
            elif self.path == "/flush_cache":
                behaviour.flushes += 1
                behaviour.caches = [set()]
                self.answer(200, {})
            elif self.path == "/v1/completions":
                self.complete(body)
            else:
                self.answer(404, {"error": {"message": "no such route"}})

        def complete(self, body: dict[str, Any]) -> None:
            arrived = time.perf_counter()
            refused = behaviour.refused & body.keys()
            if refused:
                return self.answer(400, {"error": {"message": f"unknown field {sorted(refused)[0]}"}})
            if len(body["prompt"]) <= 4:  # the probe for accepted parameters
                return self.stream(body, None, arrived, 2, None)
            if not body.get("stream"):  # the probe for the block size
                usage = {"prompt_tokens_details": {"cached_tokens": behaviour.find(body["prompt"], 0)}}
                if behaviour.slow_fill:
                    behaviour.fill(body["prompt"], 0)
                return self.answer(200, {"usage": usage})
            with behaviour.lock:
                count = len(behaviour.bodies)
                behaviour.bodies.append(body)
                behaviour.sent.append([])
                cached = behaviour.find(body["prompt"], count)
            if count in behaviour.fail:
                return self.answer(503, {"error": {"message": "no room today"}})
            if count in behaviour.hang:
                time.sleep(2.0)
                self.close_connection = True
                return None
            self.stream(body, count, arrived, body["max_tokens"] - (count in behaviour.short), cached)

        def stream(
            self, body: dict[str, Any], count: int | None, arrived: float, num_tokens: int, cached: int | None
        ) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            step = behaviour.tokens_per_event
            for first in range(0, num_tokens, step):
                token_ids = list(range(first, min(first + step, num_tokens)))
                due = arrived + behaviour.ttft_s + behaviour.gap_s * (first // step) if count is not None else 0.0
                time.sleep(max(0.0, due - time.perf_counter()))
                choice = {"index": 0, "text": "x" * len(token_ids), "finish_reason": None}
                if body.get("return_token_ids"):
                    choice["token_ids"] = token_ids
                if count is not None:
                    behaviour.sent[count].append(time.perf_counter())
                    if behaviour.slow_fill:
                        behaviour.fill(body["prompt"], count)
                self.event({"choices": [choice]})
            self.event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
            if body.get("stream_options"):
                usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
                if cached is not None:
                    usage["prompt_tokens_details"] = {"cached_tokens": cached}
                if behaviour.workers and count is not None:
                    usage["prefill"] = [{"worker": f"p{count % behaviour.workers}"}]
                self.event({"choices": [], "usage": usage})
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")

        def event(self, value: dict[str, Any]) -> None:
            self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

        def chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        def answer(self, status: int, value: dict[str, Any]) -> None:
            self.send(status, "application/json", json.dumps(value).encode())

        def send(self, status: int, content_type: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
