"""Control connections: how the messages of a two-process channel travel. One engine/wire.py connection for each pair of
a prefill and a decode worker; channels add how blocks move."""

import logging
import threading
from collections.abc import Callable
from typing import Any, get_args

from engine.wire import CLOSED_HERE, Codec, Connection, Listener, WireError, connect
from kv_transfer.channel import ChannelError, ChannelServer, DecodeEnd, PrefillEnd, Wake
from kv_transfer.channels.inbox import Inbox
from kv_transfer.handoff import BlocksTaken, Farewell, Hello, OfferBlocks, ToDecode, ToPrefill

log = logging.getLogger(__name__)

CODEC = Codec(ToPrefill | ToDecode | OfferBlocks | BlocksTaken | Farewell)
CONNECT_TIMEOUT_S = 5.0
_FLUSH_S = 1.0


class ControlPrefillEnd(PrefillEnd):
    """The prefill worker's side of a control connection. Before its Hello arrived it is not announced to the server, so
    whoever connects and does not speak the protocol is never seen by the engine.

    `on_hello` and `on_control_lost` are where a channel starts and stops what moves its blocks; both run in the
    connection's thread.
    """

    def __init__(self, connection: Connection, wake: Wake, server: "ControlServer"):
        self.peer = ""
        self._announced = False
        self._connection = connection
        self._server = server
        self._inbox: Inbox[ToPrefill] = Inbox(wake)
        connection.on_message = self._on_message
        connection.on_close = self._on_close

    def poll(self) -> list[ToPrefill]:
        return self._inbox.poll()

    def send(self, message: ToDecode) -> None:
        self._connection.send(message)

    def close(self) -> None:
        self._inbox.close(CLOSED_HERE)
        self._connection.close()
        self._server.remove(self)

    def on_hello(self, hello: Hello) -> None:
        pass

    def on_control_lost(self, reason: str) -> None:
        self._inbox.close(reason)

    def on_channel_message(self, message: BlocksTaken | Farewell) -> None:
        """A message that is the channel's own: no engine sees it."""

    def wait_flushed(self) -> None:
        """After `close`: give queued messages a moment to leave."""
        self._connection.wait_closed(_FLUSH_S)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, (BlocksTaken, Farewell)) and self._announced:
            self.on_channel_message(message)
        elif not isinstance(message, get_args(ToPrefill)) or isinstance(message, Hello) == self._announced:
            log.warning("%s sent %s out of turn", self._connection.peer_address, type(message).__name__)
            self._connection.close()
        elif isinstance(message, Hello):
            self.peer = message.worker
            self.on_hello(message)
            self._announced = True
            self._server.announce(self)  # before the inbox wakes the engine, which then finds it
            self._inbox.put(message)
        else:
            self._inbox.put(message)

    def _on_close(self, reason: str) -> None:
        self.on_control_lost(f"decode worker {self.peer!r} at {self._connection.peer_address} is gone: {reason}")
        if not self._announced:
            self.close()


class ControlServer(ChannelServer):
    """Listens for decode workers; `make_end(connection, wake, server)` gives a connection its end."""

    def __init__(
        self, host: str, wake: Wake, make_end: Callable[[Connection, Wake, "ControlServer"], ControlPrefillEnd]
    ):
        self._wake = wake
        self._make_end = make_end
        self._lock = threading.Lock()
        self._ends: set[ControlPrefillEnd] = set()
        self._announced: list[ControlPrefillEnd] = []
        try:
            self._listener = Listener(host, 0, CODEC, self._on_connection)
        except WireError as error:
            raise ChannelError(str(error)) from None
        self.address = self._listener.address

    def accept(self) -> list[PrefillEnd]:
        with self._lock:
            announced, self._announced = self._announced, []
        return list(announced)

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            ends = list(self._ends)
            self._announced = []
        for end in ends:
            end.close()
        for end in ends:
            end.wait_flushed()

    def announce(self, end: ControlPrefillEnd) -> None:
        with self._lock:
            self._announced.append(end)

    def remove(self, end: ControlPrefillEnd) -> None:
        with self._lock:
            self._ends.discard(end)

    def _on_connection(self, connection: Connection) -> None:
        end = self._make_end(connection, self._wake, self)
        with self._lock:
            self._ends.add(end)


class ControlDecodeEnd(DecodeEnd):
    """The decode worker's side of a control connection.

    `on_message` and `on_control_lost` run in the connection's thread; a channel overrides them to hold messages back.
    """

    def __init__(self, channel: str, address: str, wake: Wake):
        """Raises ChannelError when nobody answers at `address`."""
        self.pool = None
        self._inbox: Inbox[ToDecode] = Inbox(wake)
        try:
            self._connection = connect(address, CODEC, self._on_message, self._on_close, CONNECT_TIMEOUT_S)
        except WireError as error:
            raise ChannelError(f"channel {channel!r} found no prefill worker: {error}") from None

    def poll(self) -> list[ToDecode]:
        return self._inbox.poll()

    def send(self, message: ToPrefill) -> None:
        self._connection.send(message)

    def close(self) -> None:
        self._inbox.close(CLOSED_HERE)
        self._connection.close()

    def on_message(self, message: ToDecode) -> None:
        self._inbox.put(message)

    def on_offer(self, offer: OfferBlocks) -> None:
        """Blocks are there to be fetched: the channel's own message, no engine sees it."""

    def on_control_lost(self, reason: str) -> None:
        self._inbox.close(reason)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, OfferBlocks):
            self.on_offer(message)
            return
        if not isinstance(message, get_args(ToDecode)):
            raise WireError(f"a prefill worker does not send {type(message).__name__}")
        self.on_message(message)

    def _on_close(self, reason: str) -> None:
        self.on_control_lost(f"the prefill worker is gone: {reason}")
