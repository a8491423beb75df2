"""One layer, or the whole model, over whole sequences at once, without a KV pool: for calibration and measurement.

Calibration and held-out texts are shorter than any model's sliding window, so that windows play no part here.
"""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F

from engine.kernels.quantized_linear import embed, linear
from engine.kernels.rms_norm import rms_norm
from engine.kernels.swiglu import swiglu
from engine.models.config import ModelConfig
from engine.models.rope import rope_table
from engine.weights import LayerWeights, ModelWeights

Stage = Literal["qkv", "attention_out", "gate_up", "down"]
STAGES: tuple[Stage, ...] = ("qkv", "attention_out", "gate_up", "down")
"""The linear layers of a decoder layer in the order they are computed, by their names in LayerWeights."""


class Forward:
    """hidden is `[B, T, hidden_size]`: B sequences of T tokens from position 0."""

    def __init__(self, config: ModelConfig, num_positions: int, device: torch.device):
        self.config = config
        self.cos_sin = rope_table(config.rope, config.head_dim, num_positions, device)

    def layer(self, hidden: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """The layer's output."""
        *_, (_, _, out) = self._steps(hidden, layer)
        return out

    def input_of(self, stage: Stage, hidden: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """What that linear layer gets, `[B * T, in_features]`."""
        return next(x for name, x, _ in self._steps(hidden, layer) if name == stage)

    def _steps(self, hidden: torch.Tensor, layer: LayerWeights) -> Iterator[tuple[Stage, torch.Tensor, torch.Tensor]]:
        """(stage, its input, output so far); the last one's output is the layer's."""
        eps, shape = self.config.rms_norm_eps, hidden.shape
        hidden = hidden.flatten(0, 1)
        x = rms_norm(hidden, layer.input_norm, eps)
        yield "qkv", x, hidden
        x = self._attention(linear(x, layer.qkv), layer, shape[0])
        yield "attention_out", x, hidden
        hidden = hidden + linear(x, layer.attention_out)
        x = rms_norm(hidden, layer.mlp_norm, eps)
        yield "gate_up", x, hidden
        x = swiglu(linear(x, layer.gate_up))
        yield "down", x, hidden
        hidden = hidden + linear(x, layer.down)
        yield "down", x, hidden.view(shape)

    def _attention(self, qkv: torch.Tensor, layer: LayerWeights, batch: int) -> torch.Tensor:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = qkv.view(batch, -1, heads + 2 * kv_heads, config.head_dim)
        query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=2)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm(query, layer.query_norm, config.rms_norm_eps)
            key = rms_norm(key, layer.key_norm, config.rms_norm_eps)
        query, key = self._rope(query), self._rope(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _rope(self, x: torch.Tensor) -> torch.Tensor:
        """x `[B, T, heads, head_dim]`, halves rotated against each other."""
        cos, sin = self.cos_sin[: x.shape[1], :, None].to(x.dtype).unbind(1)
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def model_logits(
    config: ModelConfig, weights: ModelWeights, token_ids: torch.Tensor, batch: int = 4
) -> Iterator[torch.Tensor]:
    """Logits float32 `[T, vocab_size]` of each sequence of token_ids int64 `[B, T]`, `batch` of them at a time."""
    forward = Forward(config, token_ids.shape[1], token_ids.device)
    for rows in token_ids.split(batch):
        hidden = embed(rows.flatten(), weights.embedding).view(*rows.shape, -1)
        for layer in weights.layers:
            hidden = forward.layer(hidden, layer)
        for sequence in hidden:
            yield linear(rms_norm(sequence, weights.final_norm, config.rms_norm_eps), weights.head).float()
