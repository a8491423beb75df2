"""The endpoints for operators: health, models, metrics, tokenization, version, cache."""

import sys

import pytest

from engine.config import DeploymentConfig
from engine.protocol import PoolCounts
from engine.request import PrefillReport
from router import app as app_module
from router.app import create_app
from router.dispatcher import HealthReport, WorkerHealth
from router.version import VERSION
from tests.router.api.conftest import error_of
from tests.router.api.fake_dispatcher import deltas


def test_health_tells_each_workers_round_trip(make_api) -> None:
    response = make_api().get("/health")
    assert response.status_code == 200
    worker = {"name": "d0", "role": "decode", "ok": True, "round_trip_ms": 0.5, "detail": ""}
    assert response.json() == {"status": "ok", "workers": [worker]}


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (HealthReport(False, False, [WorkerHealth("p0", "prefill", False, None, "no answer in 5 s")]), "unavailable"),
        (HealthReport(False, False, [], starting=True), "starting"),
        (HealthReport(True, True, []), "draining"),
    ],
)
def test_health_is_503_when_requests_would_not_be_served(make_api, report, status) -> None:
    api = make_api()
    api.dispatcher.health_report = report
    response = api.get("/health")
    assert response.status_code == 503 and response.json()["status"] == status


def test_health_answers_even_when_the_dispatcher_does_not(make_api, monkeypatch) -> None:
    monkeypatch.setattr(app_module, "HEALTH_MARGIN_S", 0.05)
    api = make_api(health_timeout_s=0.05)
    api.dispatcher.health_delay_s = 60
    assert api.get("/health").status_code == 503


def test_models_tell_id_root_and_context(make_api, model_dir) -> None:
    api = make_api()
    listed = api.get("/v1/models").json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["root"], model["max_model_len"]) == (
        "tiny",
        "model",
        str(model_dir),
        256,
    )
    assert api.get("/v1/models/tiny").json() == model


def test_the_models_id_is_its_directory_unless_configured(make_api, model_dir) -> None:
    api = make_api()
    api.app = create_app(api.dispatcher, model_dir, DeploymentConfig())
    assert api.get("/v1/models").json()["data"][0]["id"] == model_dir.name
    assert api.complete(model=model_dir.name).status_code == 200


def test_text_and_tokens_turn_into_each_other(make_api, tokenizer) -> None:
    api = make_api()
    text = "naïve 😀 <|im_end|>"
    answer = api.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text) and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 256 and len(answer["token_strs"]) == answer["count"]
    assert api.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert api.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert api.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_tokenized_messages_are_what_chat_would_send(make_api) -> None:
    api = make_api()
    messages = [{"role": "user", "content": "hello"}]
    tokens = api.post("/tokenize", {"messages": messages}).json()["tokens"]
    api.chat(messages=messages)
    assert tokens == api.dispatcher.requests[0].prompt_token_ids
    error_of(api.post("/tokenize", {"messages": messages, "prompt": "x"}), 400)
    error_of(api.post("/tokenize", {}), 400)
    error_of(api.post("/detokenize", {"tokens": [512]}), 400)


def test_version_and_flush(make_api) -> None:
    api = make_api()
    assert api.get("/version").json() == {"version": VERSION}
    assert api.post("/flush_cache").json() == {"num_blocks": 7} and api.dispatcher.num_flushed == 1


def samples(api) -> dict[str, float]:
    from prometheus_client.parser import text_string_to_metric_families

    values = {}
    for family in text_string_to_metric_families(api.get("/metrics").text):
        assert family.name.startswith("baton_")
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            values[f"{sample.name.removeprefix('baton_')}{{{labels}}}"] = sample.value
    return values


def test_the_pool_invariant_is_visible_in_the_metrics(make_api) -> None:
    values = samples(make_api())
    counts = PoolCounts(10, 4, 3, 1, 2)
    states = {
        state: values[f"kv_blocks{{role=decode,state={state},worker=d0}}"] for state in vars(counts) if state != "total"
    }
    assert states == {"free": 4, "cached": 3, "leased": 1, "in_use": 2}
    assert sum(states.values()) == values["kv_blocks_capacity{role=decode,worker=d0}"] == 10


def test_metrics_count_tokens_prefills_and_how_requests_ended(make_api) -> None:
    report = PrefillReport("remote", 5, 4, 1, 2, 2048, queue_ms=3000, prefill_ms=20, transfer_ms=2)
    api = make_api(lambda request: deltas(request, [9] * 5, prefill=report))
    api.complete([5] * 6, n=2)
    api.complete([5] * 6, stop=api.tokenizer.decode([9, 9]))
    error_of(api.complete(""), 400)
    api.dispatcher.refusal = KeyError("a bug")
    error_of(api.complete("x"), 500)
    values = samples(api)
    assert values["prompt_tokens_total{}"] == 18 and values["cached_prompt_tokens_total{}"] == 12
    assert values["generation_tokens_total{}"] == 12
    assert values["request_finished_total{finish_reason=length}"] == 2
    assert values["request_finished_total{finish_reason=stop}"] == 1
    assert values["prefills_total{where=remote}"] == 3
    assert values["kv_transfer_bytes_total{}"] == 3 * 2048 and values["kv_transfer_blocks_total{}"] == 6
    assert values["time_to_first_token_seconds_count{}"] == values["e2e_request_latency_seconds_count{}"] == 3
    assert values["inter_token_latency_seconds_count{}"] == 4 + 4 + 1
    assert values["time_per_output_token_seconds_count{}"] == 3
    assert values["request_queue_time_seconds_sum{}"] == pytest.approx(9)
    assert values["http_requests_total{path=/v1/completions,status=200}"] == 2
    assert values["http_requests_total{path=/v1/completions,status=400}"] == 1
    assert values["http_requests_total{path=/v1/completions,status=500}"] == 1
    assert values["worker_decode_steps_total{role=decode,worker=d0}"] == 5
    assert values["retries_total{}"] == 6 and values["requests_running{role=decode,worker=d0}"] == 2


def test_unknown_paths_do_not_grow_the_metrics(make_api) -> None:
    api = make_api()
    for number in range(5):
        api.get(f"/nothing/{number}")
    assert samples(api)["http_requests_total{path=other,status=404}"] == 5


def test_without_prometheus_client_everything_but_metrics_works(make_api, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    api = make_api("hello")
    assert "prometheus-client" in error_of(api.get("/metrics"), 501)["message"]
    assert api.chat().status_code == api.chat(stream=True).status_code == 200
