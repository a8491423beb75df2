"""A real HTTP server on a free port, for what only a real connection shows."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from router.http_protocol import StreamingProtocol

WAIT_S = 10.0


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve the app in a thread; gives its base URL."""
    config = uvicorn.Config(app, http=StreamingProtocol, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
