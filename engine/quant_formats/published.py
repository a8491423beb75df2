"""What `quantization_config` of a published checkpoint says, as far as it is supported.

Sources: AutoAWQ's "gemm" layout, GPTQ as AutoGPTQ and GPTQModel write it (checkpoint_format gptq and gptq_v2), and
compressed-tensors (formats pack-quantized and int-quantized).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.kernels.quantized_linear import GROUP_SIZES, PADDING
from engine.models.config import ModelError

OWN_METHOD = "baton"
METHODS = ("awq", "gptq", "compressed-tensors", OWN_METHOD)


@dataclass(frozen=True)
class PublishedFormat:
    """bits, group_size (-1: one scale for each output) of the weights; int8_activations: rounded for each token.

    zero_offset  what the stored zero points lack (1 in GPTQ's first format)
    """

    method: Literal["awq", "gptq", "compressed-tensors"]
    bits: int
    group_size: int
    int8_activations: bool = False
    zero_offset: int = 0


def read_format(path: Path, values: dict[str, Any]) -> PublishedFormat:
    """`values` is quantization_config of the config.json at `path`. Raises ModelError, naming the field."""
    method = values.get("quant_method")
    reader = _Fields(path, values)
    if method == "awq":
        return _awq(reader)
    if method == "gptq":
        return _gptq(reader)
    if method == "compressed-tensors":
        return _compressed_tensors(reader)
    raise reader.unsupported("quant_method", method, METHODS)


class _Fields:
    """One object of the configuration; `prefix` is where it is."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "quantization_config"):
        self.path = path
        self.values = values
        self.prefix = prefix

    def one_of(self, key: str, allowed: tuple, default: Any = None) -> Any:
        value = self.values.get(key, default)
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[allowed.index(value)], bool):
            raise self.unsupported(key, value, allowed)
        return value

    def unsupported(self, key: str, value: Any, allowed: tuple) -> ModelError:
        supported = ", ".join("unset" if item is None else str(item) for item in allowed)
        return ModelError(f"{self.path}: {self.prefix}.{key} {value!r} is not supported; supported: {supported}")

    def group_size(self, key: str = "group_size", default: int | None = None) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or (value not in (*GROUP_SIZES, -1) and (value <= 0 or value % PADDING)):
            raise self.unsupported(key, value, (*GROUP_SIZES, f"multiples of {PADDING}", -1))
        return value

    def inside(self, key: str) -> "_Fields":
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise ModelError(f"{self.path}: {self.prefix}.{key} must be an object, not {value!r}")
        return _Fields(self.path, value, f"{self.prefix}.{key}")


def _awq(fields: _Fields) -> PublishedFormat:
    fields.one_of("version", ("gemm",), "gemm")
    return PublishedFormat("awq", fields.one_of("bits", (4,)), fields.group_size())


def _gptq(fields: _Fields) -> PublishedFormat:
    written = fields.one_of("checkpoint_format", ("gptq", "gptq_v2", None))
    if fields.values.get("dynamic"):
        raise fields.unsupported("dynamic", fields.values["dynamic"], (None,))
    if fields.values.get("is_marlin_format"):
        raise fields.unsupported("is_marlin_format", True, (False,))
    offset = 0 if written == "gptq_v2" else 1
    return PublishedFormat("gptq", fields.one_of("bits", (4, 8)), fields.group_size(), zero_offset=offset)


def _compressed_tensors(fields: _Fields) -> PublishedFormat:
    form = fields.one_of("format", ("pack-quantized", "int-quantized"))
    fields.one_of("quantization_status", ("compressed", None))
    groups = fields.inside("config_groups")
    if len(groups.values) != 1:
        raise ModelError(
            f"{fields.path}: {groups.prefix} holds {len(groups.values)} groups ({', '.join(groups.values)}); "
            "supported: one for all linear layers"
        )
    group = groups.inside(next(iter(groups.values)))
    weights = group.inside("weights")
    weights.one_of("type", ("int",), "int")
    weights.one_of("actorder", ("group", "weight", "static", "dynamic", True, False, None))
    if form == "pack-quantized":
        if group.values.get("input_activations"):
            raise group.unsupported("input_activations", group.values["input_activations"], (None,))
        bits = weights.one_of("num_bits", (4, 8))
        grouped = weights.one_of("strategy", ("group", "channel")) == "group"
        return PublishedFormat("compressed-tensors", bits, weights.group_size() if grouped else -1)
    weights.one_of("num_bits", (8,))
    weights.one_of("symmetric", (True,), True)
    weights.one_of("strategy", ("channel", "tensor"))
    if not group.values.get("input_activations"):
        return PublishedFormat("compressed-tensors", 8, -1)
    activations = group.inside("input_activations")
    activations.one_of("num_bits", (8,))
    activations.one_of("type", ("int",), "int")
    activations.one_of("symmetric", (True,), True)
    activations.one_of("dynamic", (True,))
    activations.one_of("strategy", ("token",))
    return PublishedFormat("compressed-tensors", 8, -1, int8_activations=True)
