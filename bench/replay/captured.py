"""Prompts of one's own, captured with their text: one JSON line a request, in order of arrival.

    {"t": 12.5, "session": "a", "messages": [{"role": "system", "content": "..."}, ...], "output_tokens": 64}
    {"t": 14.0, "session": "b", "prompt": "plain text", "think_s": 1.5}

t           seconds from the start (0 when absent: use closed loop)
session     any name; requests of one session are one conversation ("" when absent)
messages    rendered and tokenized by the server's own chat template, or `prompt`, tokenized as it is
output_tokens, think_s   tokens to generate (at most --output-tokens), pause before it in closed loop (0)

Only such a trace has what makes agents miss the cache: header lines that change, parts that change places.
"""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.replay.fit import FitReport
from bench.replay.oracle import Oracle
from bench.replay.plan import Tokenize, WorkloadError
from bench.replay.trace import Trace, TraceRequest, chain_sessions, sort_by_arrival
from bench.replay.workload import gather_bounded

TokenizeMessages = Callable[[list[dict[str, Any]]], Awaitable[list[int]]]


def is_captured(paths: list[Path]) -> bool:
    """Whether these are captured prompts: a .jsonl whose first line has text."""
    if len(paths) != 1 or paths[0].suffix != ".jsonl" or not paths[0].is_file():
        return False
    with paths[0].open() as lines:
        first = lines.readline()
    return '"messages"' in first or '"prompt"' in first


async def load_captured(
    path: Path,
    most_output: int,
    most_requests: int | None,
    tokenize: Tokenize,
    tokenize_messages: TokenizeMessages,
) -> tuple[Trace, list[list[int]]]:
    """Requests in order of arrival (their blocks are left empty) and their prompts. Raises WorkloadError."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or ("messages" in row) == ("prompt" in row):
                raise ValueError("give either messages or prompt")
            rows.append((float(row.get("t", 0.0)), str(row.get("session", "")), row))
        except (ValueError, TypeError) as error:
            raise WorkloadError(f"{path.name}, line {number}: {error}") from None
    rows = sorted(rows, key=lambda row: row[0])[:most_requests]
    sessions: dict[str, int] = {}
    requests = [
        TraceRequest(
            session=sessions.setdefault(session, len(sessions)),
            turn=0,
            arrival_s=arrival,
            think_s=float(row.get("think_s", 0.0)),
            blocks=(),
            tail=position,
            tail_tokens=0,
            output_tokens=max(1, min(most_output, int(row.get("output_tokens", most_output)))),
        )
        for position, (arrival, session, row) in enumerate(rows)
    ]
    prompts = await gather_bounded(
        tokenize_messages(row["messages"]) if "messages" in row else tokenize(row["prompt"]) for _, _, row in rows
    )
    ordered = sort_by_arrival(Trace(path.stem, 1, requests))
    return Trace(path.stem, 1, chain_sessions(ordered.requests)), prompts


def captured_report(trace: Trace, prompts: list[list[int]], context: int | None, block_size: int) -> FitReport:
    """What the prompts amount to; nothing of them is changed. Raises WorkloadError for one that does not fit."""
    oracle, cached = Oracle(block_size), 0
    for position, (request, prompt) in enumerate(zip(trace.requests, prompts)):
        needed = len(prompt) + request.output_tokens
        if context is not None and needed > context:
            raise WorkloadError(
                f"request {position} of {trace.name} needs {needed} tokens, the model holds {context}; "
                "captured prompts are not cut: leave it out or serve a longer context"
            )
        cached += oracle.count(prompt)
        oracle.add(prompt, (0, position))
    total = sum(map(len, prompts))
    rate = cached / total if total else 0.0
    return FitReport(total, total, rate, rate, block_size, context)
