import itertools
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from bench.speedrun.model_files import ModelFilesError, count_tokens, load_tokenizer, model_hash
from bench.speedrun.prompts import KINDS, chat_prompt, document_prompt
from bench.speedrun.scenarios import SIZES, warm_up
from tests.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def total(tokenizer: Tokenizer, messages) -> int:
    return sum(count_tokens(tokenizer, message["content"]) for message in messages)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1000, 1500])
def test_prompts_have_the_size_asked_for(tokenizer, kind, num_tokens):
    messages = chat_prompt(tokenizer, "seed", KINDS.index(kind), num_tokens)
    assert total(tokenizer, messages) == pytest.approx(num_tokens, rel=0.03)
    assert messages[-1]["role"] == "user"


def test_documents_have_the_size_asked_for_and_end_with_a_request(tokenizer):
    (message,) = document_prompt(tokenizer, "seed", 0, 3000)
    assert count_tokens(tokenizer, message["content"]) == pytest.approx(3000, rel=0.03)
    assert message["content"].startswith("Report ") and "report above" in message["content"]


def test_the_same_seed_gives_the_same_prompts_and_every_other_draw_gives_others(tokenizer):
    for scenario in (replace(SIZES["full"][0], prompt_tokens=400), replace(SIZES["full"][1], prompt_tokens=800)):
        draws = [scenario.prompts(tokenizer, seed, draw) for seed in (0, 1) for draw in ("0", "1", "warm-up")]
        assert draws[0] == scenario.prompts(tokenizer, 0, "0")
        texts = [prompt[0]["content"] for prompts in draws for prompt in prompts]
        assert len(set(texts)) == len(texts)
        for one, other in itertools.combinations(texts, 2):
            assert one[:250] != other[:250]  # no long prefix in common that a cache could keep


def test_chat_mixes_conversation_code_and_mathematics(tokenizer):
    conversation, code, mathematics = SIZES["full"][0].prompts(tokenizer, 0, "0")[:3]
    assert [message["role"] for message in conversation] == ["user", "assistant", "user"]
    assert "# file: " in code[0]["content"] and "step by step" in mathematics[0]["content"]


def test_the_warm_up_is_one_short_request_of_the_same_shape():
    first = warm_up(SIZES["full"][1])
    assert (first.requests, first.prompt_tokens, first.output_tokens) == (1, 4096, 8)


def test_the_hash_of_a_model_changes_with_weights_and_with_configuration(tmp_path):
    for name, text in (("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", "weights")):
        (tmp_path / name).write_text(text)
    hashes = [model_hash(tmp_path)]
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text("other")
        hashes.append(model_hash(tmp_path))
    assert len(set(hashes)) == 3
    (tmp_path / "README.md").write_text("not part of the model")
    assert model_hash(tmp_path) == hashes[-1]


def test_a_directory_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json.*--model-dir"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelFilesError, match=r"config\.json.*--model-dir"):
        model_hash(tmp_path)
