"""One HTTP request as bytes in and bytes out.

While requests run the client only notes when data came; HTTP is decoded afterwards. A general client spends 0.1 ms and
more on each piece of a stream, which at thousands of tokens a second would be measured as the server's latency.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast

import h11
import httpx

END_OF_CHUNKS = b"0\r\n\r\n"


@dataclass(frozen=True)
class Endpoint:
    """Where completions are posted."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, base_url: str, path: str, headers: dict[str, str]) -> "Endpoint":
        url = httpx.URL(base_url)
        tls = ssl.create_default_context() if url.scheme == "https" else None
        port = url.port or (443 if tls else 80)
        return cls(url.host, port, url.path.rstrip("/") + path, tls, tuple(headers.items()))

    def request(self, body: bytes) -> bytes:
        """A POST of JSON that asks the server to close the connection after its answer."""
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "Connection: close",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Exchange(asyncio.Protocol):
    """Sends one request and notes (seconds since `start`, bytes) of what comes back, until the connection closes."""

    def __init__(self, request: bytes, start: float, chunks: list[tuple[float, bytes]]):
        self.request, self.start, self.chunks = request, start, chunks
        self.transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.chunks.append((time.perf_counter() - self.start, data))
        if data.endswith(END_OF_CHUNKS) and self.transport:  # for servers that keep the connection open all the same
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(error)


async def exchange(endpoint: Endpoint, request: bytes, start: float, chunks: list[tuple[float, bytes]]) -> None:
    """Send `request`, fill `chunks`. Raises OSError; when cancelled, drops the connection."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(
        lambda: Exchange(request, start, chunks), endpoint.host, endpoint.port, ssl=endpoint.tls
    )
    try:
        error = await protocol.closed
    finally:
        transport.abort()
    if isinstance(error, OSError):
        raise error


@dataclass
class HttpAnswer:
    """status None: no answer came. body: (arrival time, bytes) with the transfer encoding taken off."""

    status: int | None = None
    body: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""


def decode_http(chunks: list[tuple[float, bytes]]) -> HttpAnswer:
    """Read an HTTP/1.1 answer from the bytes of a connection that has closed."""
    answer = HttpAnswer()
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "server"), ("Content-Length", "0")]))
    connection.send(h11.EndOfMessage())
    try:
        for time_s, data in [*chunks, (0.0, b"")]:
            connection.receive_data(data)
            while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    answer.status = event.status_code
                elif isinstance(event, h11.Data):
                    answer.body.append((time_s, bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    return answer
    except h11.RemoteProtocolError:
        pass
    answer.error = (
        "the connection closed before the end of the answer" if chunks else "the connection closed unanswered"
    )
    return answer
