"""What an experiment record holds. The published JSON schema (docs/experiment_record.schema.json) is made from this."""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SHA256 = r"^[0-9a-f]{64}$"


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Quantiles(Part):
    """Nearest rank, of `n` values; null when there are none."""

    n: int = Field(ge=0)
    min: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None
    mean: float | None


class Code(Part):
    """`commit` ends in +changes when the work tree differed from it; empty where there was no repository."""

    commit: str
    lock_sha256: str | None = Field(pattern=SHA256)
    command: str


class ModelFiles(Part):
    """`revision` is that of the hub the files came from, null when they do not tell. `weights` random: shapes only."""

    name: str
    revision: str | None
    weights: Literal["files", "random"]
    files_sha256: dict[str, str]


class Device(Part):
    name: str
    driver: str
    memory: str


class Hardware(Part):
    """The machine the server ran on. `devices` are its GPUs; empty: a CPU."""

    platform: str
    processor: str
    cores: int
    memory_gib: float
    devices: list[Device]
    python: str
    versions: dict[str, str]


class CostBasis(Part):
    """What is paid for while the server runs: `count` units at `price_per_hour` each, in `currency`."""

    unit: Literal["gpu", "machine"]
    count: int = Field(ge=1)
    price_per_hour: float = Field(ge=0)
    currency: str
    price_source: str


class Slo(Part):
    p99_ttft_ms: float
    p99_tpot_ms: float


class WorkloadFacts(Part):
    """`settings`: sizes of the eight-session workload, or how a trace was fitted."""

    name: Literal["eight-session", "trace", "exercise", "other"]
    seed: int
    settings: dict[str, Any]
    warm_cache: bool = Field(description="false: the cache was emptied before each load level")


class OutputValidation(Part):
    """Completed requests whose answer had the planned length, a finish reason and consistent counts are valid; all
    others are failures. `compared` and `identical` count answers held against a reference run (0: none)."""

    requests: int
    valid: int
    outputs_sha256: str
    compared: int
    identical: int
    median_divergence: float | None


class CacheHits(Part):
    """Of measured, completed requests. `cached_tokens` is the server's own count (null: it gives none), `ideal_tokens`
    that of an infinite cache."""

    prompt_tokens: int
    cached_tokens: int | None
    ideal_tokens: int | None
    hit_rate: float | None


class LoadLevel(Part):
    """One load level; latencies are those of measured, completed requests.

    unit_seconds_per_request   cost basis units (GPUs) times duration over completed requests
    cost_per_1k_tokens         the stated price over generated tokens
    """

    label: str
    offered_qps: float | None
    concurrency: int | None
    prompts_sha256: str
    requests: int
    completed: int
    failed: int
    timed_out: int
    duration_s: float
    effective_qps: float
    goodput_qps: float
    output_tokens_per_s: float
    ttft_ms: Quantiles
    tpot_ms: Quantiles
    gap_ms: Quantiles
    cache: CacheHits
    output: OutputValidation
    unit_seconds_per_request: float | None
    cost_per_1k_tokens: float | None
    errors: dict[str, int]
    warnings: list[str]
    counters: dict[str, float]
    passed: bool


class ExperimentRecord(Part):
    """One run of one configuration over all load levels.

    kind        measured on a device, or simulated; never both in one record
    role, run   what the run is for, and which repetition of it (from 1)
    objective   largest effective QPS among levels that pass, 0 when none does
    eligible    no failure, valid output, and at least one level within the SLO; `reasons` say what is missing
    """

    schema_version: Literal[1]
    kind: Literal["measured", "simulated"]
    name: str
    role: Literal["baseline", "candidate", "ablation", "interaction", "verification"]
    run: int = Field(ge=1)
    time: str
    code: Code
    model: ModelFiles
    config_name: str
    config: dict[str, Any]
    hardware: Hardware
    cost: CostBasis
    workload: WorkloadFacts
    slo: Slo
    levels: list[LoadLevel] = Field(min_length=1)
    objective_qps: float
    eligible: bool
    reasons: list[str]
    notes: list[str]


def json_schema() -> str:
    """The schema as published, JSON Schema draft 2020-12."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **ExperimentRecord.model_json_schema()}
    return json.dumps(schema, indent=1) + "\n"
