"""Recorded workloads: coding-agent sessions (block hashes, nested sub-agents) and Mooncake's JSON lines.

A trace holds no text, but for every prompt the ids of its blocks in order: two prompts share a prefix as far as their
ids agree. Formats:

    session file (.json)    {"block_size": 64, "requests": [{"t", "in", "out", "hash_ids", "think_time", "api_time",
                            "requests": [sub-agent's requests, t from its start]}]}; ids are the file's own
    Mooncake (.jsonl)       {"timestamp" (ms), "input_length", "output_length", "hash_ids"}; 512-token blocks, one id
                            space for all lines, the last block may be partial
"""

import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.replay.plan import WorkloadError

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceRequest:
    """One recorded request.

    session      which conversation; `turn` counts within it
    arrival_s    from the start of its session file, or of the JSON lines
    think_s      pause after what it waits for (`after`: positions in the trace) had ended
    blocks       ids of the full leading blocks; where ids agree from the start on, so does the text
    tail         id of what follows them, `tail_tokens` long, less than a block (0: nothing follows)
    """

    session: int
    turn: int
    arrival_s: float
    think_s: float
    blocks: tuple[Hashable, ...]
    tail: Hashable
    tail_tokens: int
    output_tokens: int
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival (sessions of several files all start at 0)."""

    name: str
    block_tokens: int
    requests: list[TraceRequest]

    @property
    def num_sessions(self) -> int:
        return len({request.session for request in self.requests})

    def prompt_tokens(self, request: TraceRequest) -> int:
        return len(request.blocks) * self.block_tokens + request.tail_tokens

    @property
    def ideal_hit_rate(self) -> float:
        """Tokens in contiguous leading blocks that an earlier request had, over all prompt tokens (infinite cache)."""
        seen: set[tuple[Hashable, ...]] = set()
        cached = total = 0
        for request in self.requests:
            known = 0
            path: tuple[Hashable, ...] = ()
            for position, block in enumerate(request.blocks, 1):
                path = (hash(path), block)
                if path in seen and known == position - 1:
                    known = position
                seen.add(path)
            most = (self.prompt_tokens(request) - 1) // self.block_tokens
            cached += min(known, most) * self.block_tokens
            total += self.prompt_tokens(request)
        return cached / total if total else 0.0


def load_trace(paths: Iterable[Path]) -> Trace:
    """Session files (directories: every .json in them), or one Mooncake file. Raises WorkloadError."""
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if not files:
        raise WorkloadError("the trace holds no .json session file")
    name = files[0].stem if len(files) == 1 else f"{len(files)} sessions"
    try:
        if files[0].suffix == ".jsonl":
            if len(files) > 1:
                raise WorkloadError(f"one .jsonl trace at a time, got {len(files)} files")
            return Trace(name, MOONCAKE_BLOCK_TOKENS, mooncake_requests(files[0]))
        return session_trace(name, files)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, WorkloadError):
            raise
        detail = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise WorkloadError(f"cannot read the trace {name}: {detail}") from None


def session_trace(name: str, files: list[Path]) -> Trace:
    requests: list[TraceRequest] = []
    block_tokens = 0
    for session, file in enumerate(files):
        recorded = json.loads(file.read_text())
        if block_tokens not in (0, recorded["block_size"]):
            raise WorkloadError(f"{file.name} has blocks of {recorded['block_size']} tokens, others of {block_tokens}")
        block_tokens = recorded["block_size"]
        requests += flatten(recorded["requests"], session, block_tokens, base=len(requests))
    return sort_by_arrival(Trace(name, block_tokens, requests))


def flatten(entries: list[dict[str, Any]], session: int, block_tokens: int, base: int) -> list[TraceRequest]:
    """A session's requests, sub-agents' included, `after` counted from `base`.

    A request waits for the one before it in its own list; a sub-agent's first for the one before the entry that holds
    it; and a request that was sent after a sub-agent's last one also for that.
    """
    found: list[TraceRequest] = []

    def walk(items: list[dict[str, Any]], start_s: float, previous: tuple[int, ...]) -> list[tuple[int, float]]:
        """(position, arrival) of the last request of this list and of every sub-agent that nobody waited for yet."""
        running: list[tuple[int, float]] = []
        for item in sorted(items, key=lambda item: item.get("t", 0.0)):
            arrival = start_s + item.get("t", 0.0)
            if item.get("hash_ids"):
                joined = tuple(position for position, sent in running if sent < arrival)
                running = [(position, sent) for position, sent in running if sent >= arrival]
                found.append(recorded_request(item, session, len(found), arrival, block_tokens, previous + joined))
                previous = (base + len(found) - 1,)
            if item.get("requests"):
                running += walk(item["requests"], arrival, previous)
        return running + [(previous[0], found[previous[0] - base].arrival_s)] if previous else running

    walk(entries, 0.0, ())
    return found


def recorded_request(
    item: dict[str, Any], session: int, position: int, arrival_s: float, block_tokens: int, after: tuple[int, ...]
) -> TraceRequest:
    full = min(item["in"] // block_tokens, len(item["hash_ids"]))
    return TraceRequest(
        session=session,
        turn=0,
        arrival_s=arrival_s,
        think_s=item.get("think_time", 0.0),
        blocks=tuple((session, block) for block in item["hash_ids"][:full]),
        tail=(session, "tail", position),
        tail_tokens=(item["in"] - full * block_tokens) % block_tokens,
        output_tokens=max(1, item["out"]),
        after=after,
    )


def mooncake_requests(file: Path) -> list[TraceRequest]:
    """Conversations are not recorded: requests that agree in a block beyond what all begin with are taken for one."""
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    if not rows:
        raise WorkloadError(f"{file.name} holds no request")
    shared = common_length([row["hash_ids"] for row in rows])
    sessions: dict[Hashable, int] = {}
    requests = []
    for position, row in enumerate(rows):
        block_ids = row["hash_ids"]
        full = min(row["input_length"] // MOONCAKE_BLOCK_TOKENS, len(block_ids))
        own = block_ids[shared] if len(block_ids) > shared else ("alone", position)
        requests.append(
            TraceRequest(
                session=sessions.setdefault(own, len(sessions)),
                turn=0,
                arrival_s=row["timestamp"] / 1000,
                think_s=0.0,
                blocks=tuple(block_ids[:full]),
                tail=block_ids[full] if full < len(block_ids) else ("tail", position),
                tail_tokens=row["input_length"] % MOONCAKE_BLOCK_TOKENS,
                output_tokens=max(1, row["output_length"]),
            )
        )
    return chain_sessions(sort_by_arrival(Trace(file.stem, MOONCAKE_BLOCK_TOKENS, requests)).requests)


def chain_sessions(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Each request waits for the one before it in its session."""
    last: dict[int, int] = {}
    chained = []
    for position, request in enumerate(requests):
        before = last.get(request.session)
        chained.append(replace(request, after=() if before is None else (before,)))
        last[request.session] = position
    return chained


def sort_by_arrival(trace: Trace) -> Trace:
    """In order of arrival (what waits stays behind what it waits for), turns counted."""
    order = sorted(range(len(trace.requests)), key=lambda position: (trace.requests[position].arrival_s, position))
    place = {old: new for new, old in enumerate(order)}
    turns: dict[int, int] = {}
    requests = []
    for old in order:
        request = trace.requests[old]
        turn = turns.get(request.session, 0)
        turns[request.session] = turn + 1
        requests.append(replace(request, turn=turn, after=tuple(place[position] for position in request.after)))
    return replace(trace, requests=requests)


def common_length(paths: list[list[Any]]) -> int:
    """How many leading elements all of the lists have in common."""
    first, last = min(paths), max(paths)
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return length
