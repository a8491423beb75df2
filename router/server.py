"""The server process: HTTP API, dispatcher, fleet and supervisor on one event loop, from first line to clean end."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from router.announce import Announcer, ServerOptions, start_up_lines
from router.dispatcher import Dispatcher
from router.fleet import Fleet
from router.http_protocol import StreamingProtocol
from router.supervisor import Supervisor, worker_specs

HTTP_STOP_S = 3
"""How long responses whose requests have ended may take to leave, in seconds."""
KEEP_ALIVE_S = 75
"""An idle connection is closed after this long. Clients keep theirs for 5 s or a minute: whoever waits longer must be
the server, or a request meets a connection that is just being closed."""


class ServerError(RuntimeError):
    """The server cannot start or go on. One line."""


def log(line: str) -> None:
    print(f"baton: {line}", file=sys.stderr, flush=True)


async def serve(options: ServerOptions) -> int:
    """Run until a signal; returns the exit code. Raises ServerError, wire.WireError or WorkerFailed when an address
    cannot be used, the API cannot be set up or a worker cannot start.

    First SIGTERM or SIGINT: refuse new requests, let running ones end, stop the workers. Second: stop at once.
    """
    config = options.config
    http_socket = _listen(config.router.host, options.port)
    fleet = Fleet(config)
    control_address = await fleet.start(*options.control)
    model_dir = str(options.model_dir)
    specs = worker_specs(config, options.config_file, model_dir, control_address) if options.starts_workers else []
    supervisor = Supervisor(specs, log)
    dispatcher = Dispatcher(fleet, supervisor.expected)
    announcer = Announcer(supervisor, log)
    fleet.listeners.append(announcer)
    stop = _stop_signal(supervisor)
    for line in start_up_lines(options, control_address, [spec.name for spec in specs]):
        log(line)
    supervisor.start()
    http = _Http(options, dispatcher, http_socket)
    try:
        events: list[asyncio.Future[Any]] = [stop, supervisor.failed, http.task]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            log(f"{stop.result()}: draining for at most {config.router.drain_timeout_s:g} s")
            ended = await dispatcher.drain(config.router.drain_timeout_s)
            log("every request has ended" if ended else "some requests did not end in time and have failed")
        elif supervisor.failed.done():
            supervisor.failed.result()
        else:
            http.task.result()
    finally:
        await http.stop()
        fleet.listeners.remove(announcer)  # from here on workers are supposed to go
        await supervisor.stop()
        await fleet.close()
        log("stopped")
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, before anything else: a port in use is noticed at once, and early clients are queued."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or error
        raise ServerError(f"cannot listen on {host}:{port}: {reason}; set PORT to a free port") from None
    return sock


def _stop_signal(supervisor: Supervisor) -> asyncio.Future[str]:
    """Set by the first SIGTERM or SIGINT. The second one ends this process and its workers on the spot."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[str] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if not stop.done():
            stop.set_result(number.name)
            return
        log(f"second signal ({number.name}): stopping at once")
        supervisor.kill()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: this process drains before it stops listening."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def install_signal_handlers(self) -> None:
        """What versions before `capture_signals` call."""


class _Http:
    """The HTTP API as a task. The tokenizer is read on a thread, while the workers load the model."""

    def __init__(self, options: ServerOptions, dispatcher: Dispatcher, sock: socket.socket):
        self._options, self._dispatcher, self._sock = options, dispatcher, sock
        self._server: _Server | None = None
        self._stopping = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        app = await asyncio.to_thread(self._create_app)
        if self._stopping:
            return
        http = uvicorn.Config(
            app,
            http=StreamingProtocol,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=HTTP_STOP_S,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _Server(http)
        await self._server.serve(sockets=[self._sock])

    def _create_app(self) -> FastAPI:
        from router.app import create_app  # slow to import

        try:
            app = create_app(self._dispatcher, self._options.model_dir, self._options.config)
            gc.collect()
            gc.freeze()  # what is here stays; looking through it again would stop every stream for tens of milliseconds
            return app
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ServerError(f"no usable tokenizer in {self._options.model_dir}: {reason}") from error

    async def stop(self) -> None:
        """Let responses leave, stop listening. Idempotent."""
        self._stopping = True
        if self._server is not None:
            self._server.should_exit = True
        await asyncio.gather(self.task, return_exceptions=True)
        self._sock.close()
