"""How few tokens a text can have, told from its length: one that cannot fit is refused before it costs the seconds and
the gigabytes that tokenizing it takes."""

import json
from typing import Any

from router.detokenizer import BYTE_OF_CHAR

NFC_SHRINKS_TO = 4
"""NFC makes a text shorter by at most a factor of 3 in bytes; one more to be safe."""


def most_bytes_a_token(backend: Any) -> int | None:
    """Most UTF-8 bytes of a text that one token of a byte-level vocabulary can stand for, the normalizer's work
    included. None where the tokenizer may drop text or shorten it by more than a known factor.

    `backend` is a tokenizers.Tokenizer."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder().values()
    normalizer = _parts(backend.normalizer, "normalizers")
    pre_tokenizer = _parts(backend.pre_tokenizer, "pretokenizers")
    if not all(char in vocabulary for char in BYTE_OF_CHAR):
        return None  # bytes without a token are dropped
    if any(token.lstrip or token.rstrip for token in added):
        return None  # these swallow any number of spaces
    if any(part["type"] != "NFC" for part in normalizer) or not all(map(_keeps_text, pre_tokenizer)):
        return None
    if not any(part["type"] == "ByteLevel" for part in pre_tokenizer):
        return None
    spelled = {token.content for token in added}
    longest = max(len(token.encode()) if token in spelled else len(token) for token in vocabulary)
    return longest * (NFC_SHRINKS_TO if normalizer else 1)


def _parts(component: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as tokenizer.json describes them."""
    if component is None:
        return []
    description = json.loads(component.__getstate__())
    return description[key] if description["type"] == "Sequence" else [description]


def _keeps_text(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    return kind in ("ByteLevel", "Digits") or (kind == "Split" and pre_tokenizer["behavior"] != "Removed")
