"""One run: the baseline, then the candidate through gate and scenarios, on the same device."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.facts import ROOT, Facts, collect_facts
from bench.progress import Progress, say
from bench.speedrun.baseline_cache import BaselineRecord, cache_path, identity, read_cached, write_cached
from bench.speedrun.client import Measurement, OnStep, run_scenario
from bench.speedrun.gate.check import GateResult, check_gate
from bench.speedrun.gate.record import Gate, GateError, gate_path, read_gate
from bench.speedrun.launch import START_LIMIT_S, Launch, LaunchError, last_lines, run_setup, running
from bench.speedrun.model_files import load_tokenizer, model_hash
from bench.speedrun.scenarios import Scenario, warm_up
from bench.speedrun.score import TIME_LIMIT_FACTOR, Outcome, ScenarioValue, geometric_mean, judge, speedup, summarize
from bench.speedrun.settings import OUTPUT_DIR, Settings
from bench.speedrun.timeline import Timeline

BASELINE_LIMIT_S = 3600.0
"""Of one run of a scenario. Limits are made from the baseline's times; its own is there for a hang only."""
GATE_LIMIT_S = 1800.0

RANDOM_WEIGHTS_NOTE = (
    "random weights: there is no accuracy gate, and tokens are counted by the servers' own usage, with end-of-sequence "
    "ignored, because the text does not tokenize to what it was made of"
)


class RunError(RuntimeError):
    """The run has no baseline, which says nothing about the candidate."""


class NoScore(Exception):
    """The candidate's run ends here."""

    def __init__(self, outcome: Outcome, reason: str):
        super().__init__(reason)
        self.outcome = outcome


@dataclass
class Result:
    """`reason`: why there is no score. Dictionaries go by scenario name; `score` is the speedups' geometric mean;
    `measurements` are the candidate's."""

    facts: Facts
    settings: Settings
    model_hash: str
    baseline: BaselineRecord
    baseline_is_cached: bool = False
    gate: Gate | None = None
    gate_result: GateResult | None = None
    values: dict[str, ScenarioValue] = field(default_factory=dict)
    limits_s: dict[str, float] = field(default_factory=dict)
    speedups: dict[str, float] = field(default_factory=dict)
    outcome: Outcome = "SCORED"
    reason: str = ""
    score: float | None = None
    measurements: list[Measurement] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)
    notes: list[str] = field(default_factory=list)


