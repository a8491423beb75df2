"""What a client is told when something goes wrong: one small JSON envelope, the shape OpenAI clients parse.

    {"error": {"message": str, "type": str, "param": str | null, "code": str | null}}

A message names the field and the rule; it never repeats the client's input, whatever its size.
"""

import asyncio
import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from router.dispatcher import Draining, GenerationError, Overloaded, Unavailable
from router.sse import ClientGone

log = logging.getLogger("baton.router")

MAX_MESSAGE_CHARS = 300
MAX_PARAM_CHARS = 80
CLIENT_GONE_STATUS = 499  # nobody reads it; access logs and metrics tell it from a success


class ApiError(Exception):
    """An answer other than success. `retry_after_s` becomes the Retry-After header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE_CHARS]
        self.param = param[:MAX_PARAM_CHARS] if param else None
        self.code = code
        self.type = type
        self.retry_after_s = retry_after_s

    @property
    def envelope(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return JSONResponse(self.envelope, self.status, headers=headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after_s: float = 1.0) -> ApiError:
    return ApiError(503, message, type="server_error", code="unavailable", retry_after_s=retry_after_s)


def from_validation(error: ValidationError) -> ApiError:
    """The first thing wrong with a request body. `param` is its path, such as messages.0.content."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return bad_request("the request body is not valid JSON", code="invalid_json")
    path = [str(part)[:MAX_PARAM_CHARS] for part in first["loc"]]
    param = ".".join(part for part in path if not part.startswith("<"))
    param = str(first.get("ctx", {}).get("param", param))[:MAX_PARAM_CHARS]
    message = first["msg"].removeprefix("Value error, ")
    return bad_request(f"{param}: {message}" if param else message, param)


def from_exception(error: BaseException) -> ApiError:
    """The answer to any exception a handler or a token stream may raise. An unexpected one is logged and told as
    500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        return ApiError(
            429, error.message, type="rate_limit_error", code="overloaded", retry_after_s=error.retry_after_s
        )
    if isinstance(error, Draining):
        return ApiError(503, error.message, type="server_error", code="draining", retry_after_s=error.retry_after_s)
    if isinstance(error, Unavailable):
        return unavailable(error.message, error.retry_after_s)
    if isinstance(error, GenerationError):
        return _from_generation_error(error)
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return ApiError(504, "the request took longer than allowed", type="timeout_error", code="deadline")
    log.error("unexpected error", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", type="server_error", code="internal")


def failure_code(error: BaseException) -> str:
    """How an exception that ended a generation is counted in the metrics."""
    if isinstance(error, GenerationError):
        return error.code
    return "abort" if isinstance(error, (ClientGone, asyncio.CancelledError)) else "internal"


def _from_generation_error(error: GenerationError) -> ApiError:
    if error.code == "deadline":
        return ApiError(504, error.message, type="timeout_error", code="deadline")
    if error.code == "worker_lost":
        return ApiError(503, error.message, type="server_error", code="worker_lost", retry_after_s=1.0)
    if error.code == "too_long":
        return bad_request(error.message, code="context_length_exceeded")
    return ApiError(500, error.message, type="server_error", code=error.code)


HTTP_MESSAGES = {
    404: ("no such path; see /openapi.json", "not_found"),
    405: ("this path does not take that method", "method_not_allowed"),
}


def answer(error: Exception) -> Response:
    """The response to an exception that a handler raised."""
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_GONE_STATUS)
    return from_exception(error).response()


def install(app: FastAPI) -> None:
    """Make every error of `app` an envelope."""

    async def on_error(request: Request, error: Exception) -> Response:
        return answer(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message, code = HTTP_MESSAGES.get(error.status_code, ("the request was refused", None))
        response = ApiError(error.status_code, message, code=code).response()
        response.headers.update(error.headers or {})
        return response

    async def on_invalid(request: Request, error: Exception) -> Response:
        return bad_request("the request does not fit this path's schema; see /openapi.json").response()

    for kind in (ApiError, Overloaded, Draining, Unavailable, GenerationError, ClientGone, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
