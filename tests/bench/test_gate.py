"""The accuracy gate: its questions, its selection, its verdict on a served model and on a damaged copy."""

import asyncio
import json
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import uvicorn
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.speedrun.baseline_server import Baseline, make_app
from bench.speedrun.gate import __main__ as command
from bench.speedrun.gate import build
from bench.speedrun.gate.check import agreement, check_gate, needed
from bench.speedrun.gate.damage import write_damaged
from bench.speedrun.gate.protocol import SHOTS, messages, read_letter
from bench.speedrun.gate.questions import LETTERS, Question, question_pool
from bench.speedrun.gate.record import Gate, GateError, ScoredQuestion, read_gate
from bench.speedrun.gate.selection import MIN_GAP, select
from tests.server import Server, free_port, write_config
from tests.tiny_models import tiny_tokenizer

POOL = question_pool()


def test_the_pool_has_several_hundred_different_questions_of_every_topic():
    assert len(POOL) > 500
    assert len({(question.text, frozenset(question.choices)) for question in POOL}) == len(POOL)
    topics = Counter(question.topic for question in POOL)
    assert set(topics) == {"facts", "definitions", "arithmetic", "code", "ordering"} and min(topics.values()) > 80


def test_no_letter_is_the_truth_much_more_often_than_another():
    counts = Counter(question.letter for question in POOL)
    assert set(counts) == set(LETTERS) and max(counts.values()) < 1.4 * min(counts.values())


def test_the_pool_is_the_same_every_time():
    assert question_pool() == POOL and question_pool(1) != POOL


def test_answers_to_arithmetic_are_right():
    operations = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "x": lambda a, b: a * b}
    checked = 0
    for question in POOL:
        if found := re.fullmatch(r"What is (\d+) ([+x-]) (\d+)\?", question.text):
            expected = operations[found[2]](int(found[1]), int(found[3]))
        elif found := re.fullmatch(r"What is (\d+) percent of (\d+)\?", question.text):
            expected = int(found[1]) * int(found[2]) / 100
        elif found := re.fullmatch(r"What is (\d+) divided by (\d+)\?", question.text):
            expected = int(found[1]) / int(found[2])
        elif found := re.fullmatch(r"(\d+) boxes hold (\d+) pens each\. (\d+) pens .*", question.text):
            expected = int(found[1]) * int(found[2]) - int(found[3])
        else:
            continue
        assert float(question.choices[question.answer]) == expected, question
        checked += 1
    assert checked > 120


@pytest.mark.parametrize(
    "text, answer",
    [
        ("What is the capital of Kenya?", "Nairobi"),
        ("What is the chemical symbol of iron?", "Fe"),
        ("What is a young swan called?", "cygnet"),
        ("Which month comes directly after June?", "July"),
        ("What is a mutex?", "a lock that lets one thread at a time into a section of code"),
    ],
)
def test_answers_to_facts_are_right(text, answer):
    assert {question.choices[question.answer] for question in POOL if question.text == text} <= {answer}
    assert any(question.text == text for question in POOL) or text.startswith("Which month")


def test_code_questions_ask_for_what_the_code_gives():
    for question in POOL:
        if question.topic == "code":
            names: dict = {}
            exec(question.text.partition("\n")[2], names)
            assert str(names["result"]) == question.choices[question.answer]


def test_a_question_needs_four_different_choices():
    with pytest.raises(ValueError):
        Question("facts", "?", ("a", "a", "b", "c"), 0)


def test_the_shots_use_each_letter_once_and_end_with_the_question():
    conversation = messages(POOL[0])
    assert sorted(shot.letter for shot in SHOTS) == list(LETTERS)
    assert [turn["role"] for turn in conversation] == ["system", *["user", "assistant"] * 4, "user"]
    assert conversation[-1]["content"].endswith("Answer:") and POOL[0].text in conversation[-1]["content"]


