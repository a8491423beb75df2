"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x `[..., D]`, weight `[D]`, the same dtype."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, pdl: bool = False
) -> torch.Tensor:
    """residual `[T, D]` += delta in place (unless None); returns rms_norm(residual) * weight, `[T, D]`.

    delta: `[T, D]`, or float32 `[parts, T, D]` to be summed. `pdl` is for kernels.
    """
    if delta is not None:
        residual.copy_(residual.float() + (delta.float() if delta.ndim == 2 else delta.sum(0)))
    return F.rms_norm(residual.float(), weight.shape, weight.float(), eps).to(residual.dtype)
