"""A GPU pool in another process: exported as an IPC handle, mapped by whoever may read or write it."""

import uuid
import weakref

import torch

from engine.kv_pool import KVLayout, KVPool
from kv_transfer.channel import ChannelError
from kv_transfer.channels.pool_description import PoolDescription, describe_blocks, read_blocks, unusable
from kv_transfer.cuda_driver import CudaError, driver

_PROCESS = uuid.uuid4().hex
_exported: "weakref.WeakValueDictionary[str, KVPool]" = weakref.WeakValueDictionary()
"""Pools of this process by their handle: the driver does not let a process open its own handles."""


def make_gpu_pool(channel: str, layout: KVLayout, num_blocks: int, device: str) -> KVPool:
    """Raises ChannelError when `device` is not a GPU."""
    if torch.device(device).type != "cuda":
        raise ChannelError(f"channel {channel!r} moves blocks of GPU pools, the pool is on {device}; use shm or tcp")
    return KVPool.allocate(layout, num_blocks, device)


def export_pool(channel: str, pool: KVPool) -> PoolDescription:
    """What another process of this host needs to map the pool. Raises ChannelError when it cannot be shared."""
    device = pool.tensor.device
    if device.type != "cuda":
        raise ChannelError(f"channel {channel!r} can only serve a pool on a GPU, this one is on {device}")
    try:
        with driver().using(device.index):
            handle, offset = driver().export(pool.tensor.data_ptr())
        gpu = driver().uuid(device.index)
    except CudaError as error:
        raise ChannelError(
            f"channel {channel!r} cannot share the KV pool: {error}; is PYTORCH_CUDA_ALLOC_CONF set to "
            "expandable_segments? Such memory has no handle"
        ) from None
    _exported[f"{handle.hex()}+{offset}"] = pool
    return {"process": _PROCESS, "handle": handle.hex(), "offset": offset, "gpu": gpu, **describe_blocks(pool)}


class MappedPool:
    """Another process's pool, mapped into the address space of `device` (an index here). `address` is its first byte's;
    `gpu` the UUID of the GPU it is on. Unmapped when the object, and every tensor made of it, is gone."""

    def __init__(self, channel: str, description: PoolDescription, device: int):
        """Raises ChannelError when it cannot be mapped."""
        self.layout, self.num_blocks = read_blocks(channel, description)
        self.device = device
        self._own: KVPool | None = None
        try:
            handle, offset = str(description["handle"]), int(description["offset"])
            num_bytes, process = int(description["bytes"]), description["process"]
            self.gpu = str(description["gpu"])
            raw = bytes.fromhex(handle)
        except (KeyError, ValueError) as error:
            raise unusable(channel, error) from None
        if num_bytes != self.num_blocks * self.layout.block_bytes:
            raise ChannelError(
                f"channel {channel!r}: {num_bytes} bytes are not {self.num_blocks} blocks of that layout"
            )
        if process == _PROCESS:
            self._own = _exported.get(f"{handle}+{offset}")
            if self._own is None:
                raise ChannelError(f"channel {channel!r}: the pool that was described is gone")
            self.address = self._own.tensor.data_ptr()
            return
        try:
            with driver().using(device):
                base = driver().open(raw)
        except CudaError as error:
            raise ChannelError(
                f"channel {channel!r} cannot map the prefill worker's pool: {error}; both workers must run on one "
                "host, and where they use two GPUs these need peer access"
            ) from None
        self.address = base + offset
        weakref.finalize(self, _unmap, device, base)

    def pool(self) -> KVPool:
        """The memory as a pool of `device`; of use where it is on that very GPU."""
        if self._own is not None:
            return self._own
        shape = (self.num_blocks, *self.layout.block_shape)
        data = torch.as_tensor(_Bytes(self), device=f"cuda:{self.device}")
        return KVPool(self.layout, self.num_blocks, data.view(self.layout.dtype).view(shape))


class _Bytes:
    """What torch.as_tensor takes (the CUDA array interface, version 3). The tensor keeps this, and so the mapping."""

    def __init__(self, mapped: MappedPool):
        self.mapped = mapped
        self.__cuda_array_interface__ = {
            "shape": (mapped.num_blocks * mapped.layout.block_bytes,),
            "typestr": "|u1",
            "data": (mapped.address, False),
            "version": 3,
        }


def _unmap(device: int, base: int) -> None:
    try:
        with driver().using(device):
            driver().close(base)
    except CudaError:
        pass  # the driver is shutting down, and unmaps it itself
