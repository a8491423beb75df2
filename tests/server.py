"""A real server in its own processes, started the way users start it: sh start_server.sh."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import yaml

ROOT = Path(__file__).resolve().parent.parent


TOPOLOGIES: dict[str, dict] = {
    "colocated": {},
    "shm": {"prefill_workers": 1, "channel": "shm", "local_prefill_max_tokens": 0},
    "tcp": {"prefill_workers": 1, "channel": "tcp", "local_prefill_max_tokens": 0},
    "2p2d-tcp": {"prefill_workers": 2, "decode_workers": 2, "channel": "tcp", "local_prefill_max_tokens": 0},
}


def write_config(directory: Path, topology: str, /, **sections) -> Path:
    """A deployment of a tiny model. `sections` replace those here."""
    values = {
        "threads": 1,
        "kv": {"block_size": 8, "pool_tokens": 4096},
        "model": {"dtype": "float32", "max_model_len": 512},
        "topology": TOPOLOGIES[topology],
        "prefill": {"chunk_tokens": 64},
        **sections,
    }
    path = directory / f"{topology}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """`with Server(config_path, model_dir) as server`: healthy on entry, stopped (and its log shown on failure) on
    exit."""

    def __init__(self, config: str | Path, model_dir: str | Path, log_path: Path, **environment: str):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self._environment = {
            **os.environ,
            "MODEL_DIR": str(model_dir),
            "PORT": str(self.port),
            "CONFIG": str(config),
            "PYTHON": sys.executable,
            **environment,
        }
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> "Server":
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                ["sh", "start_server.sh"], cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )
        try:
            self.wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def wait_healthy(self, timeout_s: float = 90.0) -> None:
        assert self.process is not None
        end = time.monotonic() + timeout_s
        while not self.healthy():
            assert self.process.poll() is None, f"server exited with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < end, f"server not healthy after {timeout_s} s:\n{self.log}"
            time.sleep(0.1)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM and wait; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"server did not stop:\n{self.log}") from None
        return self.process.returncode

    def worker_pids(self, role: str) -> list[int]:
        """Process ids of this server's own prefill or decode workers."""
        assert self.process is not None
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except (OSError, ValueError):
                continue
            if parent == self.process.pid and f"{role}_worker".encode() in command:
                found.append(int(entry.name))
        return sorted(found)

    def complete(self, prompt, timeout_s: float = 120.0, **params) -> dict:
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **params}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout_s)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name and labels, as written there."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}
