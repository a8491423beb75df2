"""Tokenization: the same ids as transformers gives, from any number of threads, off the event loop."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from router.tokenizer import Tokenizer
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


def test_work_runs_off_the_event_loops_thread(tokenizer: Tokenizer) -> None:
    async def where() -> int:
        return await tokenizer.run(threading.get_ident)

    assert asyncio.run(where()) != threading.get_ident()
