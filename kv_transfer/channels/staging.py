"""How the tcp channel reads and writes a pool's blocks: a CPU pool in place, a GPU pool through pinned host memory.

    sender     pool --copy engine--> one of a ring of pinned blocks --ZeroMQ, uncopied--> socket
    receiver   frame --CPU--> one of two pinned blocks --copy engine--> pool

Both keep the next block on its way over PCIe while the CPU deals with the one before.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.kv_pool import KVPool
from kv_transfer.channels.incoming import Incoming, Write
from kv_transfer.channels.mark import PAST, EventMark, Mark

Block = tuple[object, int, int]
"""(transfer key, table index, block id)"""


class BlockReader:
    """Blocks of a CPU pool, as they lie."""

    def __init__(self, pool: KVPool):
        self._pool = pool

    def bytes_of(self, block: Block, following: Block | None) -> memoryview | None:
        """The block's bytes, valid until `lend`'s tracker is done; None when it has to be asked again a little later.
        `following` is likely to be asked for next."""
        return self._pool.block_bytes_view(block[2])

    def lend(self, block: Block, is_done: Callable[[], bool]) -> None:
        """ZeroMQ reads the bytes until `is_done`."""

    def drop(self, block: Block) -> None:
        """The bytes will not be sent now."""


@dataclass(eq=False)
class _Buffer:
    bytes: torch.Tensor
    arrival: Mark = PAST
    is_free: Callable[[], bool] = lambda: True


class StagedBlockReader(BlockReader):
    """Blocks of a GPU pool, through `num_buffers` pinned ones."""

    def __init__(self, pool: KVPool, num_buffers: int):
        super().__init__(pool)
        self._copies = _Copies(pool.tensor.device)
        self._free = deque(_Buffer(self._copies.host_bytes(pool.layout.block_bytes)) for _ in range(num_buffers))
        self._staged: dict[Block, _Buffer] = {}
        self._lent: list[_Buffer] = []

    def bytes_of(self, block, following):
        self._collect()
        for stale in [staged for staged in self._staged if staged not in (block, following)]:
            self.drop(stale)
        for wanted in (block, following):
            if wanted is not None and wanted not in self._staged and self._free:
                self._stage(wanted)
        buffer = self._staged.get(block)
        if buffer is None:
            return None
        buffer.arrival.wait()
        return memoryview(buffer.bytes.numpy())

    def lend(self, block, is_done):
        buffer = self._staged.pop(block)
        buffer.is_free = is_done
        self._lent.append(buffer)

    def drop(self, block):
        buffer = self._staged.pop(block, None)
        if buffer is not None:
            buffer.arrival.wait()
            self._free.append(buffer)

    def _stage(self, block: Block) -> None:
        buffer = self._free.popleft()
        buffer.arrival = self._copies.copy(buffer.bytes, block_bytes(self._pool, block[2]))
        self._staged[block] = buffer

    def _collect(self) -> None:
        lent, self._lent = self._lent, []
        for buffer in lent:
            (self._free if buffer.is_free() else self._lent).append(buffer)


class BlockWriter(Protocol):
    def write(self, write: Write, body: memoryview) -> None:
        """Put one block where `write` says; it is finished then, or by a later `write` or `settle`."""

    def settle(self) -> None:
        """Finish what was written."""


class PlaceBlockWriter:
    """Into a CPU pool."""

    def __init__(self, pool: KVPool, incoming: Incoming):
        self._pool = pool
        self._incoming = incoming

    def write(self, write: Write, body: memoryview) -> None:
        target = self._pool.block_bytes_view(write.block_ids[0])
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(body, np.uint8))  # not under the GIL
        self._incoming.finish(write)

    def settle(self) -> None:
        pass


class StagedBlockWriter:
    """Into a GPU pool, through two pinned blocks."""

    def __init__(self, pool: KVPool, incoming: Incoming):
        self._pool = pool
        self._incoming = incoming
        self._copies = _Copies(pool.tensor.device)
        self._free = deque(self._copies.host_bytes(pool.layout.block_bytes) for _ in range(2))
        self._under_way: deque[tuple[torch.Tensor, Mark, Write]] = deque()

    def write(self, write: Write, body: memoryview) -> None:
        if not self._free:
            self._finish_oldest()
        buffer = self._free.popleft()
        np.copyto(buffer.numpy(), np.frombuffer(body, np.uint8))
        arrival = self._copies.copy(block_bytes(self._pool, write.block_ids[0]), buffer, write.ready)
        self._under_way.append((buffer, arrival, write))

    def settle(self) -> None:
        while self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        buffer, arrival, write = self._under_way.popleft()
        arrival.wait()
        self._free.append(buffer)
        self._incoming.finish(write)


class _Copies:
    """Copies between a device and pinned memory, on a stream of their own."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    def copy(self, target: torch.Tensor, source: torch.Tensor, ready: Mark = PAST) -> Mark:
        """Behind `ready` and the copies before; the mark is where it is over."""
        if self._stream is None:
            target.copy_(source)
            return PAST
        ready.after(self._stream)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return EventMark(self._stream, sleep=True)


def block_bytes(pool: KVPool, block_id: int) -> torch.Tensor:
    """One block as uint8 `[block_bytes]` on the pool's device, sharing its memory."""
    return pool.tensor[block_id].view(torch.uint8).reshape(-1)


def reader_of(pool: KVPool, num_buffers: int) -> BlockReader:
    return BlockReader(pool) if pool.tensor.device.type == "cpu" else StagedBlockReader(pool, num_buffers)


def writer_of(pool: KVPool, incoming: Incoming) -> BlockWriter:
    on_cpu = pool.tensor.device.type == "cpu"
    return PlaceBlockWriter(pool, incoming) if on_cpu else StagedBlockWriter(pool, incoming)
