"""From choices to an HTTP response, streamed or whole; what both APIs share.

A stream's first chunk leaves with the first token. Every TokenDelta is one chunk; the last of each choice carries its
finish reason. What fails before the first chunk is an HTTP status, after it an error event, and then the stream ends
without [DONE].
"""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from router.generation import Choice, Generation, Piece, usage
from router.http_errors import failure_code, from_exception
from router.service import Service
from router.sse import DONE, EventStream, while_connected


class ResponseForm(ABC):
    """How one response is spelled in JSON. `plain_head`/`plain_tail` surround the text in a chunk that holds nothing
    else, so that the common chunk costs one string escape."""

    kind: str
    chunk_kind: str
    plain_head: str
    plain_tail: str

    def __init__(self, response_id: str, created: int, model_name: str):
        self.response_id = response_id
        self.created = created
        self.model_name = model_name

    @abstractmethod
    def chunk_choice(self, piece: Piece) -> dict[str, Any]:
        """`choices[]` of a chunk."""

    @abstractmethod
    def whole_choice(self, choice: Choice, pieces: list[Piece]) -> dict[str, Any]:
        """`choices[]` of a response that is not streamed."""

    def extras(self, choices: list[Choice]) -> dict[str, Any]:
        """More keys of the whole response, and of the first chunk of a stream."""
        return {}

    def envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.model_name}


async def respond(
    service: Service, request: Request, choices: list[Choice], form: ResponseForm, *, stream: bool, include_usage: bool
) -> Response:
    """Dispatch the choices and answer. A client that leaves, at any time, ends them at once."""
    service.check_num_sequences(len(choices))
    streams = service.dispatcher.submit([choice.request for choice in choices])
    generation = Generation(choices, streams, service.metrics)
    try:
        if service.history is not None:
            for choice in {choice.prompt_index: choice for choice in choices}.values():
                service.history.add(choice)
        pieces = generation.pieces()
        if stream:
            first = await while_connected(request.receive, pieces.__anext__())
            return EventStream(_events(first, pieces, generation, form, include_usage), generation.close)
        return JSONResponse(await while_connected(request.receive, _whole(pieces, choices, form)))
    except BaseException as error:
        generation.fail(failure_code(error))
        raise


async def _whole(pieces: AsyncIterator[Piece], choices: list[Choice], form: ResponseForm) -> dict[str, Any]:
    collected: list[list[Piece]] = [[] for _ in choices]
    async for piece in pieces:
        collected[piece.choice.index].append(piece)
    return {
        **form.envelope(form.kind),
        "choices": [form.whole_choice(choice, collected[choice.index]) for choice in choices],
        "usage": usage(choices),
        **form.extras(choices),
    }


async def _events(
    first: Piece, pieces: AsyncIterator[Piece], generation: Generation, form: ResponseForm, include_usage: bool
) -> AsyncIterator[bytes]:
    writer = ChunkWriter(form, len(generation.choices))
    try:
        yield writer.chunk(first, form.extras(generation.choices))
        async for piece in pieces:
            yield writer.chunk(piece)
        if include_usage:
            yield writer.usage(usage(generation.choices))
    except Exception as error:
        generation.fail(failure_code(error))
        yield event(from_exception(error).envelope)
        return
    yield DONE


class ChunkWriter:
    def __init__(self, form: ResponseForm, num_choices: int):
        self._form = form
        self._envelope = form.envelope(form.chunk_kind)
        opened = "data: " + json.dumps(self._envelope, separators=(",", ":"))[:-1] + ',"choices":[{"index":'
        self._heads = [f"{opened}{index},{form.plain_head}" for index in range(num_choices)]
        self._tail = f'{form.plain_tail},"logprobs":null,"finish_reason":null}}]}}\n\n'

    def chunk(self, piece: Piece, extras: dict[str, Any] | None = None) -> bytes:
        choice = piece.choice
        if not (piece.is_first or piece.finish_reason or piece.logprobs is not None or choice.shows_token_ids):
            return (self._heads[choice.index] + quote(piece.text) + self._tail).encode("ascii")
        return event({**self._envelope, "choices": [self._form.chunk_choice(piece)], **(extras or {})})

    def usage(self, numbers: dict[str, Any]) -> bytes:
        return event({**self._envelope, "choices": [], "usage": numbers})


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event. Everything beyond ASCII is escaped, so no byte of it can be taken for a line end."""
    return f"data: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n".encode("ascii")
