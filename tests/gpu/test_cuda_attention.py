"""The CUDA C++ attention kernels on a GPU, against float64. Needs a CUDA device of SM75 or newer, and nvcc.

`native` is code for the device at hand; `ptx75` is what Turing runs, compiled for this device by its driver."""

import dataclasses
import math

import pytest
import torch

from engine.kernels.cuda.attention import paged_decode_attention, paged_prefill_attention, workspace_floats
from engine.kernels.cuda.build import PTX75, BuildError, find_nvcc
from tests.paged_attention_cases import LAYERS, assert_attention_close, expected_attention, make_case


def missing() -> str:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.get_device_capability() < (7, 5):
        return "needs SM75 or newer"
    try:
        find_nvcc()
    except BuildError as error:
        return str(error)
    return ""


pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    pytest.mark.parametrize("arch", [None, PTX75], ids=["native", "ptx75"]),
]
shapes = [
    pytest.mark.parametrize("head_dim", [64, 128]),
    pytest.mark.parametrize("block_size", [16, 32, 64, 128]),
    pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 3), (6, 2), (8, 2), (10, 2), (14, 2), (16, 2)]),
]


def over_shapes(test):
    for mark in shapes:
        test = mark(test)
    return test


def prefill(query, pool, layer, batch, window, arch):
    out = torch.full(query.shape, math.nan, dtype=query.dtype, device=query.device)
    assert paged_prefill_attention(query, pool, layer, batch, window, out=out, arch=arch) is out
    return out


def decode(query, pool, layer, batch, window, num_parts, arch):
    """Of the first S rows; the output and the workspace start as NaN."""
    size = len(batch.slots)
    out = torch.full((size, *query.shape[1:]), math.nan, dtype=query.dtype, device=query.device)
    floats = workspace_floats(size, *query.shape[1:], num_parts)
    workspace = torch.full((floats,), math.nan, device=query.device)
    paged_decode_attention(query[:size], pool, layer, batch, window, num_parts, out=out, workspace=workspace, arch=arch)
    return out


@over_shapes
def test_prefill_of_several_sequences_with_and_without_cached_prefixes(
    arch, head_dim, block_size, num_heads, num_kv_heads
):
    kv_lens = [1, 63, 64, 65, 700, 130, 128, 257, 300]
    query_lens = [1, 63, 64, 1, 700, 0, 128, 200, 7]
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    query, pool, batch = make_case(kv_lens, query_lens, **shape, seed=head_dim + block_size, device="cuda")
    for layer, window in [(0, None), (LAYERS - 1, 1), (0, 64), (1, 100)]:
        expected = expected_attention(query, pool, layer, batch, window)
        assert_attention_close(prefill(query, pool, layer, batch, window, arch), expected)


@over_shapes
def test_decode_of_several_lengths_and_padding_rows(arch, head_dim, block_size, num_heads, num_kv_heads):
    kv_lens = [0, 1, 63, 64, 65, 0, 128, 700, 4096]
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    query, pool, batch = make_case(kv_lens, [1] * len(kv_lens), **shape, seed=head_dim + block_size, device="cuda")
    for layer, window, num_parts in [(0, None, 1), (1, None, 7), (0, None, 16), (1, 1, 3), (0, 64, 1), (1, 333, 4)]:
        expected = expected_attention(query, pool, layer, batch, window)[: len(kv_lens)]
        assert_attention_close(decode(query, pool, layer, batch, window, num_parts, arch), expected)


@pytest.mark.parametrize("window", [None, 50])
def test_every_length_up_to_three_tiles(arch, window):
    shape = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128, "block_size": 16}
    lengths = list(range(1, 194))
    query, pool, batch = make_case(lengths, lengths, **shape, device="cuda")
    expected = expected_attention(query, pool, 1, batch, window)
    assert_attention_close(prefill(query, pool, 1, batch, window, arch), expected)
    query, pool, batch = make_case(lengths, [1] * len(lengths), **shape, device="cuda")
    expected = expected_attention(query, pool, 1, batch, window)[: len(lengths)]
    for num_parts in (1, 2):
        assert_attention_close(decode(query, pool, 1, batch, window, num_parts, arch), expected)


