"""What the client needs of a model's directory: its tokenizer, and a hash that tells one model from another."""

import hashlib
from pathlib import Path

from tokenizers import Tokenizer

CHUNK_BYTES = 1 << 22


class ModelFilesError(RuntimeError):
    """The directory is not usable as a model; the message says what is missing."""


def load_tokenizer(directory: Path) -> Tokenizer:
    """Raises ModelFilesError."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelFilesError(
            f"{directory} holds no tokenizer.json; --model-dir must be a Hugging Face model directory"
        )
    return Tokenizer.from_file(str(path))


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def model_hash(directory: Path) -> str:
    """SHA-256 over configuration, tokenizer and weights, in order of their names. Raises ModelFilesError."""
    files = [directory / "config.json", directory / "tokenizer.json", *sorted(directory.glob("*.safetensors"))]
    if not files[0].is_file():
        raise ModelFilesError(f"{directory} holds no config.json; --model-dir must be a Hugging Face model directory")
    digest = hashlib.sha256()
    for path in filter(Path.is_file, files):
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
