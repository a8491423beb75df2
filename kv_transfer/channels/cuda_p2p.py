"""`cuda_p2p`: two pools, one host. The decode worker maps the prefill worker's pool and fetches whole blocks from one
GPU to the other, over NVLink or PCIe, on streams of its own.

    prefill end   offers blocks (OfferBlocks) as soon as the step that filled them is over; they stay leased
    decode end    a thread copies them to the places reserved for them and answers BlocksTaken
    prefill end   is_moving until every offered block was taken

Who could touch a block at the wrong time, and why it cannot:

    a block is offered before it is filled    the prefill engine has waited for the step
    it is filled anew while it is read        it is leased until BlocksTaken. If the connection breaks first, the decode
                                              end discards what it is copying, and the prefill end counts the blocks as
                                              moving for NOTICE_S more. A decode worker that was frozen for longer than
                                              half the lease discards what it copied then (BlockPuller.max_age_s).
    its place is still written by decode      a step launched ahead may write once more for the sequence that had the
                                              place before: the copy's stream waits for what had been launched when the
                                              place was reserved
    decode reads it before it is there        the Handoff is held back until the device is past the copies
    a cancelled transfer writes to its place  `forget` waits for the piece being copied (under a millisecond)

A worker that dies takes nothing of the other with it: the driver keeps mapped memory until both have let go.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from engine.kv_pool import KVLayout, KVPool
from engine.wire import Connection
from kv_transfer.channel import ChannelError, ChannelServer, DecodeEnd, KVChannel, Wake
from kv_transfer.channels.block_copier import BlockCopier, GpuBlockCopier
from kv_transfer.channels.block_puller import BlockPuller
from kv_transfer.channels.control import ControlDecodeEnd, ControlPrefillEnd, ControlServer
from kv_transfer.channels.gpu_memory import MappedPool, export_pool, make_gpu_pool
from kv_transfer.channels.incoming import Incoming
from kv_transfer.channels.mark import mark_work
from kv_transfer.channels.pool_description import PoolDescription
from kv_transfer.handoff import (
    BlocksTaken,
    CancelPrefill,
    Farewell,
    Handoff,
    Hello,
    OfferBlocks,
    PrefillFailed,
    ToDecode,
    TransferKey,
    Welcome,
)

NOTICE_S = 1.0
"""In which the decode end notices a broken connection and stops to read."""


class PullPrefillEnd(ControlPrefillEnd):
    def __init__(self, block_bytes: int, connection: Connection, wake: Wake, server: ControlServer):
        self._block_bytes = block_bytes
        self._wake = wake
        self._lock = threading.Lock()
        self._num_offered: Counter[TransferKey] = Counter()
        self._num_moving: Counter[TransferKey] = Counter()
        self._lost_at: float | None = None
        super().__init__(connection, wake, server)

    def send(self, message: ToDecode) -> None:
        """A Handoff's report gets its num_blocks_sent and num_bytes_sent here."""
        if isinstance(message, (Handoff, PrefillFailed)):
            with self._lock:
                num_sent = self._num_offered.pop(message.key, 0)
            if isinstance(message, Handoff):
                message.report.num_blocks_sent = num_sent
                message.report.num_bytes_sent = num_sent * self._block_bytes
        super().send(message)

    def send_blocks(self, key: TransferKey, first: int, block_ids: Sequence[int]) -> int:
        with self._lock:
            if self._lost_at is not None:
                return 0
            self._num_offered[key] += len(block_ids)
            self._num_moving[key] += len(block_ids)
        super().send(OfferBlocks(key, first, list(block_ids)))  # type: ignore[arg-type]
        return len(block_ids) * self._block_bytes

    def is_moving(self, key: TransferKey) -> bool:
        with self._lock:
            if self._lost_at is not None and time.monotonic() - self._lost_at > NOTICE_S:
                self._num_moving.clear()
            return self._num_moving[key] > 0

    def abandon(self, key: TransferKey) -> None:
        """The decode end, which was told or asked for it, takes no more of it."""
        with self._lock:
            self._num_offered.pop(key, None)

    def close(self) -> None:
        self._lose()
        super().close()

    def on_channel_message(self, message: BlocksTaken | Farewell) -> None:
        with self._lock:
            if isinstance(message, Farewell):
                self._num_moving.clear()
                return
            self._num_moving[message.key] -= message.num_blocks
            if self._num_moving[message.key] <= 0:
                del self._num_moving[message.key]
        self._wake()

    def on_control_lost(self, reason: str) -> None:
        self._lose()
        super().on_control_lost(reason)

    def _lose(self) -> None:
        with self._lock:
            self._num_offered.clear()
            if self._lost_at is None:
                self._lost_at = time.monotonic()


