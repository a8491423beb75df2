"""`tcp`: two pools, anywhere. Control messages go over one connection, checksummed blocks over a second one (ZeroMQ).

    decode end    binds a PULL socket and says where in Hello.data_address
    prefill end   connects a PUSH socket to it; blocks are sent out of the pool's memory, uncopied, by a thread
                  (those of a GPU pool out of pinned memory, kv_transfer/channels/staging.py)
    decode end    a thread checks each block (expected key, size, checksum) and writes it to its place in the pool

The two connections are not ordered with each other, so the decode end holds a Handoff back until its blocks are there;
messages of other requests may overtake it. If either connection breaks, the channel is closed.
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.kv_pool import KVLayout, KVPool
from engine.wire import Connection, parse_address
from kv_transfer.channel import ChannelError, ChannelServer, DecodeEnd, KVChannel, Wake
from kv_transfer.channels.control import ControlDecodeEnd, ControlPrefillEnd, ControlServer
from kv_transfer.channels.incoming import Incoming
from kv_transfer.channels.mark import mark_work
from kv_transfer.handoff import CancelPrefill, Handoff, Hello, PrefillFailed, ToDecode, TransferKey, Welcome

try:
    import zmq  # noqa: F401
except ImportError:
    raise ChannelError("channel 'tcp' needs pyzmq: pip install 'baton-inference[transfer]'") from None

from kv_transfer.channels.tcp_receiver import BlockReceiver
from kv_transfer.channels.tcp_sender import BlockSender


class TcpPrefillEnd(ControlPrefillEnd):
    def __init__(self, pool: KVPool, connection: Connection, wake: Wake, server: ControlServer):
        self._pool = pool
        self._sender: BlockSender | None = None
        super().__init__(connection, wake, server)

    def send(self, message: ToDecode) -> None:
        """A Handoff's report gets its num_blocks_sent and num_bytes_sent here."""
        if isinstance(message, Handoff) and self._sender is not None:
            message.report.num_blocks_sent = self._sender.end(message.key)
            message.report.num_bytes_sent = message.report.num_blocks_sent * self._pool.layout.block_bytes
        elif isinstance(message, PrefillFailed):
            self.abandon(message.key)
        super().send(message)

    def send_blocks(self, key: TransferKey, first: int, block_ids: Sequence[int]) -> int:
        return self._sender.add(key, first, block_ids) if self._sender is not None else 0

    def is_moving(self, key: TransferKey) -> bool:
        return self._sender is not None and self._sender.is_moving(key)

    def abandon(self, key: TransferKey) -> None:
        if self._sender is not None:
            self._sender.abandon(key)

    def close(self) -> None:
        super().close()
        if self._sender is not None:
            self._sender.close()

    def on_hello(self, hello: Hello) -> None:
        self._sender = BlockSender(self._pool, hello.data_address, self._on_data_lost)

    def on_control_lost(self, reason: str) -> None:
        super().on_control_lost(reason)
        if self._sender is not None:
            self._sender.stop()

    def _on_data_lost(self, reason: str) -> None:
        self._inbox.close(f"decode worker {self.peer!r} is cut off: {reason}")
        self._connection.close()


class TcpDecodeEnd(ControlDecodeEnd):
    def __init__(self, address: str, pool: KVPool, wake: Wake):
        self._device = pool.tensor.device
        self._receiver: BlockReceiver | None = None
        self._incoming = Incoming(lambda handoff: self._inbox.put(handoff), self._on_failed)
        super().__init__("tcp", address, wake)
        # The address by which this host reaches the prefill worker is one where that worker reaches this host.
        host, _ = parse_address(self._connection.local_address)
        try:
            self._receiver = BlockReceiver(pool, host, self._incoming)
        except ChannelError:
            self.close()
            raise
        self.data_address = self._receiver.address

    @property
    def num_frames_dropped(self) -> int:
        """Blocks that came for no expected transfer."""
        return self._receiver.num_frames_dropped if self._receiver is not None else 0

    def expect(self, key: TransferKey, block_table: Sequence[int]) -> None:
        self._incoming.expect(key, block_table, mark_work(self._device))

    def forget(self, key: TransferKey) -> None:
        self._incoming.forget(key)

    def close(self) -> None:
        super().close()
        if self._receiver is not None:
            self._receiver.close()

    def on_message(self, message: ToDecode) -> None:
        if isinstance(message, Handoff):
            self._incoming.hold(message)
            return
        if isinstance(message, PrefillFailed):
            self.forget(message.key)
        super().on_message(message)

    def on_control_lost(self, reason: str) -> None:
        """What had arrived by now is still delivered."""
        if self._receiver is None:
            super().on_control_lost(reason)
        else:
            self._receiver.drain(lambda: self._inbox.close(reason))

    def _on_failed(self, key: TransferKey, reason: str) -> None:
        """A damaged block: both sides let go of this transfer, the others go on."""
        self.send(CancelPrefill(key))
        self._inbox.put(PrefillFailed(key, "worker_lost", f"channel 'tcp': {reason}"))


class TcpChannel(KVChannel):
    name = "tcp"
    shares_pool = False

    def make_pool(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> KVPool:
        return KVPool.allocate(layout, num_blocks, device)

    def serve(self, pool: KVPool, welcome: Welcome, wake: Wake, host: str = "127.0.0.1") -> ChannelServer:
        return ControlServer(host, wake, lambda connection, wake, server: TcpPrefillEnd(pool, connection, wake, server))

    def connect(self, address: str, pool: KVPool | None, hello: Hello, wake: Wake) -> DecodeEnd:
        if pool is None:
            raise ChannelError("channel 'tcp' needs the decode worker's own pool")
        end = TcpDecodeEnd(address, pool, wake)
        end.send(replace(hello, data_address=end.data_address))
        return end
