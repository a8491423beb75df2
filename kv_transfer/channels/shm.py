"""`shm`: two processes of one host on one pool in shared CPU memory; block ids change owner, no byte moves.

The pool is an anonymous memory file of the prefill worker. Welcome.pool says where it is (/proc/<pid>/fd/<fd>) and what
it looks like; the decode worker maps it before Welcome comes out of `poll`. The memory has no name in the file system,
so the kernel frees it with the last process that maps it, however the processes end.
"""

import fcntl
import mmap
import os
import weakref
from dataclasses import replace

import torch

from engine.kv_pool import KVLayout, KVPool
from kv_transfer.channel import ChannelError, ChannelServer, DecodeEnd, KVChannel, Wake
from kv_transfer.channels.control import ControlDecodeEnd, ControlPrefillEnd, ControlServer
from kv_transfer.channels.pool_description import PoolDescription, describe_blocks, read_blocks, unusable
from kv_transfer.channels.shared_pool import SharedPoolDecodeEnd, SharedPoolPrefillEnd
from kv_transfer.handoff import Hello, ToDecode, Welcome


class SharedPool(KVPool):
    """A KVPool in an anonymous memory file, which stays open as `fd` while the pool lives."""

    def __init__(self, layout: KVLayout, num_blocks: int, tensor: torch.Tensor, fd: int):
        super().__init__(layout, num_blocks, tensor)
        self.fd = fd
        weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, layout: KVLayout, num_blocks: int) -> "SharedPool":
        """Zero-filled. Raises ChannelError when the system has no such memory."""
        if not hasattr(os, "memfd_create"):
            raise ChannelError("channel 'shm' needs Linux (memfd_create); use channel tcp")
        num_bytes = num_blocks * layout.block_bytes
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            tensor = _map_tensor(layout, num_blocks, fd)
        except OSError as error:
            os.close(fd)
            raise ChannelError(f"channel 'shm' cannot make a pool of {num_bytes} bytes: {error.strerror}") from None
        return cls(layout, num_blocks, tensor, fd)

    def describe(self) -> PoolDescription:
        """What another process of this host needs to `open_pool` it."""
        return {
            "pid": os.getpid(),
            "fd": self.fd,
            "inode": os.fstat(self.fd).st_ino,
            **describe_blocks(self),
        }


def open_pool(description: PoolDescription) -> KVPool:
    """Map a pool that another process described. Raises ChannelError when it is not there, not reachable or another."""
    layout, num_blocks = read_blocks("shm", description)
    try:
        num_bytes = int(description["bytes"])
        inode, path = description["inode"], f"/proc/{int(description['pid'])}/fd/{int(description['fd'])}"
    except (KeyError, ValueError) as error:
        raise unusable("shm", error) from None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ChannelError(
            f"channel 'shm' cannot open the prefill worker's pool at {path}: {error.strerror}; "
            "run both workers on one host, in one PID namespace and as one user"
        ) from None
    try:
        found = os.fstat(fd)
        if found.st_ino != inode or found.st_size != num_bytes or num_bytes != num_blocks * layout.block_bytes:
            raise ChannelError(f"channel 'shm': {path} is not the pool that was described; the prefill worker is gone")
        return KVPool(layout, num_blocks, _map_tensor(layout, num_blocks, fd))
    finally:
        os.close(fd)


def _map_tensor(layout: KVLayout, num_blocks: int, fd: int) -> torch.Tensor:
    """The file as `[num_blocks, *block_shape]`; it is unmapped when the tensor is freed."""
    mapping = mmap.mmap(fd, num_blocks * layout.block_bytes)
    return torch.frombuffer(mapping, dtype=layout.dtype).view(num_blocks, *layout.block_shape)


class ShmPrefillEnd(SharedPoolPrefillEnd, ControlPrefillEnd):
    pass


class ShmDecodeEnd(SharedPoolDecodeEnd, ControlDecodeEnd):
    def on_message(self, message: ToDecode) -> None:
        if isinstance(message, Welcome) and not message.refusal:
            try:
                self.pool = open_pool(message.pool)
            except ChannelError as error:
                message = replace(message, refusal=str(error))
        super().on_message(message)


class ShmChannel(KVChannel):
    name = "shm"
    shares_pool = True

    def make_pool(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> KVPool:
        if device != "cpu":
            raise ChannelError(f"channel 'shm' shares CPU memory, the pool is on {device}; use channel cuda_ipc")
        return SharedPool.create(layout, num_blocks)

    def serve(self, pool: KVPool, welcome: Welcome, wake: Wake, host: str = "127.0.0.1") -> ChannelServer:
        """Raises ChannelError when `pool` was not made by this channel, or the host's address cannot be used."""
        if not isinstance(pool, SharedPool):
            raise ChannelError("channel 'shm' can only serve a pool from its own make_pool")
        welcome.pool = pool.describe()
        return ControlServer(host, wake, ShmPrefillEnd)

    def connect(self, address: str, pool: KVPool | None, hello: Hello, wake: Wake) -> DecodeEnd:
        """`pool` is not used: the end's own `pool` is the prefill worker's, once Welcome came."""
        end = ShmDecodeEnd("shm", address, wake)
        end.send(hello)
        return end
