"""Kernels of quantized weights on the device, against double precision, and a quantized model served by the GPU engine.
Needs a CUDA device."""

import random

import pytest
import torch
import torch.nn.functional as F

from engine.gpu_runner import kernel_shape
from engine.kernels.quantized_linear import QuantizedLinear, dequantize, from_codes, int8_linear, quantized_linear
from engine.kernels.quantized_products import CHECKS, OPERATIONS, TOLERANCE, choose_products
from engine.kernels.registry import Kernels, Tuning
from engine.kernels.self_check import choose
from engine.kernels.triton import w4a16
from engine.kv_pool import KVPool
from engine.quantize.calibration import load_tokenizer, samples
from engine.quantize.layerwise import LayerwiseQuantizer
from engine.quantize.rounding import round_weight
from engine.quantize.scheme import Precision
from engine.runner import ModelRunner, SequenceChunk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda")
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
needs_dot = pytest.mark.skipif(CAPABILITY < (8, 0), reason="tl.dot needs SM80")


@pytest.fixture(autouse=True)
def poison():
    """What torch hands out next as empty memory holds NaN."""
    torch.manual_seed(torch.seed() % 2**31)
    junk = [torch.full((1 << 22,), torch.nan, device=DEVICE) for _ in range(4)]
    del junk


def make(bits=4, outputs=518, inputs=2560, group=128, zeros=True, permuted=False, bias=False) -> QuantizedLinear:
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
    groups = torch.arange(inputs, device=DEVICE) // group
    count = int(groups.max()) + 1
    order = groups[torch.randperm(inputs, device=DEVICE)] if permuted else None
    scales = (torch.rand(outputs, count, device=DEVICE) + 0.5).half() / 256
    points = torch.randint(0, 1 << bits, (outputs, count), device=DEVICE).half() if zeros else None
    layer = from_codes(codes, scales, points, bits=bits, group_size=group, groups=order)
    layer.bias = torch.randn(outputs, device=DEVICE).half() if bias else None
    return layer


LAYERS = {
    "symmetric": {"zeros": False},
    "asymmetric": {},
    "bias": {"bias": True},
    "act-order": {"permuted": True},
    "group 32": {"group": 32},
    "odd sizes": {"outputs": 518, "inputs": 2600},
    "int8": {"bits": 8, "zeros": False},
    "int8 group 32": {"bits": 8, "group": 32},
}


def off(out: torch.Tensor, expected: torch.Tensor) -> float:
    error = float((out.double() - expected).norm() / expected.norm())
    return error if error == error else float("inf")


