"""Gated activation of the feed-forward layer (Shazeer 2020, arXiv:2002.05202)."""

import torch
import torch.nn.functional as F


def swiglu(gate_up: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """silu(gate) * up, where gate_up `[T, 2 * I]` holds gate in its first half. Returns `[T, I]`. `pdl` is for
    kernels."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
