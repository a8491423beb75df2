"""Where prompts stop being alike: the reason for a prefix cache miss that clients can do something about.

One line that changes with each request at the head of an agent's system prompt ends every cached prefix right there.
The report compares each recent prompt with the ones before it and shows the text where it leaves the closest of them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.generation import Choice

SNIPPET_TOKENS = 16
STRIDE = 64


@dataclass
class PromptRecord:
    """A prompt and how far it agrees with the most similar earlier one of the same cache_salt (`other`, if any)."""

    choice: Choice
    num_shared_tokens: int
    other_token_ids: list[int]


class PromptHistory:
    """The last `size` prompts."""

    def __init__(self, size: int, decode: Callable[[list[int]], str]):
        self._records: deque[PromptRecord] = deque(maxlen=size)
        self._decode = decode

    def add(self, choice: Choice) -> None:
        token_ids = choice.request.prompt_token_ids
        num_shared, other = 0, []
        for record in self._records:
            earlier = record.choice.request
            if earlier.cache_salt == choice.request.cache_salt:
                length = common_prefix(token_ids, earlier.prompt_token_ids)
                if length >= num_shared:
                    num_shared, other = length, earlier.prompt_token_ids
        begin = num_shared
        self._records.append(PromptRecord(choice, num_shared, other[begin : begin + SNIPPET_TOKENS]))

    def report(self) -> list[dict[str, Any]]:
        """Newest first. num_cached_tokens is null until the prompt was taken in. `text` and `other_text` begin at the
        first token that differs ("" where a prompt had ended)."""
        return [self._described(record) for record in reversed(self._records)]

    def _described(self, record: PromptRecord) -> dict[str, Any]:
        request, prefill = record.choice.request, record.choice.prefill
        begin = record.num_shared_tokens
        return {
            "request_id": request.request_id,
            "num_prompt_tokens": len(request.prompt_token_ids),
            "num_shared_tokens": begin,
            "num_cached_tokens": prefill.num_cached_tokens if prefill else None,
            "text": self._decode(request.prompt_token_ids[begin : begin + SNIPPET_TOKENS]),
            "other_text": self._decode(record.other_token_ids),
        }


def common_prefix(left: list[int], right: list[int]) -> int:
    """Number of leading elements that are equal."""
    end = min(len(left), len(right))
    begin = 0
    while begin + STRIDE <= end and left[begin : begin + STRIDE] == right[begin : begin + STRIDE]:
        begin += STRIDE
    while begin < end and left[begin] == right[begin]:
        begin += 1
    return begin
