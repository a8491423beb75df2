"""Scaling of inputs before rounding. A linear layer does not change when its input k is divided by s_k and its weights
of input k are multiplied by s_k; what came before takes the division in: a norm's weight, the value rows before the
attention output, the up rows before the down projection.

    AWQ (Lin et al. 2023, arXiv:2306.00978)          s grows with the inputs' mean magnitude to a power that is searched
    SmoothQuant (Xiao et al. 2022, arXiv:2211.10438)  s balances the largest inputs and the largest weights
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from engine.kernels.linear import Linear
from engine.kernels.quantized_linear import Scheme, dequantize
from engine.models.config import ModelConfig
from engine.quantize.forward import STAGES, Stage
from engine.quantize.rounding import round_weight
from engine.weights import LayerWeights

POWERS = (0.0, 0.15, 0.3, 0.45, 0.6)
SMOOTHING = 0.5
SMALLEST, LARGEST = 1 / 64, 64.0


def scale_layer(config: ModelConfig, layer: LayerWeights, inputs: dict[Stage, torch.Tensor], schemes: dict) -> None:
    """Scale a plain layer in place. inputs: `[rows, in_features]` samples of what each linear layer gets; schemes: the
    Scheme each will be rounded to, or None."""
    for stage in STAGES:
        if schemes[stage] is None:
            continue
        weight = getattr(layer, stage).weight
        share = partial(_over_heads, config) if stage == "attention_out" else _each
        if schemes[stage] == "w8a8":
            scales = share(smoothing_scales(inputs[stage], weight))
        else:
            scales = awq_scales(inputs[stage], weight, schemes[stage], share)
        _fold(config, layer, stage, scales)


def _each(values: torch.Tensor) -> torch.Tensor:
    return values


def _over_heads(config: ModelConfig, values: torch.Tensor) -> torch.Tensor:
    """Means over the query heads of a KV head: one value row makes the attention output's inputs of all of them."""
    heads = values.view(config.num_kv_heads, -1, config.head_dim)
    return heads.mean(1, keepdim=True).expand_as(heads).flatten()


def awq_scales(
    x: torch.Tensor, weight: torch.Tensor, scheme: Scheme, share: Callable[[torch.Tensor], torch.Tensor] = _each
) -> torch.Tensor:
    """The candidate `[in_features]` that leaves the least error in the products of x `[rows, in_features]`. `share`
    makes equal what must be."""
    magnitude = share(x.abs().mean(0)).clamp_min(1e-6)
    expected = x @ weight.T
    best, best_error = torch.ones_like(magnitude), float("inf")
    for power in POWERS:
        scales = _centred(magnitude**power)
        rounded = dequantize(round_weight(weight * scales, scheme)) / scales
        error = float((x @ rounded.T - expected).square().sum())
        if error < best_error:
            best, best_error = scales, error
    return best


def smoothing_scales(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """max|x|^a / max|w|^(1 - a) of each input."""
    largest_input = x.abs().amax(0).clamp_min(1e-5)
    largest_weight = weight.abs().amax(0).clamp_min(1e-5)
    return _centred(largest_input**SMOOTHING / largest_weight ** (1 - SMOOTHING))


def _centred(scales: torch.Tensor) -> torch.Tensor:
    return (scales / (scales.max() * scales.min()).sqrt()).clamp(SMALLEST, LARGEST)


def _fold(config: ModelConfig, layer: LayerWeights, stage: Stage, scales: torch.Tensor) -> None:
    after: Linear = getattr(layer, stage)
    setattr(layer, stage, replace(after, weight=after.weight * scales))
    if stage == "qkv":
        layer.input_norm = layer.input_norm / scales
    elif stage == "gate_up":
        layer.mlp_norm = layer.mlp_norm / scales
    elif stage == "attention_out":
        group = config.num_heads // config.num_kv_heads
        values = scales.view(config.num_kv_heads, group, config.head_dim)[:, 0].flatten()
        _divide_last_rows(layer.qkv, values)
    else:
        _divide_last_rows(layer.gate_up, scales)


def _divide_last_rows(before, scales: torch.Tensor) -> None:
    """The rows of `before` that make these values are its last ones: values in qkv, up in gate_up."""
    before.weight[-len(scales) :] /= scales[:, None]
    if before.bias is not None:
        before.bias[-len(scales) :] /= scales
