"""The attention kernels in CUDA C++ as nvcc compiles them for SM75, and the build. Needs nvcc, and no GPU."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels.cuda.attention import supports
from engine.kernels.cuda.build import PTX75, BuildError, build, find_nvcc

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = [ROOT / "engine" / "kernels" / "cuda" / f"{name}.cu" for name in ("gemv", "paged_decode", "paged_prefill")]

# Products of [16 x 8] by [8 x 8] in one step of the loop over keys, counted by hand:
# prefill, 16 rows and 64 keys a warp: 2 * 8 * (D / 8); decode, 16 keys a warp: D / 8 (scores) + 2 * (D / 16) (values).
TENSOR_CORE_INSTRUCTIONS = {
    "paged_prefill_64": 128,
    "paged_prefill_128": 256,
    "paged_decode_64": 16,
    "paged_decode_128": 32,
}


def has_nvcc() -> bool:
    try:
        find_nvcc()
    except BuildError:
        return False
    return True


def find_cuobjdump() -> str | None:
    """From PATH, beside nvcc, or in the triton package, which carries one."""
    spec = importlib.util.find_spec("triton")
    packaged = [Path(spec.origin).parent / "backends" / "nvidia" / "bin"] if spec and spec.origin else []
    beside = [Path(find_nvcc()).parent, Path("/usr/local/cuda/bin")] if has_nvcc() else []
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, beside + packaged)])
    return shutil.which("cuobjdump", path=path)


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="needs nvcc")
needs_cuobjdump = pytest.mark.skipif(find_cuobjdump() is None, reason="needs cuobjdump")


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Every source built for sm_75 in a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CACHE", str(tmp_path_factory.mktemp("cache")))
        return [build(source, "sm_75") for source in SOURCES]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def resources(log: str) -> dict[str, dict[str, int]]:
    """Kernel -> registers, bytes of spills and of shared memory, from what ptxas -v prints."""
    found = {}
    for name, text in re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", log, re.S):
        spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
        registers = re.search(r"Used (\d+) registers", text)
        shared = re.search(r"(\d+) bytes smem", text)
        assert spilled and registers, text
        found[name] = {
            "spills": sum(map(int, spilled.groups())),
            "registers": int(registers[1]),
            "shared": int(shared[1]) if shared else 0,
        }
    return found


def instructions(path: Path) -> dict[str, list[str]]:
    """Kernel -> its machine instructions by name."""
    cuobjdump = find_cuobjdump()
    assert cuobjdump
    done = subprocess.run([cuobjdump, "-sass", str(path)], capture_output=True, text=True, check=True)
    parts = re.split(r"Function : (\w+)", done.stdout)[1:]
    pattern = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", re.M)
    return {name: pattern.findall(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


@needs_nvcc
def test_kernels_fit_a_turing_multiprocessor_without_spilling(builds):
    found = {name: numbers for item in builds for name, numbers in resources(item.log).items()}
    assert set(TENSOR_CORE_INSTRUCTIONS) < set(found)
    for name, numbers in found.items():
        assert numbers["spills"] == 0, name
        assert numbers["registers"] <= 255, name
        assert numbers["shared"] <= 65536, name
    # Two thread blocks of prefill and three of decode, 128 threads each, share 65536 registers and 64 KB.
    for head_dim in (64, 128):
        prefill, decode = found[f"paged_prefill_{head_dim}"], found[f"paged_decode_{head_dim}"]
        assert 2 * prefill["shared"] <= 65536 and 3 * decode["shared"] <= 65536
        assert 3 * 128 * -(-decode["registers"] // 8) * 8 <= 65536


@needs_nvcc
@needs_cuobjdump
def test_matrix_vector_kernels_read_weights_16_bytes_a_lane_two_batches_ahead(builds):
    kernels = {name: names for name, names in instructions(builds[0].path).items() if name.startswith("gemv_")}
    assert len(kernels) == 8
    for name, names in kernels.items():
        wide = [instruction for instruction in names if instruction.startswith("LDG") and ".128" in instruction]
        assert len(wide) >= 2 * 2 * 4 * 2, name  # before the loop and in it: two batches of four rows, two pieces each


@needs_nvcc
@needs_cuobjdump
def test_products_use_tensor_cores_and_nothing_goes_through_local_memory(builds):
    found = {name: names for item in builds for name, names in instructions(item.path).items()}
    for name, count in TENSOR_CORE_INSTRUCTIONS.items():
        assert found[name].count("HMMA.1688.F32") >= count, name
    for name, names in found.items():
        assert not [text for text in names if text.startswith(("LDL", "STL"))], name


@needs_nvcc
@needs_cuobjdump
def test_keys_and_values_are_read_sixteen_bytes_at_a_time(builds):
    found = {name: names for item in builds for name, names in instructions(item.path).items()}
    for name in TENSOR_CORE_INSTRUCTIONS:
        wide = [text for text in found[name] if text.startswith("LDG.E.128")]
        head_dim = int(name.rpartition("_")[2])
        assert len(wide) >= head_dim // 8, name


@needs_nvcc
def test_portable_build_is_ptx_for_turing(cache):
    for source in SOURCES:
        text = build(source, PTX75).path.read_text()
        assert ".target sm_75" in text
        assert source.stem in text


@needs_nvcc
def test_a_build_is_reused_until_source_header_or_architecture_changes(cache, tmp_path):
    source, header = tmp_path / "one.cu", tmp_path / "one.cuh"
    source.write_text('#include "one.cuh"\nextern "C" __global__ void one(int* x) { *x = VALUE; }\n')
    header.write_text("#define VALUE 1\n")
    first = build(source, "sm_75")
    again = build(source, "sm_75")
    assert not first.cached and again.cached
    assert again.path == first.path and again.log == first.log and "Compiling entry function 'one'" in again.log
    other = build(source, PTX75)
    header.write_text("#define VALUE 2\n")
    changed = build(source, "sm_75")
    assert len({first.path, other.path, changed.path}) == 3 and not changed.cached
    assert sorted(path.suffix for path in cache.iterdir()) == [".cubin", ".cubin", ".log", ".log", ".log", ".ptx"]


@needs_nvcc
def test_a_compile_error_is_one_line_that_names_file_and_cause(cache, tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text('extern "C" __global__ void broken(int* x) {\n    *x = undeclared_name;\n}\n')
    with pytest.raises(BuildError) as caught:
        build(source, "sm_75")
    message = str(caught.value)
    assert "\n" not in message and "broken.cu(2)" in message and "undeclared_name" in message
    assert list(cache.iterdir()) == []


@needs_nvcc
def test_an_unknown_architecture_is_one_line(cache):
    with pytest.raises(BuildError, match="sm_11") as caught:
        build(SOURCES[0], "sm_11")
    assert "\n" not in str(caught.value)


@needs_nvcc
def test_a_cache_that_cannot_be_made_is_one_line_that_says_what_to_set(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("BATON_CACHE", str(blocker / "cache"))
    with pytest.raises(BuildError, match="set BATON_CACHE") as caught:
        build(SOURCES[0], "sm_75")
    assert "\n" not in str(caught.value)


def test_a_missing_compiler_is_one_line_that_says_where_it_was_looked_for(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(BuildError, match="CUDA_HOME, PATH or /usr/local/cuda") as caught:
        find_nvcc()
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_setup_without_a_gpu_succeeds_and_says_what_is_slower(cache):
    done = subprocess.run(
        ["sh", str(ROOT / "setup.sh")],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "no NVIDIA GPU found" in done.stdout and "still starts" in done.stdout and "slower" in done.stdout


@needs_nvcc
def test_setup_finds_what_is_built_for_the_architecture_it_is_given_and_refuses_nonsense(builds):
    environment = os.environ | {"PYTHON": sys.executable, "BATON_CACHE": str(builds[0].path.parent)}

    def setup(arch: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", "setup.sh", arch], cwd=ROOT, env=environment, capture_output=True, text=True)

    done = setup("sm_75")
    assert done.returncode == 0, done.stderr
    for item, source in zip(builds, SOURCES, strict=True):
        assert f"{source.name} for sm_75: already built: {item.path}" in done.stdout
    refused = setup("turing")
    assert refused.returncode == 2 and "'turing' is no architecture" in refused.stderr


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "group", "expected"),
    [
        (128, 64, torch.float16, 4, True),
        (64, 16, torch.float16, 1, True),
        (128, 128, torch.float16, 8, True),
        (96, 64, torch.float16, 4, False),
        (128, 48, torch.float16, 4, False),
        (128, 256, torch.float16, 4, False),
        (128, 64, torch.bfloat16, 4, False),
        (128, 64, torch.float16, 16, False),
    ],
)
def test_kernels_say_which_shapes_they_take(head_dim, block_size, dtype, group, expected):
    assert supports(head_dim, block_size, dtype, group) is expected
