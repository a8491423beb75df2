"""The HTTP API: OpenAI's completions and chat, and the endpoints operators and experiments need."""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from engine.config import DeploymentConfig
from router import http_errors
from router.body import body_schema, component_schemas, read_body
from router.chat import create_chat_completion, render_prompt
from router.completions import create_completion
from router.dispatcher import Dispatcher
from router.divergence import PromptHistory
from router.generation_paths import GenerationPaths
from router.http_errors import ApiError
from router.metrics import CountAnswers, Metrics
from router.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.service import Service, check_token_ids
from router.tokenizer import Tokenizer
from router.version import VERSION

HEALTH_MARGIN_S = 1.0


def create_app(dispatcher: Dispatcher, model: Tokenizer | str | Path, config: DeploymentConfig) -> FastAPI:
    """The application. `model`: a Hugging Face model directory, or its tokenizer. The caller starts and stops the
    dispatcher. Raises OSError or ValueError when the directory has no tokenizer that can be read."""
    tokenizer = model if isinstance(model, Tokenizer) else Tokenizer.load(model)
    try:
        metrics = Metrics(dispatcher.snapshot)
    except ImportError:
        metrics = None
    router = config.router
    history = PromptHistory(router.prompt_history, tokenizer.decode) if router.prompt_history else None
    service = Service(dispatcher, tokenizer, config, metrics, history, int(time.time()))

    app = FastAPI(title="Baton", version=VERSION, docs_url=None, redoc_url=None)
    http_errors.install(app)
    _add_generation(app, service)
    _add_tokenization(app, service)
    _add_operation(app, service)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    handlers = {
        "/v1/completions": partial(create_completion, service),
        "/v1/chat/completions": partial(create_chat_completion, service),
    }
    app.add_middleware(GenerationPaths, handlers=handlers)
    if metrics is not None:
        paths = frozenset(path for route in app.routes if "{" not in (path := getattr(route, "path", "{")))
        app.add_middleware(CountAnswers, metrics=metrics, paths=paths)
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models: list[type[BaseModel]] = [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody]
        schema.setdefault("components", {}).setdefault("schemas", {}).update(component_schemas(models))
        app.openapi_schema = schema
    return app.openapi_schema


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", openapi_extra=body_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        return await create_completion(service, request)

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(service, request)


def _add_tokenization(app: FastAPI, service: Service) -> None:
    tokenizer = service.tokenizer

    @app.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of messages as the chat template renders them."""
        body = await read_body(request, TokenizeBody)
        service.check_model_name(body.model)
        if body.messages is not None:
            generates = body.add_generation_prompt is not False
            prompt = await render_prompt(service, body.messages, tools=body.tools, add_generation_prompt=generates)
            token_ids = prompt.token_ids
        else:
            text, add_special = body.prompt or "", body.add_special_tokens is not False
            token_ids = await tokenizer.run(len(text), tokenizer.encode, text, add_special)
        limit = service.dispatcher.model.max_model_len if service.dispatcher.model else None
        answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": limit, "tokens": token_ids}
        if body.return_token_strs:
            answer["token_strs"] = tokenizer.token_names(token_ids)
        return JSONResponse(answer)

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body = await read_body(request, DetokenizeBody)
        service.check_model_name(body.model)
        check_token_ids(body.tokens, service.model, "tokens")
        return JSONResponse({"prompt": await tokenizer.run(len(body.tokens), tokenizer.decode, body.tokens)})


def _add_operation(app: FastAPI, service: Service) -> None:
    dispatcher, timeout_s = service.dispatcher, service.config.router.health_timeout_s

    def described_model() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.started,
            "owned_by": "baton",
            "root": str(service.tokenizer.model_dir),
            "max_model_len": dispatcher.model.max_model_len if dispatcher.model else None,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [described_model()]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        service.check_model_name(model_id)
        return JSONResponse(described_model())

    @app.get("/health")
    async def health() -> Response:
        """200 when a request sent now would be served: a round trip through the engine loops says so, in bounded
        time."""
        try:
            report = await asyncio.wait_for(dispatcher.health(timeout_s), timeout_s + HEALTH_MARGIN_S)
        except asyncio.TimeoutError:
            return JSONResponse({"status": "unavailable", "workers": []}, 503)
        healthy = report.ok and not report.draining
        workers = [vars(worker) for worker in report.workers]
        return JSONResponse({"status": report.status, "workers": workers}, 200 if healthy else 503)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": VERSION})

    @app.get("/metrics")
    async def metrics() -> Response:
        if service.metrics is None:
            raise ApiError(
                501, "no metrics without prometheus_client; pip install prometheus-client", type="server_error"
            )
        text, content_type = service.metrics.render()
        return Response(text, headers={"content-type": content_type})

    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        """Empty every worker's prefix cache; blocks in use stay."""
        return JSONResponse({"num_blocks": await dispatcher.flush()})

    @app.get("/prompts")
    async def prompts() -> Response:
        """Where each recent prompt leaves the most similar one before it."""
        if service.history is None:
            raise ApiError(501, "no prompts are kept; set router.prompt_history to a number", type="server_error")
        return JSONResponse({"prompts": service.history.report()})
