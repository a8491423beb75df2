import json

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.speedrun.baseline_server import Baseline, main, make_app

MESSAGES = [{"role": "user", "content": "The first runner carries the whole prompt."}]


@pytest.fixture(scope="module")
def model_dir(tiny_model):
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def http(model_dir) -> TestClient:
    return TestClient(make_app(Baseline(model_dir, "files", "cpu")))


def ask(http: TestClient, **values):
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, **values}
    return http.post("/v1/chat/completions", json=body)


def streamed(answer) -> tuple[str, dict, list[dict]]:
    """Text, usage and every event of a stream."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    text = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
    return text, events[-1].get("usage", {}), events


def test_greedy_answers_are_those_of_transformers(http, model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**ids, do_sample=False, max_new_tokens=12)[0, ids["input_ids"].shape[1] :]
    answer = ask(http).json()
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(output, skip_special_tokens=True)
    assert answer["usage"]["completion_tokens"] == len(output)
    assert answer["usage"]["prompt_tokens"] == ids["input_ids"].shape[1]


def test_a_stream_adds_up_to_the_answer_without_one(http):
    text, usage, events = streamed(ask(http, stream=True, stream_options={"include_usage": True}))
    whole = ask(http).json()
    assert text == whole["choices"][0]["message"]["content"]
    assert usage == whole["usage"]
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert reasons[-1] == whole["choices"][0]["finish_reason"] and set(reasons[:-1]) == {None}


def test_max_tokens_is_honoured_and_end_of_sequence_can_be_ignored(http):
    for count in (1, 5):
        assert ask(http, max_tokens=count, ignore_eos=True).json()["usage"]["completion_tokens"] == count


def test_health_and_models(http):
    assert http.get("/health").status_code == 200
    assert len(http.get("/v1/models").json()["data"]) == 1


def test_what_does_not_fit_the_context_is_refused_with_the_counts(http):
    answer = ask(http, max_tokens=4000)
    assert answer.status_code == 400 and "4000" in answer.text and "2048" in answer.text
    assert ask(http, messages=[]).status_code == 422


def test_random_weights_need_no_weight_files_and_stream_each_token(model_dir, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    http = TestClient(make_app(Baseline(tmp_path, "random", "cpu")))
    answer = ask(http, stream=True, stream_options={"include_usage": True}, ignore_eos=True, max_tokens=9)
    _, usage, events = streamed(answer)
    assert usage["completion_tokens"] == 9
    assert sum(1 for event in events for choice in event["choices"] if choice["delta"].get("content")) == 9


def test_an_error_while_generating_reaches_the_client(model_dir, monkeypatch):
    baseline = Baseline(model_dir, "files", "cpu")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(baseline.model, "generate", fail)
    answer = ask(TestClient(make_app(baseline)), stream=True)
    assert "out of memory" in answer.text and "[DONE]" not in answer.text


def test_a_directory_without_a_model_is_named(tmp_path, capsys):
    assert main(["--model-dir", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
