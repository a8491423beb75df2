"""Weights of a model: from safetensors files, or random ones of the same shapes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.kernels.linear import Linear, can_pack, pack
from engine.models.config import ModelConfig, ModelError

WeightsOrigin = Literal["files", "random"]
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
RANDOM_SEED = 0
MOST_PACKED_BYTES = 2 << 30
"""Weights up to this size are kept a second time, packed for small batches; larger ones are not worth the memory."""


@dataclass
class LayerWeights:
    """One decoder layer. `qkv` and `gate_up` are projections of the same input, stacked by output."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass
class ModelWeights:
    """embedding `[vocab_size, hidden_size]`, also the head's weight when tied; final_norm `[hidden_size]`."""

    embedding: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: Linear

    def linears(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
        yield self.head


class Source(Protocol):
    """Where tensors come from. `fill` writes the named tensor of the checkpoint over `target`."""

    def fill(self, name: str, target: torch.Tensor) -> None: ...


def load_weights(
    config: ModelConfig, model_dir: str | Path, origin: WeightsOrigin, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Read (or draw) every tensor of the model straight into place on `device`. Raises ModelError."""
    source: Source = Checkpoint(Path(model_dir)) if origin == "files" else RandomWeights(device)
    weights = _Builder(config, source, dtype, device).build()
    if sum(linear.weight.nbytes for linear in weights.linears()) <= MOST_PACKED_BYTES:
        for linear in filter(lambda linear: can_pack(linear.weight), weights.linears()):
            pack(linear)
    return weights


def weight_files(model_dir: str | Path) -> list[Path]:
    """The safetensors files of a model directory, sorted by name. Raises ModelError when there are none."""
    return sorted(set(_locate(Path(model_dir)).values()))


class _Builder:
    def __init__(self, config: ModelConfig, source: Source, dtype: torch.dtype, device: torch.device):
        self.config = config
        self.source = source
        self.dtype = dtype
        self.device = device

    def build(self) -> ModelWeights:
        config = self.config
        embedding = self.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        return ModelWeights(
            embedding=embedding,
            layers=[self.layer(f"model.layers.{index}") for index in range(config.num_layers)],
            final_norm=self.tensor("model.norm.weight", config.hidden_size),
            head=Linear(embedding)
            if config.tie_word_embeddings
            else self.linear({"lm_head": config.vocab_size}, config.hidden_size, False),
        )

    def layer(self, prefix: str) -> LayerWeights:
        config = self.config
        hidden, head_dim = config.hidden_size, config.head_dim
        query, key_value = config.num_heads * head_dim, config.num_kv_heads * head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {f"{attention}.q_proj": query, f"{attention}.k_proj": key_value, f"{attention}.v_proj": key_value}
        gate_up = {f"{mlp}.gate_proj": config.intermediate_size, f"{mlp}.up_proj": config.intermediate_size}
        return LayerWeights(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self.linear(qkv, hidden, config.qkv_bias),
            query_norm=self.tensor(f"{attention}.q_norm.weight", head_dim) if config.qk_norm else None,
            key_norm=self.tensor(f"{attention}.k_norm.weight", head_dim) if config.qk_norm else None,
            attention_out=self.linear({f"{attention}.o_proj": hidden}, query, config.o_bias),
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self.linear(gate_up, hidden, config.mlp_bias),
            down=self.linear({f"{mlp}.down_proj": hidden}, config.intermediate_size, config.mlp_bias),
        )

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        target = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.source.fill(name, target)
        return target

    def linear(self, parts: dict[str, int], in_features: int, has_bias: bool) -> Linear:
        """Projections of one input stacked into one; `parts` maps their names to their output sizes."""
        sizes = list(parts.values())
        weight = torch.empty(sum(sizes), in_features, dtype=self.dtype, device=self.device)
        bias = torch.empty(sum(sizes), dtype=self.dtype, device=self.device) if has_bias else None
        for name, piece in zip(parts, weight.split(sizes), strict=True):
            self.source.fill(f"{name}.weight", piece)
        if bias is not None:
            for name, piece in zip(parts, bias.split(sizes), strict=True):
                self.source.fill(f"{name}.bias", piece)
        return Linear(weight, bias)


class Checkpoint:
    """Tensors of a Hugging Face directory: one model.safetensors, or shards with their index."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.file_of = _locate(directory)
        self.opened: dict[Path, safe_open] = {}

    def fill(self, name: str, target: torch.Tensor) -> None:
        if name not in self.file_of:
            raise ModelError(f"{self.directory} has no tensor {name!r}, which its config.json asks for")
        path = self.file_of[name]
        try:
            tensor = self._open(path).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: tensor {name!r} is not readable: {error}") from None
        if tensor.shape != target.shape:
            raise ModelError(f"{path}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(target.shape)}")
        target.copy_(tensor)

    def _open(self, path: Path) -> safe_open:
        if path not in self.opened:
            self.opened[path] = safe_open(str(path), framework="pt")
        return self.opened[path]


class RandomWeights:
    """Seeded weights for speed work, drawn on the device itself: norms of one, biases of zero, normal projections that
    keep activations near unit size."""

    def __init__(self, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(RANDOM_SEED)

    def fill(self, name: str, target: torch.Tensor) -> None:
        if target.ndim == 1:
            target.fill_(0 if name.endswith(".bias") else 1)
        else:
            target.normal_(0, target.shape[1] ** -0.5, generator=self.generator)


def _locate(directory: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            names = json.loads(index.read_text())["weight_map"]
            located = {name: directory / file for name, file in names.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{index} is not a readable safetensors index") from None
        for path in sorted(set(located.values())):
            if not path.is_file():
                raise ModelError(f"{directory} lacks {path.name}, which {INDEX_FILE} names")
        return located
    single = directory / SINGLE_FILE
    if not single.is_file():
        raise ModelError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors weights are read")
    return dict.fromkeys(_names(single), single)


def _names(path: Path) -> Iterator[str]:
    try:
        with safe_open(str(path), framework="pt") as file:
            return iter(list(file.keys()))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from None
