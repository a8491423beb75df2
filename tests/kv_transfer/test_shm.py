"""The shared pool: mapped only where it is the very pool that was described, and never left behind."""

import gc
import os
import threading

import pytest
import torch

from engine.kv_pool import KVLayout, KVPool
from kv_transfer.channel import ChannelError
from kv_transfer.channels.shm import ShmChannel, open_pool
from kv_transfer.handoff import Welcome
from tests.kv_transfer.joined import LAYOUT, Joined, open_fds, wait_for


@pytest.fixture
def pool():
    return ShmChannel().make_pool(LAYOUT, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_both_mappings_are_one_memory(dtype):
    layout = KVLayout(num_layers=1, num_kv_heads=1, block_size=4, head_dim=8, dtype=dtype)
    pool = ShmChannel().make_pool(layout, 3)
    assert not pool.tensor.any()
    mapped = open_pool(pool.describe())
    assert mapped.layout == layout and mapped.num_blocks == 3
    pool.tensor[1].fill_(2.5)
    assert (mapped.tensor[1] == 2.5).all() and not mapped.tensor[2].any()
    mapped.tensor[2].fill_(-1.0)
    assert (pool.tensor[2] == -1.0).all()


def test_mapping_outlives_the_pool_that_made_it(pool):
    pool.tensor[0].fill_(7.0)
    mapped = open_pool(pool.describe())
    del pool
    gc.collect()
    assert (mapped.tensor[0] == 7.0).all()


def test_nothing_appears_in_the_file_system(pool):
    pool.tensor.fill_(1.0)
    assert not [name for name in os.listdir("/dev/shm") if "baton" in name]


def test_nobody_can_resize_the_pool_under_its_users(pool):
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pid": 2**22 + 1}, "cannot open the prefill worker's pool at /proc/4194305/fd/"),
        (
            {"fd": 99999},
            "No such file or directory; run both workers on one host, in one PID namespace and as one user",
        ),
        ({"inode": 1}, "is not the pool that was described"),
        ({"bytes": 5}, "is not the pool that was described"),
        ({"num_blocks": 5}, "is not the pool that was described"),
        ({"head_dim": 64}, "is not the pool that was described"),
        ({"dtype": "float8"}, "description is not usable: KeyError('float8')"),
        ({"pid": "me"}, "description is not usable"),
    ],
)
def test_wrong_description_is_refused_with_the_reason(pool, change, message):
    with pytest.raises(ChannelError) as caught:
        open_pool({**pool.describe(), **change})
    assert message in str(caught.value)


def test_a_description_with_nothing_in_it_is_refused():
    with pytest.raises(ChannelError, match="description is not usable"):
        open_pool({})


def test_welcome_with_an_unusable_pool_reaches_the_engine_as_a_refusal():
    joined = Joined("shm")
    wake = threading.Event()
    decode = joined.channel.connect(joined.server.address, None, joined.hello, wake.set)
    try:
        (prefill,) = wait_for(joined.server.accept, joined.prefill_wake)
        prefill.send(Welcome("prefill-0", "epoch-p", pool={**joined.welcome.pool, "inode": 1}))
        (welcome,) = wait_for(decode.poll, wake)
        assert "is not the pool that was described" in welcome.refusal
        assert decode.pool is None
    finally:
        decode.close()
        joined.close()


def test_a_pool_from_elsewhere_cannot_be_served():
    with pytest.raises(ChannelError, match="own make_pool"):
        ShmChannel().serve(KVPool.allocate(LAYOUT, 2), Welcome("p", "e"), lambda: None)


def test_files_are_closed_with_the_pool():
    files = open_fds()
    pools = [ShmChannel().make_pool(LAYOUT, 2) for _ in range(5)]
    mapped = [open_pool(pool.describe()) for pool in pools]
    assert open_fds() > files
    del pools, mapped
    assert open_fds() == files


def test_system_without_memfd_is_named(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ChannelError, match="needs Linux"):
        ShmChannel().make_pool(LAYOUT, 2)
