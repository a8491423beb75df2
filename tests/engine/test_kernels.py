"""Each reference kernel against its formula, computed in float64 by the plainest code."""

import math

import pytest
import torch

from engine.kernels.kv_write import kv_write
from engine.kernels.linear import PACKED_ROWS, Linear, can_pack, linear, pack
from engine.kernels.paged_attention import AttentionPlan, Chunk, paged_attention
from engine.kernels.rms_norm import rms_norm
from engine.kernels.rope import apply_rope
from engine.kernels.swiglu import swiglu
from engine.kv_pool import KVLayout, KVPool
from tests.reproducible import reproducible_products

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_rms_norm_is_its_formula():
    x, weight = torch.randn(5, 3, 48), torch.randn(48)
    wide = x.double()
    expected = wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) / 48 + 1e-3) * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), expected.float())


def test_swiglu_is_its_formula():
    gate, up = torch.randn(4, 10), torch.randn(4, 10)
    expected = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    torch.testing.assert_close(swiglu(torch.cat([gate, up], dim=1)), expected.float())


def test_rope_rotates_each_pair_by_its_angle():
    x, angles = torch.randn(6, 2, 8), torch.randn(6, 4)
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], dim=1)
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    turned = pairs * torch.polar(torch.ones(6, 1, 4, dtype=torch.float64), angles.double()[:, None])
    torch.testing.assert_close(apply_rope(x, table), torch.cat([turned.real, turned.imag], -1).float())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 3, PACKED_ROWS, PACKED_ROWS + 1, 40])
def test_linear_is_its_formula_with_and_without_packed_weights(num_rows, bias):
    x, layer = torch.randn(num_rows, 33), Linear(torch.randn(20, 33), torch.randn(20) if bias else None)
    expected = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    torch.testing.assert_close(linear(x, layer), expected.float())
    if can_pack(layer.weight):
        pack(layer)
        torch.testing.assert_close(linear(x, layer), expected.float())


@reproducible_products
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_of_linear_is_the_same_bits_among_any_rows_packed_or_not(bias):
    x, layer = torch.randn(300, 1536), Linear(torch.randn(70, 1536), torch.randn(70) if bias else None)
    expected = linear(x, layer)
    for num_rows in (1, 2, 7, 8, 9, 33, 128):
        assert torch.equal(linear(x[:num_rows], layer), expected[:num_rows])
    pack(layer)
    for num_rows in (1, 3, 8):
        assert torch.equal(linear(x[:num_rows], layer), expected[:num_rows])


def test_only_float32_weights_on_cpu_are_packed():
    assert not can_pack(torch.zeros(2, 2, dtype=torch.bfloat16))
    assert not can_pack(torch.zeros(2, 2, device="meta"))


def test_kv_write_touches_the_named_places_of_one_layer_only():
    pool = torch.zeros(5, 3, 2, 2, 4, 6)
    key_value = torch.randn(3, 2, 2, 6)
    kv_write(pool, 1, key_value, torch.tensor([4, 0, 4]), torch.tensor([3, 0, 1]))
    for token, (block, offset) in enumerate([(4, 3), (0, 0), (4, 1)]):
        assert torch.equal(pool[block, 1, :, :, offset], key_value[token])
        pool[block, 1, :, :, offset] = 0
    assert pool.count_nonzero() == 0


class Case:
    """Sequences whose keys and values lie scattered over a pool full of other numbers."""

    def __init__(self, block_size: int, lengths: list[int], num_heads: int = 6, num_kv_heads: int = 2, dim: int = 8):
        self.layout = KVLayout(2, num_kv_heads, block_size, dim, torch.float32)
        needs = [-(-length // block_size) for length in lengths]
        ids = torch.randperm(sum(needs) + 3).tolist()
        self.pool = KVPool.allocate(self.layout, len(ids)).tensor.normal_(0, 3)
        self.tables = [[ids.pop() for _ in range(need)] for need in needs]
        self.keys = [torch.randn(length, num_kv_heads, dim) for length in lengths]
        self.values = [torch.randn(length, num_kv_heads, dim) for length in lengths]
        for table, keys, values in zip(self.tables, self.keys, self.values, strict=True):
            at = torch.arange(len(keys))
            blocks, offsets = torch.tensor(table)[at // block_size], at % block_size
            kv_write(self.pool, 1, torch.stack([keys, values], dim=1), blocks, offsets)
        self.num_heads = num_heads

    def attend(self, chunks: list[tuple[int, int, int]], window: int | None = None):
        """chunks: (sequence, start, length). Returns what the kernel gives and what the formula gives."""
        query = torch.randn(sum(length for _, _, length in chunks), self.num_heads, self.layout.head_dim)
        described = [Chunk(start, length, self.tables[sequence]) for sequence, start, length in chunks]
        plan = AttentionPlan(described, self.layout, {window}, CPU)
        return paged_attention(query, self.pool, 1, plan, window), self.formula(query, chunks, window)

    def formula(self, query: torch.Tensor, chunks: list[tuple[int, int, int]], window: int | None) -> torch.Tensor:
        rows = []
        at = 0
        for sequence, start, length in chunks:
            for position in range(start, start + length):
                first = 0 if window is None else max(0, position - window + 1)
                for head in range(self.num_heads):
                    kv_head = head // (self.num_heads // self.layout.num_kv_heads)
                    keys = self.keys[sequence][first : position + 1, kv_head].double()
                    values = self.values[sequence][first : position + 1, kv_head].double()
                    scores = keys @ query[at, head].double() / math.sqrt(self.layout.head_dim)
                    rows.append(torch.softmax(scores, 0) @ values)
                at += 1
        return torch.stack(rows).float().view(len(query), -1)


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("window", [None, 1, 7, 200])
def test_attention_of_a_mixed_batch_is_its_formula(block_size, window):
    case = Case(block_size, [1, 40, 16, 230, 33, 300])
    chunks = [(0, 0, 1), (1, 0, 40), (2, 15, 1), (3, 100, 130), (4, 32, 1), (5, 299, 1)]
    given, expected = case.attend(chunks, window)
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("window", [None, 64, 150, 500])
def test_attention_far_into_a_sequence_is_its_formula(window):
    case = Case(16, [700, 650])
    given, expected = case.attend([(0, 690, 10), (1, 649, 1)], window)
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 1)])
def test_attention_with_one_or_all_heads_for_keys_is_its_formula(num_heads, num_kv_heads):
    case = Case(8, [20, 9], num_heads, num_kv_heads)
    given, expected = case.attend([(0, 4, 16), (1, 8, 1)])
    torch.testing.assert_close(given, expected)


def test_attention_gives_keys_after_the_query_no_weight_however_large_they_are():
    case = Case(8, [24])
    plan = AttentionPlan([Chunk(5, 1, case.tables[0])], case.layout, {None}, CPU)
    query = torch.randn(1, 6, 8)
    before = paged_attention(query, case.pool, 1, plan, None)
    case.pool[case.tables[0][0], 1, 0, :, 6:] = 1e30
    case.pool[case.tables[0][1:], 1] = 1e30
    assert torch.equal(paged_attention(query, case.pool, 1, plan, None), before)
