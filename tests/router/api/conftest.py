"""An app with a scripted dispatcher, and clients for it."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config import DeploymentConfig, RouterSection
from router.app import create_app
from router.tokenizer import Tokenizer
from tests.router.api.fake_dispatcher import FakeDispatcher, Script, deltas


@pytest.fixture(scope="session")
def model_dir(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.load(model_dir)
    yield tokenizer
    tokenizer.close()


class Api:
    """A client of the app, the dispatcher behind it, and shorthands for bodies."""

    def __init__(self, tokenizer: Tokenizer, script: Script, **router: Any):
        self.tokenizer = tokenizer
        self.dispatcher = FakeDispatcher(script)
        config = DeploymentConfig(router=RouterSection(**{"served_model_name": "tiny", **router}))
        self.app = create_app(self.dispatcher, tokenizer, config)  # type: ignore[arg-type]

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, body: Any = None) -> httpx.Response:
        """body: an object to send as JSON, or bytes to send as they are."""
        if isinstance(body, bytes):
            return self.request("POST", path, content=body, headers={"content-type": "application/json"})
        return self.request("POST", path, json=body)

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, content: Any = "hello", **fields: Any) -> httpx.Response:
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt_text(self, number: int = -1) -> str:
        """What the dispatcher was given, as text."""
        return self.tokenizer.decode(self.dispatcher.requests[number].prompt_token_ids)


@pytest.fixture
def make_api(tokenizer: Tokenizer) -> Callable[..., Api]:
    """make_api(script or text, **router config): the text is answered a token at a time, and ends with `stop` at the
    model's end-of-sequence token."""

    def make(script: Script | str = "The baton changes hands.", **router: Any) -> Api:
        if isinstance(script, str):
            token_ids = [*tokenizer.encode(script, add_special_tokens=False), 2]
            return Api(
                tokenizer, lambda request: deltas(request, token_ids, finish_reason="stop", stop_token_id=2), **router
            )
        return Api(tokenizer, script, **router)

    return make


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events: objects, and "[DONE]"."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [data if data == "[DONE]" else json.loads(data) for data in (block[6:] for block in blocks)]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer that must have this status, an envelope of the right shape and a small size."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and "\n" not in error["message"]
    assert len(response.content) < 1000
    return error
