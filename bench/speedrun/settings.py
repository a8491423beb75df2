"""What a run is: model, servers, sizes."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.facts import ROOT
from bench.speedrun.client import CountMode
from bench.speedrun.launch import Launch
from bench.speedrun.scenarios import SIZES, Scenario

OUTPUT_DIR = ROOT / "build" / "speedrun"
Weights = Literal["files", "random"]


@dataclass(frozen=True)
class Settings:
    """size: a key of SIZES. candidate: the directory that holds start_server.sh. candidate_model_dir: what it serves,
    where that is not the unmodified model itself. config: its CONFIG, "" for its default."""

    model_dir: Path
    size: str
    candidate: Path = ROOT
    candidate_model_dir: Path | None = None
    config: str = ""
    weights: Weights = "files"
    device: str = "auto"
    seed: int = 0
    repeats: int = 3

    @property
    def scenarios(self) -> tuple[Scenario, ...]:
        return SIZES[self.size]

    @property
    def count(self) -> CountMode:
        return "usage" if self.weights == "random" else "text"

    def baseline_launch(self, log: Path) -> Launch:
        command = [sys.executable, "-m", "bench.speedrun.baseline_server"]
        command += ["--weights", self.weights, "--device", self.device]
        return Launch("baseline", command, ROOT, log, {"MODEL_DIR": str(self.model_dir.resolve())})

    def candidate_launch(self, log: Path) -> Launch:
        """The contract's variables. Relative paths are the caller's, since the server starts in its own directory;
        PYTHON is the interpreter this runs on where the caller named none."""
        model_dir = (self.candidate_model_dir or self.model_dir).resolve()
        environment = {"MODEL_DIR": str(model_dir), "PYTHON": sys.executable}
        for name in ("CONFIG", "DRAFTER_BYO_DIR", "PYTHON"):
            if value := os.environ.get(name):
                environment[name] = os.path.abspath(value) if os.path.exists(value) else value
        return Launch("candidate", ["sh", "start_server.sh"], self.candidate.resolve(), log, environment)
