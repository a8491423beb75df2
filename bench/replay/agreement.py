"""Whether two replays of the same input gave the same answers: token ids against those of a reference run."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.replay.plan import WorkloadError
from bench.replay.response import RequestRecord

Reference = dict[tuple[str, int], list[int]]
"""Token ids of an answer by (load level, index)."""


@dataclass
class Agreement:
    """Of the requests that both runs completed with token ids: how many answers are equal, and where the others part.

    Greedy answers are equal when nothing that computes them differs. Floating point that depends on the batch lets
    single answers part late; a broken kernel or cache lets many part early.
    """

    compared: int
    identical: int
    median_divergence: float | None
    earliest_divergence: int | None


def load_reference(path: Path) -> Reference:
    """Answers of a replay's .requests.jsonl. Raises WorkloadError when it is none."""
    reference: Reference = {}
    try:
        for line in path.read_text().splitlines():
            values = json.loads(line)
            if values["outcome"] == "ok" and values["token_ids"]:
                reference[values["load"], values["index"]] = values["token_ids"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"--reference {path}: not the requests of a replay ({error!r})") from None
    if not reference:
        raise WorkloadError(f"--reference {path}: no completed request with token ids")
    return reference


def compare_outputs(reference: Reference, label: str, records: list[RequestRecord]) -> Agreement:
    pairs = [
        (reference[label, record.index], record.token_ids)
        for record in records
        if record.outcome == "ok" and record.token_ids and (label, record.index) in reference
    ]
    divergences = [first_difference(expected, given) for expected, given in pairs if expected != given]
    return Agreement(
        compared=len(pairs),
        identical=len(pairs) - len(divergences),
        median_divergence=median(divergences) if divergences else None,
        earliest_divergence=min(divergences, default=None),
    )


def first_difference(left: list[int], right: list[int]) -> int:
    """Position of the first token that differs, or where the shorter one ends."""
    for position, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return position
    return min(len(left), len(right))
