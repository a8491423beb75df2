"""Makes an experiment record from a replay and what surrounds it."""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from bench.facts import ROOT, Facts
from bench.progress import say
from bench.record.schema import (
    CacheHits,
    Code,
    CostBasis,
    Device,
    ExperimentRecord,
    Hardware,
    LoadLevel,
    ModelFiles,
    OutputValidation,
    Quantiles,
    Slo,
    WorkloadFacts,
)
from bench.replay.report import Result
from bench.replay.summary import LevelSummary

LOCK = ROOT / "requirements.lock"
HASHED = (".json", ".safetensors", ".jinja", ".txt", ".model", ".gguf")
Role = Literal["baseline", "candidate", "ablation", "interaction", "verification"]


class RecordError(ValueError):
    """A record cannot be made of what was given; the message says what is missing."""


def make_record(
    result: Result,
    *,
    name: str,
    role: Role,
    run: int,
    config_name: str,
    config: dict[str, Any],
    model: ModelFiles,
    cost: CostBasis,
    least_agreement: float = 0.0,
) -> ExperimentRecord:
    """The record of a replay's result. Raises RecordError for one without any load level.

    `least_agreement`: the share of answers that must equal the reference, where there is one, for a run to be eligible.
    """
    if not result.levels or result.facts is None:
        raise RecordError("the replay has no load level that ended")
    levels = [load_level(level, cost) for level in result.levels]
    reasons = ineligibility(levels, least_agreement)
    workload = result.workload
    seed = workload.seed if workload else 0
    return ExperimentRecord(
        schema_version=1,
        kind="measured",
        name=name,
        role=role,
        run=run,
        time=result.facts.time,
        code=Code(commit=result.facts.commit, lock_sha256=lock_sha256(), command=result.facts.command),
        model=model,
        config_name=config_name,
        config=config,
        hardware=hardware(result.facts),
        cost=cost,
        workload=WorkloadFacts(
            name="eight-session" if workload else "trace",
            seed=seed,
            settings=asdict(workload) if workload else asdict(result.trace) if result.trace else {},
            warm_cache=not result.flushed_between_levels,
        ),
        slo=Slo(p99_ttft_ms=result.slo.ttft_ms, p99_tpot_ms=result.slo.tpot_ms),
        levels=levels,
        objective_qps=result.best_effective_qps,
        eligible=not reasons,
        reasons=reasons,
        notes=result.notes,
    )


def load_level(level: LevelSummary, cost: CostBasis) -> LoadLevel:
    measured, agreement = level.measured, level.agreement
    unit_seconds = cost.count * level.duration_s
    price = unit_seconds / 3600 * cost.price_per_hour
    requests = sum(entry.requests for entry in level.classes)
    return LoadLevel(
        label=level.label,
        offered_qps=level.offered_qps,
        concurrency=level.concurrency,
        prompts_sha256=level.prompts_sha256,
        requests=requests,
        completed=sum(entry.ok for entry in level.classes),
        failed=sum(entry.failed for entry in level.classes),
        timed_out=sum(entry.timeouts for entry in level.classes),
        duration_s=level.duration_s,
        effective_qps=level.effective_qps,
        goodput_qps=level.goodput_qps,
        output_tokens_per_s=level.output_tokens_per_s,
        ttft_ms=Quantiles(**asdict(measured.ttft_ms)),
        tpot_ms=Quantiles(**asdict(measured.tpot_ms)),
        gap_ms=Quantiles(**asdict(measured.gap_ms)),
        cache=CacheHits(
            prompt_tokens=measured.prompt_tokens,
            cached_tokens=measured.cached_tokens,
            ideal_tokens=measured.oracle_tokens,
            hit_rate=measured.hit_rate,
        ),
        output=OutputValidation(
            requests=requests,
            valid=sum(entry.ok for entry in level.classes),
            outputs_sha256=level.outputs_sha256,
            compared=agreement.compared if agreement else 0,
            identical=agreement.identical if agreement else 0,
            median_divergence=agreement.median_divergence if agreement else None,
        ),
        unit_seconds_per_request=unit_seconds / measured.ok if measured.ok else None,
        cost_per_1k_tokens=price / measured.output_tokens * 1000 if measured.output_tokens else None,
        errors=level.errors,
        warnings=level.warnings,
        counters=level.counters,
        passed=level.passed,
    )


def ineligibility(levels: list[LoadLevel], least_agreement: float) -> list[str]:
    """Why a run must not be chosen; [] when it may be."""
    reasons = []
    for level in levels:
        if level.completed < level.requests:
            reasons.append(f"{level.label}: {level.requests - level.completed} of {level.requests} requests failed")
        share = level.output.identical / level.output.compared if level.output.compared else 1.0
        if share < least_agreement:
            reasons.append(
                f"{level.label}: {share:.1%} of the answers equal the reference, {least_agreement:.1%} are required"
            )
    if not any(level.passed for level in levels):
        reasons.append("no load level is within the SLO")
    return reasons


def hardware(facts: Facts) -> Hardware:
    devices = []
    for line in facts.devices:  # "name, driver, memory" as nvidia-smi prints them
        name, driver, memory = (part.strip() for part in line.rsplit(",", 2))
        devices.append(Device(name=name, driver=driver, memory=memory))
    return Hardware(
        platform=facts.platform,
        processor=facts.processor,
        cores=facts.cores,
        memory_gib=facts.memory_gib,
        devices=devices,
        python=facts.python,
        versions=facts.versions,
    )


def model_files(model_dir: Path, weights: Literal["files", "random"] = "files") -> ModelFiles:
    """Name, revision and SHA-256 of a model directory's files (with random weights: of all but the weights)."""
    if not (model_dir / "config.json").is_file():
        raise RecordError(f"{model_dir} is no model directory: it holds no config.json")
    paths = sorted(path for path in model_dir.iterdir() if path.suffix in HASHED and path.is_file())
    if weights == "random":
        paths = [path for path in paths if path.suffix not in (".safetensors", ".gguf")]
    size = sum(path.stat().st_size for path in paths)
    if size > 1 << 30:
        say(f"hashing {size / 2**30:.1f} GiB of {model_dir}")
    return ModelFiles(
        name=model_dir.name,
        revision=revision(model_dir),
        weights=weights,
        files_sha256={path.name: sha256(path) for path in paths},
    )


def revision(model_dir: Path) -> str | None:
    """The hub's commit: from the path of a hub cache, or from what its download tool leaves beside the files."""
    if match := re.search(r"/snapshots/([0-9a-f]{40})", str(model_dir.resolve()) + "/"):
        return match[1]
    for metadata in sorted(model_dir.glob(".cache/huggingface/download/*.metadata")):
        first = metadata.read_text().splitlines()[:1]
        if first and re.fullmatch(r"[0-9a-f]{40}", first[0]):
            return first[0]
    return None


def lock_sha256() -> str | None:
    return sha256(LOCK) if LOCK.is_file() else None


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def write_record(record: ExperimentRecord, path: Path) -> None:
    """Written whole or not at all, so that an interrupted run leaves no broken record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(record.model_dump(mode="json"), indent=1) + "\n")
    partial.replace(path)


def read_record(path: Path) -> ExperimentRecord:
    """Raises RecordError with the first field that is wrong."""
    try:
        return ExperimentRecord.model_validate_json(path.read_text())
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise RecordError(f"{path}: {place}: {first['msg']}") from None
