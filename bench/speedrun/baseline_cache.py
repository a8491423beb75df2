"""The baseline's measurements, kept for each device: it is slow, and it does not change."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.facts import Facts
from bench.speedrun.score import ScenarioValue
from bench.speedrun.settings import OUTPUT_DIR, Settings

SOURCE = Path(__file__).with_name("baseline_server.py")
DECIDING_VERSIONS = ("torch", "transformers")


@dataclass
class BaselineRecord:
    """`values` and `tokens` (one number a repeat) by scenario name; when it was made, and what decides whether it can
    be used again."""

    values: dict[str, ScenarioValue]
    tokens: dict[str, list[int]]
    made: str
    identity: dict[str, Any]


def identity(settings: Settings, facts: Facts, digest: str) -> dict[str, Any]:
    """Everything that the baseline's figures depend on. `digest`: the model's hash."""
    return {
        "devices": facts.devices,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "processor": facts.processor,
        "cores": facts.cores,
        "versions": {name: facts.versions.get(name) for name in DECIDING_VERSIONS},
        "source": hashlib.sha256(SOURCE.read_bytes()).hexdigest(),
        "model": digest,
        "weights": settings.weights,
        "device": settings.device,
        "scenarios": [asdict(scenario) for scenario in settings.scenarios],
        "seed": settings.seed,
        "repeats": settings.repeats,
    }


def cache_path(known: dict[str, Any], directory: Path = OUTPUT_DIR) -> Path:
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    return directory / f"baseline-{digest[:12]}.json"


def read_cached(path: Path, known: dict[str, Any]) -> BaselineRecord | None:
    """None when there is none, or when it was made for something else."""
    try:
        record = json.loads(path.read_text())
        record["values"] = {name: ScenarioValue(**value) for name, value in record["values"].items()}
        cached = BaselineRecord(**record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return cached if cached.identity == known else None


def write_cached(path: Path, record: BaselineRecord) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(record), indent=1) + "\n")
