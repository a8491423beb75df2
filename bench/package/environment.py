"""An environment that holds the pinned stack and nothing else, made from links to what is installed here.

Nothing is downloaded or copied: a fresh virtual environment gets a link for each file tree of the pinned distributions
and of what these need. A module of any other distribution cannot be imported there.
"""

import sys
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from bench.package.archive import PackageError

PINNED = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "numpy",
    "fastapi",
    "uvicorn",
    "httpx",
    "jinja2",
)
OPTIONAL = ("triton",)
"""Part of the pinned stack where torch needs it: builds for CPUs do not."""


def pinned_distributions() -> list[metadata.Distribution]:
    """The pinned stack with everything it requires here. Raises PackageError for one that is missing."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [*PINNED, *(name for name in OPTIONAL if is_installed(name))]
    while waiting:
        name = canonical(waiting.pop())
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise PackageError(f"{name} is not installed here, but the pinned stack needs it") from None
        waiting += requirements(found[name])
    return list(found.values())


def requirements(distribution: metadata.Distribution) -> Iterable[str]:
    """Names that apply here without any extra."""
    from packaging.requirements import Requirement

    for text in distribution.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def is_installed(name: str) -> bool:
    return any(True for _ in metadata.distributions(name=name))


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def make_environment(directory: Path) -> Path:
    """Make the environment in the new `directory` and give its interpreter. Raises PackageError."""
    distributions = pinned_distributions()
    venv.EnvBuilder(symlinks=True, with_pip=False).create(directory)
    python = directory / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = directory / "lib" / version / "site-packages"
    for distribution in distributions:
        for top in top_level_entries(distribution):
            link = packages / top.name
            if top.exists() and not link.exists():
                link.symlink_to(top)
    return python


def top_level_entries(distribution: metadata.Distribution) -> set[Path]:
    """Files and directories directly in site-packages that a distribution put there."""
    if distribution.files is None:
        raise PackageError(f"{distribution.metadata['Name']} does not say which files it installed")
    base = Path(str(distribution.locate_file("")))
    names = {file.parts[0] for file in distribution.files if file.parts and file.parts[0] not in ("..", "__pycache__")}
    return {base / name for name in names}
