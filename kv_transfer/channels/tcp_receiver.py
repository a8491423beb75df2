"""BlockReceiver: takes KV blocks that one prefill worker pushes over ZeroMQ and writes them where they are expected."""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import zmq

from engine.kv_pool import KVPool
from kv_transfer.channel import ChannelError
from kv_transfer.channels.block_frame import BlockHeader
from kv_transfer.channels.tcp_sender import QUEUE_BLOCKS
from kv_transfer.channels.wake_fd import WakeFd
from kv_transfer.handoff import Handoff, TransferKey

log = logging.getLogger(__name__)

_MIN_FRAME_LIMIT = 1 << 20


@dataclass
class _Incoming:
    """One expected transfer. `lock` is held while a block of it is written; `active` ends with its delivery, failure or
    `forget`, and nothing is written after that."""

    block_table: list[int]
    lock: threading.Lock = field(default_factory=threading.Lock)
    active: bool = True
    arrived: set[int] = field(default_factory=set)
    handoff: Handoff | None = None
    handoff_arrival: float = 0.0

    def is_complete(self) -> bool:
        if self.handoff is None:
            return False
        first, end = self.handoff.report.num_blocks_held, self.handoff.num_blocks
        return len(self.arrived) >= end - first and all(index in self.arrived for index in range(first, end))


class BlockReceiver:
    """Its thread owns the socket, bound to a free port of `host`; `address` is what the sender connects to.

    on_complete(handoff)   all blocks of the transfer are in the pool; called from this thread or `hold`'s
    on_failed(key, why)    a block of the transfer came damaged; the rest of it will be dropped
    num_frames_dropped     frames that no transfer expected (cancelled, stale, unknown) or that were not blocks
    """

    def __init__(
        self,
        pool: KVPool,
        host: str,
        on_complete: Callable[[Handoff], None],
        on_failed: Callable[[TransferKey, str], None],
    ):
        """Raises ChannelError when nothing can be bound on `host`."""
        self.num_frames_dropped = 0
        self._pool = pool
        self._on_complete = on_complete
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._incoming: dict[TransferKey, _Incoming] = {}
        self._stop = threading.Event()
        self._on_drained: Callable[[], None] | None = None
        self._ended = False
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.ipv6 = ":" in host
        self._pull.rcvhwm = QUEUE_BLOCKS
        self._pull.tcp_keepalive = 1
        self._pull.maxmsgsize = max(_MIN_FRAME_LIMIT, 2 * pool.layout.block_bytes)
        try:
            self._pull.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ChannelError(f"channel 'tcp' cannot receive blocks on {host}: {error}") from None
        self.address = self._pull.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self._wake = WakeFd()
        self._thread = threading.Thread(target=self._run, name=f"kv-receive-{self.address}", daemon=True)
        atexit.register(self.close)  # as in BlockSender
        self._thread.start()

    def expect(self, key: TransferKey, block_table: Sequence[int]) -> None:
        with self._lock:
            assert key not in self._incoming, f"transfer {key!r} is expected already"
            self._incoming[key] = _Incoming(list(block_table))

    def forget(self, key: TransferKey) -> None:
        """Waits for the block that is just being written, if one is."""
        with self._lock:
            incoming = self._incoming.pop(key, None)
        if incoming is not None:
            with incoming.lock:
                incoming.active = False

    def hold(self, handoff: Handoff) -> None:
        """Deliver the handoff through on_complete once its blocks are here; at once when it has none to wait for. That
        of a forgotten transfer is dropped."""
        if handoff.num_blocks <= handoff.report.num_blocks_held:
            self.forget(handoff.key)
            self._on_complete(handoff)
            return
        with self._lock:
            incoming = self._incoming.get(handoff.key)
        if incoming is None:
            return
        if handoff.num_blocks > len(incoming.block_table):
            self._fail(handoff.key, incoming, f"{handoff.num_blocks} blocks for {len(incoming.block_table)} places")
            return
        with incoming.lock:
            incoming.handoff, incoming.handoff_arrival = handoff, time.monotonic()
            complete = self._is_over(incoming)
        if complete:
            self._deliver(handoff.key, incoming)

    def drain(self, on_drained: Callable[[], None]) -> None:
        """The sender is gone: take what has already arrived, then call `on_drained` (from the thread, or here when it
        has ended)."""
        with self._lock:
            self._on_drained = on_drained
            ended = self._ended
        self._wake.set()
        if ended:
            self._call_drained()

    def close(self) -> None:
        """Stop and wait for the thread; nothing is written afterwards. Idempotent."""
        self._stop.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._pull, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                ready = dict(poller.poll())
                if self._wake.fileno() in ready:
                    self._wake.clear()
                draining = self._on_drained is not None
                while self._receive() and draining and not self._stop.is_set():
                    pass
                if draining:
                    self._call_drained()
        finally:
            self._context.destroy(linger=0)
            self._wake.close()
            atexit.unregister(self.close)
            with self._lock:
                self._ended = True
            self._call_drained()

    def _call_drained(self) -> None:
        with self._lock:
            on_drained, self._on_drained = self._on_drained, None
        if on_drained is not None:
            on_drained()

    def _receive(self) -> bool:
        """Take one frame, if there is one."""
        try:
            frames = self._pull.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        try:
            header_frame, body_frame = frames
            header = BlockHeader.unpack(header_frame.bytes)
        except ValueError:
            self.num_frames_dropped += 1
            return True
        self._take(header, body_frame.buffer)
        return True

    def _take(self, header: BlockHeader, body: memoryview) -> None:
        with self._lock:
            incoming = self._incoming.get(header.key)
        if incoming is None:
            self.num_frames_dropped += 1
            return
        damage = self._damage(header, body, incoming)
        if damage:
            self._fail(header.key, incoming, damage)
            return
        with incoming.lock:
            if not incoming.active:
                self.num_frames_dropped += 1
                return
            target = self._pool.block_bytes_view(incoming.block_table[header.index])
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(body, np.uint8))  # not under the GIL
            incoming.arrived.add(header.index)
            complete = self._is_over(incoming)
        if complete:
            self._deliver(header.key, incoming)

    def _damage(self, header: BlockHeader, body: memoryview, incoming: _Incoming) -> str:
        block_bytes = self._pool.layout.block_bytes
        if len(body) != block_bytes:
            return f"block {header.index} has {len(body)} bytes instead of {block_bytes}"
        if header.sum_of(body) != header.checksum:
            return f"block {header.index} has a wrong checksum"
        if header.index >= len(incoming.block_table):
            return f"block {header.index} has no place among the {len(incoming.block_table)} that were reserved"
        return ""

    def _is_over(self, incoming: _Incoming) -> bool:
        """Complete for the first time? The transfer's lock is held."""
        if not incoming.active or not incoming.is_complete():
            return False
        incoming.active = False
        return True

    def _deliver(self, key: TransferKey, incoming: _Incoming) -> None:
        self._remove(key, incoming)
        assert incoming.handoff is not None
        incoming.handoff.report.transfer_ms = (time.monotonic() - incoming.handoff_arrival) * 1000
        self._on_complete(incoming.handoff)

    def _fail(self, key: TransferKey, incoming: _Incoming, reason: str) -> None:
        with incoming.lock:
            was_active, incoming.active = incoming.active, False
        self._remove(key, incoming)
        if was_active:
            log.warning("transfer %s failed: %s", key, reason)
            self._on_failed(key, reason)

    def _remove(self, key: TransferKey, incoming: _Incoming) -> None:
        with self._lock:
            if self._incoming.get(key) is incoming:
                del self._incoming[key]
