"""One accepted request: where it is, what it has delivered."""

import asyncio
from dataclasses import dataclass, field, replace

from engine.request import Request, TokenDelta
from router.fleet import Worker
from router.token_stream import TokenStream


@dataclass(eq=False)
class Flight:
    """State of a request from acceptance to its one end.

        waiting --placed--> with a decode worker --finish, failure, abort, deadline--> ended
           ^                         |
           +--- worker lost: generation + 1, goes on after output_token_ids ---+

    hashes        chained hashes (hex) of the prompt's full blocks; [] where they would not help to choose a worker
    attempts      submissions so far
    backlog       the worker counted as prefilling this prompt, and the blocks it was charged for it
    """

    request: Request
    stream: TokenStream
    hashes: list[str] = field(default_factory=list)
    generation: int = 0
    attempts: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    decode: Worker | None = None
    prefill: Worker | None = None
    backlog: tuple[Worker, int] | None = None
    delivered: bool = False
    ended: bool = False
    deadline_timer: asyncio.TimerHandle | None = None
    retry_timer: asyncio.TimerHandle | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Most tokens, prompt included, a worker must be able to hold for it."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens

    def attempt(self) -> Request:
        """The request as the next worker gets it: everything delivered so far is part of its past."""
        return replace(self.request, generation=self.generation, output_token_ids=list(self.output_token_ids))

    def deliver(self, delta: TokenDelta) -> None:
        """Pass new tokens on. What belongs to the first delta of a request is not repeated by a later attempt."""
        self.output_token_ids += delta.token_ids
        if self.delivered and (delta.prefill is not None or delta.prompt_logprobs is not None):
            delta = replace(delta, prefill=None, prompt_logprobs=None)
        elif delta.prefill is not None:
            worker = self.prefill if delta.prefill.where == "remote" else self.decode
            delta = replace(delta, prefill=replace(delta.prefill, worker=worker.name if worker is not None else ""))
        self.delivered = True
        self.stream.put(delta)
