"""BlockSender: pushes KV blocks of one pool to one decode worker over ZeroMQ, without copying them."""

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import zmq
from zmq.utils.garbage import gc as zmq_garbage
from zmq.utils.monitor import recv_monitor_message

from engine.kv_pool import KVPool
from kv_transfer.channels.block_frame import BlockHeader
from kv_transfer.channels.staging import reader_of
from kv_transfer.channels.wake_fd import WakeFd
from kv_transfer.handoff import TransferKey

log = logging.getLogger(__name__)

QUEUE_BLOCKS = 8
"""Blocks given to ZeroMQ at a time, on each side. Few, so that `abandon` stops soon."""

_SPARE_BUFFERS = 4  # for the block that is sent, the next one, and those that ZeroMQ's own thread has
_BUFFER_WAIT_S = 0.001

_CONNECT_TIMEOUT_S = 10.0
_CONTROL_GRACE_S = 1.0


@dataclass
class _Outgoing:
    """One transfer: blocks not given to ZeroMQ yet, and trackers of those it may still read."""

    num_blocks: int = 0
    num_waiting: int = 0
    trackers: deque[zmq.MessageTracker] = field(default_factory=deque)
    ended: bool = False
    abandoned: bool = False

    def is_moving(self) -> bool:
        while self.trackers and self.trackers[0].done:
            self.trackers.popleft()
        return self.num_waiting > 0 or bool(self.trackers)


class BlockSender:
    """Its thread owns the sockets; the methods never wait for the network.

    `on_lost(reason)` is called from the thread when the data connection cannot be made or breaks. Frames that were
    under way are lost then, so the caller has to give up the whole channel. A decode worker that leaves in good order
    drops both connections at once: the thread first waits a moment for the control connection's end, and `stop`.
    """

    def __init__(self, pool: KVPool, address: str, on_lost: Callable[[str], None]):
        self._pool = pool
        self._reader = reader_of(pool, QUEUE_BLOCKS + _SPARE_BUFFERS)
        self._address = address
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._waiting: deque[tuple[TransferKey, int, int]] = deque()  # (key, table index, block id)
        self._outgoing: dict[TransferKey, _Outgoing] = {}
        self._accepting = True
        self._stop = threading.Event()
        self._wake = WakeFd()
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{address}", daemon=True)
        # A thread in ZeroMQ's code must not meet the interpreter's end. pyzmq's collector of uncopied frames is loaded
        # above, so it was registered before this and ends after it.
        assert zmq_garbage is not None
        atexit.register(self.close)
        self._thread.start()

    def add(self, key: TransferKey, first: int, block_ids: Sequence[int]) -> int:
        """Queue blocks; returns their bytes (0 once stopped)."""
        with self._lock:
            if not self._accepting:
                return 0
            outgoing = self._outgoing.setdefault(key, _Outgoing())
            outgoing.num_blocks += len(block_ids)
            outgoing.num_waiting += len(block_ids)
            self._waiting.extend((key, first + i, block_id) for i, block_id in enumerate(block_ids))
        self._wake.set()
        return len(block_ids) * self._pool.layout.block_bytes

    def is_moving(self, key: TransferKey) -> bool:
        with self._lock:
            return key in self._outgoing and self._outgoing[key].is_moving()

    def abandon(self, key: TransferKey) -> None:
        """Drop what ZeroMQ has not been given."""
        with self._lock:
            if key not in self._outgoing:
                return
            kept = [block for block in self._waiting if block[0] != key]
            # One block may be between the queue and ZeroMQ just now; it stays counted until it is through.
            self._outgoing[key].num_waiting -= len(self._waiting) - len(kept)
            self._outgoing[key].abandoned = True
            self._waiting = deque(kept)
        self.end(key)

    def end(self, key: TransferKey) -> int:
        """No more blocks will be added for the transfer; returns how many there were."""
        with self._lock:
            outgoing = self._outgoing.get(key)
            if outgoing is not None:
                outgoing.ended = True
            for other in [k for k, o in self._outgoing.items() if o.ended and not o.is_moving()]:
                del self._outgoing[other]
        return outgoing.num_blocks if outgoing else 0

    def stop(self) -> None:
        """Stop sending; does not wait. Blocks count as moving until ZeroMQ has let go of them."""
        self._stop.set()
        self._wake.set()

    def close(self) -> None:
        """Stop and wait for the thread. Idempotent."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        reason = None
        context = zmq.Context()
        push = context.socket(zmq.PUSH)
        try:
            reason = self._send_until_lost(push)
        except Exception as error:
            log.exception("sending blocks to %s failed", self._address)
            reason = f"sending blocks failed: {error}"
        finally:
            with self._lock:
                self._accepting = False
            context.destroy(linger=0)  # returns when ZeroMQ reads no block any more
            with self._lock:
                self._waiting.clear()
                self._outgoing.clear()
            self._wake.close()
            atexit.unregister(self.close)
        if reason is not None and not self._stop.wait(_CONTROL_GRACE_S):
            self._on_lost(reason)

    def _send_until_lost(self, push: zmq.Socket) -> str | None:
        """Returns None when stopped, else why the connection is of no use. The socket stays open: left to be collected
        it would insist on delivering its blocks."""
        push.ipv6 = self._address.startswith("[")
        push.sndhwm = QUEUE_BLOCKS
        push.immediate = True
        push.tcp_keepalive = 1
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        monitor = push.get_monitor_socket(events)
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            push.connect(f"tcp://{self._address}")
        except zmq.ZMQError as error:
            return f"data address {self._address!r} cannot be used: {error}"
        give_up = time.monotonic() + _CONNECT_TIMEOUT_S
        connected = False
        while not self._stop.is_set():
            poller.register(push, zmq.POLLOUT if connected and self._waiting else 0)
            ready = dict(poller.poll(None if connected else int(1000 * _CONNECT_TIMEOUT_S)))
            if self._wake.fileno() in ready:
                self._wake.clear()
            if monitor in ready:
                connected = recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                if not connected:
                    return f"the data connection to {self._address} broke"
            elif push in ready:
                self._send_next(push)
            if not connected and time.monotonic() > give_up:
                return f"no data connection to {self._address} in {_CONNECT_TIMEOUT_S:g} s; is a firewall in between?"
        return None

    def _send_next(self, push: zmq.Socket) -> None:
        with self._lock:
            if not self._waiting:
                return
            key, index, block_id = self._waiting.popleft()
            outgoing = self._outgoing[key]
            following = self._waiting[0] if self._waiting else None
        block = (key, index, block_id)
        body = self._reader.bytes_of(block, following)
        if body is None:  # every pinned block is with ZeroMQ
            self._put_back(outgoing, block)
            self._stop.wait(_BUFFER_WAIT_S)
            return
        header = BlockHeader.of(key, index, body).pack()
        try:
            tracker = push.send_multipart([header, body], zmq.NOBLOCK, copy=False, track=True)
        except zmq.Again:
            self._put_back(outgoing, block)
            return
        message = cast(zmq.MessageTracker, tracker)
        self._reader.lend(block, lambda: message.done)
        with self._lock:
            outgoing.trackers.append(message)
            outgoing.num_waiting -= 1

    def _put_back(self, outgoing: _Outgoing, block: tuple[TransferKey, int, int]) -> None:
        """The block cannot go now."""
        with self._lock:
            if outgoing.abandoned:
                outgoing.num_waiting -= 1
            else:
                self._waiting.appendleft(block)
