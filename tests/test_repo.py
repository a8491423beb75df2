"""The repository keeps its own rules: import direction, declared and locked dependencies, valid configurations, and a
README that says what is there."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.config_reference import with_reference
from engine.config import load_config

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ["engine", "kv_transfer", "prefill_worker", "decode_worker", "router"]
"""Each may import itself and those before it."""
BENCH_MAY_IMPORT_ENGINE = [
    "bench/cpu_engine.py",
    *sorted(f"bench/transfer/{path.name}" for path in ROOT.glob("bench/transfer/*.py")),
]
UNLOCKED_EXTRAS = ["nixl"]
PACKAGES = [*LAYERS, "bench"]
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
REQUIRED_CONFIGS = ["auto", "colocated-cpu", "disagg-2p2d-cpu-tcp", "disagg-cpu-shm", "disagg-cpu-tcp"]


def sources(package: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py"))


def imported(source: str) -> Iterator[str]:
    """Dotted names of every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse((ROOT / source).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def project() -> dict[str, Any]:
    """The [project] table of pyproject.toml."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML parser")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def declared() -> dict[str, Requirement]:
    """Requirements of pyproject.toml by canonical name, extras included but for those that are not locked."""
    table = project()
    extras = {name: texts for name, texts in table["optional-dependencies"].items() if name not in UNLOCKED_EXTRAS}
    texts = [*table["dependencies"], *(text for extra in extras.values() for text in extra)]
    requirements = [Requirement(text) for text in texts if not text.startswith(table["name"])]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def locked() -> dict[str, str]:
    """Version by canonical name."""
    pins = re.findall(r"^([^#=\s]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.M)
    return {canonicalize_name(name): version for name, version in pins}


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_one_way(package: str):
    forbidden = {*PACKAGES, "tests"} - set(LAYERS[: LAYERS.index(package) + 1])
    found = [
        f"{source} imports {name}"
        for source in sources(package)
        for name in imported(source)
        if name.partition(".")[0] in forbidden
    ]
    assert not found


def test_bench_reaches_the_service_over_http_only():
    found = [
        f"{source} imports {name}"
        for source in sources("bench")
        if source not in BENCH_MAY_IMPORT_ENGINE
        for name in imported(source)
        if name.partition(".")[0] in {*LAYERS, "tests"} and not name.startswith("engine.config.")
    ]
    assert not found


def test_every_imported_package_is_declared():
    distributions = metadata.packages_distributions()
    names = {name.partition(".")[0] for package in PACKAGES for source in sources(package) for name in imported(source)}
    third_party = names - set(PACKAGES) - set(sys.stdlib_module_names)
    undeclared = {
        name
        for name in third_party
        if not {canonicalize_name(distribution) for distribution in distributions.get(name, [name])} & declared().keys()
    }
    assert not undeclared - {"annotated_types", "starlette", "pydantic_core"}  # parts of pydantic and FastAPI


def test_the_lock_satisfies_every_declared_dependency():
    pins = locked()
    assert len(declared()) > 20
    wrong = [
        str(requirement)
        for name, requirement in declared().items()
        if name != "triton" and pins.get(name) not in requirement.specifier  # torch brings the one it needs
    ]
    assert not wrong


def test_the_lock_holds_everything_that_its_packages_need():
    pins, missing = locked(), []
    for name in pins:
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # installed for another Python only
        for requirement in map(Requirement, requirements):
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and canonicalize_name(requirement.name) not in pins:
                missing.append(f"{name} needs {requirement}")
    # builds of torch for CUDA bring libraries that the torch release itself pins
    assert not [text for text in missing if not text.startswith("torch needs ")]


def test_version_is_the_same_everywhere():
    from router.version import VERSION

    assert project()["version"] == VERSION


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration_is_valid_and_says_what_it_is_for(name: str):
    assert load_config(name).description


def test_the_promised_topologies_are_there():
    assert set(REQUIRED_CONFIGS) <= set(CONFIGS)


def test_readme_names_every_configuration_and_no_other():
    readme = (ROOT / "README.md").read_text()
    assert [name for name in CONFIGS if f"`{name}`" not in readme] == []
    assert set(re.findall(r"CONFIG=([a-z0-9-]+)\b(?!\.|/)", readme)) <= set(CONFIGS)


def test_readme_holds_the_configuration_reference():
    readme = (ROOT / "README.md").read_text()
    assert with_reference(readme) == readme, "run: make docs"


def test_commands_in_the_readme_exist():
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = set(re.findall(r"(?:^|`)make ([a-z]+)", readme, re.M))
    assert {"demo", "test"} <= commands <= targets
    for module in set(re.findall(r"python3 -m ((?:bench|engine|router)[a-z_.]*)", readme)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


@pytest.mark.parametrize("path", re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / "README.md").read_text()))
def test_links_in_the_readme_lead_somewhere(path: str):
    assert (ROOT / path).exists()


def test_every_test_that_the_list_of_failures_relies_on_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "peer_failures.md").read_text())
    assert len(named) > 34
    for path, name in named:
        assert re.search(rf"def {name}\(", (ROOT / "tests" / path).read_text()), f"{path}::{name}"


@pytest.mark.parametrize("target", ["help", "env", "model", "demo", "test", "lint", "docs", "lock", "clean"])
def test_make_knows_its_targets(target: str):
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


@pytest.mark.parametrize("script", [".ci/run", "start_server.sh", "setup.sh"])
def test_scripts_are_valid_posix_sh(script: str):
    text = (ROOT / script).read_text()
    assert text.startswith("#!/bin/sh\n") and "set -eu" in text
    done = subprocess.run(["sh", "-n", str(ROOT / script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_model_package_is_not_taken_for_model_weights():
    """`models/` without a leading slash in .gitignore would drop engine/models from the repository."""
    patterns = (ROOT / ".gitignore").read_text().splitlines()
    assert "/models/" in patterns and "models/" not in patterns
