"""How many KV blocks a worker's pool gets."""

import os

import torch

from engine.config import SHARED_POOL_CHANNELS, ConfigError, DeploymentConfig
from engine.runner import ModelRunner

HOST_MEMORY_SHARE = 0.2
GRAPH_BYTES = 1 << 30
"""Set aside on a GPU for recorded graphs and the allocator's rounding."""
CONTEXT_BYTES = 1 << 29
"""What CUDA and its libraries take of a GPU for each process."""


def num_pool_blocks(config: DeploymentConfig, runner: ModelRunner, max_model_len: int) -> int:
    """Blocks for one worker's pool: what the config says, else what memory allows, never more than `max_running`
    sequences of full length need.

    On CPU all workers of a deployment together take a fifth of the host's memory. On a GPU a worker takes what its
    share leaves beside the weights, the largest step's activations and the recorded graphs; where workers share a
    pool, beside those of all of them. Raises ConfigError when not even
    one block fits.
    """
    layout, device = runner.layout, runner.device
    resolved = config.on(device)
    useful_tokens = resolved.max_running * max_model_len
    if config.kv.pool_tokens is not None:
        tokens = config.kv.pool_tokens
        why = f"kv.pool_tokens is {tokens}"
    else:
        if device == "cpu":
            host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            num_bytes = int(host_bytes * HOST_MEMORY_SHARE / config.num_workers)
        else:
            activations = runner.activation_bytes()
            free, total = torch.cuda.mem_get_info()
            spared = total * (1 - config.kv.gpu_memory_share)
            if config.topology.channel in SHARED_POOL_CHANNELS:  # the others load their weights when they like
                each = torch.cuda.memory_allocated() + activations + GRAPH_BYTES + CONTEXT_BYTES
                num_bytes = max(0, int(total - spared - config.num_workers * each))
            else:
                num_bytes = max(0, int(free - spared - activations - GRAPH_BYTES))
        tokens = min(useful_tokens, num_bytes // layout.block_bytes * layout.block_size)
        why = f"{num_bytes >> 20} MiB are set aside for it"
    num_blocks = tokens // layout.block_size
    if num_blocks < 1:
        advice = "raise kv.pool_tokens"
        if device != "cpu" and config.kv.pool_tokens is None:
            advice = "lower prefill.chunk_tokens, raise kv.gpu_memory_share, or use a smaller model"
        raise ConfigError(f"the KV pool holds no block of {layout.block_size} tokens: {why}; {advice}")
    return num_blocks
