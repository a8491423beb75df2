"""Typed messages over TCP: what the router, the workers and the channels talk through.

A frame is a 4-byte big-endian length and that many bytes of JSON. Messages are dataclasses that name themselves in
`kind` (engine/protocol.py, kv_transfer/handoff.py). Standard library sockets only, so every topology can use it.

    send(message) --encode--> socket, at once if it takes the bytes ---------> peer
                                 \\--> backlog --> writer thread, in batches --/
    on_message(message) <-- reader thread <-- frames <------------------------- peer
    on_close(reason)    <-- reader thread, once, after the last message
"""

import logging
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any, BinaryIO, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 128 << 20
MAX_BACKLOG_BYTES = 1 << 30
CLOSED_HERE = "closed on this side"
CLOSED_BY_PEER = "closed by the peer"

_HEADER = struct.Struct(">I")
_BUFFER_BYTES = 256 << 10
_LINGER_S = 1.0
_RETRY_S = 0.1

OnMessage = Callable[[Any], None]
OnClose = Callable[[str], None]


class WireError(ConnectionError):
    """A message cannot be put on the wire or read from it, or an address cannot be used. One line."""


class Codec:
    """JSON for one union of stdlib dataclasses, told apart by their `kind`. Infinite floats survive.

    A message is checked against its declared types in both directions; unknown keys are ignored.
    """

    def __init__(self, union_type: Any):
        tagged = Annotated[union_type, Field(discriminator="kind")]
        adapter: TypeAdapter[Any] = TypeAdapter(tagged, config=ConfigDict(ser_json_inf_nan="constants"))
        self._validate = adapter.validator.validate_json
        self._serialize = adapter.serializer.to_json

    def encode(self, message: Any) -> bytes:
        """Raises WireError when a field does not hold what its type says, or text is not valid Unicode."""
        try:
            return self._serialize(message, warnings="error")
        except PydanticSerializationError as error:
            raise WireError(f"cannot encode {type(message).__name__}: {' '.join(str(error).split())[:300]}") from None

    def decode(self, data: bytes) -> Any:
        """Raises WireError when `data` is not JSON of one of the union's types."""
        try:
            return self._validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "message"
            raise WireError(f"malformed message: {where}: {first['msg'][:200]}") from None


