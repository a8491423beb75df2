"""`nixl`: two pools, anywhere the NIXL library reaches: RDMA networks, NVLink, sockets. An optional extra.

The protocol is that of channel `cuda_p2p`; only the copy is another: the decode worker's NIXL agent reads the offered
blocks out of the prefill worker's registered pool. Pools may be on GPUs or CPUs. The back-end is UCX, which takes its
own settings from UCX_ variables of the environment.
"""

import base64
import importlib
import time
import uuid
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch

from engine.kv_pool import KVLayout, KVPool
from kv_transfer.channel import ChannelError
from kv_transfer.channels.block_copier import BlockCopier, runs
from kv_transfer.channels.cuda_p2p import CudaP2PChannel
from kv_transfer.channels.mark import Mark
from kv_transfer.channels.pool_description import PoolDescription, describe_blocks, read_blocks, unusable

_POLL_S = 0.0001


@cache
def library() -> ModuleType:
    """Raises ChannelError when it is not installed."""
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise ChannelError(
            f"channel 'nixl' needs the NIXL library ({error}): pip install 'baton-inference[nixl]', or use cuda_p2p, "
            "nccl or tcp"
        ) from None


def register(pool: KVPool) -> Any:
    """An agent that may read and write the pool."""
    agent = library().nixl_agent(f"baton-{uuid.uuid4().hex}", library().nixl_agent_config(backends=["UCX"]))
    agent.register_memory(pool.tensor)
    return agent


def kind_of(tensor: torch.Tensor) -> tuple[str, int]:
    """(NIXL's word for a tensor's memory, device index)"""
    return ("VRAM", tensor.device.index) if tensor.device.type == "cuda" else ("DRAM", 0)


class NixlRead:
    """A read that was posted; over when the library says so."""

    def __init__(self, agent: Any, handle: Any):
        self._agent, self._handle = agent, handle
        self._state = agent.transfer(handle)

    def wait(self) -> None:
        """Raises ChannelError when it failed."""
        while self._state == "PROC":
            time.sleep(_POLL_S)
            self._state = self._agent.check_xfer_state(self._handle)
        self._handle.release()
        if self._state != "DONE":
            raise ChannelError(f"NIXL reports {self._state}")

    def after(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("a read by NIXL is in no stream's order; wait for it")


class NixlBlockCopier(BlockCopier):
    def __init__(self, description: PoolDescription, pool: KVPool):
        """Raises ChannelError when the pools' blocks are not alike, or the other agent cannot be reached."""
        layout, _ = read_blocks("nixl", description)
        if layout != pool.layout:
            raise ChannelError(
                f"channel 'nixl': the prefill worker's blocks are {layout.describe()}, "
                f"this worker's {pool.layout.describe()}"
            )
        try:
            metadata = base64.b64decode(str(description["agent"]))
            self._source, self._source_device = int(description["address"]), int(description["device"])
            self._source_kind = str(description["memory"])
        except (KeyError, ValueError) as error:
            raise unusable("nixl", error) from None
        self._pool = pool
        self._agent = register(pool)
        try:
            self._peer = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise ChannelError(f"channel 'nixl' cannot reach the prefill worker's pool: {error!r}") from None

    def copy(self, sources: Sequence[int], targets: Sequence[int], ready: Mark) -> list[Mark]:
        ready.wait()
        size, base = self._pool.layout.block_bytes, self._pool.tensor.data_ptr()
        kind, device = kind_of(self._pool.tensor)
        stretches = list(runs(sources, targets))
        here = [(base + target * size, count * size, device) for _, target, count in stretches]
        there = [(self._source + source * size, count * size, self._source_device) for source, _, count in stretches]
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(here, kind),
            self._agent.get_xfer_descs(there, self._source_kind),
            self._peer,
        )
        return [NixlRead(self._agent, handle)]


class NixlChannel(CudaP2PChannel):
    name = "nixl"

    def __init__(self) -> None:
        library()

    def make_pool(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> KVPool:
        return KVPool.allocate(layout, num_blocks, device)

    def describe(self, pool: KVPool) -> PoolDescription:
        self._agent = register(pool)  # it has to live as long as the pool is served
        kind, device = kind_of(pool.tensor)
        return {
            "agent": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "address": pool.tensor.data_ptr(),
            "memory": kind,
            "device": device,
            **describe_blocks(pool),
        }

    def make_copier(self, description: PoolDescription, pool: KVPool) -> BlockCopier:
        return NixlBlockCopier(description, pool)
