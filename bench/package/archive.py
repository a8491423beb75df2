"""Writes a submission archive: the source that start_server.sh needs, with start_server.sh at the root.

The same files give the same bytes: entries are sorted, and times and owners are left out.
"""

import gzip
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

REQUIRED = "start_server.sh"
OPTIONAL_FILES = ("setup.sh", "LICENSE", "pyproject.toml")
DIRECTORIES = ("configs", "router", "decode_worker", "prefill_worker", "kv_transfer", "engine")
"""What a colocated or disaggregated server imports and reads; tests, measurements and documents stay behind."""
LEFT_OUT = {"__pycache__", ".git", ".venv", "build"}
SOURCE_SUFFIXES = {
    *(".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".md", ".txt", ".jinja"),
    *(".cu", ".cuh", ".c", ".cc", ".cpp", ".h", ".hpp"),
}


class PackageError(RuntimeError):
    """The archive cannot be built or is not acceptable; the message says why."""


def source_files(root: Path) -> Iterator[Path]:
    """Files of a submission, sorted, relative to `root`. Raises PackageError."""
    if not (root / REQUIRED).is_file():
        raise PackageError(f"{root} holds no {REQUIRED}")
    found = [Path(name) for name in (REQUIRED, *OPTIONAL_FILES) if (root / name).is_file()]
    for directory in DIRECTORIES:
        for path in (root / directory).rglob("*"):
            relative = path.relative_to(root)
            if path.is_file() and path.suffix in SOURCE_SUFFIXES and not LEFT_OUT & set(relative.parts):
                found.append(relative)
    yield from sorted(found)


def write_archive(root: Path, output: Path, manifest: str | None = None) -> list[str]:
    """Write `output` and give the names in it. `manifest`: text of manifest.json, if a drafter is declared.

    Raises PackageError and OSError.
    """
    entries = [(str(path), (root / path).read_bytes(), os.access(root / path, os.X_OK)) for path in source_files(root)]
    if manifest is not None:
        entries.append(("manifest.json", manifest.encode(), False))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content, executable in sorted(entries):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if executable else 0o644
            archive.addfile(entry, io.BytesIO(content))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
    return sorted(name for name, _, _ in entries)
