"""The source of the CUDA attention kernels, run on the CPU by an emulated thread block, against float64.

Covers their index arithmetic, fragment layouts, barriers and argument structs, not what nvcc makes of them: tests/gpu
does that. Needs g++."""

import ctypes
import dataclasses
import math
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from engine.kernels.cuda import attention
from tests.paged_attention_cases import assert_attention_close, expected_attention, make_case

KERNELS = Path(attention.__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def emulated_source(name: str) -> str:
    """The kernel file with the emulation in place of its header, and a launcher for each kernel."""
    source = (KERNELS / f"{name}.cu").read_text().replace('#include "tensor_core.cuh"', '#include "emulated_block.h"')
    kernels = re.findall(r'extern "C" __global__ .* (\w+)\((baton::\w+) arguments\)', source)
    assert kernels
    return source + "\n".join(f"LAUNCHER({kernel}, {arguments})" for kernel, arguments in kernels)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> dict[str, ctypes.CDLL]:
    directory = tmp_path_factory.mktemp("emulated")
    loaded = {}
    for name in ("paged_prefill", "paged_decode"):
        source, library = directory / f"{name}.cpp", directory / f"{name}.so"
        source.write_text(emulated_source(name))
        include = f"-I{Path(__file__).parent}"
        command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", "-w", include, str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        loaded[name] = ctypes.CDLL(str(library))
    return loaded


class EmulatedKernel:
    """Stands in for engine.kernels.cuda.module.Kernel."""

    def __init__(self, library: ctypes.CDLL, name: str, layout: str, threads: int):
        self._launch = getattr(library, f"launch_{name}")
        self._layout = struct.Struct(f"@{layout}")
        self._threads = threads
        padded = -(-self._layout.size // 8) * 8
        assert padded == getattr(library, f"size_of_{name}")(), "the struct differs between Python and CUDA"

    def __call__(self, grid: tuple[int, int, int], *values: int | float) -> None:
        self._launch(self._layout.pack(*values).ljust(256, b"\0"), *grid, self._threads)


@pytest.fixture(autouse=True)
def emulated(libraries, monkeypatch):
    monkeypatch.setattr(attention, "_module", lambda name, arch, device_index: libraries[name])
    monkeypatch.setattr(attention, "Kernel", EmulatedKernel)
    for cached in (attention._prefill_kernel, attention._decode_kernels):
        cached.cache_clear()
    yield
    for cached in (attention._prefill_kernel, attention._decode_kernels):
        cached.cache_clear()


def prefill(query, pool, batch, window, layer=1):
    out = torch.full(query.shape, math.nan, dtype=torch.float16)
    return attention.paged_prefill_attention(query, pool, layer, batch, window, out=out)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("head_dim", "block_size", "heads"), [(64, 16, (3, 1)), (128, 64, (2, 2)), (128, 32, (2, 1))])
def test_prefill_is_attention_by_its_formula(head_dim, block_size, heads, window):
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "block_size": block_size}
    query, pool, batch = make_case([159, 64, 1, 65, 130], [100, 64, 1, 0, 3], **shape, seed=head_dim)
    assert_attention_close(prefill(query, pool, batch, window), expected_attention(query, pool, 1, batch, window))


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("head_dim", "block_size", "heads"), [(64, 128, (5, 1)), (128, 16, (8, 1)), (128, 64, (4, 2))])
def test_decode_is_attention_by_its_formula(head_dim, block_size, heads, window):
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "block_size": block_size}
    kv_lens = [0, 1, 63, 64, 65, 300]
    query, pool, batch = make_case(kv_lens, [1] * len(kv_lens), **shape, seed=head_dim)
    query = query[: len(kv_lens)]
    expected = expected_attention(query, pool, 1, batch, window)
    for num_parts in (1, 2, 5):
        floats = attention.workspace_floats(*query.shape, num_parts)
        tensors = {"out": torch.full_like(query, math.nan), "workspace": torch.full((floats,), math.nan)}
        attention.paged_decode_attention(query, pool, 1, batch, window, num_parts, **tensors)
        assert_attention_close(tensors["out"], expected)


@pytest.mark.parametrize("window", [None, 50])
def test_prefill_gives_the_same_bits_however_a_prompt_is_cut(window):
    query, pool, batch = make_case([150], [150], num_heads=2, num_kv_heads=2, head_dim=64, block_size=16)
    whole = prefill(query, pool, batch, window)
    cuts = [0, 1, 70, 128, 150]
    for start, end in zip(cuts, cuts[1:]):
        tiles = [(0, row) for row in range(0, end - start, attention.TILE_ROWS)]
        numbers = {"query_start": [start], "query_len": [end - start], "kv_len": [end], "tiles": tiles}
        tensors = {name: torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()}
        chunk = prefill(query, pool, dataclasses.replace(batch, **tensors), window)
        assert torch.equal(chunk[start:end], whole[start:end])


def test_tensors_laid_out_otherwise_are_refused():
    query, pool, batch = make_case([5], [5], num_heads=2, num_kv_heads=1, head_dim=64, block_size=16)
    with pytest.raises(ValueError, match=r"tiles have 128 rows; this kernel needs 64"):
        prefill(query, pool, dataclasses.replace(batch, tile_rows=128), None)
    with pytest.raises(ValueError, match="query rows must be contiguous"):
        prefill(query.transpose(0, 1).contiguous().transpose(0, 1), pool, batch, None)
    with pytest.raises(ValueError, match="ask supports"):
        prefill(query.float(), pool.float(), batch, None)
    with pytest.raises(ValueError, match="must be contiguous"):
        prefill(query, pool[:, :1], batch, None, layer=0)
