"""How many KV blocks a worker's pool gets."""

import os

import torch

from engine.config import ConfigError, DeploymentConfig
from engine.kv_pool import KVLayout

HOST_MEMORY_SHARE = 0.2
GPU_MEMORY_SHARE = 0.85


def num_pool_blocks(config: DeploymentConfig, layout: KVLayout, max_model_len: int, device: str) -> int:
    """Blocks for one worker's pool: what the config says, else what memory allows, never more than `max_running`
    sequences of full length need.

    On CPU all workers of a deployment together take a fifth of the host's memory; on a GPU a worker takes 85 % of what
    is free now. Raises ConfigError when not even one block fits.
    """
    useful_tokens = config.decode.max_running * max_model_len
    if config.kv.pool_tokens is not None:
        tokens = config.kv.pool_tokens
        why = f"kv.pool_tokens is {tokens}"
    else:
        if device == "cpu":
            host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            num_bytes = int(host_bytes * HOST_MEMORY_SHARE / config.num_workers)
        else:
            num_bytes = int(torch.cuda.mem_get_info()[0] * GPU_MEMORY_SHARE)
        tokens = min(useful_tokens, num_bytes // layout.block_bytes * layout.block_size)
        why = f"{num_bytes >> 20} MiB are set aside for it"
    num_blocks = tokens // layout.block_size
    if num_blocks < 1:
        raise ConfigError(f"the KV pool holds no block of {layout.block_size} tokens: {why}; raise kv.pool_tokens")
    return num_blocks
