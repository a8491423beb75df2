"""Rotary position embedding: the frequencies of each rope type and the table of their cosines and sines.

Sources: RoPE, Su et al. 2021 (arXiv:2104.09864); linear interpolation, Chen et al. 2023 (arXiv:2306.15595); yarn, Peng
et al. 2023 (arXiv:2309.00071); llama3, the scaling published with Llama 3.1.
"""

import math

import torch

from engine.models.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines of every position as apply_rope takes them, float32 `[num_positions, 2, head_dim]`.

    A table, not a computation at each step, so that a position's values are the same bits wherever it is in a batch.
    """
    frequencies, scale = rope_frequencies(rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.stack([torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)], dim=1).to(device)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair of dimensions, float32 `[head_dim // 2]`, and the factor on cosine and sine."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.type == "linear":
        return plain / rope.scaling["factor"], 1.0
    if rope.type == "llama3":
        return _llama3(plain, rope.scaling), 1.0
    if rope.type == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain, 1.0


def _llama3(plain: torch.Tensor, scaling: dict) -> torch.Tensor:
    """Divide slow frequencies by `factor`, keep fast ones, blend by how often they turn in the original context."""
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (keep + (1 - keep) / scaling["factor"])


def _yarn(plain: torch.Tensor, rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Divide by `factor` the dimensions that turn less than `beta_slow` times in the original context, keep those that
    turn more than `beta_fast` times, ramp linearly over the dimensions between; scale the attention by
    `attention_factor`."""
    scaling = rope.scaling
    factor = scaling["factor"]

    def dimension(turns: float) -> float:
        context = scaling["original_max_position_embeddings"]
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = dimension(scaling.get("beta_fast") or 32)
    last = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    slow = ramp.clamp(0, 1)
    return plain * (1 - slow) + plain / factor * slow, _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: dict, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)
