"""Incremental text: the pieces together are what the tokenizer itself makes of all ids."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from router.detokenizer import MAX_HELD_TOKENS, Vocabulary
from tests.router.api.piece_tokenizer import byte_ids, piece_tokenizer
from tests.tiny_models import tiny_tokenizer

BYTE_LEVEL = PreTrainedTokenizerFast(
    tokenizer_object=tiny_tokenizer(),
    eos_token="<|im_end|>",
    pad_token="<|pad|>",
    extra_special_tokens=["<|im_start|>"],
)
BYTE_LEVEL.add_tokens(["plain added ✓"])
PIECES = piece_tokenizer()
TOKENIZERS = {"byte-level": BYTE_LEVEL, "pieces": PIECES}
VOCABULARIES = {name: Vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def decode(name: str, ids: list[int], skip: bool = True) -> str:
    return TOKENIZERS[name].decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def streamed(name: str, ids: list[int], sizes: list[int], skip: bool = True, continues: bool = False) -> list[str]:
    detokenizer = VOCABULARIES[name].detokenizer(skip, continues)
    parts, sizes = [], list(sizes)
    while ids:
        size = sizes.pop(0) if sizes else 1
        parts.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    return [*parts, detokenizer.finish()]


def token_lists(name: str) -> st.SearchStrategy[list[int]]:
    size = len(TOKENIZERS[name]) + 4  # a model's vocabulary may be larger than its tokenizer's
    return st.lists(st.integers(0, size - 1), max_size=40)


def sizes() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 5), max_size=20)


def test_vocabularies_are_told_apart() -> None:
    assert VOCABULARIES["byte-level"].is_byte_level
    assert not VOCABULARIES["pieces"].is_byte_level


@given(ids=token_lists("byte-level"), sizes=sizes(), skip=st.booleans())
@settings(deadline=None, max_examples=300)
def test_byte_level_pieces_join_to_what_the_tokenizer_decodes(ids: list[int], sizes: list[int], skip: bool) -> None:
    assert "".join(streamed("byte-level", ids, sizes, skip)) == decode("byte-level", ids, skip)


@given(data=st.binary(max_size=24), sizes=sizes())
@settings(deadline=None, max_examples=300)
def test_any_bytes_decode_as_the_tokenizer_decodes_them(data: bytes, sizes: list[int]) -> None:
    spelled = {VOCABULARIES["byte-level"].bytes_of(token_id): token_id for token_id in range(4, 512)}
    ids = [spelled[bytes([byte])] for byte in data]
    assert "".join(streamed("byte-level", ids, sizes)) == decode("byte-level", ids)


@given(ids=token_lists("pieces"), sizes=sizes(), skip=st.booleans())
@settings(deadline=None, max_examples=300)
def test_pieces_join_to_what_the_tokenizer_decodes(ids: list[int], sizes: list[int], skip: bool) -> None:
    run, longest = 0, 0
    for token_id in ids:
        is_byte = 3 <= token_id < 259
        is_skipped = token_id >= len(PIECES) or (skip and token_id < 3)
        run = run + 1 if is_byte else run if is_skipped else 0
        longest = max(longest, run)
    if longest < MAX_HELD_TOKENS:
        assert "".join(streamed("pieces", ids, sizes, skip)) == decode("pieces", ids, skip)


@given(
    text=st.text(alphabet="ab é😀日 \n\u0301👩‍👩‍👧", max_size=30),
    sizes=sizes(),
    name=st.sampled_from(sorted(TOKENIZERS)),
)
@settings(deadline=None, max_examples=300)
def test_text_survives_being_streamed(text: str, sizes: list[int], name: str) -> None:
    ids = TOKENIZERS[name].encode(text, add_special_tokens=False)
    parts = streamed(name, ids, sizes)
    assert "".join(parts) == decode(name, ids)
    assert "\ufffd" not in "".join(parts)


@given(prompt=st.text(alphabet="ab é", min_size=1, max_size=8), ids=st.lists(st.integers(259, 271), max_size=12))
@settings(deadline=None)
def test_a_completion_keeps_the_space_before_its_first_word(prompt: str, ids: list[int]) -> None:
    prompt_ids = PIECES.encode(prompt, add_special_tokens=False)
    answer = "".join(streamed("pieces", ids, [], continues=True))
    assert decode("pieces", prompt_ids) + answer == decode("pieces", prompt_ids + ids)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_an_emoji_split_over_tokens_is_shown_once_it_is_whole(name: str) -> None:
    emoji = "😀".encode()
    if name == "pieces":
        ids = byte_ids(emoji)
    else:
        spelled = {VOCABULARIES[name].bytes_of(token_id): token_id for token_id in range(4, 512)}
        ids = [spelled[bytes([byte])] for byte in emoji]
    parts = streamed(name, ids, [])
    assert parts[:3] == ["", "", ""]
    assert "".join(parts) == "😀"


def test_a_long_run_of_byte_tokens_is_not_held_for_ever() -> None:
    ids = byte_ids(("日" * 40).encode())
    detokenizer = VOCABULARIES["pieces"].detokenizer()
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += detokenizer.push([token_id])
        assert count - len(shown.encode()) < MAX_HELD_TOKENS
    assert shown + detokenizer.finish() == "日" * 40


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_character_that_never_completes_becomes_a_replacement_at_the_end(name: str) -> None:
    ids = byte_ids(b"\xf0\x9f") if name == "pieces" else [BYTE_LEVEL.convert_tokens_to_ids(c) for c in ("ð", "Ł")]
    *parts, last = streamed(name, ids, [])
    assert parts == ["", ""]
    assert last == decode(name, ids) != ""


def test_a_real_models_tokens_join_to_what_its_tokenizer_decodes(embedded_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir)
    vocabulary = Vocabulary(tokenizer)
    draw, size = random.Random(0), len(tokenizer)
    for skip in (True, False):
        for _ in range(100):
            ids = [draw.randrange(size) for _ in range(60)] + tokenizer.encode("日本語 👩‍👩‍👧 naïve")
            detokenizer = vocabulary.detokenizer(skip)
            parts = [detokenizer.push([token_id]) for token_id in ids] + [detokenizer.finish()]
            assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)
