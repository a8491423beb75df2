"""NCCL's C interface, of the library that torch brings: one communicator of two ranks for each channel.

torch.distributed would be another way to the same library. Its process groups are made for jobs whose ranks start and
end together: a watchdog ends the process when a peer is gone. Here workers come and go one at a time.
Reference: NCCL user guide, sections Creating a communicator, Point-to-point communication, Fault tolerance.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from kv_transfer.channel import ChannelError

PREFILL_RANK, DECODE_RANK = 0, 1
_UNSIGNED_BYTE = 1
_ID_BYTES = 128


class NcclError(RuntimeError):
    """A call failed; the message says which, and what NCCL says."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * _ID_BYTES)]


class Nccl:
    """Raises ChannelError when there is no library."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libnccl.so.2")
        except OSError:
            raise ChannelError("channel 'nccl' needs libnccl.so.2, which CUDA builds of torch bring") from None
        buffer, size, handle = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        quick = ctypes.PyDLL("libnccl.so.2")  # in a group these only queue, so they keep the interpreter
        self._queueing = {name: getattr(quick, name) for name in ("ncclSend", "ncclRecv", "ncclGroupStart")}
        for name in ("ncclSend", "ncclRecv"):
            self._queueing[name].argtypes = [buffer, size, ctypes.c_int, ctypes.c_int, handle, handle]
        self._library.ncclCommInitRank.argtypes = [ctypes.POINTER(handle), ctypes.c_int, _UniqueId, ctypes.c_int]
        self._library.ncclCommAbort.argtypes = [handle]
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def unique_id(self) -> bytes:
        """Of a new communicator; both ranks need it."""
        made = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made.bytes)

    def join(self, unique_id: bytes, rank: int) -> "Communicator":
        """Waits until the other rank does the same. The calling thread's CUDA device is the rank's; two ranks cannot
        share one."""
        handle = ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(handle), 2, _UniqueId.from_buffer_copy(unique_id), rank)
        return Communicator(self, handle, 1 - rank)

    def call(self, name: str, *arguments: object) -> None:
        code = (self._queueing.get(name) or getattr(self._library, name))(*arguments)
        if code:
            raise NcclError(f"{name} failed: {self._library.ncclGetErrorString(code).decode()}")


class Communicator:
    """The link to one peer. `send` and `receive` inside `group` are launched together when it ends; both sides must
    group alike."""

    def __init__(self, nccl: Nccl, handle: ctypes.c_void_p, peer: int):
        self._nccl, self._handle, self._peer = nccl, handle, peer

    @contextmanager
    def group(self) -> Iterator[None]:
        self._nccl.call("ncclGroupStart")
        try:
            yield
        finally:
            self._nccl.call("ncclGroupEnd")

    def send(self, address: int, num_bytes: int, stream: int) -> None:
        self._nccl.call("ncclSend", address, num_bytes, _UNSIGNED_BYTE, self._peer, self._handle, stream)

    def receive(self, address: int, num_bytes: int, stream: int) -> None:
        self._nccl.call("ncclRecv", address, num_bytes, _UNSIGNED_BYTE, self._peer, self._handle, stream)

    def abort(self) -> None:
        """End what is under way, on the device too. From any thread; once."""
        self._nccl.call("ncclCommAbort", self._handle)


@cache
def nccl() -> Nccl:
    return Nccl()
