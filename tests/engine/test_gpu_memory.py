"""The pool of a GPU takes what its share leaves; memory that is short gives advice, not a trace."""

from types import SimpleNamespace

import pytest
import torch

from engine import worker
from engine.config import ConfigError, DeploymentConfig
from engine.kv_pool import KVLayout
from engine.pool_size import GRAPH_BYTES, num_pool_blocks

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, block_size=64, head_dim=64, dtype=torch.float16)
GIB = 1 << 30


def runner(activations: int):
    return SimpleNamespace(layout=LAYOUT, device="cuda", activation_bytes=lambda: activations)


def blocks(monkeypatch, free: int, total: int, activations: int = 0, max_model_len: int = 1 << 20, **kv) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, total))
    return num_pool_blocks(DeploymentConfig.model_validate({"kv": kv}), runner(activations), max_model_len)


def test_the_pool_takes_the_share_less_weights_activations_and_graphs(monkeypatch):
    # 16 GiB card, 8 GiB of weights: 10 % of the card stays free, 2 GiB are for the largest step
    expected = 8 * GIB - int(1.6 * GIB) - 2 * GIB - GRAPH_BYTES
    found = blocks(monkeypatch, 8 * GIB, 16 * GIB, 2 * GIB)
    assert found == pytest.approx(expected / LAYOUT.block_bytes, abs=1)


def test_the_share_is_configurable_and_never_more_than_sequences_can_use(monkeypatch):
    small = blocks(monkeypatch, 8 * GIB, 16 * GIB, gpu_memory_share=0.7)
    assert small < blocks(monkeypatch, 8 * GIB, 16 * GIB, gpu_memory_share=0.9)
    assert blocks(monkeypatch, 100 * GIB, 141 * GIB, max_model_len=640) == 128 * 640 // 64


def test_no_room_for_a_pool_says_what_to_lower(monkeypatch):
    with pytest.raises(ConfigError, match="gpu_memory_share") as error:
        blocks(monkeypatch, 2 * GIB, 16 * GIB, activations=3 * GIB)
    assert "\n" not in str(error.value)


def test_running_out_of_gpu_memory_ends_with_one_line_of_advice(monkeypatch):
    def make_worker(arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")

    monkeypatch.setattr(worker, "parse_arguments", lambda *_: SimpleNamespace(name="d0"))
    with pytest.raises(SystemExit) as ended:
        worker.run_worker(make_worker, "decode", "d0", OSError)
    message = str(ended.value)
    assert message.startswith("d0: GPU memory is short: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "decode.max_running" in message and "\n" not in message