class PullDecodeEnd(ControlDecodeEnd):
    def __init__(self, channel: "CudaP2PChannel", address: str, pool: KVPool, wake: Wake):
        self._channel = channel
        self._own = pool
        self._puller: BlockPuller | None = None
        self._incoming = Incoming(lambda handoff: self._inbox.put(handoff), self._on_failed)
        super().__init__(channel.name, address, wake)

    def expect(self, key: TransferKey, block_table: Sequence[int]) -> None:
        self._incoming.expect(key, block_table, mark_work(self._own.tensor.device))

    def forget(self, key: TransferKey) -> None:
        self._incoming.forget(key)

    def close(self) -> None:
        puller, self._puller = self._puller, None  # the prefill worker's memory is unmapped with it
        if puller is not None:
            puller.close()
        self._connection.send(Farewell())
        super().close()

    def on_message(self, message: ToDecode) -> None:
        if isinstance(message, Welcome) and not message.refusal:
            try:
                copier = self._channel.make_copier(message.pool, self._own)
                self._puller = BlockPuller(
                    copier, self._own.layout.block_bytes, self._incoming, self._on_taken, message.lease_s / 2
                )
            except ChannelError as error:
                message = replace(message, refusal=str(error))
        elif isinstance(message, Handoff):
            self._incoming.hold(message)
            return
        elif isinstance(message, PrefillFailed):
            self._incoming.forget(message.key)
        super().on_message(message)

    def on_offer(self, offer: OfferBlocks) -> None:
        puller = self._puller
        if puller is not None:
            puller.offer(offer)

    def on_control_lost(self, reason: str) -> None:
        puller = self._puller
        if puller is not None:
            puller.stop()
        super().on_control_lost(reason)

    def _on_taken(self, key: TransferKey, num_blocks: int) -> None:
        self._connection.send(BlocksTaken(key, num_blocks))

    def _on_failed(self, key: TransferKey, reason: str) -> None:
        """Both sides let go of this transfer, the others go on."""
        self.send(CancelPrefill(key))
        self._inbox.put(PrefillFailed(key, "worker_lost", f"channel {self._channel.name!r}: {reason}"))


class CudaP2PChannel(KVChannel):
    name = "cuda_p2p"
    shares_pool = False

    def make_pool(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> KVPool:
        return make_gpu_pool(self.name, layout, num_blocks, device)

    def serve(self, pool: KVPool, welcome: Welcome, wake: Wake, host: str = "127.0.0.1") -> ChannelServer:
        """Raises ChannelError when the pool cannot be shared, or the host's address not be used."""
        welcome.pool = self.describe(pool)
        return ControlServer(host, wake, partial(PullPrefillEnd, pool.layout.block_bytes))

    def connect(self, address: str, pool: KVPool | None, hello: Hello, wake: Wake) -> DecodeEnd:
        if pool is None:
            raise ChannelError(f"channel {self.name!r} needs the decode worker's own pool")
        end = PullDecodeEnd(self, address, pool, wake)
        end.send(hello)
        return end

    def describe(self, pool: KVPool) -> PoolDescription:
        return export_pool(self.name, pool)

    def make_copier(self, description: PoolDescription, pool: KVPool) -> BlockCopier:
        """Raises ChannelError when the prefill worker's pool cannot be mapped or its blocks are not like the pool's."""
        mapped = MappedPool(self.name, description, pool.tensor.device.index)
        return GpuBlockCopier(self.name, mapped, pool)
