"""A kernel that is wrong, or does not run, never serves: the next implementation takes its place, with a warning."""

import json
import logging

import pytest
import torch

from engine.config import ConfigError
from engine.kernels import registry, self_check
from engine.kernels.registry import TABLE, Implementation, Kernels, Shape, Tuning, decode_parts
from engine.kernels.rms_norm import add_rms_norm

pytest.importorskip("triton", reason="needs Triton, which torch's builds for CUDA bring")

SHAPE = Shape(4, 2, 32, 16, 64, 96, torch.float16)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pretend_gpu(monkeypatch, tmp_path):
    """Checks run on the CPU, where no Triton kernel can: what is chosen there is plain torch."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(self_check, "machine_key", lambda shape: "key")
    return tmp_path


def broken_norm(residual, delta, weight, eps, pdl=False):
    return add_rms_norm(residual, delta, weight, eps) * 1.02


def good_norm(residual, delta, weight, eps, pdl=False):
    return add_rms_norm(residual, delta, weight, eps)


def test_kernels_that_do_not_run_are_replaced_down_to_plain_torch(caplog):
    chosen = self_check.choose(SHAPE, CPU)
    needed = {name for name in TABLE if name not in registry.OPTIONAL}
    assert {name: backend for name, (backend, _) in chosen.items()} == dict.fromkeys(needed, "torch")
    for name in set(TABLE) - {"shared_prefix_attention"}:  # which is nothing without its decode attention
        assert any(name in record.message and record.levelno == logging.WARNING for record in caplog.records)
    kernels = Kernels(chosen, Tuning(), 2)
    assert not kernels.can_be_recorded and not kernels.can_share_prefixes and not kernels.fuses_rows(1)


def test_a_wrong_kernel_is_passed_over_and_named(monkeypatch, caplog):
    here = f"{__name__}:"
    table = [
        Implementation("wrong", here + "broken_norm"),
        Implementation("right", here + "good_norm"),
        TABLE["add_rms_norm"][-1],
    ]
    monkeypatch.setattr(self_check, "TABLE", {"add_rms_norm": table})
    monkeypatch.setattr(Implementation, "load", lambda self: globals().get(self.where.partition(":")[2], add_rms_norm))
    chosen = self_check.choose(SHAPE, CPU)
    assert chosen["add_rms_norm"][0] == "right"
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "add_rms_norm of wrong is not used" in warning and "off by" in warning


def test_the_outcome_is_kept_and_checks_nothing_again(pretend_gpu, monkeypatch):
    first = self_check.choose(SHAPE, CPU)
    kept = json.loads((pretend_gpu / "checked-key.json").read_text())
    assert kept == {name: backend for name, (backend, _) in first.items()}
    monkeypatch.setattr(self_check, "_problem", lambda *_: pytest.fail("checked again"))
    assert {name: backend for name, (backend, _) in self_check.choose(SHAPE, CPU).items()} == kept


def test_deterministic_is_refused_where_its_kernels_do_not_run():
    chosen = self_check.choose(SHAPE, CPU)
    with pytest.raises(ConfigError, match="deterministic"):
        Kernels(chosen, Tuning(), 2, deterministic=True)


def test_decode_attention_is_split_for_few_sequences_only():
    assert [decode_parts(batch, 8) for batch in (1, 2, 4, 8, 16, 32, 128)] == [16, 16, 8, 4, 2, 1, 1]
