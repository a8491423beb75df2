"""Loads built kernels and launches them through the CUDA driver, on torch's context and streams."""

import ctypes
import functools
import struct
from pathlib import Path

import torch

from engine.kernels.cuda.build import build

STATIC_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory beyond this must be asked for (CUDA C++ Programming Guide, "Shared Memory")."""


class DriverError(RuntimeError):
    """A CUDA driver call failed; the message is one line and names the driver's error."""


def native_arch(device: torch.device | int) -> str:
    """Architecture of a CUDA device, such as "sm_75"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


class Module:
    """The kernels of one source file on one CUDA device, built and loaded when the first of them is launched."""

    def __init__(self, source: Path, arch: str, device_index: int):
        self.source = source
        self.arch = arch
        self.device_index = device_index
        self._handle: int | None = None

    def function(self, name: str, shared_bytes: int) -> int:
        """Driver handle of a kernel that may use `shared_bytes` of dynamic shared memory."""
        if self._handle is None:
            self._handle = self._load()
        function = ctypes.c_void_p()
        _check("cuModuleGetFunction", ctypes.byref(function), ctypes.c_void_p(self._handle), name.encode())
        if shared_bytes > STATIC_SHARED_BYTES:
            max_dynamic_shared_size_bytes = 8  # CUfunction_attribute in cuda.h
            _check("cuFuncSetAttribute", function, max_dynamic_shared_size_bytes, shared_bytes)
        assert function.value is not None
        return function.value

    def _load(self) -> int:
        image = build(self.source, self.arch).path.read_bytes() + b"\0"
        with torch.cuda.device(self.device_index):
            torch.cuda.current_stream().synchronize()  # makes torch's context current on this thread
            module = ctypes.c_void_p()
            _check("cuModuleLoadData", ctypes.byref(module), image)
        assert module.value is not None
        return module.value


class Kernel:
    """A kernel that takes one struct by value. Calling it launches it on torch's current stream of the module's device.

    `layout` is the struct in the notation of Python's struct module, with native alignment. A launch packs the values
    into a buffer made once and makes one driver call; the driver copies the buffer, so it can be packed again at once.
    Launches from several threads must not overlap. Works during CUDA graph capture, once loaded.
    """

    def __init__(self, module: Module, name: str, layout: str, threads: int, shared_bytes: int = 0):
        self.name = name
        self.threads = threads
        self._module = module
        self._shared_bytes = shared_bytes
        self._layout = struct.Struct(f"@{layout}")
        self._values = ctypes.create_string_buffer(self._layout.size)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._values))
        self._parameters_address = ctypes.addressof(self._parameters)
        self._function: int | None = None

    def load(self) -> None:
        """Builds and loads now. Raises BuildError or DriverError."""
        if self._function is None:
            self._function = self._module.function(self.name, self._shared_bytes)

    def __call__(self, grid: tuple[int, int, int], *values: int | float) -> None:
        """Launches grid[0] x grid[1] x grid[2] thread blocks with the struct's values. Raises DriverError."""
        if self._function is None:
            self.load()
        self._layout.pack_into(self._values, 0, *values)
        stream = torch._C._cuda_getCurrentRawStream(self._module.device_index)
        status = _launcher()(
            self._function, *grid, self.threads, 1, 1, self._shared_bytes, stream, self._parameters_address, None
        )
        if status:
            raise DriverError(f"launch of {self.name} on a grid of {grid} failed: {_error_name(status)}")


@functools.lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError("libcuda.so.1 not found: no NVIDIA driver is installed here") from error


@functools.lru_cache(maxsize=1)
def _launcher():
    """cuLaunchKernel, called with the interpreter lock held: a launch is shorter than giving the lock up and back."""
    _driver()
    launch = ctypes.PyDLL("libcuda.so.1").cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return launch


def _check(call: str, *arguments: object) -> None:
    status = getattr(_driver(), call)(*arguments)
    if status:
        raise DriverError(f"{call} failed: {_error_name(status)}")


def _error_name(status: int) -> str:
    name = ctypes.c_char_p()
    if _driver().cuGetErrorName(status, ctypes.byref(name)) or name.value is None:
        return f"error {status}"
    return name.value.decode()
