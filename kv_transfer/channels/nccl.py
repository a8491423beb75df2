"""`nccl`: two pools on two GPUs, of one host or of several; whole blocks by NCCL's send and receive.

    decode end    makes the communicator's id and says it in Hello.data_address; both ends join in threads of their own
    prefill end   announces blocks (OfferBlocks) and sends them, as one group
    decode end    receives the group into the places reserved for it, or into a spare block when nobody expects it

Announcements travel on the control connection, in the order in which the thread of the prefill end sends, and the
decode end receives in that order. A peer that is gone leaves a send or receive waiting on the device: when the control
connection breaks the communicator is aborted, which ends it. The rules of channel `cuda_p2p` for who may touch a block
hold here too, only that the prefill end knows by itself when its blocks have been read.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.kv_pool import KVLayout, KVPool
from engine.wire import Connection
from kv_transfer.channel import ChannelError, ChannelServer, DecodeEnd, KVChannel, Wake
from kv_transfer.channels.control import ControlDecodeEnd, ControlPrefillEnd, ControlServer
from kv_transfer.channels.gpu_memory import make_gpu_pool
from kv_transfer.channels.incoming import Incoming, Write
from kv_transfer.channels.mark import PAST, EventMark, Mark, mark_work
from kv_transfer.channels.nccl_library import DECODE_RANK, PREFILL_RANK, Communicator, nccl
from kv_transfer.channels.pipeline import Pipeline
from kv_transfer.handoff import (
    CancelPrefill,
    Handoff,
    Hello,
    OfferBlocks,
    PrefillFailed,
    ToDecode,
    TransferKey,
    Welcome,
)

GROUP_BYTES = 256 << 20
"""Sent at a time: `Incoming.forget` waits for that much."""

STUCK_S = 2.0


class BlockLink:
    """A pool's side of a communicator: moves whole blocks on a stream of its own. For one thread; `abort` for any."""

    def __init__(self, pool: KVPool, unique_id: bytes, rank: int):
        self._pool, self._unique_id, self._rank = pool, unique_id, rank
        self._lock = threading.Lock()
        self._communicator: Communicator | None = None
        self._aborted = False

    def open(self) -> None:
        """Waits for the peer, and moves one block, so that the first transfer finds everything set up."""
        device = self._pool.tensor.device
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device, priority=-1)
        with torch.cuda.stream(self._stream):
            self._spare = torch.zeros(self._pool.layout.block_bytes, dtype=torch.uint8, device=device)
        communicator = nccl().join(self._unique_id, self._rank)
        with self._lock:
            self._communicator = communicator
            if self._aborted:
                communicator.abort()
                return
        move = self.send if self._rank == PREFILL_RANK else self.receive
        for mark in move([None], PAST):
            mark.wait()

    def send(self, block_ids: Sequence[int | None], ready: Mark = PAST) -> list[Mark]:
        assert self._communicator is not None
        return self._move(self._communicator.send, block_ids, ready)

    def receive(self, block_ids: Sequence[int | None], ready: Mark) -> list[Mark]:
        """None stands for the spare block."""
        assert self._communicator is not None
        return self._move(self._communicator.receive, block_ids, ready)

    def abort(self) -> None:
        """What is under way ends, and nothing can be moved any more. Idempotent."""
        with self._lock:
            if self._communicator is not None and not self._aborted:
                self._communicator.abort()
            self._aborted = True

    def _move(
        self, operation: Callable[[int, int, int], None], block_ids: Sequence[int | None], ready: Mark
    ) -> list[Mark]:
        if self._aborted:
            raise ChannelError("the other worker is gone")
        assert self._communicator is not None
        base, block_bytes = self._pool.tensor.data_ptr(), self._pool.layout.block_bytes
        ready.after(self._stream)
        with self._communicator.group():
            for block_id in block_ids:
                address = self._spare.data_ptr() if block_id is None else base + block_id * block_bytes
                operation(address, block_bytes, self._stream.cuda_stream)
        return [EventMark(self._stream, sleep=False)]


