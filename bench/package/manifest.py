"""manifest.json of a submission: which drafter to fetch before the server starts."""

import json
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

NAME = "manifest.json"
DRAFTER_LIMIT_BYTES = 2_500_000_000


class ManifestError(ValueError):
    """What is wrong with a manifest, in one line."""


class Manifest(BaseModel):
    """A public model repository at one commit. Names cannot move under a graded run; commits do not."""

    model_config = ConfigDict(extra="forbid")

    drafter_hf_repo: str
    revision: str

    @field_validator("drafter_hf_repo")
    @classmethod
    def names_owner_and_repository(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", value):
            raise ValueError(f"{value!r} is not OWNER/NAME")
        return value

    @field_validator("revision")
    @classmethod
    def is_a_commit(cls, value: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{40}", value):
            raise ValueError(f"{value!r} is not a full commit sha (40 hexadecimal digits); branches and tags move")
        return value


def read_manifest(text: str) -> Manifest:
    """Raises ManifestError."""
    try:
        return Manifest.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "top level"
        raise ManifestError(f"{NAME}: {key}: {first['msg']}") from None
    except ValueError as error:
        raise ManifestError(f"{NAME} is no JSON: {error}") from None


def drafter_bytes(directory: Path) -> int:
    """Size of everything in a drafter's directory. Raises ManifestError when it is none or too large."""
    if not (directory / "config.json").is_file():
        raise ManifestError(f"{directory} holds no config.json; --drafter-dir must be the drafter's model directory")
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    if size > DRAFTER_LIMIT_BYTES:
        raise ManifestError(f"the drafter in {directory} has {size:,} bytes, the limit is {DRAFTER_LIMIT_BYTES:,}")
    return size
