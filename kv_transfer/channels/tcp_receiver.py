"""BlockReceiver: takes KV blocks that one prefill worker pushes over ZeroMQ and writes them where they are expected."""

import atexit
import threading
from collections.abc import Callable

import zmq

from engine.kv_pool import KVPool
from kv_transfer.channel import ChannelError
from kv_transfer.channels.block_frame import BlockHeader
from kv_transfer.channels.incoming import Incoming
from kv_transfer.channels.staging import writer_of
from kv_transfer.channels.tcp_sender import QUEUE_BLOCKS
from kv_transfer.channels.wake_fd import WakeFd

_MIN_FRAME_LIMIT = 1 << 20


class BlockReceiver:
    """Its thread owns the socket, bound to a free port of `host`; `address` is what the sender connects to.

    incoming             the transfers that are expected; one whose block comes damaged fails
    num_frames_dropped   frames that no transfer expected (cancelled, stale, unknown) or that were not blocks
    """

    def __init__(self, pool: KVPool, host: str, incoming: Incoming):
        """Raises ChannelError when nothing can be bound on `host`."""
        self.num_frames_dropped = 0
        self._pool = pool
        self._incoming = incoming
        self._writer = writer_of(pool, incoming)
        self._lock = threading.Lock()
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
                if not int(self._pull.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    self._writer.settle()
                if draining:
                    self._call_drained()
        finally:
            self._writer.settle()
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
        num_places = self._incoming.num_places(header.key)
        if num_places is None:
            self.num_frames_dropped += 1
            return
        damage = self._damage(header, body, num_places)
        if damage:
            self._incoming.fail(header.key, damage)
            return
        write = self._incoming.begin(header.key, header.index, 1)
        if write is None:
            self.num_frames_dropped += 1
            return
        self._writer.write(write, body)

    def _damage(self, header: BlockHeader, body: memoryview, num_places: int) -> str:
        block_bytes = self._pool.layout.block_bytes
        if len(body) != block_bytes:
            return f"block {header.index} has {len(body)} bytes instead of {block_bytes}"
        if header.sum_of(body) != header.checksum:
            return f"block {header.index} has a wrong checksum"
        if header.index >= num_places:
            return f"block {header.index} has no place among the {num_places} that were reserved"
        return ""
