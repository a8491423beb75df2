"""Real source code for the sessions' prefixes: the standard library of this Python, or a directory of one's own."""

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from bench.replay.codegen import session_text
from bench.replay.plan import WorkloadError

GENERATED, STDLIB = "generated", "stdlib"
SUFFIXES = frozenset(
    ".py .pyi .js .jsx .ts .tsx .go .rs .c .h .cc .cpp .hpp .cu .java .kt .rb .php .swift .sh .sql".split()
)
LEAST_BYTES = 2048
MOST_FILES = 400
NUM_SESSIONS = 8


def session_source(source: str, seed: int, session: int) -> Iterator[str]:
    """The text of one session's code base, without end: an agent's instructions, then file after file.

    `source` is "stdlib" (top-level modules of this Python's standard library), "generated" (made by rule, the same on
    every machine) or a directory. Sessions share no file, and differ from their first line on. Raises WorkloadError
    when a directory holds fewer than eight source files.
    """
    if source == GENERATED:
        return session_text(seed, session)
    return file_texts(source_files(source), seed, session)


def source_files(source: str) -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"]) if source == STDLIB else Path(source)
    paths = root.glob("*.py") if source == STDLIB else root.rglob("*")
    found = sorted(path for path in paths if path.suffix in SUFFIXES and path.is_file())
    files = [path for path in found if path.stat().st_size >= LEAST_BYTES][:MOST_FILES]
    if len(files) < NUM_SESSIONS:
        raise WorkloadError(
            f"--code {source}: {root} holds {len(files)} source files of {LEAST_BYTES} bytes or more, not eight; "
            f"give another directory, or --code {GENERATED}"
        )
    return files


def file_texts(files: list[Path], seed: int, session: int) -> Iterator[str]:
    rng = random.Random(f"files/{seed}")
    order = rng.sample(files, len(files))[session::NUM_SESSIONS]
    tag = random.Random(f"session/{seed}/{session}").getrandbits(32)
    yield (
        f"# {tag:08x} workspace\n"
        "You edit the code base below. Read the files, answer with a patch, and keep the public names as they are.\n\n"
    )
    number = 0
    while True:
        path = order[number % len(order)]
        yield f"# file {number}: {path.name}\n"
        yield path.read_text(encoding="utf-8", errors="replace")
        number += 1
