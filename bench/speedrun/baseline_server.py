"""The baseline: a complete, correct and deliberately naive OpenAI-compatible server.

One lock around the model, one `generate` for each request, one token after another, no batching, no reuse. It needs
the pinned stack only and defines what a speedup is measured against.

    MODEL_DIR=... PORT=... python3 -m bench.speedrun.baseline_server [--weights random] [--device cpu]
"""

import argparse
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from starlette.responses import Response, StreamingResponse
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer
from transformers.utils import logging


class ChatMessage(BaseModel):
    role: str
    content: str


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int = Field(256, ge=1)
    temperature: float = Field(1.0, ge=0)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False


class EachTokenStreamer(TextIteratorStreamer):
    """Gives out every token at once. Text of random weights has hardly a space, and the parent waits for one."""

    def put(self, value: torch.Tensor) -> None:
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
            return
        self.on_finalized_text(str(self.tokenizer.decode(value.flatten().tolist())))

    def end(self) -> None:
        self.on_finalized_text("", stream_end=True)


class Baseline:
    """The model and the lock that every request waits for."""

    def __init__(self, model_dir: Path, weights: str, device: str):
        logging.disable_progress_bar()
        self.name = model_dir.name
        self.device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.float16 if self.device == "cuda" else torch.float32
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self.streamer_class = EachTokenStreamer if weights == "random" else TextIteratorStreamer
        self.model: Any
        if weights == "random":
            torch.manual_seed(0)
            with torch.device(self.device):
                self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=dtype)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        self.model.to(self.device).eval()
        self.lock = threading.Lock()

    def prompt_ids(self, request: ChatRequest) -> torch.Tensor:
        """[1, tokens]. Raises HTTPException when prompt and answer do not fit the model."""
        conversation = [message.model_dump() for message in request.messages]
        rendered = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
        ids = torch.tensor([rendered["input_ids"]], device=self.device)
        longest = self.model.config.max_position_embeddings
        if ids.shape[1] + request.max_tokens > longest:
            message = (
                f"{ids.shape[1]} prompt tokens and max_tokens {request.max_tokens} exceed the context of {longest}"
            )
            raise HTTPException(400, message)
        return ids

    def generate(self, request: ChatRequest, ids: torch.Tensor, **streamer: Any) -> int:
        """The number of tokens generated; with `streamer=...` their text goes there as it comes."""
        sampling = (
            {"do_sample": True, "temperature": request.temperature} if request.temperature else {"do_sample": False}
        )
        limits: dict[str, Any] = {"max_new_tokens": request.max_tokens}
        if request.ignore_eos:
            limits["min_new_tokens"] = request.max_tokens
        with self.lock, torch.inference_mode():
            output = self.model.generate(ids, attention_mask=torch.ones_like(ids), **sampling, **limits, **streamer)
        return output.shape[1] - ids.shape[1]

    def pieces(self, request: ChatRequest, ids: torch.Tensor) -> Iterator[str | int]:
        """Pieces of text as they come, then the number of tokens. Raises what generation raised."""
        streamer = self.streamer_class(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        outcome: list[int | Exception] = []

        def work() -> None:
            try:
                outcome.append(self.generate(request, ids, streamer=streamer))
            except Exception as error:  # told to the client by the thread that answers it
                outcome.append(error)
                streamer.end()

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        yield from (piece for piece in streamer if piece)
        worker.join()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        yield outcome[0]


def make_app(baseline: Baseline) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok", "model": baseline.name}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": baseline.name, "object": "model"}]}

    @app.post("/v1/chat/completions")
    def chat(request: ChatRequest) -> Response:
        ids = baseline.prompt_ids(request)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": baseline.name}
        if request.stream:
            return StreamingResponse(events(baseline, request, ids, head), media_type="text/event-stream")
        *pieces, counted = baseline.pieces(request, ids)
        text, num_tokens = "".join(map(str, pieces)), int(counted)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": finish_reason(request, num_tokens),
        }
        answer = {**head, "object": "chat.completion", "choices": [choice], "usage": usage(ids, num_tokens)}
        return Response(json.dumps(answer), media_type="application/json")

    return app


def events(baseline: Baseline, request: ChatRequest, ids: torch.Tensor, head: dict[str, Any]) -> Iterator[bytes]:
    """Server-sent events of one streamed answer."""
    head = {**head, "object": "chat.completion.chunk"}
    num_tokens = 0
    try:
        for piece in baseline.pieces(request, ids):
            if isinstance(piece, int):
                num_tokens = piece
                continue
            yield event({**head, "choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
    except Exception as error:
        yield event({"error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}})
        return
    reason = finish_reason(request, num_tokens)
    yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    if request.stream_options.include_usage:
        yield event({**head, "choices": [], "usage": usage(ids, num_tokens)})
    yield b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def usage(ids: torch.Tensor, num_tokens: int) -> dict[str, int]:
    prompt = ids.shape[1]
    return {"prompt_tokens": prompt, "completion_tokens": num_tokens, "total_tokens": prompt + num_tokens}


def finish_reason(request: ChatRequest, num_tokens: int) -> str:
    return "length" if num_tokens >= request.max_tokens else "stop"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.speedrun.baseline_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model_dir = os.environ.get("MODEL_DIR")
    parser.add_argument("--model-dir", type=Path, default=model_dir, required=not model_dir, help="(MODEL_DIR)")
    parser.add_argument("--port", type=int, default=int(os.environ.get("PORT", "8000")), help="(PORT, else 8000)")
    parser.add_argument("--weights", choices=("files", "random"), default="files", help="random: config.json is enough")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    if not (arguments.model_dir / "config.json").is_file():
        print(
            f"baseline: {arguments.model_dir} holds no config.json; set MODEL_DIR to a model directory", file=sys.stderr
        )
        return 2
    app = make_app(Baseline(arguments.model_dir, arguments.weights, arguments.device))
    print(f"baseline: {arguments.model_dir.name} on port {arguments.port}", flush=True)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
