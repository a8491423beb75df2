"""Rotary position embedding, applied (the angles come from engine/models/rope.py)."""

import torch


def apply_rope(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's pairs (i, i + D/2) by its row's angles.

    x `[T, H, D]`; cos_sin float32 `[T, 2, D/2]`, already scaled. Returns a new tensor like x.
    """
    cos, sin = cos_sin.to(x.dtype)[:, :, None].unbind(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