class Connection:
    """One ordered, framed stream of messages in both directions, with its own threads.

    `on_message(message)` and `on_close(reason)` are called from the reader thread, one at a time; a slow callback holds
    up only this connection's input. on_close comes exactly once, after the last message, whoever closed. An exception
    in on_message closes the connection. Both callbacks must be set when `start` is called; nothing is read before.

    `codec` has to cover the messages of both directions.
    """

    def __init__(
        self, sock: socket.socket, codec: Codec, on_message: OnMessage | None = None, on_close: OnClose | None = None
    ):
        self.on_message = on_message
        self.on_close = on_close
        self.peer_address = _format_address(sock.getpeername())
        self.local_address = _format_address(sock.getsockname())
        _tune(sock)
        self._sock = sock
        self._codec = codec
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._started = False
        self._closing = False
        self._reason: str | None = None
        self._read_ended = threading.Event()
        self._done = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"wire-read-{self.peer_address}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"wire-write-{self.peer_address}", daemon=True)

    def start(self) -> None:
        """Begin to read. `connect` and `Listener` do this."""
        assert self.on_message is not None and self.on_close is not None, "callbacks must be set before start"
        self._started = True
        self._writer.start()
        self._reader.start()

    @property
    def closed(self) -> bool:
        return self._closing

    @property
    def backlog_bytes(self) -> int:
        """Bytes accepted by `send` that the socket has not taken yet."""
        return self._backlog_bytes

    def send(self, message: Any) -> None:
        """Encode now and send or queue; never waits for the peer. Callable from any thread; each thread's messages keep
        their order. After the connection closed, messages are dropped (on_close tells).

        Raises WireError for a message that cannot be encoded or exceeds MAX_FRAME_BYTES; nothing is sent then. A peer
        that lets MAX_BACKLOG_BYTES pile up is dropped.
        """
        if self._closing:
            return
        body = self._codec.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise WireError(f"{type(message).__name__} takes {len(body)} bytes, over the frame limit {MAX_FRAME_BYTES}")
        frame = memoryview(_HEADER.pack(len(body)) + body)
        with self._lock:
            if self._closing:
                return
            if not self._backlog:
                frame = frame[self._try_send(frame) :]
                if not frame:
                    return
            self._backlog.append(frame)
            self._backlog_bytes += len(frame)
            if self._backlog_bytes > MAX_BACKLOG_BYTES:
                self._fail(f"the peer reads too slowly: {self._backlog_bytes} bytes wait to be sent")
            self._work.notify_all()

    def close(self) -> None:
        """Stop. No further message is delivered (one may just be being delivered); what `send` accepted still goes out
        in the background for up to a second. Idempotent, does not wait, callable from the callbacks."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._reason = CLOSED_HERE
            self._work.notify_all()
        if not self._started:
            self._sock.close()
            self._done.set()

    def wait_closed(self, timeout_s: float = 2.0) -> bool:
        """Wait until the socket is released and on_close has returned. Not callable from the callbacks."""
        return self._done.wait(timeout_s)

    def _try_send(self, data: memoryview) -> int:
        """Bytes the socket took without waiting. The lock is held. An error counts as nothing taken: the reader sees it
        too, delivers what had arrived before it, and closes."""
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except OSError:
            return 0

    def _fail(self, reason: str) -> None:
        """Close at once from either thread or a sender. The lock is held."""
        if self._reason is None:
            self._reason = reason
        self._closing = True
        self._backlog.clear()
        self._backlog_bytes = 0
        self._work.notify_all()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _read(self) -> None:
        stream = cast(BinaryIO, self._sock.makefile("rb", buffering=_BUFFER_BYTES))
        try:
            reason = self._read_frames(stream)
        except Exception as error:
            log.exception("reading from %s failed", self.peer_address)
            reason = f"reading failed: {error}"
        with self._lock:
            self._fail(reason)
        self._read_ended.set()
        self._writer.join()
        stream.close()
        self._sock.close()
        try:
            assert self.on_close is not None and self._reason is not None
            self.on_close(self._reason)
        except Exception:
            log.exception("on_close of the connection to %s failed", self.peer_address)
        self.on_message = self.on_close = None  # owners are freed without waiting for the cycle collector
        self._done.set()

    def _read_frames(self, stream: BinaryIO) -> str:
        """Deliver messages until the stream ends; returns why it ended."""
        assert self.on_message is not None
        while True:
            try:
                header = stream.read(_HEADER.size)
                if len(header) < _HEADER.size:
                    return CLOSED_BY_PEER if not header else f"{CLOSED_BY_PEER} inside a frame"
                (num_bytes,) = _HEADER.unpack(header)
                if num_bytes > MAX_FRAME_BYTES:
                    return f"frame of {num_bytes} bytes, over the limit {MAX_FRAME_BYTES}; not a Baton peer?"
                body = stream.read(num_bytes)
                if len(body) < num_bytes:
                    return f"{CLOSED_BY_PEER} inside a frame"
                if self._closing:
                    continue
                message = self._codec.decode(body)
            except WireError as error:
                return str(error)
            except OSError as error:
                return f"connection lost: {error.strerror or error}"
            try:
                self.on_message(message)
            except Exception as error:
                log.exception("on_message of the connection to %s failed", self.peer_address)
                return f"handling {type(message).__name__} failed: {error}"

    def _write(self) -> None:
        """Send the backlog whenever there is one; after `close`, say goodbye and see that the reader ends."""
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        end_time = None
        while True:
            with self._lock:
                while not self._backlog and not self._closing:
                    self._work.wait()
                if self._closing and (not self._backlog or self._reason != CLOSED_HERE):
                    break
                if self._closing and end_time is None:
                    end_time = time.monotonic() + _LINGER_S
                taken = self._try_send(_join(self._backlog))
                self._drop_sent(taken)
            if end_time is not None and time.monotonic() > end_time:
                break
            if not taken:
                poller.poll(_RETRY_S * 1000)
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return
        if not self._read_ended.wait(_LINGER_S):
            with self._lock:
                self._fail(CLOSED_HERE)

    def _drop_sent(self, num_bytes: int) -> None:
        self._backlog_bytes -= num_bytes
        while num_bytes:
            head = self._backlog.popleft()
            if len(head) > num_bytes:
                self._backlog.appendleft(head[num_bytes:])
            num_bytes -= min(num_bytes, len(head))


class Listener:
    """Accepts connections. `on_connection(connection)` is called from the accept thread before anything of the
    connection is read; it sets `connection.on_message` and `connection.on_close`; reading starts when it returns.

    port 0 picks a free one; `address` ("host:port") has the real one. Raises WireError when it cannot listen there.
    """

    def __init__(self, host: str, port: int, codec: Codec, on_connection: Callable[[Connection], None]):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind((host, port))
            self._sock.listen(128)
        except OSError as error:
            self._sock.close()
            raise WireError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        self.address = _format_address(self._sock.getsockname())
        self._codec = codec
        self._on_connection = on_connection
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name=f"wire-accept-{self.address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting; accepted connections live on. Idempotent."""
        self._closing = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._sock.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if not self._closing:
                    log.warning("accepting on %s failed: %s", self.address, error.strerror or error)
                    time.sleep(_RETRY_S)
                continue
            try:
                connection = Connection(sock, self._codec)
            except OSError:
                sock.close()
                continue
            try:
                self._on_connection(connection)
                if not connection.closed:
                    connection.start()
            except Exception:
                log.exception("a connection from %s was not taken", connection.peer_address)
                connection.close()


def connect(address: str, codec: Codec, on_message: OnMessage, on_close: OnClose, timeout_s: float = 5.0) -> Connection:
    """Open a connection to "host:port". Raises WireError when nobody answers within `timeout_s`."""
    host, port = parse_address(address)
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise WireError(f"cannot connect to {address}: {error.strerror or error}") from None
    try:
        connection = Connection(sock, codec, on_message, on_close)
    except OSError as error:
        sock.close()
        raise WireError(f"cannot connect to {address}: {error.strerror or error}") from None
    connection.start()
    return connection


def parse_address(address: str) -> tuple[str, int]:
    """ "127.0.0.1:80" or "[::1]:80" -> (host, port). Raises WireError."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise WireError(f"{address!r} is not an address; write host:port")
    return host.strip("[]"), int(port)


def _format_address(sockname: tuple[Any, ...]) -> str:
    host, port = sockname[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tune(sock: socket.socket) -> None:
    """No delay for small messages; a host that vanished is noticed within half a minute."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _join(frames: deque[memoryview]) -> memoryview:
    """The head of the backlog as one piece: small frames together, a large one as it is."""
    if len(frames) == 1 or len(frames[0]) >= _BUFFER_BYTES:
        return frames[0]
    batch = bytearray()
    for frame in frames:
        batch += frame[: _BUFFER_BYTES - len(batch)]
        if len(batch) >= _BUFFER_BYTES:
            break
    return memoryview(batch)
