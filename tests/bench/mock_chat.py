"""A server that streams chat completions at known times, on 127.0.0.1 in a thread."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Chat:
    """`words` of text, one an event: the first `ttft_s` after the request came, the others `gap_s` apart. `arrived` and
    `sent` collect, for each request, when it came and when each event left (perf_counter)."""

    words: int = 8
    ttft_s: float = 0.0
    gap_s: float = 0.0
    hangs: bool = False
    arrived: list[float] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def mock_chat(chat: Chat) -> Iterator[str]:
    """The server's URL while it runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            arrived = time.perf_counter()
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            sent: list[float] = []
            with chat.lock:
                chat.arrived.append(arrived)
                chat.bodies.append(body)
                chat.sent.append(sent)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            for index in range(chat.words):
                time.sleep(max(0.0, arrived + chat.ttft_s + chat.gap_s * index - time.perf_counter()))
                sent.append(time.perf_counter())
                self.event({"choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]})
                if chat.hangs:
                    time.sleep(3.0)
                    return
            self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            self.event({"choices": [], "usage": {"completion_tokens": chat.words}})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, value: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
            self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
