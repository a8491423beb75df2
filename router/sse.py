"""Server-sent events, and doing work only as long as the client is there."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

BODY_WRITER = "baton.body_writer"
"""ASGI extension of router/http_protocol.py: a BodyWriter, for a response that has begun and has no content length."""


class BodyWriter(Protocol):
    @property
    def is_ready(self) -> bool:
        """Whether to write. Not while the client reads too slowly, nor when it is gone; `send` deals with both."""

    def write(self, data: bytes) -> None:
        """A piece of the body, not empty."""


class ClientGone(Exception):
    """The client closed its connection."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; if the client disconnects first, cancel it and raise ClientGone. The request body must have been
    read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `events` (each whole "data: ...\\n\\n" texts) as they come. Nothing leaves before the first: what `events`
    raises until then, and ClientGone, is raised here, and still has its own HTTP status. `close` is called exactly once
    at the end, however it came: the last event, a lost client, a server shutting down.

    begin   called with the connection's BodyWriter, if there is one: while the iterator is waited for, events may be
            written there by whoever makes them
    """

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], begin: Callable[[BodyWriter], None] | None = None
    ):
        self.events = events
        self.close = close
        self.begin = begin
        self._started = False
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send, scope.get("extensions", {}).get(BODY_WRITER)))
        except ClientGone:
            if not self._started:
                raise
        finally:
            self.close()

    async def _send(self, send: Send, writer: BodyWriter | None) -> None:
        async for event in self.events:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                if writer is not None and self.begin is not None:
                    self.begin(writer)
            if writer is not None and writer.is_ready:
                writer.write(event)
            else:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
