"""What can be checked of an archive without running it."""

import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bench.package.archive import REQUIRED, SOURCE_SUFFIXES, PackageError
from bench.package.manifest import NAME as MANIFEST_NAME
from bench.package.manifest import ManifestError, read_manifest

ARCHIVE_LIMIT_BYTES = 10_000_000
FILE_LIMIT_BYTES = 1_000_000
"""Both are this tool's own: source is far smaller, and what is larger is hardly source."""
NO_SUFFIX_ALLOWED = {"LICENSE", "NOTICE", "README", "Makefile"}
SCRIPTS = (REQUIRED, "setup.sh")


@dataclass(frozen=True)
class Check:
    """One thing looked at: passed, and what was found."""

    name: str
    passed: bool
    found: str


def validate_archive(path: Path) -> list[Check]:
    """Every static check. Later ones are left out when the archive cannot be read at all."""
    head = path.open("rb").read(2) if path.is_file() else b""
    if head != b"\x1f\x8b":
        return [Check("gzip-compressed tar", False, f"{path} does not begin as gzip; make it with this command")]
    try:
        with tarfile.open(path, "r:gz") as archive:
            members = archive.getmembers()
    except (tarfile.TarError, OSError, EOFError) as error:
        return [Check("gzip-compressed tar", False, f"{path}: {error}")]
    return [
        Check("gzip-compressed tar", True, f"{len(members)} entries"),
        check_root(members),
        check_names(members),
        check_source_only(members),
        check_sizes(path, members),
        check_manifest(path, members),
    ]


def check_root(members: list[tarfile.TarInfo]) -> Check:
    names = {member.name.removeprefix("./") for member in members}
    if REQUIRED in names:
        return Check("start_server.sh at the root", True, "it is")
    nested = sorted(name for name in names if PurePosixPath(name).name == REQUIRED)
    where = f"it is at {nested[0]}; pack from inside that folder" if nested else "there is none"
    return Check("start_server.sh at the root", False, where)


def check_names(members: list[tarfile.TarInfo]) -> Check:
    """Nothing but files and folders below the root: no links, devices or ways out of it."""
    bad = [
        member.name
        for member in members
        if not (member.isfile() or member.isdir())
        or member.name.startswith("/")
        or ".." in PurePosixPath(member.name).parts
    ]
    return Check("plain files below the root", not bad, f"not so: {', '.join(bad[:3])}" if bad else "all of them")


def check_source_only(members: list[tarfile.TarInfo]) -> Check:
    bad = [member.name for member in members if member.isfile() and not is_source(PurePosixPath(member.name))]
    return Check(
        "source only, no weights or wheels", not bad, f"no source: {', '.join(bad[:3])}" if bad else "all of it"
    )


def is_source(path: PurePosixPath) -> bool:
    return path.suffix in SOURCE_SUFFIXES or path.name in NO_SUFFIX_ALLOWED


def check_sizes(path: Path, members: list[tarfile.TarInfo]) -> Check:
    size, largest = path.stat().st_size, max(members, key=lambda member: member.size, default=None)
    found = f"{size:,} bytes, largest file {largest.name} with {largest.size:,}" if largest else "empty"
    small = size <= ARCHIVE_LIMIT_BYTES and (largest is None or largest.size <= FILE_LIMIT_BYTES)
    return Check(f"at most {ARCHIVE_LIMIT_BYTES:,} bytes, {FILE_LIMIT_BYTES:,} a file", small, found)


def check_manifest(path: Path, members: list[tarfile.TarInfo]) -> Check:
    name = "manifest.json"
    if MANIFEST_NAME not in {member.name.removeprefix("./") for member in members}:
        return Check(name, True, "none, no drafter is declared")
    try:
        manifest = read_manifest(member_text(path, MANIFEST_NAME))
    except ManifestError as error:
        return Check(name, False, str(error))
    return Check(name, True, f"drafter {manifest.drafter_hf_repo} at {manifest.revision[:12]}")


def member_text(path: Path, name: str) -> str:
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            if member.name.removeprefix("./") == name and (file := archive.extractfile(member)):
                return file.read().decode(errors="replace")
    raise PackageError(f"{path} holds no {name}")


def check_scripts(directory: Path) -> list[Check]:
    """`sh` syntax of the scripts of an unpacked archive."""
    checks = []
    for script in SCRIPTS:
        if (directory / script).is_file():
            done = subprocess.run(["sh", "-n", script], cwd=directory, capture_output=True, text=True)
            checks.append(Check(f"sh -n {script}", done.returncode == 0, done.stderr.strip() or "valid"))
    return checks
