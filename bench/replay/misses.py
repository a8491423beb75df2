"""Why a prompt was not found in the cache: where it left the best earlier prompt, the text there, and the likely cause.

For each request two numbers are compared: the tokens that the server says it found, and those an infinite cache would
have held (oracle.py). What lies between them was there once:

    in_flight     it was still being computed when this request came
    other_worker  only workers that did not serve this request had computed it (needs a server that names its worker)
    evicted       otherwise: it had been computed, and was gone (or is on a worker that the server does not name)

When the server found all there was, the prompt itself ended the match, and the tokens behind the place where it left
the most similar earlier prompt tell how:

    header_line   soon after that place both go on alike: one line changed, and hides what follows it
    reordered     what follows is in the other prompt too, elsewhere: parts changed places
    new_input     what follows is new: nothing was lost
    cold          no earlier prompt begins like it, and none shares what follows
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from bench.replay.oracle import Key, Oracle

Cause = Literal["in_flight", "other_worker", "evicted", "header_line", "reordered", "new_input", "cold", "unreported"]

CAUSES: dict[str, str] = {
    "in_flight": "its prefix was still being computed",
    "other_worker": "another worker held its prefix",
    "evicted": "its prefix was evicted",
    "header_line": "a line changed and hides what follows it",
    "reordered": "parts of the prompt changed places",
    "new_input": "new input, nothing lost",
    "cold": "nothing like it came before",
    "unreported": "the server reports no cached tokens",
}
GRAM = 32
"""Tokens in a row that make two places alike."""
WINDOW = 4096
"""Tokens behind the place of divergence that are looked at."""
LINE_TOKENS = 96
"""A changed line is at most this long."""
LEAST_SHARE = 0.5
"""Of what follows, this much must be in the other prompt, and at least a block, for the change to be a loss."""
TEXT_BEFORE, TEXT_AFTER = 8, 24


@dataclass
class Miss:
    """What became of one prompt.

    position       token at which it left the cached prefix
    lost_tokens    tokens computed that need not have been: lost from the cache, or hidden by a changed line
    other          (load level, index) of the earlier request it is compared with, None when there is none
    text, other_text   the tokens around `position` in both prompts, as text (the other's where the two differ)
    """

    cause: Cause
    position: int
    lost_tokens: int
    oracle_tokens: int
    other: Key | None = None
    text: str = ""
    other_text: str = ""


@dataclass
class Served:
    """A request as the explanation needs it; times in seconds of one clock.

    ready_s   when its prompt's KV was surely there: its first token
    worker    the worker that prefilled it, "" when the server does not say
    """

    key: Key
    session: int
    prompt: list[int]
    output: list[int]
    sent_s: float
    ready_s: float
    cached_tokens: int | None
    worker: str = ""


@dataclass
class Explainer:
    """Takes requests in the order they were sent; one for a whole replay, emptied when the server's cache is."""

    block_size: int
    oracle: Oracle = field(init=False)
    _served: dict[Key, Served] = field(default_factory=dict)
    _last_of_session: dict[int, Key] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.oracle = Oracle(self.block_size)

    def clear(self) -> None:
        self.oracle.clear()
        self._served.clear()
        self._last_of_session.clear()

    def explain(self, request: Served) -> Miss:
        """The miss of a request against all that were added before it."""
        ideal = self.oracle.count(request.prompt)
        if request.cached_tokens is None:
            return Miss("unreported", ideal, 0, ideal)
        if request.cached_tokens < ideal:
            return self._lost(request, ideal)
        return self._diverged(request, ideal)

    def add(self, request: Served) -> None:
        self._served[request.key] = request
        self._last_of_session[request.session] = request.key
        self.oracle.add(request.prompt + request.output[:-1], request.key)

    def texts(self, request: Served, miss: Miss) -> tuple[list[int], list[int]]:
        """Token ids around the miss in the prompt and, where they differ, in the one it is compared with."""
        begin, end = max(0, miss.position - TEXT_BEFORE), miss.position + TEXT_AFTER
        own = request.prompt[begin:end]
        other = self._served[miss.other].prompt[begin:end] if miss.other is not None else own
        return own, other if other != own else []

    def _lost(self, request: Served, ideal: int) -> Miss:
        cached = request.cached_tokens or 0
        nodes = list(self.oracle.known_blocks(request.prompt))
        holders = [self._served[key] for key in nodes[cached // self.block_size].holders]
        cause: Cause = "evicted"
        if all(holder.ready_s > request.sent_s for holder in holders):
            cause = "in_flight"
        elif request.worker and all(holder.worker and holder.worker != request.worker for holder in holders):
            cause = "other_worker"
        return Miss(cause, cached, ideal - cached, ideal, holders[-1].key)

    def _diverged(self, request: Served, ideal: int) -> Miss:
        other = self._most_similar(request)
        cached = request.cached_tokens or 0
        if other is None:
            return Miss("cold", cached, 0, ideal)
        position = common_prefix(request.prompt, other.prompt)
        cause, share = compare(request.prompt[position:], other.prompt[position:])
        lost = round(share * (len(request.prompt) - position))
        if cause == "new_input" or lost < self.block_size:
            return Miss("new_input" if ideal else "cold", position, 0, ideal, other.key)
        return Miss(cause, position, lost, ideal, other.key)

    def _most_similar(self, request: Served) -> Served | None:
        """Of the deepest block's last holder and the session's last request, the one with the longer common prefix."""
        nodes = list(self.oracle.known_blocks(request.prompt))
        keys = {nodes[-1].holders[-1]} if nodes else set()
        if request.session in self._last_of_session:
            keys.add(self._last_of_session[request.session])
        candidates = [self._served[key] for key in sorted(keys)]
        return max(candidates, key=lambda served: common_prefix(request.prompt, served.prompt), default=None)


def compare(rest: list[int], other: list[int]) -> tuple[Literal["header_line", "reordered", "new_input"], float]:
    """How two prompts go on from where they part, and the share of `rest` that is in `other` too."""
    rest, other = rest[:WINDOW], other[:WINDOW]
    if len(rest) < GRAM or len(other) < GRAM:
        return "new_input", 0.0
    places: dict[tuple[int, ...], int] = {}
    for place in range(len(other) - GRAM + 1):
        places.setdefault(tuple(other[place : place + GRAM]), place)
    found = [(place, places.get(tuple(rest[place : place + GRAM]))) for place in range(len(rest) - GRAM + 1)]
    alike = [(here, there) for here, there in found if there is not None]
    share = len(alike) / len(found)
    if share < LEAST_SHARE:
        return "new_input", share
    here, there = alike[0]
    return ("header_line" if here <= LINE_TOKENS and there <= LINE_TOKENS else "reordered"), share


def common_prefix(left: list[int], right: list[int]) -> int:
    """Number of leading elements that are equal."""
    low, high = 0, min(len(left), len(right))
    while low < high:  # slices compare fast, so halve what is left
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass
class CauseSummary:
    """All requests with one cause. `example` is the one that lost most."""

    cause: Cause
    description: str
    requests: int
    lost_tokens: int
    example: Miss


def summarize_misses(misses: Iterable[Miss]) -> list[CauseSummary]:
    """By lost tokens, then by number of requests, most first."""
    by_cause: dict[Cause, list[Miss]] = {}
    for miss in misses:
        by_cause.setdefault(miss.cause, []).append(miss)
    summaries = [
        CauseSummary(
            cause,
            CAUSES[cause],
            len(group),
            sum(miss.lost_tokens for miss in group),
            max(group, key=lambda miss: miss.lost_tokens),
        )
        for cause, group in by_cause.items()
    ]
    return sorted(summaries, key=lambda summary: (-summary.lost_tokens, -summary.requests))
