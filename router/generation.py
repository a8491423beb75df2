"""The choices of one HTTP response: their token streams, turned into pieces of text."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from engine.request import PrefillReport, Request, TokenDelta, TokenLogprobs
from router.detokenizer import Detokenizer
from router.dispatcher import GenerationError, TokenStream
from router.metrics import Metrics
from router.stop_strings import StopStrings


@dataclass
class Piece:
    """What one TokenDelta added to a choice.

    offsets           with logprobs: characters of the choice's text before each token
    prompt_logprobs   on the first piece, if the request asked
    finish_reason     on the last piece; stop_reason: the stop string or stop token that ended the choice, if one did
    """

    choice: "Choice"
    is_first: bool
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    offsets: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Choice:
    """One sequence to generate and how its tokens become text.

    prompt_index    which of the response's prompts it continues; the first choice of each counts its prompt's usage
    prompt_text, prompt_offsets   echo: the prompt as text, and the characters before each of its tokens
    shows_token_ids answers list token ids beside the text
    keeps_no_token  max_tokens is 0: an engine generates at least one token, which is thrown away
    """

    index: int
    prompt_index: int
    request: Request
    detokenizer: Detokenizer
    stops: StopStrings
    include_stop: bool = False
    prompt_text: str | None = None
    prompt_offsets: list[int] | None = None
    shows_token_ids: bool = False
    keeps_no_token: bool = False
    num_tokens: int = 0
    num_chars: int = 0
    finish_reason: str | None = None
    prefill: PrefillReport | None = None
    _started: bool = False

    def accept(self, delta: TokenDelta) -> Piece:
        """Turn a delta into a piece. Tokens behind the one that completes a stop string are dropped."""
        piece = Piece(self, not self._started, "", delta.token_ids, delta.logprobs)
        if piece.is_first:
            self._started = True
            self.prefill = delta.prefill
            piece.prompt_logprobs = delta.prompt_logprobs
        if self.keeps_no_token:
            piece.token_ids, piece.logprobs = [], [] if delta.logprobs is not None else None
            piece.finish_reason = self.finish_reason = "length" if delta.finish_reason else None
            return piece
        if self.stops.is_empty and delta.logprobs is None:
            self._add_at_once(piece, delta)
        else:
            self._add_one_by_one(piece, delta)
        self.finish_reason = piece.finish_reason
        return piece

    def add_tokens(self, token_ids: list[int]) -> str:
        """Text of tokens in mid-answer, where no stop string and no logprobs were asked for."""
        self.num_tokens += len(token_ids)
        return self.detokenizer.push(token_ids)

    def _shown(self, delta: TokenDelta) -> int:
        """How many of the delta's tokens have text: the one that ends the sequence has none."""
        ended = delta.stop_token_id is not None and not self.include_stop
        return len(delta.token_ids) - ended

    def _add_at_once(self, piece: Piece, delta: TokenDelta) -> None:
        piece.text = self.detokenizer.push(delta.token_ids[: self._shown(delta)])
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            piece.text += self.detokenizer.finish()
            self._finish(piece, delta)

    def _add_one_by_one(self, piece: Piece, delta: TokenDelta) -> None:
        num_shown = self._shown(delta)
        for position, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            piece.offsets.append(self.num_chars)
            if position < num_shown:
                self._add_text(piece, self.detokenizer.push([token_id]))
            if self.stops.hit is not None:
                piece.token_ids = delta.token_ids[: position + 1]
                piece.logprobs = delta.logprobs and delta.logprobs[: position + 1]
                return
        if delta.finish_reason is not None:
            self._add_text(piece, self.detokenizer.finish())
            if self.stops.hit is None:
                piece.text += self.stops.flush()
                self._finish(piece, delta)

    def _add_text(self, piece: Piece, text: str) -> None:
        self.num_chars += len(text)
        piece.text += self.stops.push(text, armed=self.num_tokens > self.request.sampling.min_tokens)
        if self.stops.hit is not None:
            piece.finish_reason, piece.stop_reason = "stop", self.stops.hit

    def _finish(self, piece: Piece, delta: TokenDelta) -> None:
        piece.finish_reason = delta.finish_reason
        if delta.stop_token_id in self.request.sampling.stop_token_ids:
            piece.stop_reason = delta.stop_token_id


