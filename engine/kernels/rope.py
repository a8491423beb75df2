"""Rotary position embedding, applied (the angles come from engine/models/rope.py)."""

import torch


def apply_rope(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's pairs (i, i + D/2) by its row's angles: (a, b) -> (a cos - b sin, b cos + a sin).

    x `[T, H, D]`; cos_sin float32 `[T, 2, D]`: the row's cosines twice over, then its negated sines and its sines.
    Returns a new tensor like x.
    """
    cos, sin = cos_sin.to(x.dtype)[:, :, None].unbind(1)
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
