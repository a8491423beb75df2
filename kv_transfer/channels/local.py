"""`local`: both engines in one process on one pool. Messages are handed over by reference, blocks by id."""

from engine.kv_pool import KVLayout, KVPool
from kv_transfer.channel import ChannelError, ChannelServer, DecodeEnd, KVChannel, PrefillEnd, Wake
from kv_transfer.channels.inbox import Inbox
from kv_transfer.channels.shared_pool import SharedPoolDecodeEnd, SharedPoolPrefillEnd
from kv_transfer.handoff import Hello, ToDecode, ToPrefill, Welcome

PEER = "local"
CLOSED = "the local channel is closed"


def local_pair(pool: KVPool | None, wake_prefill: Wake, wake_decode: Wake) -> tuple[PrefillEnd, DecodeEnd]:
    """The two ends of a channel inside this process, joined at once: no Hello and no Welcome pass. A message must not
    be changed after it was sent. Closing either end closes both."""
    to_prefill: Inbox[ToPrefill] = Inbox(wake_prefill)
    to_decode: Inbox[ToDecode] = Inbox(wake_decode)
    return LocalPrefillEnd(to_prefill, to_decode), LocalDecodeEnd(pool, to_prefill, to_decode)


class LocalPrefillEnd(SharedPoolPrefillEnd):
    def __init__(self, to_prefill: Inbox[ToPrefill], to_decode: Inbox[ToDecode]):
        self.peer = PEER
        self._to_prefill = to_prefill
        self._to_decode = to_decode

    def poll(self) -> list[ToPrefill]:
        return self._to_prefill.poll()

    def send(self, message: ToDecode) -> None:
        self._to_decode.put(message)

    def close(self) -> None:
        self._to_decode.close(CLOSED)
        self._to_prefill.close(CLOSED)


class LocalDecodeEnd(SharedPoolDecodeEnd):
    def __init__(self, pool: KVPool | None, to_prefill: Inbox[ToPrefill], to_decode: Inbox[ToDecode]):
        self.pool = pool
        self._to_prefill = to_prefill
        self._to_decode = to_decode

    def poll(self) -> list[ToDecode]:
        return self._to_decode.poll()

    def send(self, message: ToPrefill) -> None:
        self._to_prefill.put(message)

    def close(self) -> None:
        self._to_prefill.close(CLOSED)
        self._to_decode.close(CLOSED)


class LocalChannel(KVChannel):
    name = "local"
    shares_pool = True

    def make_pool(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> KVPool:
        return KVPool.allocate(layout, num_blocks, device)

    def serve(self, pool: KVPool, welcome: Welcome, wake: Wake, host: str = "127.0.0.1") -> ChannelServer:
        raise ChannelError("channel 'local' joins two engines of one process; use local_pair, or channel shm or tcp")

    def connect(self, address: str, pool: KVPool | None, hello: Hello, wake: Wake) -> DecodeEnd:
        raise ChannelError("channel 'local' joins two engines of one process; use local_pair, or channel shm or tcp")
