"""uvicorn's HTTP/1.1 with a short way out for streams: a piece of a response's body goes straight to the socket."""

from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.sse import BODY_WRITER


class StreamingProtocol(H11Protocol):
    """Gives every HTTP/1.1 request itself as a `router.sse.BodyWriter`, in the scope's extensions. Only for responses
    without a content length, whose body is chunked: h11 keeps no count of those bytes, so it misses nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        app = self.app

        async def with_body_writer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope.get("http_version") == "1.1":
                scope.setdefault("extensions", {})[BODY_WRITER] = self
            await app(scope, receive, send)

        self.app = with_body_writer

    @property
    def is_ready(self) -> bool:
        return not (self.flow.write_paused or self.transport.is_closing())

    def write(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
