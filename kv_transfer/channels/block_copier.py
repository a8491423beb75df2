"""Copies of whole blocks from another worker's pool, mapped here, into this worker's."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from engine.kv_pool import KVPool
from kv_transfer.channel import ChannelError
from kv_transfer.channels.gpu_memory import MappedPool
from kv_transfer.channels.mark import EventMark, Mark
from kv_transfer.cuda_driver import driver

NUM_STREAMS = 2
"""Two copies at a time hide the start of each behind the other. One 9 MB block takes 25 us over a link of 385 GB/s."""


class BlockCopier(ABC):
    @abstractmethod
    def copy(self, sources: Sequence[int], targets: Sequence[int], ready: Mark) -> list[Mark]:
        """Start copying block sources[i] of the other pool to block targets[i] of this one, once the device is past
        `ready`. The marks are where the copies are over. Does not wait."""


class GpuBlockCopier(BlockCopier):
    """By the copy engines of the GPU: no kernel, so nothing the model runs is held up. A block is one range of bytes in
    each pool, and neighbours that stay neighbours are one copy."""

    def __init__(self, channel: str, mapped: MappedPool, pool: KVPool):
        """Raises ChannelError when the pools' blocks are not alike."""
        if mapped.layout != pool.layout:
            raise ChannelError(
                f"channel {channel!r}: the prefill worker's blocks are {mapped.layout.describe()}, "
                f"this worker's {pool.layout.describe()}"
            )
        self._mapped = mapped
        self._pool = pool
        device = pool.tensor.device
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(NUM_STREAMS)]

    def copy(self, sources: Sequence[int], targets: Sequence[int], ready: Mark) -> list[Mark]:
        block_bytes = self._pool.layout.block_bytes
        to, of = self._pool.tensor.data_ptr(), self._mapped.address
        for stream in self._streams:
            ready.after(stream)
        with driver().using(self._mapped.device):
            for number, (source, target, count) in enumerate(runs(sources, targets)):
                stream = self._streams[number % NUM_STREAMS]
                driver().copy(
                    to + target * block_bytes, of + source * block_bytes, count * block_bytes, stream.cuda_stream
                )
        return [EventMark(stream, sleep=False) for stream in self._streams]


def runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, blocks) of each stretch that is contiguous on both sides."""
    start = 0
    for i in range(1, len(sources) + 1):
        if i == len(sources) or sources[i] != sources[i - 1] + 1 or targets[i] != targets[i - 1] + 1:
            yield sources[start], targets[start], i - start
            start = i