@pytest.mark.parametrize(
    "text, letter",
    [("B", "B"), (" C", "C"), ("(A)", "A"), ("D.", "D"), ("A\n", "A"), ("Apple", None), ("E", None), ("", None)],
)
def test_an_answer_is_the_letter_it_begins_with(text, letter):
    assert read_letter(text) == letter


def scored(key: str, index: int, true: bool = False, **values) -> ScoredQuestion:
    question = Question(
        "facts", f"{key}{index}", ("a", "b", "c", "d"), LETTERS.index(key) if true else (LETTERS.index(key) + 1) % 4
    )
    return ScoredQuestion(question, key, **{"gap": 1.0, **values})


def test_letters_take_turns_so_that_a_constant_answer_reaches_little():
    many = [scored("A", index) for index in range(50)] + [scored(letter, 0) for letter in "BCD"]
    assert Counter(item.key for item in select(many, 8)) == {"A": 5, "B": 1, "C": 1, "D": 1}


def test_what_the_model_answers_truly_comes_first():
    chosen = select([*(scored("A", index) for index in range(9)), scored("A", 9, true=True)], 3)
    assert sum(item.is_true for item in chosen) == 1


def test_close_calls_and_other_tokens_are_left_out_and_too_few_is_an_error():
    items = [scored("A", 0), scored("B", 1, gap=MIN_GAP / 2), scored("C", 2, is_letter=False)]
    assert select(items, 1) == items[:1]
    with pytest.raises(GateError, match="1 of 3 questions.*needs 2"):
        select(items, 2)


def test_ninety_five_percent_is_needed():
    assert [needed(200), needed(20), needed(10)] == [190, 19, 10]


def test_agreement_is_the_share_of_tokens_before_the_first_difference():
    tokenizer = tiny_tokenizer()

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    text = "The first runner carries the whole prompt."
    assert agreement(tokenizer, text, text) == 1.0
    assert agreement(tokenizer, text, "") == 0.0
    head = "The first runner"
    assert agreement(tokenizer, text, head + "!!!") == pytest.approx(tokens(head) / tokens(text))
    assert 0 < agreement(tokenizer, text, text + " And more of it.") < 1.0


