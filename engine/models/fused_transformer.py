"""The transformer of engine/models/transformer.py over fused kernels, for a GPU.

The same layers in fewer launches: residual additions go with the norms, q/k norm and rope with the KV write. Batches of
up to MAX_ROWS rows go through matrix-vector kernels that take in the norms, the gate and the residual as well, five
launches a layer. No launch depends on a value that only the device knows, so a batch of fixed size can be recorded as a
CUDA graph and replayed.
"""

from dataclasses import dataclass

import torch

from engine.kernels.attention_batch import AttentionBatch, Groups
from engine.kernels.quantized_linear import embed
from engine.kernels.registry import Kernels
from engine.models.config import ModelConfig
from engine.weights import LayerWeights, ModelWeights


@dataclass(frozen=True)
class FusedBatch:
    """T rows to compute.

    token_ids  int32 `[T]`; positions, blocks  int32 `[T]`: where each row's KV goes (block -1: nowhere)
    decode     one row a sequence
    groups     rows that share leading blocks (decode only)
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    attention: AttentionBatch
    decode: bool
    groups: Groups | None = None


class FusedTransformer:
    def __init__(self, config: ModelConfig, weights: ModelWeights, cos_sin: torch.Tensor, kernels: Kernels):
        self.config = config
        self.weights = weights
        self.cos_sin = cos_sin
        self.kernels = kernels

    def logits(self, batch: FusedBatch, pool: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor | None:
        """Compute the batch, store its KV in the pool, and return the logits of `rows` (int32 `[n]`, None: none, which
        spares the head) in the model's dtype, `[n, vocab_size]`. A decode batch returns those of all its rows."""
        hidden = embed(batch.token_ids, self.weights.embedding)
        if batch.decode and self.kernels.fuses_rows(len(hidden)):
            return self._few_rows(hidden, batch, pool)
        kernels, eps = self.kernels, self.config.rms_norm_eps
        delta = None
        for index, layer in enumerate(self.weights.layers):
            normed = kernels.add_rms_norm(hidden, delta, layer.input_norm, eps)
            qkv = kernels.linear(normed, layer.qkv)
            attended = self._attend(index, layer, qkv, batch, pool)
            delta = kernels.linear_parts(attended, layer.attention_out)
            normed = kernels.add_rms_norm(hidden, delta, layer.mlp_norm, eps)
            delta = kernels.linear_parts(kernels.swiglu(kernels.linear(normed, layer.gate_up)), layer.down)
        if rows is None and not batch.decode:
            return None
        normed = kernels.add_rms_norm(hidden, delta, self.weights.final_norm, eps)
        if rows is not None:
            normed = normed.index_select(0, rows)
        return kernels.linear(normed, self.weights.head)

    def _few_rows(self, hidden: torch.Tensor, batch: FusedBatch, pool: torch.Tensor) -> torch.Tensor:
        gemv, eps = self.kernels.gemv, self.config.rms_norm_eps
        for index, layer in enumerate(self.weights.layers):
            qkv = gemv(hidden, layer.qkv, norm_weight=layer.input_norm, eps=eps)
            attended = self._attend(index, layer, qkv, batch, pool)
            gemv(attended, layer.attention_out, residual=hidden)
            gated = gemv(hidden, layer.gate_up, norm_weight=layer.mlp_norm, eps=eps, gated=True)
            gemv(gated, layer.down, residual=hidden)
        return gemv(hidden, self.weights.head, norm_weight=self.weights.final_norm, eps=eps)

    def _attend(
        self, index: int, layer: LayerWeights, qkv: torch.Tensor, batch: FusedBatch, pool: torch.Tensor
    ) -> torch.Tensor:
        config, kernels = self.config, self.kernels
        query = kernels.rope_kv_write(
            qkv,
            layer.query_norm,
            layer.key_norm,
            config.rms_norm_eps,
            self.cos_sin,
            batch.positions,
            batch.blocks,
            pool,
            index,
            config.num_heads,
        )
        window = config.sliding_windows[index]
        if batch.decode:
            attended = kernels.decode_attention(query, pool, index, batch.attention, window, batch.groups)
        else:
            attended = kernels.prefill_attention(query, pool, index, batch.attention, window)
        return attended.view(len(query), -1)
