"""Kernels of quantized weights without a GPU: their results under Triton's interpreter, and what they compile to."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels.quantized_linear import dequantize
from engine.kernels.quantized_products import QuantizedProducts
from engine.quantize.rounding import round_weight

ROOT = Path(__file__).resolve().parent.parent.parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_the_kernels_give_the_products_of_the_weights_by_definition():
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.quantized_kernels"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@needs_triton
@pytest.mark.parametrize(
    ("kernel", "capability", "instruction"), [("_gemv", 75, ""), ("_matmul", 90, "wgmma.mma_async")]
)
def test_the_kernels_compile_for_the_devices_they_are_meant_for(kernel, capability, instruction):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from engine.kernels.triton import w4a16

    function = getattr(w4a16, kernel)
    pointers = {"x": "*fp16", "codes": "*i32", "scales": "*fp16", "zeros": "*fp16", "permutation": "*i32"}
    types = {**pointers, "bias": "*fp16", "norm_weight": "*fp16", "out": "*fp16", "eps": "fp32"}
    constants = {"BITS": 4, "GROUP": 128, "ZEROS": True, "PERMUTED": False, "BIAS": False, "PDL": False}
    constants |= {"M": 1, "NORM": True, "GATED": True, "RESIDUAL": False, "ROWS": 2, "BLOCKS": 8}
    constants |= {"TILE_M": 16, "TILE_N": 64, "PARTS": 1}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    signature = {name: types.get(name, "i32") for name in function.arg_names if name not in constants}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(function.arg_names)
        if name not in constants and name != "eps"
    }
    source = ASTSource(
        function,
        signature={name: signature[name] for name in function.arg_names},
        constexprs=constants,
        attrs=aligned,
    )
    built = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4 if instruction else 1})
    assert f".target sm_{capability}" in built.asm["ptx"]
    assert instruction in built.asm["ptx"]
    assert "ld.global.v4.b32" in built.asm["ptx"] or "cp.async" in built.asm["ptx"], (
        "weights are read 16 bytes at a time"
    )


def test_without_kernels_a_gpu_multiplies_with_the_dequantized_weight():
    """What a device gets on which every kernel fails its check."""
    torch.manual_seed(0)
    weight = torch.randn(16, 130)
    products = QuantizedProducts(
        dict.fromkeys(("gemv", "matmul", "dequantize"), "torch"), fusible=True, beside_plain=False
    )
    assert not products.fuses_rows(1)
    for scheme in ("w4a16", "w8a16"):
        layer = round_weight(weight, scheme)
        for rows in (1, 70):
            x = torch.randn(rows, 130)
            torch.testing.assert_close(products.linear(x, layer), x @ dequantize(layer).T)
