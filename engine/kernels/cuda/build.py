"""Builds a CUDA source file with nvcc: a cubin for one architecture, or PTX.

A build is kept in a cache directory under a name that holds a hash of everything it was made from. Nothing is linked
against torch, so a build takes seconds and serves every torch version.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from engine.cache_directory import cache_directory

PTX75 = "ptx75"
"""PTX for compute_75, which the driver of any newer GPU compiles: runs Turing's code path on other cards."""

FLAGS = ("-O3", "-std=c++17", "-Xptxas", "-v")


class BuildError(RuntimeError):
    """A kernel cannot be built; the message is one line."""


@dataclass(frozen=True)
class Build:
    """A built file (cubin or PTX), what nvcc printed (registers, spills, shared memory), and how it came about."""

    path: Path
    log: str
    seconds: float
    cached: bool


def find_nvcc() -> str:
    """Path of nvcc, from CUDA_HOME, PATH or /usr/local/cuda, in this order. Raises BuildError."""
    home = os.environ.get("CUDA_HOME")
    candidates = [f"{home}/bin/nvcc"] if home else []
    candidates += ["nvcc", "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        path = shutil.which(candidate)
        if path:
            return path
    raise BuildError("nvcc not found in CUDA_HOME, PATH or /usr/local/cuda; install the CUDA toolkit or set CUDA_HOME")


def writable_cache() -> Path:
    """The cache directory, created if missing. Raises BuildError where it cannot be found or written."""
    try:
        path = cache_directory()
    except RuntimeError as error:
        raise BuildError(f"cannot create the kernel cache ~/.cache/baton: {error}; set BATON_CACHE") from error
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"cannot create the kernel cache {path}: {error}; set BATON_CACHE") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise BuildError(f"the kernel cache {path} is not writable; set BATON_CACHE to a directory that is")
    return path


def build(source: Path, arch: str) -> Build:
    """The build of a .cu file for `arch`: "sm_NN" gives a cubin, "ptx75" gives PTX. From the cache if it is there.

    Raises BuildError: no nvcc, no writable cache, or the first error of the compiler.
    """
    nvcc = find_nvcc()
    flags = (*FLAGS, *(("-ptx", "-arch=compute_75") if arch == PTX75 else ("-cubin", f"-arch={arch}")))
    key = hashlib.sha256(repr((_nvcc_version(nvcc), flags)).encode())
    for path in (source, *sorted(source.parent.glob("*.cuh"))):
        key.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    suffix = ".ptx" if arch == PTX75 else ".cubin"
    target = writable_cache() / f"{source.stem}-{arch}-{key.hexdigest()[:16]}{suffix}"
    log_path = target.with_suffix(".log")
    if target.exists() and log_path.exists():
        return Build(target, log_path.read_text(), 0.0, True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as directory:
        output = Path(directory) / target.name
        command = [nvcc, *flags, str(source), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not output.exists():
            raise BuildError(f"nvcc cannot build {source.name} for {arch}: {_first_error(done.stderr + done.stdout)}")
        log = Path(directory) / log_path.name
        log.write_text(done.stderr + done.stdout)
        os.replace(log, log_path)
        os.replace(output, target)
    return Build(target, log_path.read_text(), time.monotonic() - start, False)


@functools.lru_cache(maxsize=4)
def _nvcc_version(nvcc: str) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{nvcc} --version failed: {_first_error(done.stderr + done.stdout)}")
    return done.stdout


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
    return (errors or lines or ["no output"])[0]
