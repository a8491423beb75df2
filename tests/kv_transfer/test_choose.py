"""What `channel: auto` becomes."""

import sys

import pytest

from engine.config import ConfigError, DeploymentConfig
from kv_transfer import choose
from kv_transfer.channel import ChannelError
from kv_transfer.channels import get_channel, nccl_library
from kv_transfer.choose import Gpus, choose_channel, resolve_channel
from kv_transfer.cuda_driver import CudaDriver, CudaError


def deployment(device="auto", **topology) -> DeploymentConfig:
    values = {"prefill_workers": 1, "channel": "auto", "local_prefill_max_tokens": 0, **topology}
    return DeploymentConfig.model_validate({"device": device, "topology": values})


@pytest.mark.parametrize(
    ("config", "gpus", "channel"),
    [
        (deployment(), Gpus(0, False), "shm"),
        (deployment("cpu"), Gpus(2, True), "shm"),
        (deployment(prefill_workers=2), Gpus(0, False), "tcp"),
        (deployment(), Gpus(1, True), "cuda_ipc"),
        (deployment(prefill_workers=2, decode_workers=2), Gpus(1, True), "cuda_p2p"),
        (deployment(), Gpus(2, True), "cuda_p2p"),
        (deployment(gpus=[1, 1]), Gpus(2, True), "cuda_ipc"),
        (deployment(), Gpus(2, False), "nccl"),
        (deployment(prefill_workers=2, decode_workers=1), Gpus(2, False), "tcp"),
    ],
    ids=["cpu", "cpu-asked", "cpu-2p", "1gpu", "2p2d-1gpu", "2gpu", "same-gpu", "no-peer", "no-peer-shared"],
)
def test_auto_is_the_best_that_works_between_the_workers(config, gpus, channel):
    name, reason = choose_channel(config, gpus)
    assert name == channel
    assert reason


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="topology.gpus names GPU 3, this host has 2"):
        choose_channel(deployment(gpus=[0, 3]), Gpus(2, True))


def test_the_choice_replaces_auto_and_is_logged_with_its_reason(monkeypatch, caplog):
    monkeypatch.setattr(choose, "find_gpus", lambda: Gpus(2, True))
    with caplog.at_level("INFO", logger="channel"):
        config = resolve_channel(deployment())
    assert config.topology.channel == "cuda_p2p" and config.topology.prefill_workers == 1
    assert "channel auto is cuda_p2p: the workers' 2 GPUs reach each other's memory" in caplog.text


def test_a_named_channel_stays(monkeypatch):
    monkeypatch.setattr(choose, "find_gpus", lambda: pytest.fail("nobody needs to know"))
    config = deployment(channel="tcp")
    assert resolve_channel(config) is config


def test_auto_needs_a_prefill_worker(tmp_path):
    with pytest.raises(ValueError, match="channel 'auto' needs at least one prefill worker"):
        DeploymentConfig.model_validate({"topology": {"channel": "auto"}})


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", absent)
    with pytest.raises(CudaError, match="no CUDA driver"):
        CudaDriver()
    choose.driver.cache_clear()
    assert choose.find_gpus() == Gpus(0, False)
    nccl_library.nccl.cache_clear()
    with pytest.raises(ChannelError, match="channel 'nccl' needs libnccl.so.2, which CUDA builds of torch bring"):
        nccl_library.nccl()


def test_without_nixl_the_error_names_the_extra(monkeypatch):
    from kv_transfer.channels import nixl

    nixl.library.cache_clear()
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ChannelError, match=r"needs the NIXL library .*: pip install 'baton-inference\[nixl\]'"):
        get_channel("nixl")
