"""What the replay asks an OpenAI-compatible server besides generation: what it is, token ids and text, its counters,
the block size of its cache, a cache flush."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.replay.plan import Tokenize
from bench.replay.transport import Endpoint

OPTIONAL_PARAMETERS = ("stream_options", "ignore_eos", "min_tokens", "return_token_ids")
"""Request fields that a server may refuse. Without them a run is possible, with less known about it."""
CONTROL_TIMEOUT_S = 60.0
PROBE_TOKENS = 512
PROBE_TRIES = 3


class ServerError(RuntimeError):
    """The server cannot be used for a replay; the message says what it answered and what to do."""


@dataclass
class ServerFacts:
    """What a server says of itself. `version` and `models` are its own answers (None where it has no such route).
    `block_size`: tokens in a block of its prefix cache, found by asking for the same prompt twice; None: not found."""

    url: str
    model: str
    max_model_len: int | None
    version: Any
    models: Any
    accepted_parameters: list[str] = field(default_factory=list)
    block_size: int | None = None


class Server:
    """One server, reached over HTTP. Use as an async context manager. The variable OPENAI_API_KEY is sent when set."""

    def __init__(self, url: str):
        self.url = url.rstrip("/").removesuffix("/v1")
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.completions = Endpoint.of(self.url, "/v1/completions", headers)
        self.http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=CONTROL_TIMEOUT_S, trust_env=False)

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def describe(self, model: str | None) -> ServerFacts:
        """Facts about the server; `model` None takes the first it lists. Raises ServerError."""
        models = await self._json("GET", "/v1/models")
        if models is None or not models.get("data"):
            raise ServerError(f"{self.url}/v1/models lists no model; is this an OpenAI-compatible server?")
        listed = {entry["id"]: entry for entry in models["data"]}
        name = model or next(iter(listed))
        if name not in listed:
            raise ServerError(f"model {name!r} is not served at {self.url}; it has {', '.join(listed)}")
        return ServerFacts(
            url=self.url,
            model=name,
            max_model_len=listed[name].get("max_model_len"),
            version=await self._json("GET", "/version"),
            models=models,
        )

    def tokenizer(self, model: str) -> Tokenize:
        """Token ids from the server's own /tokenize."""

        async def tokenize(text: str) -> list[int]:
            body = {"model": model, "prompt": text, "add_special_tokens": False}
            answer = await self._json("POST", "/tokenize", body)
            if answer is None or "tokens" not in answer:
                raise ServerError(f"{self.url} has no /tokenize; give the model's directory with --tokenizer DIR")
            return answer["tokens"]

        return tokenize

    async def tokenize_messages(self, model: str, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of messages as the server's chat template renders them. Raises ServerError."""
        answer = await self._json("POST", "/tokenize", {"model": model, "messages": messages})
        if answer is None or "tokens" not in answer:
            raise ServerError(f"{self.url} has no /tokenize for messages; capture prompts as text instead")
        return answer["tokens"]

    async def detokenize(self, model: str, token_ids: list[int]) -> str | None:
        """The text of token ids; None when the server has no /detokenize."""
        answer = await self._json("POST", "/detokenize", {"model": model, "tokens": token_ids})
        return answer.get("prompt") if isinstance(answer, dict) else None

    async def cache_block_size(self, model: str, token_ids: list[int]) -> int | None:
        """Tokens in a block of the server's prefix cache: of a prompt of n blocks that was there before, all but the
        last block is found, since its last token must be computed. None when nothing is found, or reported.

        `token_ids` hold PROBE_TOKENS or fewer, a multiple of any block size to be recognized.
        """
        body = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 0}
        for _ in range(PROBE_TRIES):  # the first fills the cache; with several workers so may the second
            response = await self._request("POST", "/v1/completions", body)
            if response.status_code != 200:
                return None
            details = (response.json().get("usage") or {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or 0
            size = len(token_ids) - cached
            if cached and len(token_ids) % size == 0:
                return size
        return None

    async def counters(self) -> dict[str, float]:
        """Samples of /metrics that only rise, by name and labels; {} where there is no such route."""
        try:
            response = await self.http.get("/metrics")
        except httpx.HTTPError:
            return {}
        return parse_counters(response.text) if response.status_code == 200 else {}

    async def flush_cache(self) -> None:
        """Empty the prefix cache, so that the next level starts cold. Raises ServerError."""
        if await self._json("POST", "/flush_cache") is None:
            raise ServerError(
                f"{self.url} has no POST /flush_cache; leave --flush-cache out and restart it between runs"
            )

    async def accepted_parameters(self, model: str, prompt_token_ids: list[int]) -> list[str]:
        """Which of OPTIONAL_PARAMETERS the server takes, found with requests of two tokens.

        Raises ServerError when it refuses even a plain streamed completion of token ids.
        """
        values = optional_parameters(2)

        async def status(names: tuple[str, ...]) -> tuple[int, str]:
            body = plain_body(model, prompt_token_ids, 2) | {name: values[name] for name in names}
            response = await self._request("POST", "/v1/completions", body)
            return response.status_code, response.text

        if (await status(OPTIONAL_PARAMETERS))[0] == 200:
            return list(OPTIONAL_PARAMETERS)
        code, text = await status(())
        if code != 200:
            raise ServerError(f"{self.url}/v1/completions answers {code} to a prompt of token ids: {one_line(text)}")
        return [name for name in OPTIONAL_PARAMETERS if (await status((name,)))[0] == 200]

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return await self.http.request(method, path, json=body)
        except httpx.TimeoutException:
            raise ServerError(f"{self.url}{path} did not answer within {CONTROL_TIMEOUT_S:g} s") from None
        except httpx.HTTPError as error:
            raise ServerError(f"cannot reach {self.url}{path}: {error or type(error).__name__}; is it up?") from None

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The decoded answer; None when the server has no such route. An empty or plain body is given as text."""
        response = await self._request(method, path, body)
        if response.status_code in (404, 405):
            return None
        if response.status_code != 200:
            raise ServerError(f"{self.url}{path} answers {response.status_code}: {one_line(response.text)}")
        try:
            return response.json()
        except ValueError:
            return response.text


def parse_counters(text: str) -> dict[str, float]:
    """Counters, and the sums and counts of histograms, in Prometheus text format; buckets are left out."""
    found = {}
    for line in text.splitlines():
        sample, _, value = line.rpartition(" ")
        name = sample.partition("{")[0]
        if not line.startswith("#") and name.endswith(("_total", "_sum", "_count")):
            try:
                found[sample] = float(value)
            except ValueError:
                continue
    return found


def counters_between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What rose, by how much."""
    risen = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: value for name, value in risen.items() if value}


def plain_body(model: str, prompt_token_ids: list[int], output_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt_token_ids,
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
    }


def optional_parameters(output_tokens: int) -> dict[str, Any]:
    """End-of-sequence is ignored and the length forced, so that every run generates the same number of tokens."""
    return {
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "min_tokens": output_tokens,
        "return_token_ids": True,
    }


def request_body(model: str, prompt_token_ids: list[int], output_tokens: int, accepted: list[str]) -> bytes:
    values = optional_parameters(output_tokens)
    body = plain_body(model, prompt_token_ids, output_tokens) | {name: values[name] for name in accepted}
    return json.dumps(body).encode()


def directory_tokenizer(directory: str) -> Tokenize:
    """Token ids from a model directory's tokenizer.json, for servers without /tokenize. Raises ServerError."""
    tokenizer = load_tokenizer(directory)

    async def tokenize(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return tokenize


def load_tokenizer(directory: str) -> Any:
    from tokenizers import Tokenizer

    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise ServerError(f"--tokenizer {directory}: it holds no tokenizer.json")
    return Tokenizer.from_file(str(path))


def one_line(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