@pytest.mark.parametrize("window", [None, 70])
def test_prefill_gives_the_same_result_however_a_prompt_is_cut(arch, window):
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "block_size": 32}
    query, pool, batch = make_case([500], [500], **shape, device="cuda")
    whole = prefill(query, pool, 0, batch, window, arch)[:500]
    cuts = [0, 1, 70, 128, 333, 500]
    for start, end in zip(cuts, cuts[1:]):
        tiles = [(0, row) for row in range(0, end - start, 64)]
        numbers = {"query_start": [start], "query_len": [end - start], "kv_len": [end], "tiles": tiles}
        tensors = {name: torch.tensor(value, dtype=torch.int32, device="cuda") for name, value in numbers.items()}
        chunk = prefill(query, pool, 0, dataclasses.replace(batch, **tensors), window, arch)
        torch.testing.assert_close(chunk[start:end], whole[start:end], atol=2e-3, rtol=2e-3)


def test_repeated_launches_give_the_same_bits(arch):
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block_size": 64}
    query, pool, batch = make_case([700, 333], [700, 100], **shape, device="cuda")
    whole = prefill(query, pool, 0, batch, None, arch)[:800]
    assert all(torch.equal(prefill(query, pool, 0, batch, None, arch)[:800], whole) for _ in range(20))
    first = decode(query, pool, 0, batch, None, 4, arch)
    assert all(torch.equal(decode(query, pool, 0, batch, None, 4, arch), first) for _ in range(20))


def test_scores_beyond_the_range_of_half_floats_stay_finite(arch):
    shape = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128, "block_size": 64}
    query, pool, batch = make_case([300], [300], **shape, device="cuda")
    query = query * 64
    pool[:, :, 0] *= 16
    scores = query[:300].flatten(0, 1).double() @ pool[:, 0, 0].nan_to_num().double().flatten(0, 2).T
    assert scores.abs().max() > torch.finfo(torch.float16).max
    expected = expected_attention(query, pool, 0, batch, None)
    assert_attention_close(prefill(query, pool, 0, batch, None, arch), expected, tolerance=2e-2)


def test_a_recorded_decode_serves_other_lengths_and_tables(arch):
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block_size": 64}
    cases = [
        make_case(kv_lens, [1] * 4, **shape, seed=seed, device="cuda")
        for seed, kv_lens in enumerate([[4000, 1, 64, 500], [3, 3900, 0, 65], [0, 0, 4032, 63]])
    ]
    blocks = max(len(pool) for _, pool, _ in cases)
    width = max(batch.tables.shape[1] for _, _, batch in cases)
    query = cases[0][0][:4].clone()
    pool = torch.zeros((blocks, *cases[0][1].shape[1:]), dtype=torch.float16, device="cuda")
    tables = torch.zeros((cases[0][2].tables.shape[0], width), dtype=torch.int32, device="cuda")
    batch = dataclasses.replace(cases[0][2], tables=tables)
    out = torch.empty_like(query)
    workspace = torch.empty(workspace_floats(4, 8, 128, 6), device="cuda")

    def fill(case) -> None:
        other_query, other_pool, other = case
        query.copy_(other_query[:4])
        pool[: len(other_pool)].copy_(other_pool)
        tables[:, : other.tables.shape[1]].copy_(other.tables)
        batch.slots.copy_(other.slots)
        batch.kv_len.copy_(other.kv_len)

    cases = [(q, p, dataclasses.replace(b, slots=b.slots.clone(), kv_len=b.kv_len.clone())) for q, p, b in cases]
    fill(cases[0])
    paged_decode_attention(query, pool, 1, batch, None, 6, out=out, workspace=workspace, arch=arch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_decode_attention(query, pool, 1, batch, None, 6, out=out, workspace=workspace, arch=arch)
    for case in [*cases[1:], cases[0]]:
        fill(case)
        out.fill_(math.nan)
        workspace.fill_(math.nan)
        graph.replay()
        assert_attention_close(out, expected_attention(case[0][:4], case[1], 1, case[2], None))


def test_a_recorded_prefill_serves_other_tiles(arch):
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}
    query, pool, batch = make_case([300, 200], [130, 190], **shape, device="cuda")
    expected = expected_attention(query, pool, 0, batch, None)
    prefill(query, pool, 0, batch, None, arch)
    tiles = batch.tiles.clone()
    batch.tiles.copy_(torch.tensor([-1, 0], dtype=torch.int32, device="cuda").expand_as(tiles))
    out = torch.full(query.shape, math.nan, dtype=query.dtype, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_prefill_attention(query, pool, 0, batch, None, out=out, arch=arch)
    graph.replay()
    assert out.isnan().all()
    batch.tiles.copy_(tiles)
    graph.replay()
    assert_attention_close(out, expected)
