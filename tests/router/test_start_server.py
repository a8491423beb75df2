"""start_server.sh under each POSIX shell there is: what is wrong is said in one line, before anything starts."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELLS = sorted({os.path.realpath(path) for path in map(shutil.which, ("sh", "dash")) if path})


@pytest.fixture(params=SHELLS)
def start(request, tmp_path):
    """start(cwd=..., **environment) -> the finished process of start_server.sh, run from another directory."""

    def run(*arguments: str, cwd: Path = tmp_path, **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {key: value for key, value in os.environ.items() if key not in ("MODEL_DIR", "PORT", "CONFIG")}
        return subprocess.run(
            [request.param, str(ROOT / "start_server.sh"), *arguments],
            cwd=cwd,
            env={**inherited, "PYTHON": sys.executable, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.fixture
def model_dir(tmp_path) -> Path:
    """Enough of a model for the router; no worker can load it."""
    directory = tmp_path / "a model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "abacus", "architectures": ["AbacusForCausalLM"]}')
    return directory


def assert_one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode != 0
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("baton: error: ")
    for word in words:
        assert word in lines[0], lines[0]


def test_a_missing_model_dir_variable_is_named(start):
    assert_one_line(start(), "MODEL_DIR")


def test_a_model_dir_that_does_not_exist_is_named(start):
    assert_one_line(start(MODEL_DIR="/no/such/model"), "/no/such/model", "not a directory")


def test_a_directory_without_a_model_is_named(start, tmp_path):
    assert_one_line(start(MODEL_DIR=str(tmp_path)), "config.json")


@pytest.mark.parametrize("port", ["eighty", "0", "65536", "-1"])
def test_a_port_that_is_none_is_refused(start, model_dir, port):
    assert_one_line(start(MODEL_DIR=str(model_dir), PORT=port), repr(port))


def test_an_unknown_configuration_lists_the_known_ones(start, model_dir):
    assert_one_line(start(MODEL_DIR=str(model_dir), CONFIG="fast"), "'fast'", "auto", "disagg-cpu-tcp")


def test_an_unknown_key_names_file_and_key(start, model_dir, tmp_path):
    (tmp_path / "mine.yaml").write_text("kv:\n  blocksize: 3\n")
    assert_one_line(start(MODEL_DIR=str(model_dir), CONFIG="mine.yaml"), "mine.yaml", "kv.blocksize")


def test_relative_paths_are_those_of_the_caller(start, model_dir, tmp_path):
    (tmp_path / "mine.yaml").write_text("kv:\n  block_size: 0\n")
    assert_one_line(start(MODEL_DIR="a model", CONFIG="mine.yaml"), str(tmp_path / "mine.yaml"), "kv.block_size")


def test_an_interpreter_that_does_not_exist_is_named(start, model_dir):
    assert_one_line(start(MODEL_DIR=str(model_dir), PYTHON="/no/python"), "/no/python", "PYTHON")


def test_a_port_in_use_is_named(start, model_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_one_line(start(MODEL_DIR=str(model_dir), PORT=port), f"127.0.0.1:{port}", "PORT")


def test_a_model_that_no_worker_can_load_ends_the_server_with_the_workers_own_line(start, model_dir):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    result = start(MODEL_DIR=str(model_dir), PORT=port, DRAFTER_BYO_DIR="drafter")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr, result.stderr
    assert "DRAFTER_BYO_DIR" in result.stderr and "is ignored" in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("baton: error: worker d0 did not start") and "AbacusForCausalLM" in last


def test_help_explains_the_command(start):
    result = start("--help")
    assert result.returncode == 0
    for word in ("--config", "--control", "--no-workers", "SIGTERM", "decode_worker"):
        assert word in result.stdout
