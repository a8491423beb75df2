"""What a model is, read from the config.json of an unmodified Hugging Face directory.

Missing keys take the defaults that transformers gives each family, so that both read the same directory the same way.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """The model cannot be used. The message is one line: what is wrong, in which file, and what is supported."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `type` is default, linear, llama3 or yarn; `scaling` holds the keys of that type."""

    theta: float
    type: str
    scaling: dict[str, Any]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer.

    sliding_windows   for each layer the number of latest positions it attends to (itself included), None: all
    qkv_bias, o_bias, mlp_bias   whether those projections have biases
    qk_norm           RMSNorm over each query and key head before rope (Qwen3)
    eos_token_ids     from generation_config.json, else from config.json
    dtype             dtype of the checkpoint as config.json names it ("" when it does not)
    quantization      quantization_config as config.json has it (engine/quant_formats reads it), None: a plain
    checkpoint
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: dict[str, Any] | None = None

    @classmethod
    def from_dir(cls, model_dir: str | Path) -> "ModelConfig":
        """Read config.json and generation_config.json. Raises ModelError."""
        directory = Path(model_dir)
        path = directory / "config.json"
        if not directory.is_dir():
            raise ModelError(f"model directory {directory} does not exist")
        if not path.is_file():
            raise ModelError(f"{directory} has no config.json; it must be a Hugging Face model directory")
        generation = directory / "generation_config.json"
        return _Reader(path, _read_json(path), _read_json(generation) if generation.is_file() else {}).read()


FAMILIES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
MAX_POSITIONS = {"qwen3": 32768, "qwen2": 32768, "llama": 2048, "mistral": 131072}
WINDOWED_BY_SWITCH = ("qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
REQUIRED_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content


class _Reader:
    def __init__(self, path: Path, values: dict[str, Any], generation: dict[str, Any]):
        self.path = path
        self.values = values
        self.generation = generation

    def read(self) -> ModelConfig:
        family = self.family()
        quantization = self.values.get("quantization_config") or self.values.get("compression_config")
        if quantization is not None and not isinstance(quantization, dict):
            raise ModelError(f"{self.path}: quantization_config must be an object, not {quantization!r}")
        activation = self.values.get("hidden_act", "silu")
        if activation != "silu":
            raise ModelError(f"{self.path}: hidden_act {activation!r} is not supported, only 'silu'")
        hidden_size = self.count("hidden_size")
        num_heads = self.count("num_attention_heads")
        num_kv_heads = self.count("num_key_value_heads", num_heads)
        head_dim = self.count("head_dim", 128 if family == "qwen3" else hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"{self.path}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        if head_dim % 2:
            raise ModelError(f"{self.path}: head_dim {head_dim} is odd; rope needs an even one")
        attention_bias = family in ("qwen3", "llama") and bool(self.values.get("attention_bias", False))
        num_layers = self.count("num_hidden_layers")
        max_positions = self.count("max_position_embeddings", MAX_POSITIONS[family])
        return ModelConfig(
            model_type=family,
            vocab_size=self.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6),
            rope=self.rope(max_positions),
            max_position_embeddings=max_positions,
            sliding_windows=self.sliding_windows(family, num_layers),
            tie_word_embeddings=bool(self.values.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            mlp_bias=family == "llama" and bool(self.values.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            eos_token_ids=self.eos_token_ids(),
            dtype=str(self.values.get("dtype") or self.values.get("torch_dtype") or "").removeprefix("torch."),
            quantization=quantization,
        )

    def family(self) -> str:
        family = self.values.get("model_type")
        architectures = self.values.get("architectures") or []
        supported = ", ".join(FAMILIES.values())
        if family is None and architectures:
            family = next((name for name, cls in FAMILIES.items() if cls == architectures[0]), None)
        if family not in FAMILIES:
            found = architectures[0] if architectures else self.values.get("model_type")
            raise ModelError(f"{self.path}: architecture {found!r} is not supported; supported: {supported}")
        if architectures and FAMILIES[family] not in architectures:
            raise ModelError(f"{self.path}: architecture {architectures[0]!r} is not supported; supported: {supported}")
        return family

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.path} lacks {key!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.path}: {key} is {value!r}, expected a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        return self.as_number(key, self.values.get(key, default))

    def as_number(self, key: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {key} is {value!r}, expected a number")
        return float(value)

    def rope(self, max_positions: int) -> RopeConfig:
        """Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters` with everything inside."""
        parameters = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}
        if not isinstance(parameters, dict):
            raise ModelError(f"{self.path}: rope parameters must be an object, not {parameters!r}")
        if any(isinstance(value, dict) for value in parameters.values()):
            raise ModelError(f"{self.path}: rope parameters for each layer type are not supported")
        scaling = {key: value for key, value in parameters.items() if key not in ("rope_type", "type", "rope_theta")}
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise ModelError(
                f"{self.path}: rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        rotary = scaling.get("partial_rotary_factor", self.values.get("partial_rotary_factor"))
        if rotary not in (None, 1, 1.0):
            raise ModelError(f"{self.path}: partial_rotary_factor {rotary!r} is not supported, only 1.0")
        missing = [key for key in REQUIRED_ROPE_KEYS[rope_type] if key not in scaling]
        if missing:
            raise ModelError(f"{self.path}: rope type {rope_type!r} lacks {missing[0]!r}")
        if rope_type in ("llama3", "yarn"):
            original = self.values.get("original_max_position_embeddings")
            original = original or scaling.get("original_max_position_embeddings") or max_positions
            scaling["original_max_position_embeddings"] = self.as_number("original_max_position_embeddings", original)
        if rope_type == "yarn" and scaling["factor"] is None:
            scaling["factor"] = max_positions / scaling["original_max_position_embeddings"]
        for key in REQUIRED_ROPE_KEYS[rope_type]:
            scaling[key] = self.as_number(key, scaling[key])
        theta = self.as_number("rope_theta", parameters.get("rope_theta") or self.values.get("rope_theta") or 10000.0)
        return RopeConfig(theta=theta, type=rope_type, scaling=scaling)

    def sliding_windows(self, family: str, num_layers: int) -> tuple[int | None, ...]:
        if family == "mistral":
            window = self.window()
            return (window,) * num_layers
        if family not in WINDOWED_BY_SWITCH:
            return (None,) * num_layers
        window = self.window() if self.values.get("use_sliding_window", False) else None
        layer_types = self.values.get("layer_types")
        if layer_types is None:
            first = self.values.get("max_window_layers", 28)
            return tuple(window if layer >= first else None for layer in range(num_layers))
        if len(layer_types) != num_layers:
            raise ModelError(f"{self.path}: layer_types names {len(layer_types)} layers of {num_layers}")
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ModelError(f"{self.path}: layer type {sorted(unknown)[0]!r} is not supported")
        if window is None and "sliding_attention" in layer_types:
            raise ModelError(f"{self.path}: layer_types asks for sliding_attention, but no sliding_window is in use")
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)

    def window(self) -> int | None:
        """transformers' configs of these families default to 4096; null switches the window off."""
        if "sliding_window" in self.values and self.values["sliding_window"] is None:
            return None
        return self.count("sliding_window", 4096)

    def eos_token_ids(self) -> tuple[int, ...]:
        for source in (self.generation, self.values):
            ids = source.get("eos_token_id")
            if ids is not None:
                ids = ids if isinstance(ids, list) else [ids]
                if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                    raise ModelError(f"{self.path}: eos_token_id is {ids!r}, expected token ids")
                return tuple(ids)
        return ()