def expected_product(x: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
    return F.linear(x.double(), dequantize(layer, torch.float64), None if layer.bias is None else layer.bias.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_gemv(name, dtype):
    layer = make(**LAYERS[name])
    if layer.bias is not None:
        layer.bias = layer.bias.to(dtype)
    norm = torch.randn(layer.in_features, device=DEVICE).to(dtype)
    for rows in (1, 2, 4):
        x = torch.randn(rows, layer.in_features, device=DEVICE).to(dtype)
        for tile in ({}, {"rows": 2, "blocks": 16, "num_warps": 2}, {"rows": 8, "blocks": 4, "num_warps": 4}):
            assert off(w4a16.gemv(x, layer, **tile), expected_product(x, layer)) < TOLERANCE[dtype]
        normed = F.rms_norm(x.double(), norm.shape, norm.double(), 1e-6)
        gate, up = expected_product(normed, layer).chunk(2, 1)
        for pdl in (False, True) if CAPABILITY >= (9, 0) else (False,):
            out = w4a16.gemv(x, layer, norm_weight=norm, eps=1e-6, gated=True, pdl=pdl)
            assert off(out, F.silu(gate) * up) < TOLERANCE[dtype]
        residual = torch.randn(rows, layer.out_features, device=DEVICE).to(dtype)
        expected = residual.double() + expected_product(x, layer)
        w4a16.gemv(x, layer, residual=residual)
        assert off(residual, expected) < TOLERANCE[dtype]


@needs_dot
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_matmul(name, dtype):
    layer = make(**LAYERS[name])
    if layer.bias is not None:
        layer.bias = layer.bias.to(dtype)
    for rows in (1, 5, 16, 33, 64, 200):
        x = torch.randn(rows, layer.in_features, device=DEVICE).to(dtype)
        for split in (False, True):
            out = w4a16.matmul(x, layer, w4a16.tiling_for(rows, layer, split))
            assert off(out.sum(0) if out.ndim == 3 else out, expected_product(x, layer)) < TOLERANCE[dtype]


@needs_dot
def test_with_the_uniform_tiling_a_row_does_not_depend_on_the_others():
    layer = make()
    x = torch.randn(130, layer.in_features, device=DEVICE).half()
    whole = w4a16.matmul(x, layer, w4a16.UNIFORM)
    assert torch.equal(w4a16.matmul(x[77:78].contiguous(), layer, w4a16.UNIFORM)[0], whole[77])


@pytest.mark.parametrize("name", LAYERS)
def test_dequantize(name):
    layer = make(**LAYERS[name])
    assert off(w4a16.dequantize(layer, torch.float16), dequantize(layer, torch.float64)) < 1e-3


@pytest.mark.parametrize("rows", [1, 16, 17, 300])
def test_the_int8_product_is_that_of_the_rounded_activations(rows):
    layer = round_weight(torch.randn(512, 256, device=DEVICE), "w8a8")
    x = torch.randn(rows, 256, device=DEVICE)
    assert off(int8_linear(x, layer), quantized_linear(x.double(), layer).double()) < 1e-4


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_checks_at_start_pass_and_would_notice(operation, monkeypatch):
    if operation == "matmul" and CAPABILITY < (8, 0):
        pytest.skip("tl.dot needs SM80")
    layer = make(outputs=256)
    assert CHECKS[operation](layer, torch.float16) < TOLERANCE[torch.float16]
    kernel = getattr(w4a16, operation)
    monkeypatch.setattr(w4a16, operation, lambda *given, **options: kernel(*given, **options) * 1.05)
    assert CHECKS[operation](layer, torch.float16) > TOLERANCE[torch.float16]
    products = choose_products([layer], torch.float16, CAPABILITY, False)
    assert products is not None and products.backends[operation] == "torch"


@pytest.mark.parametrize(
    ("quantization", "head"), [("w4a16", "full"), ("w4a16", "int8"), ("mixed", "int4"), ("w8a8", "full")]
)
def test_products_and_logits_on_the_device_are_those_of_the_cpu(quantization, head, tiny_model, tmp_path):
    """Of one quantized directory: products by the chosen kernels for any number of rows, logits by the reference."""
    plain = tiny_model("qwen3", hidden_size=256, intermediate_size=512, head_dim=64)
    tokens = samples(load_tokenizer(plain), num_tokens=64, most=2)
    out = tmp_path / "model"
    LayerwiseQuantizer(plain, out, Precision(quantization, head), "rtn", tokens, torch.device("cpu"), print).run()
    options = {"block_size": 16, "max_model_len": 128}
    cpu = ModelRunner.load(out, dtype="float32", **options)
    cpu.use_pool(KVPool.allocate(cpu.layout, 8))
    prompt = [random.Random(3).randrange(512) for _ in range(100)]
    expected = cpu.run([SequenceChunk(prompt, 0, list(range(8)), logits="all")])
    gpu = ModelRunner.load(out, dtype="float16", device="cuda", **options)
    products = choose_products(gpu.model.weights.linears(), torch.float16, CAPABILITY, False)
    kernels = Kernels(choose(kernel_shape(gpu), DEVICE), Tuning(), gpu.config.num_kv_heads, quantized=products)
    hidden = torch.randn(100, gpu.config.hidden_size, device=DEVICE).half()
    reference = cpu.model.weights.layers[0].qkv
    for rows in (1, 4, 7, 100):
        product = kernels.linear(hidden[:rows], gpu.model.weights.layers[0].qkv)
        assert off(product.cpu(), quantized_linear(hidden[:rows].cpu().float(), reference).double()) < 5e-3
    gpu.use_pool(KVPool.allocate(gpu.layout, 8, "cuda"))
    logits = gpu.run([SequenceChunk(prompt, 0, list(range(8)), logits="all")])
    assert off(logits.cpu(), expected.double()) < (0.1 if quantization == "w8a8" else 0.03)
