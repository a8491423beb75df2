"""The channels that tests run on, by the name of a test's parameter.

cuda_p2p, tcp-gpu ...   the channel on GPU pools
cuda_p2p-cpu ...        a GPU channel's messages and threads, while the device's part is played by the CPU: pools in
                        shared memory, copies that happen when somebody waits for them
"""

import importlib.util
import os
import queue
import threading

import pytest
import torch

from engine.kv_pool import KVPool
from kv_transfer.channel import KVChannel
from kv_transfer.channels import get_channel
from kv_transfer.channels.block_copier import BlockCopier
from kv_transfer.channels.cuda_ipc import CudaIpcChannel
from kv_transfer.channels.cuda_p2p import CudaP2PChannel
from kv_transfer.channels.mark import PAST
from kv_transfer.channels.nccl import NcclChannel
from kv_transfer.channels.shm import SharedPool, open_pool

ON_CPU = ["shm", "tcp", "cuda_ipc-cpu", "cuda_p2p-cpu"]
IN_ONE_PROCESS = ["nccl-cpu"]
ON_GPU = ["cuda_ipc", "cuda_p2p", "tcp-gpu"]
WITH_NIXL = ["nixl"]
ON_TWO_GPUS = ["nccl"]


class LazyCopy:
    """A copy that is over when it was waited for, as late as a device may be."""

    def __init__(self, copy):
        self._copy = copy

    def wait(self):
        self._copy()

    def after(self, stream):
        raise AssertionError("there is no stream")


class LazyCopier(BlockCopier):
    def __init__(self, source, pool):
        self.source, self.pool = source, pool

    def copy(self, sources, targets, ready):
        ready.wait()

        def copy():
            for source, target in zip(sources, targets, strict=True):
                self.pool.tensor[target].copy_(self.source.tensor[source])

        return [LazyCopy(copy)]


class PullOnCpu(CudaP2PChannel):
    def make_pool(self, layout, num_blocks, device="cpu"):
        return SharedPool.create(layout, num_blocks)

    def describe(self, pool):
        return pool.describe()

    def make_copier(self, description, pool):
        return LazyCopier(open_pool(description), pool)


class IpcOnCpu(CudaIpcChannel):
    def make_pool(self, layout, num_blocks, device="cpu"):
        return SharedPool.create(layout, num_blocks)

    def device(self):
        return torch.device("cpu")

    def describe(self, pool):
        return pool.describe()

    def open_pool(self, description):
        return open_pool(description)


class QueueLink:
    """A communicator's two sides in one process. A block is read when the other side takes it, as late as may be."""

    _queues: dict[bytes, tuple[queue.Queue, threading.Event]] = {}

    def __init__(self, pool, unique_id, rank):
        self.pool = pool
        self.blocks, self.aborted = self._queues.setdefault(unique_id, (queue.Queue(), threading.Event()))

    def open(self):
        pass

    def abort(self):
        self.aborted.set()

    def send(self, block_ids, ready=PAST):
        taken = [threading.Event() for _ in block_ids]
        for block_id, event in zip(block_ids, taken, strict=True):
            self.blocks.put((block_id, self.pool, event))

        def wait():
            while not all(event.is_set() for event in taken):
                self._check()

        return [LazyCopy(wait)]

    def receive(self, block_ids, ready):
        def wait():
            for block_id in block_ids:
                source, pool, event = self._next()
                if block_id is not None:
                    self.pool.tensor[block_id].copy_(pool.tensor[source])
                event.set()

        return [LazyCopy(wait)]

    def _next(self):
        while True:
            self._check()
            try:
                return self.blocks.get(timeout=0.005)
            except queue.Empty:
                continue

    def _check(self):
        if self.aborted.wait(0.0005):
            raise RuntimeError("aborted")


class NcclOnCpu(NcclChannel):
    def make_pool(self, layout, num_blocks, device="cpu"):
        return KVPool.allocate(layout, num_blocks)

    def check(self):
        pass

    def unique_id(self):
        return os.urandom(16)

    def make_link(self, pool, unique_id, rank):
        return QueueLink(pool, unique_id, rank)


STAND_INS = {"cuda_ipc-cpu": IpcOnCpu, "cuda_p2p-cpu": PullOnCpu, "nccl-cpu": NcclOnCpu}


def channel_of(parameter: str) -> tuple[KVChannel, str]:
    """(channel, device of its pools)"""
    if parameter in STAND_INS:
        return STAND_INS[parameter](), "cpu"
    if parameter == "nixl":
        return get_channel("nixl"), "cuda" if torch.cuda.is_available() else "cpu"
    device = "cuda" if parameter in ON_GPU + ON_TWO_GPUS else "cpu"
    return get_channel(parameter.removesuffix("-gpu")), device


def needs_gpus(parameters: list[str], number: int) -> list:
    """The parameters, skipped with a reason on machines with fewer GPUs."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reason = f"needs {number} CUDA device{'s' * (number > 1)}, found {found}"
    return [pytest.param(name, marks=pytest.mark.skipif(found < number, reason=reason)) for name in parameters]


def needs_nixl(parameters: list[str]) -> list:
    absent = importlib.util.find_spec("nixl") is None
    return [pytest.param(name, marks=pytest.mark.skipif(absent, reason="needs nixl")) for name in parameters]


EVERYWHERE = [*ON_CPU, *IN_ONE_PROCESS, *needs_gpus(ON_GPU, 1), *needs_gpus(ON_TWO_GPUS, 2), *needs_nixl(WITH_NIXL)]
