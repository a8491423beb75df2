"""Fixtures for every test: one torch thread, no network, tiny models of each family, the embedded model."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import engine.kernels  # noqa: F401  (it tells MKL how to compute, which must come before the first product)
from tests.cluster import Cluster, make_config
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(family, **options) -> directory of a tiny random model, options as in make_tiny_model. Made once."""
    made: dict[str, Path] = {}

    def get(family: str, **options) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(family), family, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def embedded_model_dir() -> Path:
    """Directory of SmolLM2-135M-Instruct; the test is skipped when it was not fetched."""
    directory = Path(os.environ.get("BATON_TEST_MODEL") or ROOT / "models" / "smollm2-135m-instruct")
    if not (directory / "config.json").is_file():
        pytest.skip(f"no model in {directory}; make it with: python3 -m engine.embedded_model {directory}")
    return directory


@pytest.fixture
def start_cluster(tiny_model) -> Iterator[Callable[..., Cluster]]:
    """start_cluster(topology, **config) -> a cluster that is closed, with whole pools, when the test ends."""
    clusters: list[Cluster] = []

    def start(topology: str, **config) -> Cluster:
        clusters.append(Cluster(str(tiny_model("qwen3")), make_config(topology, **config)))
        return clusters[-1]

    yield start
    for cluster in clusters:
        cluster.check_whole()
        cluster.close()
