"""Submission archives: what is in them, what is refused, and that the one of this repository starts."""

import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from bench.facts import ROOT
from bench.package import __main__ as command
from bench.package.archive import PackageError, write_archive
from bench.package.environment import make_environment
from bench.package.manifest import DRAFTER_LIMIT_BYTES, ManifestError, drafter_bytes, read_manifest
from bench.package.validate import check_scripts, validate_archive

SHA = "0123456789abcdef0123456789abcdef01234567"
SERVER = """\
import http.server, json, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.reply(b"")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body.get("stream"):
            return self.reply(b'data: {"choices": []}\\n\\ndata: [DONE]\\n\\n')
        self.reply(json.dumps({"usage": {"completion_tokens": TOKENS}}).encode())
    def reply(self, data):
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.fixture
def root(tmp_path) -> Path:
    """A small project whose server needs the standard library only."""
    root = tmp_path / "project"
    (root / "engine" / "kernels").mkdir(parents=True)
    (root / "engine" / "__pycache__").mkdir()
    (root / "tests").mkdir()
    for name, text in {
        "start_server.sh": '#!/bin/sh\nexec "$PYTHON" engine/server.py\n',
        "engine/server.py": SERVER.replace("TOKENS", "8"),
        "engine/kernels/gemv.cu": "// kernel",
        "engine/weights.safetensors": "weights",
        "engine/__pycache__/server.pyc": "bytecode",
        "tests/test_server.py": "",
    }.items():
        (root / name).write_text(text)
    (root / "start_server.sh").chmod(0o755)
    return root


def pack(path: Path, files: dict[str, bytes], **links: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for name, target in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return path


def failures(path: Path) -> list[str]:
    return [f"{check.name}: {check.found}" for check in validate_archive(path) if not check.passed]


def test_an_archive_holds_the_source_with_start_server_at_its_root(root, tmp_path):
    names = write_archive(root, tmp_path / "sub.tar.gz")
    assert names == ["engine/kernels/gemv.cu", "engine/server.py", "start_server.sh"]
    with tarfile.open(tmp_path / "sub.tar.gz") as archive:
        assert archive.getnames() == names
        assert (
            archive.getmember("start_server.sh").mode & 0o111 and not archive.getmember("engine/server.py").mode & 0o111
        )
    assert failures(tmp_path / "sub.tar.gz") == []


def test_the_same_files_give_the_same_bytes(root, tmp_path):
    write_archive(root, tmp_path / "one.tar.gz")
    os.utime(root / "engine" / "server.py", (1, 1))
    write_archive(root, tmp_path / "two.tar.gz")
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()


def test_setup_and_a_declared_drafter_are_in_the_archive(root, tmp_path):
    (root / "setup.sh").write_text("#!/bin/sh\n")
    output = tmp_path / "sub.tar.gz"
    arguments = ["--root", str(root), "--output", str(output), "--static-only"]
    assert command.main([*arguments, "--drafter-repo", "someone/drafter", "--drafter-revision", SHA]) == 0
    with tarfile.open(output) as archive:
        assert "setup.sh" in archive.getnames()
        assert json.load(archive.extractfile("manifest.json")) == {
            "drafter_hf_repo": "someone/drafter",
            "revision": SHA,
        }


def test_a_project_without_start_server_is_refused(tmp_path):
    with pytest.raises(PackageError, match="start_server.sh"):
        write_archive(tmp_path, tmp_path / "sub.tar.gz")


def test_archives_that_a_grader_would_refuse_are_refused(tmp_path):
    start = {"start_server.sh": b"#!/bin/sh\n"}
    plain = tmp_path / "plain.tar.gz"
    with tarfile.open(plain, "w") as archive:
        archive.addfile(tarfile.TarInfo("start_server.sh"))
    bad = {
        "gzip": plain,
        "project/start_server.sh": pack(tmp_path / "a.tar.gz", {"project/start_server.sh": b""}),
        "there is none": pack(tmp_path / "b.tar.gz", {"server.py": b""}),
        "model.safetensors": pack(tmp_path / "c.tar.gz", {**start, "model.safetensors": b"w"}),
        "engine.whl": pack(tmp_path / "d.tar.gz", {**start, "engine.whl": b"w"}),
        "kernel.so": pack(tmp_path / "e.tar.gz", {**start, "kernel.so": b"w"}),
        "link": pack(tmp_path / "f.tar.gz", start, link="/etc/passwd"),
        "../out.py": pack(tmp_path / "g.tar.gz", {**start, "../out.py": b""}),
        "largest file big.py": pack(tmp_path / "h.tar.gz", {**start, "big.py": b" " * 1_000_001}),
        "commit sha": pack(
            tmp_path / "i.tar.gz", {**start, "manifest.json": b'{"drafter_hf_repo": "a/b", "revision": "main"}'}
        ),
    }
    for reason, path in bad.items():
        assert any(reason in failure for failure in failures(path)), (reason, failures(path))
    assert failures(pack(tmp_path / "z.tar.gz", start)) == []


@pytest.mark.parametrize(
    "text, reason",
    [
        ("{", "no JSON"),
        ('{"drafter_hf_repo": "a/b"}', "revision"),
        (f'{{"drafter_hf_repo": "drafter", "revision": "{SHA}"}}', "OWNER/NAME"),
        ('{"drafter_hf_repo": "a/b", "revision": "v1.0"}', "commit sha"),
        (f'{{"drafter_hf_repo": "a/b", "revision": "{SHA[:12]}"}}', "commit sha"),
        (f'{{"drafter_hf_repo": "a/b", "revision": "{SHA}", "weights": "x"}}', "weights"),
    ],
)
def test_a_manifest_names_a_repository_and_a_commit_and_nothing_else(text, reason):
    with pytest.raises(ManifestError, match=reason):
        read_manifest(text)


def test_a_drafter_has_at_most_two_and_a_half_gigabytes(tmp_path):
    with pytest.raises(ManifestError, match="config.json"):
        drafter_bytes(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(DRAFTER_LIMIT_BYTES - 2)  # a hole: no disk is used
    assert drafter_bytes(tmp_path) == DRAFTER_LIMIT_BYTES
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.truncate(DRAFTER_LIMIT_BYTES)
    with pytest.raises(ManifestError, match="limit"):
        drafter_bytes(tmp_path)


def test_a_script_that_is_no_sh_is_refused(tmp_path):
    (tmp_path / "start_server.sh").write_text("if true; then\n")
    (check,) = check_scripts(tmp_path)
    assert not check.passed and "start_server.sh" in check.found


def test_the_environment_of_a_dry_run_holds_the_pinned_stack_and_nothing_else(tmp_path):
    python = make_environment(tmp_path / "environment")
    code = (
        "import importlib.util as u\n"
        "there = [n for n in ('torch', 'transformers', 'fastapi', 'uvicorn', 'httpx', 'jinja2') if u.find_spec(n)]\n"
        "extra = [n for n in ('zmq', 'prometheus_client', 'matplotlib', 'pytest', 'gguf', 'pip') if u.find_spec(n)]\n"
        "print(len(there), extra)"
    )
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={"PATH": os.environ["PATH"]}
    )
    assert done.stdout.split(maxsplit=1) == ["6", "[]\n"], done.stderr


def test_a_dry_run_starts_the_server_and_asks_it(root, tmp_path, capsys):
    output = tmp_path / "sub.tar.gz"
    assert command.main(["--root", str(root), "--output", str(output), "--json", str(tmp_path / "checks.json")]) == 0
    names = [check["name"] for check in json.loads((tmp_path / "checks.json").read_text())["checks"]]
    assert "starts, /health answers 200" in names and "no network" in names and "MODEL_DIR is left as it was" in names
    assert f"{output} is valid" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, text, reason",
    [
        ("engine/server.py", SERVER.replace("TOKENS", "9"), "9 tokens, max_tokens 8"),
        ("start_server.sh", "#!/bin/sh\necho no such module; exit 1\n", "no such module"),
        ("setup.sh", "#!/bin/sh\necho no compiler; exit 2\n", "no compiler"),
    ],
)
def test_a_dry_run_that_fails_makes_the_archive_invalid(root, tmp_path, capsys, monkeypatch, name, text, reason):
    (root / name).write_text(text)
    monkeypatch.setattr(command, "make_environment", lambda directory: Path("/usr/bin/env"))
    (root / "start_server.sh").write_text((root / "start_server.sh").read_text().replace('"$PYTHON"', "python3"))
    assert command.main(["--root", str(root), "--output", str(tmp_path / "sub.tar.gz")]) == 1
    printed = capsys.readouterr().out
    assert reason in printed and "NOT valid" in printed


def test_this_repositorys_package_starts_with_the_pinned_stack_alone(tmp_path, capsys):
    assert command.main(["--root", str(ROOT), "--output", str(tmp_path / "sub.tar.gz")]) == 0, capsys.readouterr()
