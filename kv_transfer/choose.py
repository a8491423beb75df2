"""Which channel `auto` is, on this host. Router and workers ask alike and get the same answer: it depends on the
configuration and on what GPUs there are and how they reach each other, in whatever order."""

import logging
from dataclasses import dataclass

from engine.config import ChannelName, DeploymentConfig
from kv_transfer.cuda_driver import CudaError, driver

log = logging.getLogger("channel")


@dataclass(frozen=True)
class Gpus:
    """number: visible GPUs of this host; linked: each can read the memory of each other one."""

    number: int
    linked: bool


def find_gpus() -> Gpus:
    try:
        number = driver().num_devices()
        pairs = [(i, j) for i in range(number) for j in range(number) if i != j]
        return Gpus(number, all(driver().can_access_peer(i, j) for i, j in pairs))
    except CudaError:
        return Gpus(0, False)


def choose_channel(config: DeploymentConfig, gpus: Gpus) -> tuple[ChannelName, str]:
    """(channel, why) for the workers of one host. Raises ConfigError for a GPU that is not there."""
    one_owner = config.topology.prefill_workers == 1
    if config.device == "cpu" or gpus.number == 0:
        if one_owner:
            return "shm", "one prefill worker on the CPU: decode workers work in its pool"
        return "tcp", "several prefill workers on the CPU, each with a pool of its own"
    used = set(config.worker_gpus(gpus.number))
    if len(used) == 1 and one_owner:
        return "cuda_ipc", "all workers are on one GPU: decode workers work in the prefill worker's pool"
    if len(used) == 1:
        return "cuda_p2p", "several prefill workers on one GPU: blocks are copied within its memory"
    if gpus.linked:
        return "cuda_p2p", f"the workers' {len(used)} GPUs reach each other's memory"
    if len(used) == config.num_workers:
        return "nccl", "the GPUs do not reach each other's memory; NCCL goes through the host's"
    return "tcp", "the GPUs do not reach each other's memory, and workers share one, which NCCL cannot"


def resolve_channel(config: DeploymentConfig) -> DeploymentConfig:
    """The configuration with `channel: auto` replaced by what it means here, logged with the reason."""
    if config.topology.channel != "auto":
        return config
    name, reason = choose_channel(config, find_gpus())
    log.info("channel auto is %s: %s", name, reason)
    return config.model_copy(update={"topology": config.topology.model_copy(update={"channel": name})})
