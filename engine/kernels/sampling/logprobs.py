"""Log-probabilities of chosen tokens and of the most likely ones, on the device."""

import torch


def chosen_and_top(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
    """Log-softmax of unmodified logits at the chosen token and at the `top` most likely ones.

    logits `[R, V]`, float16, bfloat16 or float32; tokens int64 `[R]`, -1 for a row without one (its results mean
    nothing). Returns chosen float64 `[R]`; top ids int64 and their log-probabilities float64, both `[R, top]`, most
    likely first and of equally likely ones the lowest ids first.
    """
    values = logits.double()
    log_total = values.logsumexp(-1, keepdim=True)
    chosen = values.gather(-1, tokens.clamp(min=0)[:, None]) - log_total
    # Ranks have no ties: the order of the float32 value in the high half, that of the falling id in the low half.
    bits = (logits.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    falling = 0xFFFFFFFF - torch.arange(logits.shape[1], device=logits.device)
    ranks = (rising.long() << 32).bitwise_or_(falling)
    top_ids = 0xFFFFFFFF - (ranks.topk(top, dim=-1).values & 0xFFFFFFFF)
    return chosen[:, 0], top_ids, values.gather(-1, top_ids) - log_total
