"""Partial attention results, and their merge.

Where several programs share a row's keys, each leaves float32 sums of weighted values, the maximum score and the sum of
weights (scores are in units of log 2); the merge weighs them (Dao et al. 2023, "Flash-Decoding for long-context
inference").
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class SharedPart:
    """Partial results over keys that several rows share.

    partial, stats  as `partials` makes them, the first `num_parts` parts filled in for rows of a group
    lens            int32 `[B]`: leading keys (whole blocks) of each row that are in them, 0: none
    """

    partial: torch.Tensor
    stats: torch.Tensor
    num_parts: int
    lens: torch.Tensor | None


@triton.jit
def _merge(
    partial,
    partial_stats,
    out,
    shared_lens,
    first_part,
    num_parts,
    num_heads,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    dims = tl.arange(0, DIMS)
    inside = parts < num_parts
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SHARED:
        inside = inside & ((parts >= first_part) | (tl.load(shared_lens + row // num_heads) > 0))
    index = row * num_parts + parts
    bests = tl.load(partial_stats + index * 2, mask=inside, other=float("-inf"))
    totals = tl.load(partial_stats + index * 2 + 1, mask=inside, other=0.0)
    best = tl.max(bests, 0)
    safe = tl.where(best == float("-inf"), 0.0, best)
    factors = tl.exp2(bests - safe)
    total = tl.sum(totals * factors, 0)
    used = inside & (totals > 0)
    values = tl.load(partial + index[:, None] * D + dims[None, :], mask=used[:, None] & (dims < D)[None, :], other=0.0)
    merged = tl.sum(values * factors[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + row * D + dims, merged.to(out.dtype.element_ty), mask=dims < D)


def merge(out: torch.Tensor, parts: SharedPart, more_parts: int, pdl: bool = False) -> None:
    """out `[B, Hq, D]` from the partial results of `parts` and `more_parts` that follow them."""
    batch_size, num_heads, head_dim = out.shape
    all_parts = parts.num_parts + more_parts
    _merge[(batch_size * num_heads,)](
        parts.partial,
        parts.stats,
        out,
        parts.lens if parts.lens is not None else parts.stats,
        parts.num_parts,
        all_parts,
        num_heads,
        D=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        PARTS=triton.next_power_of_2(all_parts),
        SHARED=parts.lens is not None,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )


def partials(query: torch.Tensor, num_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for partial results: float32 `[B, Hq, num_parts, D]`, and maximum and sum `[B, Hq, num_parts, 2]`."""
    batch_size, num_heads, head_dim = query.shape
    shape = (batch_size, num_heads, num_parts)
    return (
        torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device),
        torch.empty((*shape, 2), dtype=torch.float32, device=query.device),
    )