@pytest.fixture(scope="module")
def lettered_model(tiny_model, tmp_path_factory) -> Path:
    """A tiny model whose head gives nothing but letters a chance, so that it answers questions with one."""
    directory = tmp_path_factory.mktemp("lettered") / "model"
    shutil.copytree(tiny_model("qwen2"), directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    letters = [tiny_tokenizer().token_to_id(letter) for letter in LETTERS]
    kept = torch.randn(4, tensors["lm_head.weight"].shape[1], generator=torch.Generator().manual_seed(3))
    tensors["lm_head.weight"].zero_()
    tensors["lm_head.weight"][letters] = kept
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def gate(lettered_model) -> Gate:
    """Twenty of forty questions, short continuations."""
    patch = pytest.MonkeyPatch()
    patch.setattr(build, "question_pool", lambda: POOL[:60])
    patch.setattr(build, "NUM_QUESTIONS", 20)
    patch.setattr(build, "NUM_CONTINUATIONS", 2)
    patch.setattr(build, "CONTINUATION_TOKENS", 16)
    yield build.build_gate(lettered_model, device="cpu")
    patch.undo()


def test_the_key_is_the_unmodified_models_own_greedy_letter(gate, lettered_model):
    """Checked against one plain forward pass of the whole prompt a question."""
    tokenizer = AutoTokenizer.from_pretrained(lettered_model)
    model = AutoModelForCausalLM.from_pretrained(lettered_model, dtype=torch.float32)
    ids = [tokenizer.encode(letter)[0] for letter in LETTERS]
    assert len(gate.questions) == 20 and gate.pool_size == 60
    for item in gate.questions[:6]:
        prompt = tokenizer.apply_chat_template(
            messages(item.question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            logits = model(**prompt).logits[0, -1]
        assert int(logits.argmax()) == ids[LETTERS.index(item.key)]
        best, second = logits[ids].sort(descending=True).values[:2]
        assert item.gap == pytest.approx(float(best - second), abs=1e-3)


def test_a_gate_file_is_read_back_as_it_was_written_and_other_files_are_refused(gate, tmp_path):
    path = tmp_path / "gate.json"
    gate.write(path)
    assert read_gate(path) == gate
    assert json.loads(path.read_text())["summary"]["mean_gap"] == pytest.approx(gate.mean_gap)
    replace(gate, protocol={**gate.protocol, "max_tokens": 9}).write(path)
    with pytest.raises(GateError, match="another protocol"):
        read_gate(path)
    path.write_text("{}")
    with pytest.raises(GateError, match="no gate file"):
        read_gate(path)


def check(url: str, gate: Gate, model_dir: Path):
    return asyncio.run(check_gate(url, gate, Tokenizer.from_file(str(model_dir / "tokenizer.json"))))


@contextmanager
def serving(model_dir: Path) -> Iterator[str]:
    """The baseline's application on a port of its own."""
    app = make_app(Baseline(model_dir, "files", "cpu"))
    server = uvicorn.Server(uvicorn.Config(app, port=free_port(), log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.config.port}"
    server.should_exit = True
    thread.join(10)


def test_the_unmodified_model_passes_when_the_service_serves_it(gate, lettered_model, tmp_path):
    sections = {"model": {"dtype": "float32", "max_model_len": 2048}, "decode": {"max_running": 8}}
    sections |= {"kv": {"block_size": 64, "pool_tokens": 16384}, "prefill": {"chunk_tokens": 512}}
    config = write_config(tmp_path, "colocated", **sections)
    with Server(config, lettered_model, tmp_path / "log") as server:
        result = check(server.url, gate, lettered_model)
    assert result.passed and result.agreed == 20, result.answers
    assert result.continuation_agreement == 1.0 and result.continuations_equal == 2
    assert "PASS: 20 of 20" in result.line()


def test_a_damaged_model_fails_where_the_unmodified_one_passes(gate, lettered_model, tmp_path):
    write_damaged(lettered_model, tmp_path / "damaged", noise=1.0)
    with serving(lettered_model) as url:
        assert check(url, gate, lettered_model).passed
    with serving(tmp_path / "damaged") as url:
        broken = check(url, gate, lettered_model)
    assert not broken.passed and broken.agreed < 19, broken.answers
    assert "FAIL" in broken.line() and broken.continuation_agreement is None


def test_damage_changes_the_layers_and_nothing_else(lettered_model, tmp_path):
    write_damaged(lettered_model, tmp_path / "copy", noise=0.5)
    before, after = (load_file(directory / "model.safetensors") for directory in (lettered_model, tmp_path / "copy"))
    for name, tensor in before.items():
        changed = not torch.equal(tensor, after[name])
        assert changed is (".layers." in name and tensor.ndim == 2), name
    difference = after["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]
    assert float(difference.std()) == pytest.approx(
        0.5 * float(before["model.layers.0.mlp.up_proj.weight"].std()), rel=0.05
    )


def test_a_server_that_is_not_there_fails_with_the_reason(gate, lettered_model):
    result = check("http://127.0.0.1:9", gate, lettered_model)
    assert not result.passed and result.agreed == 0 and "20 requests failed" in result.line()


def test_the_command_builds_damages_and_names_what_is_missing(lettered_model, tmp_path, capsys):
    assert command.main(["damage", "--model-dir", str(lettered_model), "--output", str(tmp_path / "copy")]) == 0
    assert command.main(["damage", "--model-dir", str(lettered_model), "--output", str(tmp_path / "copy")]) == 2
    assert command.main(["check", "--model-dir", str(tmp_path), "--gate", str(tmp_path / "none.json")]) == 2
    assert "gate build" in capsys.readouterr().err
