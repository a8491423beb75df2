import sys
import time
from pathlib import Path

import httpx
import pytest

from bench import demo

HEALTHY_AFTER_TWO = """\
import http.server, os, pathlib, subprocess, sys
asked = [0]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked[0] += 1
        self.send_response(200 if asked[0] > 2 else 503)
        self.send_header("content-length", "0")
        self.end_headers()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}")
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "MODEL_DIR", tmp_path / "model")
    return tmp_path


def write_start_script(root: Path, text: str) -> None:
    (root / "start_server.sh").write_text(f"cd {root}\n{text}\n")


def is_running(pid: int) -> bool:
    """False for what is gone and for what has ended but was not collected."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_the_service_is_used_when_healthy_and_stopped_with_all_its_processes(root: Path, capsys):
    (root / "server.py").write_text(HEALTHY_AFTER_TWO)
    write_start_script(root, 'exec "$PYTHON" server.py')
    with pytest.raises(RuntimeError, match="replay broke"), demo.running_server(demo.free_port(), root / "log") as url:
        assert httpx.get(f"{url}/health").status_code == 200
        pids = [int(pid) for pid in (root / "pids").read_text().split()]
        assert all(is_running(pid) for pid in pids)
        raise RuntimeError("replay broke")
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)
    assert "healthy" in capsys.readouterr().err


def test_a_service_that_does_not_start_is_an_error_with_the_end_of_its_log(root: Path):
    write_start_script(root, "echo no such model; exit 3")
    with pytest.raises(demo.DemoError, match=r"ended with status 3(.|\n)*no such model"):
        with demo.running_server(demo.free_port(), root / "log"):
            pytest.fail("the service did not start")


def test_a_service_that_never_gets_healthy_is_an_error(root: Path, monkeypatch):
    monkeypatch.setattr(demo, "START_TIMEOUT_S", 0.2)
    write_start_script(root, "echo still loading; exec sleep 60")
    with pytest.raises(demo.DemoError, match="not healthy(.|\n)*still loading"):
        with demo.running_server(demo.free_port(), root / "log"):
            pytest.fail("the service was not healthy")


def test_the_service_gets_the_model_the_topology_and_this_interpreter(root: Path):
    write_start_script(root, 'echo "$MODEL_DIR $CONFIG $PORT $PYTHON"; exit 1')
    with pytest.raises(demo.DemoError), demo.running_server(4321, root / "log"):
        pass
    assert (root / "log").read_text().split() == [str(root / "model"), "disagg-cpu-shm", "4321", sys.executable]


def test_without_the_model_the_demo_names_the_command_that_makes_it(root: Path, capsys):
    assert demo.main([]) == 1
    assert "make model" in capsys.readouterr().err
