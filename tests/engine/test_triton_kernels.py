"""The Triton kernels compute what plain torch computes (on the CPU, through Triton's interpreter; tests/gpu has the
compiled ones), and compile for the GPUs they are meant for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which torch's builds for CUDA bring")


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.triton_cases"], cwd=root, env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "kind", ["attention", "shared prefix", "norm", "residual", "swiglu", "rope", "kv", "gemv", "matmul"]
)
def test_kernels_agree_with_float64(errors, kind):
    found = {name: error for name, error in errors.items() if kind in name}
    assert found and max(found.values()) < 1e-5, found


def test_products_without_tensor_cores_compile_for_turing():
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from engine.kernels.triton.gemv import _gemv

    pointers = dict.fromkeys(("x", "weight", "bias", "norm_weight", "out"), "*fp16")
    constants = {"M": 1, "NORM": True, "GATED": True, "RESIDUAL": False, "BIAS": False, "ROWS": 4, "COLUMNS": 512}
    constants["PDL"] = False
    others = {"num_outputs": "i32", "num_inputs": "i32", "eps": "fp32"}
    signature = {name: pointers.get(name) or others.get(name) or "constexpr" for name in _gemv.arg_names}
    source = ASTSource(_gemv, signature, {(_gemv.arg_names.index(name),): value for name, value in constants.items()})
    compiled = compile(source, target=GPUTarget("cuda", 75, 32), options={"num_warps": 4})
    assert ".target sm_75" in compiled.asm["ptx"]
    assert not torch.cuda.is_available() or compiled.metadata.shared <= 64 << 10
