"""Tokenization: the same ids as transformers gives, from any number of threads, off the event loop."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from router.tokenizer import INLINE_CHARS, Tokenizer
from tests.router.api.piece_tokenizer import piece_tokenizer
from tests.tiny_models import tiny_tokenizer

TEXTS = ["The baton", "", "  two  spaces", "naïve 😀 日本語", "<|im_start|>user\n", "x" * 500, "a\x00b"]


def test_ids_are_transformers_ids(model_dir: Path, tokenizer: Tokenizer) -> None:
    reference = AutoTokenizer.from_pretrained(model_dir)
    for text in TEXTS:
        for special in (False, True):
            assert tokenizer.encode(text, special) == reference.encode(text, add_special_tokens=special)
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(reference.encode(text))


def test_limits_stored_with_the_tokenizer_do_not_cut_prompts(tmp_path: Path) -> None:
    inner = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer())
    whole = inner.backend_tokenizer.encode("a b c d e f").ids
    inner.backend_tokenizer.enable_truncation(4)
    inner.backend_tokenizer.enable_padding(length=40)
    assert Tokenizer(inner, tmp_path).encode("a b c d e f") == whole


def test_many_threads_may_encode_at_once(tokenizer: Tokenizer) -> None:
    texts = [f"{number} {text}" for number in range(40) for text in TEXTS]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(tokenizer.encode, texts)) == [tokenizer.encode(text) for text in texts]


def test_long_work_runs_off_the_event_loops_thread_and_short_work_on_it(tokenizer: Tokenizer) -> None:
    def where(num_chars: float) -> int:
        return asyncio.run(tokenizer.run(num_chars, threading.get_ident))

    assert where(INLINE_CHARS + 1) != threading.get_ident() == where(INLINE_CHARS)


def test_other_threads_run_while_a_text_is_encoded(tokenizer: Tokenizer) -> None:
    """Else one long prompt stops every stream of the server for as long as it takes."""
    done, ticks = threading.Event(), 0

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before = ticks
        tokenizer.encode("The baton changes hands. " * 40_000)
        after = ticks
    finally:
        done.set()
        thread.join()
    assert after - before > 20


def variant(backend, normalizer=None) -> Tokenizer:
    if normalizer is not None:
        backend.normalizer = normalizer
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), Path())


COMPOSED = variant(tiny_tokenizer(), normalizers.NFC())


@given(text=st.text(max_size=200) | st.text("a\u0301\u0323\u0345\u1100\u1161\u11a8\u212b\u1fef  ", max_size=200))
def test_no_text_has_fewer_tokens_than_the_bound(tokenizer: Tokenizer, text: str) -> None:
    for each in (tokenizer, COMPOSED):
        assert each.fewest_tokens(text) <= len(each.encode(text, add_special_tokens=False))


def test_the_bound_is_reached_by_the_longest_token(tokenizer: Tokenizer) -> None:
    longest = "<|endoftext|>"
    assert max(map(len, tokenizer.token_names(list(range(512))))) == len(longest)
    assert tokenizer.fewest_tokens(longest * 50) == len(tokenizer.encode(longest * 50)) == 50


def test_there_is_no_bound_where_text_may_be_dropped() -> None:
    swallowing = tiny_tokenizer()
    swallowing.add_tokens([AddedToken("<gap>", lstrip=True)])
    splitting = tiny_tokenizer()
    splitting.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    lossy = [variant(swallowing), variant(splitting), variant(tiny_tokenizer(), normalizers.Strip())]
    lossy.append(Tokenizer(piece_tokenizer(), Path()))
    assert [tokenizer.fewest_tokens("x" * 10_000) for tokenizer in lossy] == [0] * 4