class Generation:
    """The running choices of one response. `close` ends whatever has not ended; it is safe at any time."""

    def __init__(self, choices: list[Choice], streams: list[TokenStream], metrics: Metrics | None):
        self.choices = choices
        self._streams = streams
        self._metrics = metrics
        self._timers = [metrics.timer(choice.request.arrival) if metrics else None for choice in choices]

    def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come. Raises what the dispatcher reports, and then nothing more comes."""
        return self._pieces_of(0) if len(self._streams) == 1 else self._merged()

    async def _merged(self) -> AsyncIterator[Piece]:
        merged: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

        async def forward(position: int) -> None:
            try:
                async for piece in self._pieces_of(position):
                    merged.put_nowait(piece)
                merged.put_nowait(None)
            except Exception as error:
                merged.put_nowait(error)

        tasks = [asyncio.create_task(forward(position)) for position in range(len(self._streams))]
        try:
            running = len(tasks)
            while running:
                item = await merged.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    async def _pieces_of(self, position: int) -> AsyncIterator[Piece]:
        choice, timer = self.choices[position], self._timers[position]
        async for delta in self._streams[position]:
            piece = choice.accept(delta)
            if timer is not None:
                timer.tokens(len(piece.token_ids))
            if piece.finish_reason is not None:
                self._end(position, piece.finish_reason)
                yield piece
                return
            yield piece
        raise GenerationError("internal", "the token stream ended without a finish reason")

    def take_shortcut(self, is_ready: Callable[[], bool], show: Callable[[Choice, str, list[int]], None]) -> None:
        """From now on, call `show` for tokens in mid-answer as they arrive, without waking whoever iterates `pieces`,
        as long as it waits there and `is_ready`. For one choice that only its engine can end."""
        choice, timer, stream = self.choices[0], self._timers[0], self._streams[0]
        if len(self._streams) > 1 or not choice.stops.is_empty:
            return

        def shortcut(delta: TokenDelta) -> bool:
            if delta.finish_reason is not None or delta.logprobs is not None or not is_ready():
                return False
            try:
                show(choice, choice.add_tokens(delta.token_ids), delta.token_ids)
            except Exception:  # it happens again where the iterator's user can tell the client
                return False
            if timer is not None:
                timer.tokens(len(delta.token_ids))
            return True

        stream.shortcut = shortcut

    def fail(self, reason: str) -> None:
        """Close, counting what had not ended under `reason`."""
        for position, choice in enumerate(self.choices):
            self._end(position, choice.finish_reason or reason)

    def close(self) -> None:
        """Close; what had not ended counts as aborted."""
        self.fail("abort")

    def _end(self, position: int, reason: str) -> None:
        self._streams[position].close()
        timer, self._timers[position] = self._timers[position], None
        if timer is not None:
            timer.end(reason, self.choices[position])


def usage(choices: list[Choice]) -> dict:
    """`usage` of a response. Prompts count once, whatever n is, and so do their cached tokens, as the engine that
    took them in measured them. `prefill` has one entry a choice: what its prompt cost and where
    (engine.request.PrefillReport).
    """
    first_choices = list({choice.prompt_index: choice for choice in reversed(choices)}.values())
    num_prompt = sum(len(choice.request.prompt_token_ids) for choice in first_choices)
    num_cached = sum(choice.prefill.num_cached_tokens for choice in first_choices if choice.prefill)
    num_output = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "prefill": [{"index": choice.index, **vars(choice.prefill)} for choice in choices if choice.prefill],
    }
