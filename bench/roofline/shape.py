"""A model's shape from its config.json, and what its parts weigh."""

import json
from dataclasses import dataclass
from pathlib import Path


class ShapeError(ValueError):
    """The configuration does not describe a decoder with the usual parts; the message names the key."""


@dataclass(frozen=True)
class Shape:
    """Parameters are counted by what a step reads; norms (about 0.01 % of all) are left out."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @property
    def layer_parameters(self) -> int:
        """Of one layer: query and output, key and value, gate, up and down."""
        attention = 2 * self.hidden * self.heads * self.head_dim + 2 * self.hidden * self.kv_heads * self.head_dim
        return attention + 3 * self.hidden * self.intermediate

    @property
    def body_parameters(self) -> int:
        return self.layers * self.layer_parameters

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def read_shape(model_dir: Path) -> Shape:
    """Raises ShapeError, OSError."""
    path = model_dir / "config.json" if model_dir.is_dir() else model_dir
    try:
        values = json.loads(path.read_text())
        heads = values["num_attention_heads"]
        return Shape(
            name=model_dir.resolve().name,
            layers=values["num_hidden_layers"],
            hidden=values["hidden_size"],
            intermediate=values["intermediate_size"],
            heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            vocabulary=values["vocab_size"],
            tied=bool(values.get("tie_word_embeddings", False)),
        )
    except ValueError as error:
        raise ShapeError(f"{path} is no JSON: {error}") from None
    except KeyError as error:
        raise ShapeError(f"{path} has no {error}; it must describe a Llama-like decoder") from None


QWEN3_4B = Shape("Qwen3-4B-Instruct-2507", 36, 2560, 9728, 32, 8, 128, 151_936, True)
"""Source: its published config.json."""
