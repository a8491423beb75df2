"""The Triton kernels on the CPU, against plain torch in float64. Run as a process of its own: the interpreter has to be
chosen before the first kernel is defined. Prints each case's relative error as JSON."""

import tests.triton_interpreter  # isort: skip  # noqa: F401

import json
import math

import torch
import torch.nn.functional as F

from engine.kernels.attention_batch import Groups
from engine.kernels.dense_attention import dense_attention
from engine.kernels.registry import Shape
from engine.kernels.rms_norm import add_rms_norm as plain_norm
from engine.kernels.rope_kv_write import rope_kv_write as plain_rope
from engine.kernels.self_check import random_batch
from engine.kernels.triton.decode_attention import paged_decode_attention
from engine.kernels.triton.gemv import gemv
from engine.kernels.triton.matmul import Tiling, matmul
from engine.kernels.triton.prefill_attention import paged_prefill_attention
from engine.kernels.triton.rms_norm import add_rms_norm
from engine.kernels.triton.rope_kv_write import rope_kv_write
from engine.kernels.triton.shared_prefix import shared_prefix_attention
from engine.kernels.triton.swiglu import swiglu
from engine.models.config import RopeConfig
from engine.models.rope import rope_table

CPU = torch.device("cpu")
errors: dict[str, float] = {}


def note(name: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    difference = float((out.double() - expected.double()).norm() / expected.double().norm())
    errors[name] = difference if math.isfinite(difference) else 1e9


def shape_of(head_dim: int, block_size: int, group: int) -> Shape:
    return Shape(2 * group, 2, head_dim, block_size, 64, 96, torch.float32)


def attention() -> None:
    mixed = [(0, 5), (16, 17), (30, 3), (0, 33)]
    for shape, lengths, window in (
        (shape_of(64, 16, 1), mixed, None),
        (shape_of(24, 16, 4), mixed, 7),
        (shape_of(32, 64, 3), [(100, 20)], None),
    ):
        query, pool, batch = random_batch(lengths, shape, CPU, 16)
        expected = dense_attention(query.double(), pool, 1, batch, window, torch.float64)
        for uniform in (False, True):
            out = paged_prefill_attention(query, pool, 1, batch, window, uniform)
            note(f"prefill attention {shape.head_dim} {shape.block_size} {window} {uniform}", out, expected)
    for window in (None, 20):
        query, pool, batch = random_batch([(cached, 1) for cached in (0, 15, 16, 100)], shape_of(32, 16, 3), CPU, 16)
        expected = dense_attention(query.double(), pool, 1, batch, window, torch.float64)
        for parts in (1, 3):
            note(
                f"decode attention {window} {parts}",
                paged_decode_attention(query, pool, 1, batch, window, parts),
                expected,
            )
    query, pool, batch = random_batch([(cached, 1) for cached in (49, 69, 19, 63)], shape_of(32, 16, 2), CPU, 16)
    batch.tables[1, :3] = batch.tables[3, :3] = batch.tables[0, :3]
    expected = dense_attention(query.double(), pool, 1, batch, None, torch.float64)
    members, tiles, lens = [0, 1, 3, 2], [[0, 3, 48], [0, 0, 0]], [48, 48, 0, 48]
    groups = Groups(*(torch.tensor(values, dtype=torch.int32) for values in (members, tiles, lens)))
    for parts, own in ((1, 1), (2, 3)):
        shared = shared_prefix_attention(query, pool, 1, batch, groups, parts, own)
        out = paged_decode_attention(query, pool, 1, batch, None, own, shared)
        note(f"shared prefix {parts} {own}", out, expected)


def elementwise() -> None:
    residual, parts, weight = torch.randn(3, 40), torch.randn(2, 3, 40), torch.randn(40)
    expected_residual = residual.clone()
    expected = plain_norm(expected_residual, parts, weight, 1e-6)
    note("norm", add_rms_norm(residual, parts, weight, 1e-6), expected)
    note("residual", residual, expected_residual)
    gate_up = torch.randn(3, 40)
    note("swiglu", swiglu(gate_up), F.silu(gate_up[:, :20].double()) * gate_up[:, 20:].double())
    heads, kv_heads, dim, size = 4, 2, 24, 16
    table = rope_table(RopeConfig(1e4, "default", {}), dim, 64, CPU)
    qkv = torch.randn(5, (heads + 2 * kv_heads) * dim)
    norms = torch.randn(dim), torch.randn(dim)
    positions = torch.tensor([0, 15, 16, 33, 7], dtype=torch.int32)
    blocks = torch.tensor([1, 4, 2, 3, -1], dtype=torch.int32)
    for names in ((None, None), norms):
        pools = [torch.zeros(6, 2, 2, kv_heads, size, dim) for _ in range(2)]
        rest = (*names, 1e-6, table, positions, blocks)
        note("rope", rope_kv_write(qkv, *rest, pools[0], 1, heads), plain_rope(qkv, *rest, pools[1], 1, heads))
        note("kv write", *pools)


def products() -> None:
    for rows in (1, 2, 4):
        x, weight, bias, norm = torch.randn(rows, 100), torch.randn(24, 100), torch.randn(24), torch.randn(100)
        normed = F.rms_norm(x.double(), (100,), norm.double(), 1e-6)
        product = normed @ weight.double().T + bias.double()
        gate, up = product.chunk(2, -1)
        options = {"norm_weight": norm, "eps": 1e-6, "columns": 64}
        note(f"gemv norm {rows}", gemv(x, weight, bias, **options), product)
        note(f"gemv gated {rows}", gemv(x, weight, bias, gated=True, **options), F.silu(gate) * up)
        residual = torch.randn(rows, 24)
        expected = residual.double() + x.double() @ weight.double().T
        note(f"gemv residual {rows}", gemv(x, weight, residual=residual, columns=128), expected)
    x, weight = torch.randn(19, 100), torch.randn(40, 100)
    note("matmul", matmul(x, weight, None, Tiling(16, 32, 32)), x.double() @ weight.double().T)
    note("matmul parts", matmul(x, weight, None, Tiling(16, 32, 32, 3)).sum(0), x.double() @ weight.double().T)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    attention()
    elementwise()
    products()
    print(json.dumps(errors))
