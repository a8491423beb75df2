"""The calls of the CUDA driver that torch does not offer: memory shared between processes, copies between any two
device addresses. Reference: the CUDA driver API, sections Memory Management and Peer Context Memory Access.

An IPC handle names one allocation. The process that opens it maps the allocation into its own device's address space,
also if the memory is on another GPU (peer access is enabled as needed), and without a context there. The memory lives
until its owner has freed it, or died, and everyone who mapped it has closed it.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1
_QUEUEING = ("cuMemcpyAsync", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")


class CudaError(RuntimeError):
    """A driver call failed; the message says which, and what the driver says."""


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


class CudaDriver:
    """Device indices count what CUDA_VISIBLE_DEVICES shows this process."""

    def __init__(self) -> None:
        """Raises CudaError when there is no driver or no device."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            quick = ctypes.PyDLL("libcuda.so.1")
        except OSError:
            raise CudaError("no CUDA driver (libcuda.so.1) on this machine") from None
        # Calls that only queue something keep the interpreter: to get it back from a busy engine loop may take 5 ms.
        self._queueing = {name: getattr(quick, name) for name in _QUEUEING}
        pointer, size = ctypes.c_uint64, ctypes.c_size_t
        self._queueing["cuMemcpyAsync"].argtypes = [pointer, pointer, size, ctypes.c_void_p]
        self._library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(pointer), _Handle, ctypes.c_uint]
        self._library.cuIpcCloseMemHandle.argtypes = [pointer]
        self._library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), pointer]
        self._library.cuMemGetAddressRange_v2.argtypes = [ctypes.POINTER(pointer), ctypes.POINTER(size), pointer]
        self._queueing["cuCtxPushCurrent_v2"].argtypes = [ctypes.c_void_p]
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", 0)

    def num_devices(self) -> int:
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def uuid(self, index: int) -> str:
        """32 hex digits, the same in every process."""
        uuid = _Uuid()
        self._call("cuDeviceGetUuid", ctypes.byref(uuid), self._device(index))
        return bytes(uuid.bytes).hex()

    def can_access_peer(self, index: int, other: int) -> bool:
        """Whether GPU `index` reads the memory of GPU `other` over a direct link or PCIe."""
        answer = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(answer), self._device(index), self._device(other))
        return bool(answer.value)

    @contextmanager
    def using(self, index: int) -> Iterator[None]:
        """Torch's context of a device is the calling thread's meanwhile: `export`, `open`, `close`, `copy` need it."""
        if index not in self._contexts:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(index))
            self._contexts[index] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[index])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def export(self, address: int) -> tuple[bytes, int]:
        """(IPC handle of the allocation that `address` lies in, offset of `address` in it)."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base.value)
        return bytes(handle.bytes), address - base.value

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process; returns its address here. Opened twice, it must be closed twice."""
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _ENABLE_PEER_ACCESS
        )
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Between any two device addresses, in the order of a stream (its handle)."""
        self._call("cuMemcpyAsync", target, source, num_bytes, stream)

    def _device(self, index: int) -> int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        return device.value

    def _call(self, name: str, *arguments: object) -> None:
        code = (self._queueing.get(name) or getattr(self._library, name))(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{name} failed: {text.value.decode() if text.value else f'error {code}'}")


@cache
def driver() -> CudaDriver:
    """This process's driver. Raises CudaError when there is none."""
    return CudaDriver()
