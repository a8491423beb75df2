"""Weights of a model: from safetensors files, or random ones of the same shapes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.cache_directory import cache_directory
from engine.kernels.linear import Linear, can_pack, pack
from engine.kernels.quantized_linear import QuantizedEmbedding, QuantizedLinear, densify
from engine.models.config import ModelConfig, ModelError
from engine.quant_formats.published import OWN_METHOD, read_format
from engine.quant_formats.readers import CachingReader, PublishedReader, Reader, RoundingReader, StoredReader, cache_key
from engine.quantize.rounding import round_embedding
from engine.quantize.scheme import HEAD, Precision

WeightsOrigin = Literal["files", "random"]
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
RANDOM_SEED = 0
MOST_PACKED_BYTES = 2 << 30
"""Weights up to this size are kept a second time, packed for small batches; larger ones are not worth the memory."""
EMBEDDING = "model.embed_tokens"
AnyLinear = Linear | QuantizedLinear


@dataclass
class LayerWeights:
    """One decoder layer. `qkv` and `gate_up` are projections of the same input, stacked by output."""

    input_norm: torch.Tensor
    qkv: AnyLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_out: AnyLinear
    mlp_norm: torch.Tensor
    gate_up: AnyLinear
    down: AnyLinear


@dataclass
class ModelWeights:
    """embedding `[vocab_size, hidden_size]`, also the head's weight when tied; final_norm `[hidden_size]`."""

    embedding: torch.Tensor | QuantizedEmbedding
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: AnyLinear

    def linears(self) -> Iterator[AnyLinear]:
        for layer in self.layers:
            yield from (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
        yield self.head


class Source(Protocol):
    """Where tensors come from. `fill` writes the named tensor of the checkpoint over `target`."""

    def fill(self, name: str, target: torch.Tensor) -> None: ...


def load_weights(
    config: ModelConfig,
    model_dir: str | Path,
    origin: WeightsOrigin,
    dtype: torch.dtype,
    device: torch.device,
    precision: Precision = Precision(),
) -> ModelWeights:
    """Read (or draw) every tensor of the model straight into place on `device`. Raises ModelError.

    A quantized checkpoint stays as it is; `precision` says what the weights of a plain one are rounded to. What is
    converted or rounded is kept in the cache directory.
    """
    source: Source = Checkpoint(Path(model_dir)) if origin == "files" else RandomWeights(device)
    builder = WeightsBuilder(config, source, dtype, device)
    if config.quantization is not None and origin == "files":
        if not precision.is_full:
            raise ModelError(f"{model_dir} is quantized already; set model.quantization: none and full precisions")
        builder.stay_quantized(Path(model_dir), config.quantization)
    elif not precision.is_full:
        builder.round_to(precision, Path(model_dir))
    weights = builder.build()
    num_values = sum(_num_values(linear) for linear in weights.linears())
    if num_values * dtype.itemsize <= MOST_PACKED_BYTES:
        for linear in weights.linears():
            if isinstance(linear, QuantizedLinear) and device.type == "cpu":
                densify(linear, dtype)
            dense = linear.dense if isinstance(linear, QuantizedLinear) else linear
            if dense is not None and can_pack(dense.weight):
                pack(dense)
    return weights


def _num_values(linear: AnyLinear) -> int:
    return linear.out_features * linear.in_features if isinstance(linear, QuantizedLinear) else linear.weight.numel()


def weight_files(model_dir: str | Path) -> list[Path]:
    """The safetensors files of a model directory, sorted by name. Raises ModelError when there are none."""
    return sorted(set(_locate(Path(model_dir)).values()))


class WeightsBuilder:
    def __init__(self, config: ModelConfig, source: Source, dtype: torch.dtype, device: torch.device):
        self.config = config
        self.source = source
        self.dtype = dtype
        self.device = device
        self.reader: Reader | None = None
        self.rounds_embedding = False

    def stay_quantized(self, model_dir: Path, described: dict[str, Any]) -> None:
        """Take quantized layers as `described` (quantization_config of config.json) says."""
        checkpoint = self.source
        assert isinstance(checkpoint, Checkpoint)
        path = model_dir / "config.json"
        if described.get("quant_method") == OWN_METHOD:
            self.reader = StoredReader(checkpoint, described["layers"], self.device)
            return
        form = read_format(path, described)
        reader = PublishedReader(checkpoint, form, path, self.device)
        self.reader = self.cached(reader, model_dir, checkpoint.files(), form)

    def round_to(self, precision: Precision, model_dir: Path) -> None:
        """Round the weights as they are read."""
        self.rounds_embedding = precision.embedding == "int8"
        self.reader = RoundingReader(precision.of, self.stacked)
        if isinstance(self.source, Checkpoint):
            self.reader = self.cached(self.reader, model_dir, self.source.files(), (precision, self.dtype))

    def cached(self, reader: Reader, model_dir: Path, files: list[Path], settings: object) -> Reader:
        directory = cache_directory() / f"weights-{cache_key(model_dir, files, settings)}"
        return CachingReader(reader, directory, self.device)

    def build(self) -> ModelWeights:
        config = self.config
        embedding = self.embedding()
        return ModelWeights(
            embedding=embedding,
            layers=[self.layer(f"model.layers.{index}") for index in range(config.num_layers)],
            final_norm=self.tensor("model.norm.weight", config.hidden_size),
            head=self.head(embedding),
        )

    def embedding(self) -> torch.Tensor | QuantizedEmbedding:
        config, codes = self.config, f"{EMBEDDING}.codes"
        if isinstance(self.source, Checkpoint) and self.source.has(codes):
            scales = self.source.get(f"{EMBEDDING}.scales")
            return QuantizedEmbedding(self.source.get(codes).to(self.device), scales.to(self.device), self.dtype)
        embedding = self.tensor(f"{EMBEDDING}.weight", config.vocab_size, config.hidden_size)
        return round_embedding(embedding) if self.rounds_embedding else embedding

    def head(self, embedding: torch.Tensor | QuantizedEmbedding) -> AnyLinear:
        config = self.config
        name = EMBEDDING if config.tie_word_embeddings else HEAD
        found = self.reader.read(HEAD, {name: config.vocab_size}, config.hidden_size) if self.reader else None
        if found is not None:
            return found
        if config.tie_word_embeddings and isinstance(embedding, torch.Tensor):
            return Linear(embedding)
        return Linear(self.stacked({name: config.vocab_size}, config.hidden_size))

    def layer(self, prefix: str) -> LayerWeights:
        config = self.config
        hidden, head_dim = config.hidden_size, config.head_dim
        query, key_value = config.num_heads * head_dim, config.num_kv_heads * head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {f"{attention}.q_proj": query, f"{attention}.k_proj": key_value, f"{attention}.v_proj": key_value}
        gate_up = {f"{mlp}.gate_proj": config.intermediate_size, f"{mlp}.up_proj": config.intermediate_size}
        return LayerWeights(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self.linear(f"{attention}.qkv_proj", qkv, hidden, config.qkv_bias),
            query_norm=self.tensor(f"{attention}.q_norm.weight", head_dim) if config.qk_norm else None,
            key_norm=self.tensor(f"{attention}.k_norm.weight", head_dim) if config.qk_norm else None,
            attention_out=self.linear(f"{attention}.o_proj", {f"{attention}.o_proj": hidden}, query, config.o_bias),
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self.linear(f"{mlp}.gate_up_proj", gate_up, hidden, config.mlp_bias),
            down=self.linear(
                f"{mlp}.down_proj", {f"{mlp}.down_proj": hidden}, config.intermediate_size, config.mlp_bias
            ),
        )

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        target = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.source.fill(name, target)
        return target

    def linear(self, name: str, parts: dict[str, int], in_features: int, has_bias: bool) -> AnyLinear:
        """Projections of one input stacked into one; `parts` maps their names to their output sizes."""
        bias = torch.empty(sum(parts.values()), dtype=self.dtype, device=self.device) if has_bias else None
        if bias is not None:
            for part, piece in zip(parts, bias.split(list(parts.values())), strict=True):
                self.source.fill(f"{part}.bias", piece)
        found = self.reader.read(name, parts, in_features) if self.reader else None
        if found is not None:
            found.bias = bias
            return found
        return Linear(self.stacked(parts, in_features), bias)

    def stacked(self, parts: dict[str, int], in_features: int) -> torch.Tensor:
        """Their weights, one below the other."""
        sizes = list(parts.values())
        weight = torch.empty(sum(sizes), in_features, dtype=self.dtype, device=self.device)
        for name, piece in zip(parts, weight.split(sizes), strict=True):
            self.source.fill(f"{name}.weight", piece)
        return weight


class Checkpoint:
    """Tensors of a Hugging Face directory: one model.safetensors, or shards with their index."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.file_of = _locate(directory)
        self.opened: dict[Path, safe_open] = {}

    def fill(self, name: str, target: torch.Tensor) -> None:
        tensor = self.get(name)
        if tensor.shape != target.shape:
            path = self.file_of[name]
            raise ModelError(f"{path}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(target.shape)}")
        target.copy_(tensor)

    def has(self, name: str) -> bool:
        return name in self.file_of

    def get(self, name: str) -> torch.Tensor:
        """The tensor, in host memory. Raises ModelError."""
        if name not in self.file_of:
            raise ModelError(f"{self.directory} has no tensor {name!r}, which its config.json asks for")
        path = self.file_of[name]
        try:
            return self._open(path).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: tensor {name!r} is not readable: {error}") from None

    def files(self) -> list[Path]:
        return sorted(set(self.file_of.values()))

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
