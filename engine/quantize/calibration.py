"""The text that ships with the project, as token ids: one part to calibrate with, one held out to measure with."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.models.config import ModelError

TEXT_DIR = Path(__file__).with_name("text")
CALIBRATION_TEXT = TEXT_DIR / "calibration.txt"
HELD_OUT_TEXT = TEXT_DIR / "held_out.txt"
SAMPLE_TOKENS = 256


def load_tokenizer(model_dir: str | Path) -> Tokenizer:
    """Raises ModelError."""
    path = Path(model_dir) / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{model_dir} has no tokenizer.json, which calibration text needs")
    return Tokenizer.from_file(str(path))


def samples(
    tokenizer: Tokenizer, text: Path = CALIBRATION_TEXT, num_tokens: int = SAMPLE_TOKENS, most: int | None = None
) -> torch.Tensor:
    """The text cut into sequences of num_tokens, int64 `[samples, num_tokens]`; a rest is dropped. With `most`, that
    many, evenly spread over the text. Raises ModelError when the text is too short or cannot be read."""
    try:
        ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"calibration text {text} is not readable: {error}") from None
    count = len(ids) // num_tokens
    if count == 0:
        raise ModelError(f"calibration text {text} holds {len(ids)} tokens, less than one sample of {num_tokens}")
    rows = torch.tensor(ids[: count * num_tokens]).view(count, num_tokens)
    if most is None or most >= count:
        return rows
    return rows[torch.linspace(0, count - 1, most).round().long()]
