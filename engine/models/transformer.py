"""The decoder-only transformer of the Qwen3, Qwen2, Llama and Mistral families over a paged KV pool.

One packed batch of tokens from any number of sequences goes through every linear layer at once; only attention knows
about sequences. The families differ in what the configuration switches on: biases, query and key norms, sliding
windows, rope.
"""

from dataclasses import dataclass

import torch

from engine.kernels.kv_write import kv_write
from engine.kernels.paged_attention import AttentionPlan, paged_attention
from engine.kernels.quantized_linear import embed, linear
from engine.kernels.rms_norm import rms_norm
from engine.kernels.rope import apply_rope
from engine.kernels.swiglu import swiglu
from engine.models.config import ModelConfig
from engine.weights import LayerWeights, ModelWeights


@dataclass(frozen=True)
class Batch:
    """T tokens to compute, packed.

    token_ids        int64 `[T]`
    cos_sin          `[T, 2, head_dim]`: the rope table's rows of their positions
    blocks, offsets  int64 `[T]`: where their KV goes
    """

    token_ids: torch.Tensor
    cos_sin: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    attention: AttentionPlan


class Transformer:
    def __init__(self, config: ModelConfig, weights: ModelWeights):
        self.config = config
        self.weights = weights

    def forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """Compute the batch's tokens and store their KV in the pool. Returns the last layer's output, before the
        final norm, `[T, hidden_size]`."""
        hidden = embed(batch.token_ids, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            normed = rms_norm(hidden, layer.input_norm, self.config.rms_norm_eps)
            hidden = hidden + self._attention(index, layer, normed, batch, pool)
            normed = rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
            hidden = hidden + linear(swiglu(linear(normed, layer.gate_up)), layer.down)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits float32 `[n, vocab_size]` of rows of forward's result."""
        normed = rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)
        return linear(normed, self.weights.head).float()

    def _attention(
        self, index: int, layer: LayerWeights, hidden: torch.Tensor, batch: Batch, pool: torch.Tensor
    ) -> torch.Tensor:
        config = self.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = linear(hidden, layer.qkv).view(-1, heads + 2 * kv_heads, head_dim)
        query_key, value = qkv.split([heads + kv_heads, kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = query_key.split([heads, kv_heads], dim=1)
            query = rms_norm(query, layer.query_norm, config.rms_norm_eps)
            query_key = torch.cat((query, rms_norm(key, layer.key_norm, config.rms_norm_eps)), dim=1)
        query, key = apply_rope(query_key, batch.cos_sin).split([heads, kv_heads], dim=1)
        kv_write(pool, index, torch.stack((key, value), dim=1), batch.blocks, batch.offsets)
        attended = paged_attention(query, pool, index, batch.attention, config.sliding_windows[index])
        return linear(attended, layer.attention_out)
