"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x `[..., D]`, weight `[D]`, the same dtype; the mean is taken in float32, and the result is rounded to x's dtype before it is
    multiplied by the weight, as the reference models do.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
