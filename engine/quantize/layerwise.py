"""Quantize a model layer by layer, with little more than one layer in memory, into a directory that can be served.

Each layer is calibrated on what the quantized layers before it make of the text. A layer's file is written when it is
done, so a run that was interrupted goes on where it stopped.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.kernels.linear import Linear
from engine.kernels.quantized_linear import QuantizedEmbedding, QuantizedLinear, densify, linear
from engine.models.config import ModelConfig, ModelError
from engine.quant_formats.published import OWN_METHOD
from engine.quantize.forward import STAGES, Forward, Stage
from engine.quantize.gptq import gptq_weight
from engine.quantize.rounding import round_embedding, round_weight
from engine.quantize.scaling import scale_layer
from engine.quantize.scheme import HEAD, HEAD_SCHEMES, Precision
from engine.weights import EMBEDDING, INDEX_FILE, Checkpoint, LayerWeights, WeightsBuilder, weight_files

Method = Literal["rtn", "awq", "gptq", "awq+gptq"]
METHODS: tuple[Method, ...] = ("rtn", "awq", "gptq", "awq+gptq")
STORED_AS: dict[Stage, str] = {
    "qkv": "self_attn.qkv_proj",
    "attention_out": "self_attn.o_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
}
OUTSIDE_FILE = "outside-layers.safetensors"
SETTINGS_FILE = "quantize-settings.json"
REPORT_FILE = "quantize-report.json"
VERSION = 1
BATCH = 4
ERROR_ROWS = 512
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json",
          "merges.txt", "tokenizer.model", "special_tokens_map.json", "added_tokens.json")  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What a quantized directory follows from, beside the model. text: hash of the calibration token ids."""

    precision: Precision
    method: Method
    text: str
    source: str
    version: int = VERSION


