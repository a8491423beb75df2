"""From choices to an HTTP response, streamed or whole; what both APIs share.

A stream's first chunk leaves with the first token. Every TokenDelta is one chunk; the last of each choice carries its
finish reason. On a connection that allows it, chunks in mid-answer go from the dispatcher to the socket without waking
the response (Generation.take_shortcut). What fails before the first chunk is an HTTP status, after it an error event,
and then the stream ends without [DONE].
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
from router.sse import DONE, BodyWriter, EventStream, while_connected

_compact_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


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
            writer = ChunkWriter(form, choices)
            events = _events(pieces, generation, writer, include_usage)

            def begin(body: BodyWriter) -> None:
                generation.take_shortcut(
                    lambda: body.is_ready, lambda choice, text, ids: body.write(writer.plain(choice, text, ids))
                )

            return EventStream(events, generation.close, begin)
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
    pieces: AsyncIterator[Piece], generation: Generation, writer: "ChunkWriter", include_usage: bool
) -> AsyncIterator[bytes]:
    """Raises what fails before the first piece. The last piece leaves together with what follows it."""
    try:
        first = await pieces.__anext__()
    except BaseException as error:
        generation.fail(failure_code(error))
        raise
    num_running = len(generation.choices) - (first.finish_reason is not None)
    try:
        event_bytes = writer.first_chunk(first)
        while num_running:
            yield event_bytes
            piece = await pieces.__anext__()
            event_bytes = writer.chunk(piece)
            num_running -= piece.finish_reason is not None
        if include_usage:
            event_bytes += writer.usage(usage(generation.choices))
    except Exception as error:
        generation.fail(failure_code(error))
        yield event(from_exception(error).envelope)
        return
    yield event_bytes + DONE


class ChunkWriter:
    def __init__(self, form: ResponseForm, choices: list[Choice]):
        self._form = form
        self._choices = choices
        self._envelope = form.envelope(form.chunk_kind)
        opened = "data: " + _compact_json(self._envelope)[:-1] + ',"choices":[{"index":'
        self._heads = [f"{opened}{index},{form.plain_head}" for index in range(len(choices))]
        self._tail = f'{form.plain_tail},"logprobs":null,"finish_reason":null}}]}}\n\n'
        self._tail_with_ids = f'{form.plain_tail},"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":'

    def first_chunk(self, piece: Piece) -> bytes:
        return self._full(piece, self._form.extras(self._choices))

    def chunk(self, piece: Piece) -> bytes:
        if piece.is_first or piece.finish_reason or piece.logprobs is not None:
            return self._full(piece, {})
        return self.plain(piece.choice, piece.text, piece.token_ids)

    def plain(self, choice: Choice, text: str, token_ids: list[int]) -> bytes:
        """A chunk in mid-answer, without logprobs."""
        if not choice.shows_token_ids:
            return (self._heads[choice.index] + quote(text) + self._tail).encode("ascii")
        ids = ",".join(map(str, token_ids))
        return f"{self._heads[choice.index]}{quote(text)}{self._tail_with_ids}[{ids}]}}]}}\n\n".encode("ascii")

    def _full(self, piece: Piece, extras: dict[str, Any]) -> bytes:
        return event({**self._envelope, "choices": [self._form.chunk_choice(piece)], **extras})

    def usage(self, numbers: dict[str, Any]) -> bytes:
        return event({**self._envelope, "choices": [], "usage": numbers})


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event. Everything beyond ASCII is escaped, so no byte of it can be taken for a line end."""
    return f"data: {_compact_json(data)}\n\n".encode("ascii")
