"""Fast kernels against plain torch in float64, on fresh random inputs with poisoned outputs. Needs a CUDA device."""

import pytest
import torch

from engine.kernels.attention_batch import Groups
from engine.kernels.dense_attention import dense_attention
from engine.kernels.registry import Shape
from engine.kernels.self_check import CHECKS, TOLERANCE, random_batch, relative_error
from engine.kernels.triton.decode_attention import paged_decode_attention
from engine.kernels.triton.gemv import gemv
from engine.kernels.triton.matmul import UNIFORM, Tiling, matmul
from engine.kernels.triton.prefill_attention import paged_prefill_attention
from engine.kernels.triton.shared_prefix import shared_prefix_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda")


def shape_of(head_dim: int = 128, block_size: int = 64, group: int = 4, dtype=torch.float16) -> Shape:
    return Shape(2 * group, 2, head_dim, block_size, 256, 512, dtype)


@pytest.fixture(autouse=True)
def poison():
    """What torch hands out next as empty memory holds NaN."""
    torch.manual_seed(torch.seed() % 2**31)
    junk = [torch.full((1 << 22,), torch.nan, device=DEVICE) for _ in range(4)]
    del junk


SHAPES = [
    shape_of(),
    shape_of(64, 16, 1),
    shape_of(64, 32, 3),
    shape_of(128, 128, 8),
    shape_of(96, 64, 2, torch.bfloat16),
    shape_of(24, 16, 2, torch.float32),
]
LENGTHS = [[(0, 1), (0, 17), (100, 64), (63, 1), (64, 65), (0, 333)], [(3968, 128)], [(127, 129), (5, 3)]]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("tile_rows", [16, 64, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_attention(shape, lengths, tile_rows, window):
    query, pool, batch = random_batch(lengths, shape, DEVICE, tile_rows)
    expected = dense_attention(query.double(), pool, 1, batch, window, torch.float64)
    for uniform in (False, True):
        out = paged_prefill_attention(query, pool, 1, batch, window, uniform)
        assert relative_error(out, expected) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("num_parts", [1, 4, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_attention(shape, num_parts, window):
    lengths = [(cached, 1) for cached in (0, 1, 62, 63, 64, 127, 128, 500, 4095)]
    query, pool, batch = random_batch(lengths, shape, DEVICE, 16)
    expected = dense_attention(query.double(), pool, 1, batch, window, torch.float64)
    batch.kv_len[0] = 0  # a padding row
    out = paged_decode_attention(query, pool, 1, batch, window, num_parts)
    assert relative_error(out[1:], expected[1:]) < TOLERANCE[shape.dtype]
    assert not out[0].any()


@pytest.mark.parametrize("shape", [shape_of(), shape_of(64, 16, 1), shape_of(64, 32, 3)], ids=str)
def test_shared_prefix_attention(shape):
    size = shape.block_size
    lengths = [(20 * size + extra, 1) for extra in range(30)] + [(3, 1), (40 * size, 1)]
    query, pool, batch = random_batch(lengths, shape, DEVICE, 16)
    batch.tables[1:20, :18] = batch.tables[0, :18]
    batch.tables[21:30, :20] = batch.tables[20, :20]
    expected = dense_attention(query.double(), pool, 1, batch, None, torch.float64)
    members, tiles, lens = [], [], [0] * 32
    for first, last, blocks in ((0, 20, 18), (20, 30, 20)):
        for start in range(first, last, 8):
            rows = list(range(start, min(start + 8, last)))
            tiles.append([len(members), len(rows), blocks * size])
            members += rows
        lens[first:last] = [blocks * size] * (last - first)
    tiles.append([0, 0, 0])
    groups = Groups(*(torch.tensor(v, dtype=torch.int32, device=DEVICE) for v in (members, tiles, lens)))
    for parts, own in ((1, 1), (4, 2)):
        shared = shared_prefix_attention(query, pool, 1, batch, groups, parts, own)
        out = paged_decode_attention(query, pool, 1, batch, None, own, shared)
        assert relative_error(out, expected) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operation", CHECKS)
def test_self_checks_pass_and_would_notice(operation, dtype):
    from engine.kernels.registry import TABLE

    shape = shape_of(dtype=dtype)
    function = TABLE[operation][0].load()
    assert CHECKS[operation](function, shape, DEVICE) < TOLERANCE[dtype]

    def wrong(*arguments, **options):
        result = function(*arguments, **options)
        for tensor in (result, getattr(result, "partial", None)):
            if isinstance(tensor, torch.Tensor):
                tensor.mul_(1.05)
        return result

    assert CHECKS[operation](wrong, shape, DEVICE) > TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("pdl", [False, True])
def test_gemv_of_odd_sizes(rows, pdl):
    if pdl and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs SM90")
    x = torch.randn(rows, 2561, device=DEVICE, dtype=torch.float16)
    weight = torch.randn(519, 2561, device=DEVICE, dtype=torch.float16) * 0.02
    bias = torch.randn(519, device=DEVICE, dtype=torch.float16)
    expected = x.double() @ weight.double().T + bias.double()
    assert relative_error(gemv(x, weight, bias, pdl=pdl), expected) < 2e-3


@pytest.mark.parametrize("arch", [None, "ptx75"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs, outputs", [(576, 1000), (2560, 6144), (4096, 70), (9728, 2560), (10240, 3), (8, 200)])
def test_cuda_gemv(inputs, outputs, dtype, arch):
    from engine.kernels.cuda import gemv as cuda

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=DEVICE).to(dtype)

    x, norm = random(1, inputs), random(inputs)
    weight, bias = random(2 * outputs, inputs) * inputs**-0.5, random(2 * outputs)
    normed = torch.nn.functional.rms_norm(x.double(), (inputs,), norm.double(), 1e-6)
    product = normed @ weight.double().T + bias.double()
    gate, up = product.chunk(2, dim=1)
    limit = TOLERANCE[dtype]
    if cuda.supports(inputs, dtype, norm=True):
        assert relative_error(cuda.gemv(x, weight, bias, norm_weight=norm, eps=1e-6, arch=arch), product) < limit
        gated = cuda.gemv(x, weight, bias, norm_weight=norm, eps=1e-6, gated=True, arch=arch)
        assert relative_error(gated, torch.nn.functional.silu(gate) * up) < limit
    plain = x.double() @ weight.double().T
    assert relative_error(cuda.gemv(x, weight, arch=arch), plain) < limit
    residual = random(1, 2 * outputs)
    expected = residual.double() + plain
    out = cuda.gemv(x, weight, residual=residual, arch=arch)
    assert out is residual and relative_error(out, expected) < limit


@pytest.mark.parametrize("rows", [1, 16, 70])
@pytest.mark.parametrize("tiling", [UNIFORM, Tiling(16, 64, 128, 4, 4, 4), Tiling(64, 128, 64, 2, 8, 3)], ids=str)
def test_matmul(rows, tiling):
    x = torch.randn(rows, 1000, device=DEVICE, dtype=torch.float16)
    weight = torch.randn(330, 1000, device=DEVICE, dtype=torch.float16) * 0.03
    out = matmul(x, weight, None, tiling)
    out = out if tiling.parts == 1 else out.sum(0)
    assert relative_error(out, x.double() @ weight.double().T) < 2e-3


def test_uniform_results_do_not_depend_on_the_batch():
    shape = shape_of()
    weight = torch.randn(700, 256, device=DEVICE, dtype=torch.float16)
    x = torch.randn(133, 256, device=DEVICE, dtype=torch.float16)
    whole = matmul(x, weight, None, UNIFORM)
    assert torch.equal(whole[40:41], matmul(x[40:41], weight, None, UNIFORM))
    query, pool, batch = random_batch([(0, 200)], shape, DEVICE, 64)
    whole = paged_prefill_attention(query, pool, 1, batch, None, uniform=True)
    for start in (1, 37, 130, 199):
        part = random_batch([(start, 200 - start)], shape, DEVICE, 16)[2]
        part.tables.copy_(batch.tables)
        out = paged_prefill_attention(query[start:].contiguous(), pool, 1, part, None, uniform=True)
        assert torch.equal(out, whole[start:])
