"""Token ids to text, as they come: what was shown is never taken back, and the pieces together are what decoding all
ids at once gives.

Two kinds of vocabulary exist. In a *byte-level* one every token is some bytes; the text is those bytes read as UTF-8,
and only a tail that is not yet a whole character waits. In a *piece* one (SentencePiece style) every token is text,
save for byte tokens <0x00>..<0xFF>: a run of them is text when the whole run is valid UTF-8, else one U+FFFD a byte,
so a run waits for its end, but no longer than MAX_HELD_TOKENS.
"""

import codecs
import json
import re
from typing import Any, Protocol

MAX_HELD_TOKENS = 16

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    def push(self, token_ids: list[int]) -> str:
        """Text that these tokens complete."""

    def finish(self) -> str:
        """No token follows: the rest, with U+FFFD for what never became a character."""


class Vocabulary:
    """The text of each token of a Hugging Face tokenizer. Ids without a token have no text."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.special_ids = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.is_byte_level = _is_byte_level(tokenizer)
        self._bytes: dict[int, bytes] = _byte_table(tokenizer) if self.is_byte_level else {}
        self._pieces: dict[int, str | None] = {}
        if not self.is_byte_level:
            # Decoders treat the first token unlike others (its space is dropped); behind a letter nothing is first.
            self.anchor: int = tokenizer.encode("a", add_special_tokens=False)[-1]
            self._num_anchor_chars = len(self.decode([self.anchor]))

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids` alone, special tokens included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def has_token(self, token_id: int) -> bool:
        """Whether the tokenizer knows the id. A model's vocabulary may be padded to a larger size."""
        return self._tokenizer.convert_ids_to_tokens(token_id) is not None

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes a token stands for inside a text. Not always whole characters."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._look_up(token_id)
        return data

    def text_of(self, token_id: int) -> str:
        """A token by itself, for people to read: U+FFFD where its bytes are no characters."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def piece_of(self, token_id: int) -> str | None:
        """Piece vocabularies: a token's text behind other text; None for a byte token, whose text depends on its
        run."""
        try:
            return self._pieces[token_id]
        except KeyError:
            token = self._tokenizer.convert_ids_to_tokens(token_id)
            piece: str | None = ""
            if token is not None:
                piece = self.decode([self.anchor, token_id])[self._num_anchor_chars :]
                if BYTE_TOKEN.fullmatch(token) and piece != token:
                    piece = None
            self._pieces[token_id] = piece
            return piece

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            return _spelled_bytes(token)
        piece = self.piece_of(token_id)
        return bytes.fromhex(token[3:5]) if piece is None else piece.encode()

    def detokenizer(self, skip_special_tokens: bool = True, continues: bool = False) -> Detokenizer:
        """continues: the text goes on after other text (a completion after its prompt), so a leading space is kept."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self.is_byte_level:
            return ByteDetokenizer(self, skipped)
        return PieceDetokenizer(self, skipped, continues)


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return False
    description = json.loads(decoder.__getstate__())
    parts = description["decoders"] if description["type"] == "Sequence" else [description]
    return [part["type"] for part in parts] == ["ByteLevel"]


def _byte_of_char() -> dict[str, int]:
    """How byte-level vocabularies spell bytes (GPT-2): printable Latin-1 characters are themselves, the other bytes are
    the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    spelled.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return spelled


BYTE_OF_CHAR = _byte_of_char()
_LATIN_1_OF_CHAR = {ord(char): byte for char, byte in BYTE_OF_CHAR.items()}


def _spelled_bytes(token: str) -> bytes:
    """What a token of a byte-level vocabulary stands for. Added tokens are spelled in plain text."""
    if BYTE_OF_CHAR.keys() >= set(token):
        return token.translate(_LATIN_1_OF_CHAR).encode("latin-1")
    return token.encode()


def _byte_table(tokenizer: Any) -> dict[int, bytes]:
    """Every token's bytes, at once: looked up one by one they cost more than all else that is done with a token."""
    return {token_id: _spelled_bytes(token) for token, token_id in tokenizer.get_vocab().items()}


class ByteDetokenizer:
    """Detokenizer of a byte-level vocabulary."""

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]):
        self._bytes_of = vocabulary.bytes_of
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: list[int]) -> str:
        bytes_of, skipped = self._bytes_of, self._skipped
        return self._utf8.decode(b"".join([bytes_of(token_id) for token_id in token_ids if token_id not in skipped]))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class PieceDetokenizer:
    """Detokenizer of a piece vocabulary.

    _lead   tokens decoded before new ones to give them their context: what came first as long as it has no text (a lone
            space may be dropped at the start of a text, and then shows what follows it), the anchor ever after
    _run    byte tokens whose run has not ended
    _broken the run cannot become valid any more; its bytes are shown as they come
    """

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int], continues: bool):
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._anchored = [vocabulary.anchor]
        self._lead: list[int] = self._anchored if continues else []
        self._run: list[int] = []
        self._broken = False

    def push(self, token_ids: list[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._skipped])

    def _push_one(self, token_id: int) -> str:
        piece = self._vocabulary.piece_of(token_id)
        if piece is None:
            return self._push_byte(token_id)
        if not piece and not self._vocabulary.has_token(token_id):
            return ""
        before = self.finish()
        return before + (piece if self._lead == self._anchored else self._text([token_id]))

    def _push_byte(self, token_id: int) -> str:
        self._run.append(token_id)
        data = b"".join(self._vocabulary.bytes_of(token_id) for token_id in self._run)
        num_whole = len(data) - _num_incomplete(data)
        try:
            data[:num_whole].decode()
        except UnicodeDecodeError:
            self._broken = True
        if self._broken:
            run, self._run = self._run, []
            return self._shown("\ufffd" * len(run), run)
        if len(self._run) < MAX_HELD_TOKENS:
            return ""
        whole, self._run = self._run[:num_whole], self._run[num_whole:]
        return self._text(whole)

    def finish(self) -> str:
        run, self._run = self._run, []
        self._broken = False
        return self._text(run) if run else ""

    def _text(self, token_ids: list[int]) -> str:
        """Text of `token_ids` behind what came before."""
        decode = self._vocabulary.decode
        return self._shown(decode(self._lead + token_ids)[len(decode(self._lead)) :], token_ids)

    def _shown(self, text: str, token_ids: list[int]) -> str:
        self._lead = self._anchored if text else self._lead + token_ids
        return text


def _num_incomplete(data: bytes) -> int:
    """How many bytes at the end of `data` are the beginning of a UTF-8 character that is not whole yet (0 to 3)."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < length else 0
        if byte < 0x80:
            return 0
    return 0
