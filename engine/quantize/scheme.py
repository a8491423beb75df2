"""Which layers a scheme quantizes, and how."""

from dataclasses import dataclass
from typing import Literal

from engine.kernels.quantized_linear import Scheme

ModelScheme = Literal["none", "w4a16", "w8a16", "w8a8", "mixed"]
HeadPrecision = Literal["full", "int8", "int4"]
EmbeddingPrecision = Literal["full", "int8"]

HEAD = "lm_head"
HEAD_SCHEMES: dict[str, Scheme | None] = {"full": None, "int8": "w8a16", "int4": "w4a16"}


@dataclass(frozen=True)
class Precision:
    """What a model's weights are rounded to.

    scheme     of the decoder layers. mixed: int8 weights for the down projections, whose inputs have the largest
               outliers, int4 for the others
    head       of the output head; a tied embedding keeps its own precision
    embedding  int8: with a scale for each row
    """

    scheme: ModelScheme = "none"
    head: HeadPrecision = "full"
    embedding: EmbeddingPrecision = "full"

    @property
    def is_full(self) -> bool:
        return self == Precision()

    def of(self, layer: str) -> Scheme | None:
        """The scheme of a stacked layer by its name, None: not quantized."""
        if layer == HEAD:
            return HEAD_SCHEMES[self.head]
        if self.scheme == "none":
            return None
        if self.scheme == "mixed":
            return "w8a16" if layer.endswith("down_proj") else "w4a16"
        return self.scheme
