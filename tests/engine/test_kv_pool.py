import pytest
import torch

from engine.kv_pool import KVLayout, KVPool

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype=torch.float32)


def test_block_bytes_are_those_of_the_embedded_models_block():
    layout = KVLayout(num_layers=30, num_kv_heads=3, block_size=64, head_dim=64, dtype=torch.float32)
    assert layout.block_bytes == 30 * 2 * 3 * 64 * 64 * 4
    assert layout.describe() == "layers=30,kv=2,heads=3,block=64,dim=64,dtype=float32"


def test_layouts_that_cannot_exchange_blocks_describe_themselves_differently():
    layouts = [LAYOUT]
    for change in (
        {"num_layers": 2},
        {"num_kv_heads": 1},
        {"block_size": 8},
        {"head_dim": 4},
        {"dtype": torch.float16},
    ):
        layouts.append(KVLayout(**{**LAYOUT.__dict__, **change}))
    assert len({layout.describe() for layout in layouts}) == len(layouts)


def test_a_new_pool_is_zero_so_that_unwritten_slots_hold_no_nan():
    pool = KVPool.allocate(LAYOUT, 5)
    assert pool.tensor.shape == (5, 3, 2, 2, 4, 8)
    assert torch.count_nonzero(pool.tensor) == 0


def test_layer_is_a_view_of_that_layer_in_every_block():
    pool = KVPool.allocate(LAYOUT, 5)
    pool.layer(1)[4, 0, 1, 3] = 7.0
    assert pool.layer(1).shape == (5, 2, 2, 4, 8)
    assert torch.all(pool.tensor[4, 1, 0, 1, 3] == 7.0)
    assert pool.tensor.sum() == 7.0 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_block_bytes_view_reads_and_writes_exactly_one_block(dtype):
    layout = KVLayout(num_layers=2, num_kv_heads=1, block_size=4, head_dim=8, dtype=dtype)
    pool = KVPool.allocate(layout, 3)
    pool.tensor[1] = torch.randn(layout.block_shape).to(dtype)
    source, target = pool.block_bytes_view(1), pool.block_bytes_view(2)
    assert len(source) == source.nbytes == layout.block_bytes and not target.readonly
    assert bytes(source) == pool.tensor[1].clone().view(torch.uint8).numpy().tobytes()
    target[:] = source
    assert torch.equal(pool.tensor[2], pool.tensor[1])
    assert torch.count_nonzero(pool.tensor[0]) == 0


def test_a_block_outside_the_pool_is_refused():
    pool = KVPool.allocate(LAYOUT, 2)
    for block_id in (-1, 2):
        with pytest.raises(IndexError, match=f"block {block_id}"):
            pool.block_bytes_view(block_id)


@pytest.mark.parametrize(
    "tensor, problem",
    [
        (torch.zeros(2, 3, 2, 2, 4, 4), "shape"),
        (torch.zeros(3, *LAYOUT.block_shape), "shape"),
        (torch.zeros(2, *LAYOUT.block_shape, dtype=torch.float16), "dtype"),
        (torch.zeros(*LAYOUT.block_shape, 2).movedim(-1, 0), "contiguous"),
    ],
)
def test_memory_that_does_not_fit_the_layout_is_refused(tensor, problem):
    with pytest.raises(ValueError, match=problem):
        KVPool(LAYOUT, 2, tensor)
