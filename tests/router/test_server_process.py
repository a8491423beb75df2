"""The server with scripted workers instead of engines: start, drain on SIGTERM, the second signal, its errors."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from engine.config import load_config
from engine.protocol import Submit
from engine.wire import WireError
from router.announce import ServerOptions
from router.server import ServerError, serve
from tests.router.fake_worker import FakeWorker, async_test

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """`serve` in this process; workers join at its control address."""

    def __init__(self, model_dir: Path):
        port, control_port = free_port(), free_port()
        self.url, self.control = f"http://127.0.0.1:{port}", f"127.0.0.1:{control_port}"
        config = load_config("colocated-cpu")
        options = ServerOptions(config, "colocated-cpu", model_dir, port, ("127.0.0.1", control_port), False)
        self.exit = asyncio.create_task(serve(options))

    async def join(self, name: str) -> FakeWorker:
        while True:
            try:
                return await FakeWorker(name).join(self.control)
            except WireError:
                assert not self.exit.done()
                await asyncio.sleep(0.01)

    async def health(self) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.get(f"{self.url}/health")

    async def complete(self) -> httpx.Response:
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "return_token_ids": True}
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.post(f"{self.url}/v1/completions", json=body)


@async_test
async def test_a_server_starts_serves_drains_on_sigterm_and_exits_with_0(tiny_model, capfd):
    server = Server(tiny_model("llama"))
    await asyncio.sleep(0)  # the port is open from here on
    health = await server.health()
    assert health.status_code == 503 and health.json()["status"] == "starting"
    worker = await server.join("d0")
    while (await server.health()).status_code != 200:
        await asyncio.sleep(0.01)
    answer = asyncio.create_task(server.complete())
    submit = await worker.next(Submit)
    worker.emit(submit, 10, 11)
    os.kill(os.getpid(), signal.SIGTERM)
    while (await server.health()).json()["status"] != "draining":
        await asyncio.sleep(0.01)
    refused = await server.complete()
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    worker.emit(submit, 12, finish="length")
    completed = await answer
    assert completed.status_code == 200
    assert completed.json()["choices"][0]["token_ids"] == [10, 11, 12]
    assert await server.exit == 0
    log = capfd.readouterr().err
    for expected in (
        "colocated-cpu",
        "workers register at",
        "decode worker d0 is up",
        "SIGTERM: draining",
        "has ended",
    ):
        assert expected in log


@async_test
async def test_a_model_without_a_tokenizer_is_one_line(tiny_model, tmp_path):
    shutil.copy(tiny_model("llama") / "config.json", tmp_path)
    with pytest.raises(ServerError, match=f"no usable tokenizer in {tmp_path}") as failed:
        await Server(tmp_path).exit
    assert "\n" not in str(failed.value)


def test_a_second_signal_ends_the_server_at_once(tiny_model):
    """Both come while the tokenizer is being read, which a first signal alone waits for."""
    command = [sys.executable, "-m", "router", "--port", str(free_port()), "--no-workers"]
    command += ["--model-dir", str(tiny_model("llama"))]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for expected in ("API at", "SIGTERM: draining"):
            while expected not in (line := process.stderr.readline()):
                assert line, "the server ended too early"
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
