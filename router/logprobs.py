"""Log-probabilities in the shapes of the two APIs. Every value is finite, so the JSON is valid."""

import math
from dataclasses import dataclass, field
from typing import Any

from engine.request import TokenLogprobs
from router.detokenizer import Vocabulary

LOWEST = -9999.0


def finite(logprob: float) -> float:
    """-inf and NaN have no JSON; clients expect a very low number."""
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


def chat_logprobs(entries: list[TokenLogprobs], vocabulary: Vocabulary) -> dict[str, Any]:
    """`choices[].logprobs` of chat: one element of `content` a token. `bytes` tells tokens apart that are no whole
    characters."""

    def described(token_id: int, logprob: float) -> dict[str, Any]:
        data = vocabulary.bytes_of(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}

    content = []
    for entry in entries:
        top = [described(token_id, logprob) for token_id, logprob in entry.top]
        content.append({**described(entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content}


def token_key(token_id: int, vocabulary: Vocabulary) -> str:
    """A token as a string that differs from other tokens': "bytes:\\xf0\\x9f" when it is no whole characters."""
    data = vocabulary.bytes_of(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass
class CompletionLogprobs:
    """`choices[].logprobs` of completions: four lists with one element a token. The first prompt token, which nothing
    predicts, has null for both of its numbers."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token_id: int, entry: TokenLogprobs | None, offset: int, vocabulary: Vocabulary) -> None:
        """offset: characters of the answer before this token."""
        self.tokens.append(token_key(token_id, vocabulary))
        self.text_offset.append(offset)
        if entry is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(finite(entry.logprob))
        top = {token_key(top_id, vocabulary): finite(logprob) for top_id, logprob in entry.top}
        top.setdefault(token_key(token_id, vocabulary), finite(entry.logprob))
        self.top_logprobs.append(top)