class LayerwiseQuantizer:
    """tokens int64 `[samples, T]` to calibrate with. `report` gets a line of progress now and then."""

    def __init__(
        self,
        model_dir: Path,
        out: Path,
        precision: Precision,
        method: Method,
        tokens: torch.Tensor,
        device: torch.device,
        report: Callable[[str], None],
    ):
        self.config = ModelConfig.from_dir(model_dir)
        if self.config.quantization is not None:
            raise ModelError(f"{model_dir} is quantized already (quantization_config is set in its config.json)")
        self.model_dir, self.out = model_dir, out
        self.precision, self.method = precision, method
        self.tokens, self.device, self.report = tokens, device, report
        self.builder = WeightsBuilder(self.config, Checkpoint(model_dir), torch.float32, device)
        self.forward = Forward(self.config, tokens.shape[1], device)
        self.settings = Settings(precision, method, _hash(tokens.numpy().tobytes()), _source(model_dir))

    @torch.inference_mode()
    def run(self) -> dict[str, Any]:
        """Write the directory. Returns the report: for each layer and stage the relative error of its output."""
        self._start()
        started = time.monotonic()
        embedding = self.builder.tensor(f"{EMBEDDING}.weight", self.config.vocab_size, self.config.hidden_size)
        hidden = torch.stack([embedding[row] for row in self.tokens.to(self.device)]).cpu()
        errors: list[dict[str, Any]] = []
        schemes: dict[str, str] = {}
        for index in range(self.config.num_layers):
            path = self.out / f"layer-{index:03d}.safetensors"
            if path.is_file():
                layer, figures = self._load_layer(path, index)
            else:
                layer, figures = self._quantize_layer(index, hidden)
                self._save_layer(path, index, layer, figures)
            hidden = self._advance(hidden, layer)
            errors.append({"layer": index, **{str(stage): error for stage, error in figures.items()}})
            for stage in STAGES:
                found = getattr(layer, stage)
                if isinstance(found, QuantizedLinear):
                    schemes[f"model.layers.{index}.{STORED_AS[stage]}"] = found.scheme
            spent = time.monotonic() - started
            told = ", ".join(f"{stage} {error:.3f}" for stage, error in figures.items())
            self.report(f"layer {index + 1} of {self.config.num_layers} after {spent:.0f} s: relative error {told}")
        self._write_outside(embedding, schemes)
        return self._finish(errors, schemes, time.monotonic() - started)

    def _start(self) -> None:
        path = self.out / SETTINGS_FILE
        wanted = asdict(self.settings)
        if path.is_file():
            try:
                known = json.loads(path.read_text())
            except ValueError:
                known = None
            if known != wanted:
                raise ModelError(f"{self.out} holds the work of other settings; remove it or name another directory")
            return
        if self.out.exists() and any(self.out.iterdir()):
            raise ModelError(f"{self.out} is not empty; remove it or name another directory")
        self.out.mkdir(parents=True, exist_ok=True)
        _write_json(path, wanted)

    def _quantize_layer(self, index: int, hidden: torch.Tensor) -> tuple[LayerWeights, dict[Stage, float]]:
        layer = self.builder.layer(f"model.layers.{index}")
        schemes = {stage: self.precision.of(STORED_AS[stage]) for stage in STAGES}
        if "awq" in self.method or "w8a8" in schemes.values():
            sampled = {stage: self._sample(stage, hidden, layer) for stage in STAGES}
            to_scale = {
                stage: scheme if "awq" in self.method or scheme == "w8a8" else None for stage, scheme in schemes.items()
            }
            scale_layer(self.config, layer, sampled, to_scale)
        figures: dict[Stage, float] = {}
        for stage in STAGES:
            scheme, plain = schemes[stage], getattr(layer, stage)
            if scheme is None:
                continue
            if "gptq" in self.method:
                quantized = gptq_weight(plain.weight, self._products(stage, hidden, layer), scheme)
            else:
                quantized = round_weight(plain.weight, scheme)
            quantized.bias = plain.bias
            densify(quantized, torch.float32)
            figures[stage] = self._error(self._sample(stage, hidden, layer), plain, quantized)
            setattr(layer, stage, quantized)
        return layer, figures

    def _batches(self, hidden: torch.Tensor):
        return (rows.to(self.device) for rows in hidden.split(BATCH))

    def _sample(self, stage: Stage, hidden: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Some rows of a stage's input, evenly from all samples."""
        rows = torch.cat(
            [self.forward.input_of(stage, batch, layer) for batch in self._batches(hidden[:: _step(hidden)])]
        )
        return rows[:: max(1, len(rows) // ERROR_ROWS)]

    def _products(self, stage: Stage, hidden: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        total: torch.Tensor | None = None
        for batch in self._batches(hidden):
            x = self.forward.input_of(stage, batch, layer)
            total = x.T @ x if total is None else total.addmm_(x.T, x)
        assert total is not None
        return total

    def _error(self, x: torch.Tensor, plain: Linear, quantized: QuantizedLinear) -> float:
        """||quantized - plain|| / ||plain|| of the outputs, biases left out."""
        expected = x @ plain.weight.T
        bare = replace(quantized, bias=None, dense=replace(quantized.dense, bias=None) if quantized.dense else None)
        return float((linear(x, bare) - expected).norm() / expected.norm())

    def _advance(self, hidden: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        return torch.cat([self.forward.layer(batch, layer).cpu() for batch in self._batches(hidden)])

    def _save_layer(self, path: Path, index: int, layer: LayerWeights, figures: dict[Stage, float]) -> None:
        prefix = f"model.layers.{index}"
        tensors = {
            f"{prefix}.input_layernorm.weight": layer.input_norm,
            f"{prefix}.post_attention_layernorm.weight": layer.mlp_norm,
        }
        for name, norm in (("q_norm", layer.query_norm), ("k_norm", layer.key_norm)):
            if norm is not None:
                tensors[f"{prefix}.self_attn.{name}.weight"] = norm
        metadata = {"errors": json.dumps(figures)}
        for stage in STAGES:
            found: QuantizedLinear | Linear = getattr(layer, stage)
            name = f"{prefix}.{STORED_AS[stage]}"
            if isinstance(found, QuantizedLinear):
                tensors |= {f"{name}.{kind}": tensor for kind, tensor in found.tensors().items()}
                metadata[name] = found.scheme
            else:
                tensors |= self._named_parts(prefix, stage, found.weight, "weight")
            if found.bias is not None:
                tensors |= self._named_parts(prefix, stage, found.bias, "bias")
        _save(tensors, path, metadata)

    def _named_parts(self, prefix: str, stage: Stage, stacked: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
        config = self.config
        key_value = config.num_kv_heads * config.head_dim
        names = {
            "qkv": {
                "self_attn.q_proj": config.num_heads * config.head_dim,
                "self_attn.k_proj": key_value,
                "self_attn.v_proj": key_value,
            },
            "attention_out": {"self_attn.o_proj": config.hidden_size},
            "gate_up": {"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size},
            "down": {"mlp.down_proj": config.hidden_size},
        }[stage]
        pieces = stacked.split(list(names.values()))
        return {f"{prefix}.{name}.{kind}": piece for name, piece in zip(names, pieces, strict=True)}

    def _load_layer(self, path: Path, index: int) -> tuple[LayerWeights, dict[Stage, float]]:
        """A layer that an interrupted run has left."""
        from engine.quant_formats.readers import StoredReader

        source = _OneFile(path)
        schemes = {name: scheme for name, scheme in source.metadata.items() if name != "errors"}
        builder = WeightsBuilder(self.config, source, torch.float32, self.device)
        builder.reader = StoredReader(source, schemes, self.device)
        layer = builder.layer(f"model.layers.{index}")
        for stage in STAGES:
            if isinstance(getattr(layer, stage), QuantizedLinear):
                densify(getattr(layer, stage), torch.float32)
        return layer, json.loads(source.metadata["errors"])

    def _write_outside(self, embedding: torch.Tensor, schemes: dict[str, str]) -> None:
        """Final norm, embedding and head."""
        config = self.config
        tensors = {"model.norm.weight": self.builder.tensor("model.norm.weight", config.hidden_size)}
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(config.dtype, torch.float32)
        if self.precision.embedding == "int8":
            rounded: QuantizedEmbedding = round_embedding(embedding)
            tensors |= {f"{EMBEDDING}.codes": rounded.codes, f"{EMBEDDING}.scales": rounded.scales}
        else:
            tensors[f"{EMBEDDING}.weight"] = embedding.to(dtype)
        scheme = HEAD_SCHEMES[self.precision.head]
        name = EMBEDDING if config.tie_word_embeddings else HEAD
        if scheme is not None:
            head = (
                embedding if name == EMBEDDING else self.builder.stacked({name: config.vocab_size}, config.hidden_size)
            )
            rounded_head = round_weight(head, scheme)
            tensors |= {f"{HEAD}.{kind}": tensor for kind, tensor in rounded_head.tensors().items()}
            schemes[HEAD] = scheme
        elif name == HEAD:
            tensors[f"{HEAD}.weight"] = self.builder.stacked({name: config.vocab_size}, config.hidden_size).to(dtype)
        elif self.precision.embedding == "int8":
            tensors[f"{EMBEDDING}.weight"] = embedding.to(dtype)  # the head is tied to it
        _save(tensors, self.out / OUTSIDE_FILE, {})

    def _finish(self, errors: list[dict[str, Any]], schemes: dict[str, str], seconds: float) -> dict[str, Any]:
        files = sorted(self.out.glob("layer-*.safetensors")) + [self.out / OUTSIDE_FILE]
        weight_map: dict[str, str] = {}
        for path in files:
            with safe_open(str(path), framework="pt") as file:
                weight_map |= dict.fromkeys(file.keys(), path.name)
        num_bytes = sum(path.stat().st_size for path in files)
        _write_json(self.out / INDEX_FILE, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})
        for name in COPIED:
            if (self.model_dir / name).is_file():
                shutil.copyfile(self.model_dir / name, self.out / name)
        config = json.loads((self.model_dir / "config.json").read_text())
        about = {**asdict(self.precision), "method": self.method, "quant_method": OWN_METHOD, "version": VERSION}
        config["quantization_config"] = {**about, "layers": schemes}
        report = {"settings": asdict(self.settings), "bytes": num_bytes, "seconds": round(seconds, 1), "errors": errors}
        _write_json(self.out / REPORT_FILE, report)
        _write_json(self.out / "config.json", config)  # last: without it the directory is no model
        return report


class _OneFile:
    """The tensors of one safetensors file."""

    def __init__(self, path: Path):
        self.file = safe_open(str(path), framework="pt")
        self.metadata: dict[str, Any] = self.file.metadata()
        self.names = set(self.file.keys())

    def has(self, name: str) -> bool:
        return name in self.names

    def get(self, name: str) -> torch.Tensor:
        return self.file.get_tensor(name)

    def fill(self, name: str, target: torch.Tensor) -> None:
        target.copy_(self.get(name))


def _step(hidden: torch.Tensor) -> int:
    """Samples to skip so that ERROR_ROWS rows are enough of what is computed."""
    return max(1, hidden.shape[0] * hidden.shape[1] // (4 * ERROR_ROWS))


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    temporary = path.with_suffix(".part")
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, str(temporary), metadata)
    temporary.replace(path)


def _write_json(path: Path, content: Any) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def _source(model_dir: Path) -> str:
    files = [(path.name, path.stat().st_size) for path in (model_dir / "config.json", *weight_files(model_dir))]
    return _hash(repr(files).encode())


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()
