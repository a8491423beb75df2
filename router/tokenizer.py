"""Text to token ids: a Hugging Face tokenizer and its chat template, off the event loop where it takes time."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from router.detokenizer import Vocabulary
from router.token_bound import most_bytes_a_token

T = TypeVar("T")

MAX_THREADS = 4
INLINE_CHARS = 2000


class TemplateError(ValueError):
    """The chat template cannot render these messages; the message says what it said."""


class Tokenizer:
    """One model's tokenizer. Encoding takes no lock and changes nothing, so any number of threads may do it at once."""

    def __init__(self, tokenizer: Any, model_dir: Path):
        self.model_dir = model_dir
        self.vocabulary = Vocabulary(tokenizer)
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # Limits in tokenizer.json are training's. Unset once, here: unsetting them is not thread-safe.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._bytes_a_token = most_bytes_a_token(self._backend) if self.vocabulary.is_byte_level else None
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "tokenizer")

    @staticmethod
    def load(model_dir: str | Path) -> "Tokenizer":
        """Read the tokenizer of a Hugging Face model directory. Raises OSError or ValueError when there is none."""
        from transformers import AutoTokenizer

        return Tokenizer(AutoTokenizer.from_pretrained(str(model_dir)), Path(model_dir))

    async def run(self, num_chars: float, work: Callable[..., T], *arguments: Any) -> T:
        """Call `work`, which is on that many characters: at once when it takes no longer than reaching a thread, else
        in the tokenizer's threads, so that it does not hold up other requests."""
        if num_chars <= INLINE_CHARS:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self._backend is None:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # Of the ways to encode, those for batches alone let other Python threads run meanwhile.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, at once: 0 when nothing is known."""
        return -(-len(text.encode()) // self._bytes_a_token) if self._bytes_a_token else 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_names(self, token_ids: list[int]) -> list[str]:
        """How the vocabulary spells each token ("" for an id without one)."""
        return [self._tokenizer.convert_ids_to_tokens(token_id) or "" for token_id in token_ids]

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def template_mentions(self, variable: str) -> bool:
        """Whether the chat template has a use for a variable."""
        return variable in str(self._tokenizer.chat_template or "")

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_variables: dict[str, Any],
    ) -> str:
        """The prompt text of a chat. Raises TemplateError."""
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_variables,
            )
        except jinja2.TemplateError as error:
            reason = " ".join(str(error).split())[:150]
            raise TemplateError(f"the chat template refused these messages: {reason}") from None
        except Exception as error:
            raise TemplateError(f"the chat template failed on these messages ({type(error).__name__})") from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
