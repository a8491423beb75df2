"""The quality floor: which schemes `model.quantization: auto` may choose, from the table that engine.quantize.quality
measured and that ships with the project."""

import json
import logging
from pathlib import Path
from typing import Any

from engine.config import ModelSection
from engine.models.config import ModelConfig
from engine.quantize.scheme import ModelScheme, Precision

log = logging.getLogger("weights")

TABLE = Path(__file__).with_name("quality.json")
MOST_PERPLEXITY_RISE = 0.06
LEAST_AGREEMENT = 0.85
"""A scheme's floor on the embedded model. Perplexity on the held-out text may rise by this part; at this share of
positions at least its most likely token must be that of the full model."""
SMALLEST_FIRST: tuple[ModelScheme, ...] = ("w4a16", "mixed", "w8a16")
"""Schemes that `auto` chooses among, by bytes of weight that a decode step reads."""


def measured(table: Path = TABLE) -> dict[str, dict[str, Any]]:
    """Figures of each scheme as rounded at load ({} when none were measured)."""
    try:
        rows = json.loads(table.read_text())["rows"]
    except (OSError, ValueError, KeyError):
        return {}
    return {row["scheme"]: row for row in rows if row["method"] == "rtn" and row["head"] == "full"}


def passes(row: dict[str, Any]) -> bool:
    return row["perplexity_rise"] <= MOST_PERPLEXITY_RISE and row["agreement"] >= LEAST_AGREEMENT


def best_scheme(table: Path = TABLE) -> ModelScheme:
    """The smallest scheme above the floor, "none" when there is none."""
    rows = measured(table)
    return next((scheme for scheme in SMALLEST_FIRST if scheme in rows and passes(rows[scheme])), "none")


def choose_precision(model_dir: str, section: ModelSection, device: str) -> Precision:
    """What a model is rounded to as it is loaded. `auto` leaves quantized models, and any on a CPU, as they are.

    Raises ModelError when the model's config.json cannot be read.
    """
    scheme = section.quantization
    if scheme == "auto":
        plain = ModelConfig.from_dir(model_dir).quantization is None
        scheme = best_scheme() if plain and device != "cpu" else "none"
        log.info("quantization: %s", scheme)
    return Precision(scheme, section.head_precision, section.embedding_precision)