class Runner:
    """Holds what every phase needs. Raises ModelFilesError for a directory that is no model."""

    def __init__(self, settings: Settings, start_limit_s: float = START_LIMIT_S):
        self.settings, self.start_limit_s = settings, start_limit_s
        self.facts = collect_facts()
        self.timeline = Timeline()
        self.tokenizer: Tokenizer = load_tokenizer(settings.model_dir)
        say(f"model {settings.model_dir}: hashing")
        self.model_hash = model_hash(settings.model_dir)

    def run(self, gate_file: Path | None, fresh_baseline: bool) -> Result:
        """Raises RunError without a baseline, GateError without a gate."""
        gate = self.load_gate(gate_file) if self.settings.weights == "files" else None
        baseline, is_cached = self.load_baseline(fresh_baseline)
        result = Result(self.facts, self.settings, self.model_hash, baseline, is_cached, gate, timeline=self.timeline)
        if gate is None:
            result.notes.append(RANDOM_WEIGHTS_NOTE)
        try:
            self.measure_candidate(result)
            result.score = geometric_mean(list(result.speedups.values()))
        except NoScore as end:
            result.outcome, result.reason = end.outcome, str(end)
        except LaunchError as error:
            result.outcome, result.reason = ("TIMEOUT" if error.timed_out else "FAIL"), str(error)
        return result

    def load_gate(self, file: Path | None) -> Gate:
        path = file or gate_path(self.model_hash)
        if file or path.is_file():
            gate = read_gate(path)
        else:
            with self.timeline.phase("model", "build the gate, once for a model"):
                self.build_gate(path)
            gate = read_gate(path)
        if gate.model_hash != self.model_hash:
            raise GateError(f"{path} was built for another model than {self.settings.model_dir}; build it again")
        return gate

    def build_gate(self, path: Path) -> None:
        """In a process of its own, which takes the model out of the device's memory when it ends. Raises GateError."""
        command = [sys.executable, "-m", "bench.speedrun.gate", "build"]
        command += ["--model-dir", str(self.settings.model_dir.resolve())]
        command += ["--device", self.settings.device, "--output", str(path)]
        status = subprocess.run(command, cwd=ROOT).returncode
        if status:
            raise GateError(f"the gate was not built (exit status {status}); its message is above")

    def load_baseline(self, fresh: bool) -> tuple[BaselineRecord, bool]:
        known = identity(self.settings, self.facts, self.model_hash)
        path = cache_path(known)
        cached = None if fresh else read_cached(path, known)
        if cached:
            say(f"baseline: measured here at {cached.made} ({path.name}); --fresh-baseline measures it again")
            return cached, True
        record = self.measure_baseline(known)
        write_cached(path, record)
        return record, False

    def measure_baseline(self, known: dict[str, Any]) -> BaselineRecord:
        launch = self.settings.baseline_launch(OUTPUT_DIR / "baseline.log")
        record = BaselineRecord({}, {}, self.facts.time, known)
        try:
            with self.server(launch) as url:
                for scenario in self.settings.scenarios:
                    runs = self.measure(launch.name, url, scenario, BASELINE_LIMIT_S)
                    for measurement in runs:
                        outcome, reason = judge(scenario, measurement, None)
                        if outcome != "SCORED":
                            raise RunError(f"the baseline gave no figure: {reason}; its log is {launch.log}")
                    record.values[scenario.name] = summarize(scenario, runs)
                    record.tokens[scenario.name] = [measurement.tokens for measurement in runs]
        except LaunchError as error:
            raise RunError(f"the baseline did not start: {error}") from None
        return record

    def measure_candidate(self, result: Result) -> None:
        """Fills `result`. Raises NoScore and LaunchError."""
        launch = self.settings.candidate_launch(OUTPUT_DIR / "candidate.log")
        if not (launch.directory / "start_server.sh").is_file():
            raise NoScore("FAIL", f"{launch.directory} holds no start_server.sh")
        launch.log.unlink(missing_ok=True)
        if (launch.directory / "setup.sh").is_file():
            with self.timeline.phase(launch.name, "setup"):
                run_setup(launch)
        else:
            result.notes.append("the candidate has no setup.sh")
        with self.server(launch) as url:
            if result.gate:
                result.gate_result = self.check_gate(launch.name, url, result.gate)
                if not result.gate_result.passed:
                    raise NoScore("INCORRECT", f"gate: {result.gate_result.line()}")
            for scenario in self.settings.scenarios:
                self.score_scenario(launch.name, url, scenario, result)

    def check_gate(self, server: str, url: str, gate: Gate) -> GateResult:
        async def check(progress: Progress) -> GateResult:
            return await asyncio.wait_for(check_gate(url, gate, self.tokenizer, progress.update), GATE_LIMIT_S)

        with self.timeline.phase(server, "gate"), Progress("gate", len(gate.questions)) as progress:
            try:
                checked = asyncio.run(check(progress))
            except asyncio.TimeoutError:
                raise NoScore("TIMEOUT", f"the gate took longer than its limit, {GATE_LIMIT_S:g} s") from None
        say(f"gate: {checked.line()}")
        return checked

    def score_scenario(self, server: str, url: str, scenario: Scenario, result: Result) -> None:
        reference = result.baseline.values[scenario.name]
        limit_s = result.limits_s[scenario.name] = TIME_LIMIT_FACTOR * reference.wall_s
        runs = self.measure(server, url, scenario, limit_s)
        result.measurements += runs
        for measurement, tokens in zip(runs, result.baseline.tokens[scenario.name]):
            outcome, reason = judge(scenario, measurement, tokens)
            if outcome == "TIMEOUT":
                reason += f", {limit_s:.1f} s ({TIME_LIMIT_FACTOR:g} x the baseline's time)"
            if outcome != "SCORED":
                raise NoScore(outcome, reason)
        result.values[scenario.name] = value = summarize(scenario, runs)
        result.speedups[scenario.name] = speedup(scenario, reference.value, value.value)
        say(f"{scenario.title}: {value.value:.4g} {scenario.metric}, {result.speedups[scenario.name]:.2f} x")

    @contextmanager
    def server(self, launch: Launch) -> Iterator[str]:
        """The URL of a server that is healthy and has answered one short and one long prompt, which is not measured.

        Raises LaunchError.
        """
        with ExitStack() as stack:
            with self.timeline.phase(launch.name, "start"):
                url = stack.enter_context(running(launch, self.start_limit_s))
            with self.timeline.phase(launch.name, "warm-up"):
                for scenario in map(warm_up, self.settings.scenarios[:2]):
                    first = self.run_once(url, scenario, "warm-up", self.start_limit_s)
                    if first.errors:
                        message = f"{launch.name} did not answer its first requests: {first.errors[0]}"
                        raise LaunchError(f"{message}; {last_lines(launch.log)}", first.timed_out)
            yield url

    def measure(self, server: str, url: str, scenario: Scenario, limit_s: float) -> list[Measurement]:
        """Every repeat, each with prompts of its own and at most `limit_s` long; ends with the first that timed out."""
        runs: list[Measurement] = []
        title = f"{scenario.title}, {self.settings.repeats} x {scenario.requests} requests"
        with (
            self.timeline.phase(server, title),
            Progress(scenario.title, scenario.requests * self.settings.repeats) as bar,
        ):
            for repeat in range(self.settings.repeats):
                before = repeat * scenario.requests

                def on_step(done: int, detail: str, before: int = before) -> None:
                    bar.update(before + done, detail)

                runs.append(self.run_once(url, scenario, str(repeat), limit_s, on_step))
                if runs[-1].timed_out:
                    break
        return runs

    def run_once(
        self, url: str, scenario: Scenario, draw: str, limit_s: float, on_step: OnStep = lambda done, detail: None
    ) -> Measurement:
        settings = self.settings
        prompts = scenario.prompts(self.tokenizer, settings.seed, draw)
        model = settings.model_dir.resolve().name
        run = run_scenario(url, model, scenario, prompts, self.tokenizer, settings.count, limit_s, on_step)
        return asyncio.run(run)
