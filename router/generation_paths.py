"""The paths that generate, without FastAPI's layers.

The routes of these paths stay in the application, for its schema and for other methods than POST. FastAPI takes longer
to reach a handler than the handler takes: it prepares dependencies, which these have none of.
"""

from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import http_errors

Handler = Callable[[Request], Awaitable[Response]]


class GenerationPaths:
    """Middleware: answers a POST to one of `handlers`' paths itself."""

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler]):
        self._app = app
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handler is None:
            return await self._app(scope, receive, send)
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            response = await handler(Request(scope, receive))
            await response(scope, receive, noting)
        except Exception as error:
            if started:
                raise
            await http_errors.answer(error)(scope, receive, send)