MakeLink = Callable[[KVPool, bytes, int], BlockLink]


class NcclPrefillEnd(ControlPrefillEnd):
    def __init__(self, pool: KVPool, make_link: MakeLink, connection: Connection, wake: Wake, server: ControlServer):
        self._pool = pool
        self._make_link = make_link
        self._wake = wake
        self._group_blocks = max(1, GROUP_BYTES // pool.layout.block_bytes)
        self._lock = threading.Lock()
        self._num_given: Counter[TransferKey] = Counter()
        self._num_moving: Counter[TransferKey] = Counter()
        self._abandoned: set[TransferKey] = set()
        self._link: BlockLink | None = None
        self._pipeline: Pipeline[OfferBlocks] | None = None
        self._lost = False
        super().__init__(connection, wake, server)

    def send(self, message: ToDecode) -> None:
        """A Handoff's report gets its num_blocks_sent and num_bytes_sent here."""
        if isinstance(message, Handoff):
            with self._lock:
                message.report.num_blocks_sent = self._num_given.pop(message.key, 0)
            message.report.num_bytes_sent = message.report.num_blocks_sent * self._pool.layout.block_bytes
        elif isinstance(message, PrefillFailed):
            self.abandon(message.key)
        super().send(message)

    def send_blocks(self, key: TransferKey, first: int, block_ids: Sequence[int]) -> int:
        if self._pipeline is None:
            return 0
        with self._lock:
            if self._lost:
                return 0
            self._num_given[key] += len(block_ids)
            self._num_moving[key] += len(block_ids)
            self._abandoned.discard(key)
        step = self._group_blocks
        self._pipeline.put(
            *(
                OfferBlocks(key, first + start, list(block_ids[start : start + step]))
                for start in range(0, len(block_ids), step)
            )
        )
        return len(block_ids) * self._pool.layout.block_bytes

    def is_moving(self, key: TransferKey) -> bool:
        with self._lock:
            return self._num_moving[key] > 0

    def abandon(self, key: TransferKey) -> None:
        with self._lock:
            self._num_given.pop(key, None)
            if self._num_moving[key]:
                self._abandoned.add(key)

    def close(self) -> None:
        self._lose()
        super().close()
        if self._pipeline is not None:
            self._pipeline.close()

    def on_hello(self, hello: Hello) -> None:
        self._link = self._make_link(self._pool, bytes.fromhex(hello.data_address), PREFILL_RANK)
        self._pipeline = Pipeline("kv-nccl-send", self._start, self._finish, self._link.open, self._on_broken)

    def on_control_lost(self, reason: str) -> None:
        self._lose()
        super().on_control_lost(reason)

    def _start(self, group: OfferBlocks) -> list[Mark] | None:
        with self._lock:
            abandoned = group.key in self._abandoned
        if abandoned:
            self._finish(group, None)
            return None
        assert self._link is not None
        self._connection.send(group)
        return self._link.send(group.block_ids)

    def _finish(self, group: OfferBlocks, error: Exception | None) -> None:
        with self._lock:
            self._num_moving[group.key] -= len(group.block_ids)
            if self._num_moving[group.key] <= 0:
                del self._num_moving[group.key]
                self._abandoned.discard(group.key)
        if error is not None:
            self._on_broken(f"sending blocks failed: {error}")
        self._wake()

    def _on_broken(self, reason: str) -> None:
        self._inbox.close(f"decode worker {self.peer!r} is cut off: {reason}")
        self._connection.close()

    def _lose(self) -> None:
        """Ends what is being sent, then nothing moves any more."""
        if self._link is not None:
            self._link.abort()
        if self._pipeline is not None:
            self._pipeline.stop()
        with self._lock:
            self._lost = True
            self._num_given.clear()
            self._num_moving.clear()


@dataclass(eq=False)
class _Group:
    offer: OfferBlocks
    write: Write | None = None


class NcclDecodeEnd(ControlDecodeEnd):
    def __init__(self, address: str, pool: KVPool, wake: Wake, link: BlockLink):
        self._own = pool
        self._link = link
        self._pipeline: Pipeline[_Group] | None = None
        self._incoming = Incoming(lambda handoff: self._inbox.put(handoff), self._on_failed)
        super().__init__("nccl", address, wake)
        self._pipeline = Pipeline("kv-nccl-receive", self._start, self._finish, link.open, self._on_broken)

    def expect(self, key: TransferKey, block_table: Sequence[int]) -> None:
        self._incoming.expect(key, block_table, mark_work(self._own.tensor.device))

    def forget(self, key: TransferKey) -> None:
        """A group that was announced and does not come, from a worker that froze in between, costs the channel."""
        if not self._incoming.forget(key, STUCK_S):
            self._on_broken(f"blocks announced for {key} did not come within {STUCK_S:g} s")
            self._link.abort()
            self._incoming.forget(key)

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()
        self._link.abort()
        if self._pipeline is not None:
            self._pipeline.close()
        super().close()

    def on_message(self, message: ToDecode) -> None:
        if isinstance(message, Handoff):
            self._incoming.hold(message)
            return
        if isinstance(message, PrefillFailed):
            self._incoming.forget(message.key)
        super().on_message(message)

    def on_offer(self, offer: OfferBlocks) -> None:
        if self._pipeline is not None:
            self._pipeline.put(_Group(offer))

    def on_control_lost(self, reason: str) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()
        self._link.abort()
        super().on_control_lost(reason)

    def _start(self, group: _Group) -> list[Mark]:
        offer = group.offer
        group.write = self._incoming.begin(offer.key, offer.first, len(offer.block_ids))
        if group.write is None:
            return self._link.receive([None] * len(offer.block_ids), PAST)
        return self._link.receive(group.write.block_ids, group.write.ready)

    def _finish(self, group: _Group, error: Exception | None) -> None:
        assert self._pipeline is not None
        if group.write is not None:
            if error is None and not self._pipeline.stopping:
                self._incoming.finish(group.write)
            else:
                why = f"receiving failed: {error}" if error else "the prefill worker left in the middle of the transfer"
                self._incoming.give_up(group.write, why)
        if error is not None:
            self._on_broken(f"receiving blocks failed: {error}")

    def _on_broken(self, reason: str) -> None:
        self._inbox.close(f"the prefill worker is cut off: {reason}")
        self._connection.close()

    def _on_failed(self, key: TransferKey, reason: str) -> None:
        """Both sides let go of this transfer, the others go on."""
        self.send(CancelPrefill(key))
        self._inbox.put(PrefillFailed(key, "worker_lost", f"channel 'nccl': {reason}"))


class NcclChannel(KVChannel):
    name = "nccl"
    shares_pool = False

    def make_pool(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> KVPool:
        return make_gpu_pool(self.name, layout, num_blocks, device)

    def serve(self, pool: KVPool, welcome: Welcome, wake: Wake, host: str = "127.0.0.1") -> ChannelServer:
        """Raises ChannelError when there is no NCCL, or the host's address cannot be used."""
        self.check()
        return ControlServer(host, wake, partial(NcclPrefillEnd, pool, self.make_link))

    def connect(self, address: str, pool: KVPool | None, hello: Hello, wake: Wake) -> DecodeEnd:
        if pool is None:
            raise ChannelError("channel 'nccl' needs the decode worker's own pool")
        unique_id = self.unique_id()
        end = NcclDecodeEnd(address, pool, wake, self.make_link(pool, unique_id, DECODE_RANK))
        end.send(replace(hello, data_address=unique_id.hex()))
        return end

    def check(self) -> None:
        nccl()

    def unique_id(self) -> bytes:
        return nccl().unique_id()

    def make_link(self, pool: KVPool, unique_id: bytes, rank: int) -> BlockLink:
        return BlockLink(pool, unique_id, rank)
