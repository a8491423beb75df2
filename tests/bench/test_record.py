"""Experiment records: made of a replay's result, valid against the published schema, refused when anything is wrong."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from bench.facts import collect_facts
from bench.record.__main__ import main
from bench.record.make import RecordError, make_record, model_files, read_record, write_record
from bench.record.schema import CostBasis, ExperimentRecord, json_schema
from bench.replay.agreement import Agreement
from bench.replay.client import LevelRun
from bench.replay.plan import Level
from bench.replay.report import Result
from bench.replay.summary import Slo, summarize_level
from bench.replay.workload import Workload
from tests.bench.test_replay_summary import FAILED, record

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs" / "experiment_record.schema.json").read_text())
TWO_GPUS = CostBasis(unit="gpu", count=2, price_per_hour=3.6, currency="USD", price_source="list price, 2026-11")


def experiment(tmp_path: Path, changed: dict[int, Any] | None = None, agreement: Agreement | None = None, **options):
    """Sixteen requests of 0.5 s and 3 tokens each, one a second: eight measured ones end 7.5 s after the first came."""
    (tmp_path / "config.json").write_text("{}")
    records = [record(index, **(changed or {}).get(index, {})) for index in range(16)]
    level = summarize_level(
        Level("1 QPS", [], offered_qps=1.0), records, Slo(500.0, 250.0), LevelRun([], 0.0, [0.0]), block_size=16
    )
    level.agreement = agreement
    result = Result(Slo(500.0, 250.0), True, facts=collect_facts(), workload=Workload(), levels=[level])
    values: dict[str, Any] = {
        "name": "pairs",
        "role": "candidate",
        "run": 1,
        "config_name": "disagg",
        "config": {"topology": {"prefill_workers": 1}},
        "model": model_files(tmp_path),
        "cost": TWO_GPUS,
    }
    return make_record(result, **(values | options))


def test_the_published_schema_is_the_one_in_force():
    assert json.dumps(SCHEMA, indent=1) + "\n" == json_schema(), "run: python3 -m bench.record --schema docs/..."


def test_a_record_is_valid_for_an_independent_validator_and_reads_back_equal(tmp_path: Path):
    made = experiment(tmp_path)
    path = tmp_path / "records" / "1.json"
    write_record(made, path)
    jsonschema_rs.Draft202012Validator(SCHEMA).validate(json.loads(path.read_text()))
    assert read_record(path) == made
    assert [file.name for file in path.parent.iterdir()] == ["1.json"]


def test_cost_and_rates_are_those_computed_by_hand(tmp_path: Path):
    (level,) = experiment(tmp_path).levels
    assert level.duration_s == pytest.approx(7.5)
    assert level.unit_seconds_per_request == pytest.approx(2 * 7.5 / 8)
    # 15 GPU-seconds at 3.6 an hour are 0.015; 8 x 3 tokens
    assert level.cost_per_1k_tokens == pytest.approx(0.015 / 24 * 1000)
    assert (level.cache.cached_tokens, level.cache.ideal_tokens, level.cache.hit_rate) == (512, 512, 0.8)
    assert (level.requests, level.completed, level.ttft_ms.p99) == (16, 16, 100.0)


def test_a_run_is_eligible_only_without_failures_within_the_slo_and_with_the_same_answers(tmp_path: Path):
    assert experiment(tmp_path).eligible
    failed = experiment(tmp_path, {9: FAILED})
    assert not failed.eligible and failed.reasons[0] == "1 QPS: 1 of 16 requests failed"
    slow = experiment(tmp_path, {9: {"ttft_ms": 501.0}})
    assert slow.reasons == ["no load level is within the SLO"] and slow.objective_qps == 0.0
    differs = Agreement(compared=16, identical=15, median_divergence=2.0, earliest_divergence=2)
    assert experiment(tmp_path, agreement=differs, least_agreement=0.9).eligible
    assert (
        "93.8% of the answers equal the reference"
        in experiment(tmp_path, agreement=differs, least_agreement=1.0).reasons[0]
    )


def test_a_replay_without_levels_makes_no_record(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RecordError, match="no load level"):
        make_record(
            Result(Slo(), True),
            name="x",
            role="baseline",
            run=1,
            config_name="",
            config={},
            model=model_files(tmp_path),
            cost=TWO_GPUS,
        )


def test_model_files_are_hashed_and_the_hubs_revision_is_found(tmp_path: Path):
    revision = "0123456789abcdef0123456789abcdef01234567"
    directory = tmp_path / "snapshots" / revision
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    facts = model_files(directory)
    assert facts.revision == revision
    assert facts.files_sha256["model.safetensors"] == hashlib.sha256(b"weights").hexdigest()
    assert list(model_files(directory, "random").files_sha256) == ["config.json"]
    local = tmp_path / "local"
    metadata = local / ".cache" / "huggingface" / "download"
    metadata.mkdir(parents=True)
    (local / "config.json").write_text("{}")
    assert model_files(local).revision is None
    (metadata / "config.json.metadata").write_text(f"{revision}\netag\n0\n")
    assert model_files(local).revision == revision
    with pytest.raises(RecordError, match="no config.json"):
        model_files(tmp_path)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"kind": "guessed"}, "kind"),
        ({"levels": []}, "levels"),
        ({"surprise": 1}, "surprise"),
        ({"run": 0}, "run"),
        ({"schema_version": 2}, "schema_version"),
        ({"objective_qps": "fast"}, "objective_qps"),
    ],
)
def test_a_record_that_breaks_the_schema_is_named_by_field_and_fails(tmp_path: Path, capsys, change, place: str):
    values = experiment(tmp_path).model_dump(mode="json") | change
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(values))
    assert not jsonschema_rs.Draft202012Validator(SCHEMA).is_valid(values)
    assert main([str(path)]) == 1
    assert f"broken.json: {place}: " in capsys.readouterr().out


def test_the_command_checks_records_and_writes_the_schema(tmp_path: Path, capsys):
    write_record(experiment(tmp_path), tmp_path / "good.json")
    assert main([str(tmp_path / "good.json"), "--schema", str(tmp_path / "schema.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"record": str(tmp_path / "good.json"), "error": ""}]
    assert json.loads((tmp_path / "schema.json").read_text()) == SCHEMA
    assert main([]) == 2
    assert main([str(tmp_path / "none.json")]) == 1


def test_a_simulated_record_cannot_pass_for_a_measured_one(tmp_path: Path):
    values = experiment(tmp_path).model_dump()
    assert values["kind"] == "measured"
    assert ExperimentRecord.model_validate(values | {"kind": "simulated"}).kind == "simulated"
