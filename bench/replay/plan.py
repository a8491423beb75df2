"""What a replay sends: requests with their times or what they wait for, in load levels."""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["warmup", "measured"]
Tokenize = Callable[[str], Awaitable[list[int]]]


class WorkloadError(ValueError):
    """The sizes, files or options asked for make no workload; the message names what to change."""


@dataclass(frozen=True)
class PlannedRequest:
    """One request. It is due `think_s` after the last of the requests in `after` has ended (closed loop), not before
    `arrival_s` seconds from the start of the level; without `after` that time alone counts (open loop).

    turn    how many requests of its session come before it
    """

    index: int
    session: int
    phase: Phase
    arrival_s: float
    prompt_token_ids: list[int]
    output_tokens: int
    turn: int = 0
    after: tuple[int, ...] = ()
    think_s: float = 0.0


@dataclass(frozen=True)
class Level:
    """One load level.

    offered_qps   measured requests a second, where arrivals do not depend on the server (open loop)
    concurrency   requests, or sessions, that run at once (closed loop)
    """

    label: str
    requests: list[PlannedRequest]
    offered_qps: float | None = None
    concurrency: int | None = None

    @property
    def prompts_sha256(self) -> str:
        """Of every prompt's token ids in order: equal in two records when they were given the same input."""
        digest = hashlib.sha256()
        for request in self.requests:
            digest.update(repr(request.prompt_token_ids).encode())
        return digest.hexdigest()


def check_order(requests: list[PlannedRequest]) -> None:
    """Asserts what the client relies on: indices count from 0, and nobody waits for a later request."""
    for position, request in enumerate(requests):
        assert request.index == position, f"request {position} has index {request.index}"
        assert all(0 <= earlier < position for earlier in request.after), f"request {position} waits for a later one"
