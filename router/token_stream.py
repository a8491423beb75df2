"""The tokens of one request on their way from the dispatcher to an HTTP response."""

import asyncio
from collections import deque
from collections.abc import Callable

from engine.request import TokenDelta
from router.errors import GenerationError


class TokenStream:
    """Async iterator of a request's TokenDeltas, for one consumer. Ends after the delta that carries a finish reason;
    raises GenerationError when the request failed, after the deltas that came before.

    Belongs to the event loop: every method is called there.
    """

    def __init__(self, request_id: str, on_close: Callable[[], None]):
        """`on_close` is called at most once, when the consumer closes the stream before its end."""
        self.request_id = request_id
        self._on_close = on_close
        self._deltas: deque[TokenDelta] = deque()
        self._error: GenerationError | None = None
        self._ended = False
        self._arrived = asyncio.Event()
        self._is_awaited = False
        self.shortcut: Callable[[TokenDelta], bool] | None = None
        """Offered each delta that would otherwise wake the consumer, which saves that; False: it has to."""

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> TokenDelta:
        while not self._deltas:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            self._is_awaited = True
            try:
                await self._arrived.wait()
            finally:
                self._is_awaited = False
        return self._deltas.popleft()

    def put(self, delta: TokenDelta) -> None:
        """Dispatcher: deliver a delta. Its finish reason, if any, ends the stream."""
        if self._ended:
            return
        if self.shortcut is not None and self._is_awaited and not self._deltas and self.shortcut(delta):
            return
        self._deltas.append(delta)
        self._ended = delta.finish_reason is not None
        self._arrived.set()

    def fail(self, error: GenerationError) -> None:
        """Dispatcher: end the stream with an error."""
        if self._ended:
            return
        self._ended, self._error = True, error
        self._arrived.set()

    def close(self) -> None:
        """Consumer: no more tokens are wanted. Aborts the request if it has not ended. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._arrived.set()
        self._on_close()
