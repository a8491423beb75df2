"""Which worker gets a request. Pure policy: numbers in, a choice out.

Everything is counted in KV blocks, the unit of prefill work. For each candidate worker w and one prompt:

    cached(w)   leading blocks of the prompt that w has, or soon has because it was given a prompt that starts alike
    shared      leading blocks that say nothing about where to go: those every candidate has, and those a whole crowd
                of sessions starts with (a system prompt; see `Branches`)
    backlog(w)  blocks w still has to prefill for requests it was given
    batch(w)    share of w's decode slots in use, 0..1 (a prefill worker: 0)

    score(w) = max(0, cached(w) - shared) - 0.5 * backlog(w) - 32 * batch(w)

Waiting delays one request, computing blocks again delays all that come after: hence the half. A full batch weighs as
much as 32 blocks. The best score wins; a worker whose batch is fuller than the emptiest candidate's by more than a
quarter is passed over, however much it has cached. Ties go to the worker that saves more blocks, then to the emptier
one, then round robin. So a session stays where its blocks are until that place is overloaded, and sessions that have
only a system prompt in common spread by load.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

BACKLOG_WEIGHT = 0.5
FULL_BATCH_BLOCKS = 32.0
MAX_BATCH_SPREAD = 0.25


@dataclass(frozen=True)
class Candidate:
    """One worker that could take a prompt; see the module's text for the fields."""

    name: str
    cached_blocks: int = 0
    backlog_blocks: int = 0
    batch: float = 0.0


class Policy:
    """Chooses by the formula above. Keeps nothing but whose turn it is."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """`candidates` must not be empty."""
        shared = min(candidate.cached_blocks for candidate in candidates)
        emptiest = min(candidate.batch for candidate in candidates)
        allowed = [candidate for candidate in candidates if candidate.batch - emptiest <= MAX_BATCH_SPREAD]

        def rank(candidate: Candidate) -> tuple[float, int, float]:
            saved = max(0, candidate.cached_blocks - shared)
            score = saved - BACKLOG_WEIGHT * candidate.backlog_blocks - FULL_BATCH_BLOCKS * candidate.batch
            return (score, saved, -candidate.batch)

        best = max(map(rank, allowed))
        tied = sorted((candidate for candidate in allowed if rank(candidate) == best), key=lambda c: c.name)
        if len(tied) == 1:
            return tied[0]
        self._turn += 1
        return tied[(self._turn - 1) % len(tied)]


class WorkerBlocks:
    """The blocks one worker has in its prefix index, as it reported them, and those promised by prompts given to it."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._promised: Counter[str] = Counter()
        self._settling: list[Sequence[str]] = []

    def report(self, added: Sequence[str], removed: Sequence[str]) -> None:
        """A stats message: chained hashes that entered and left the index. Promises of requests that ended before it
        are dropped, for what they were worth is in the report."""
        self._reported.difference_update(removed)
        self._reported.update(added)
        for hashes in self._settling:
            self._promised.subtract(hashes)
        if self._settling:
            self._settling.clear()
            self._promised = +self._promised

    def promise(self, hashes: Sequence[str]) -> None:
        """A prompt with these blocks was given to the worker, which will soon have them."""
        self._promised.update(hashes)

    def settle(self, hashes: Sequence[str]) -> None:
        """The request that promised these blocks is over; the worker's next report tells what became of them."""
        self._settling.append(hashes)

    def num_leading(self, hashes: Sequence[str]) -> int:
        """How many blocks from the prompt's start are here or promised."""
        for index, block in enumerate(hashes):
            if block not in self._reported and self._promised[block] <= 0:
                return index
        return len(hashes)

    def __len__(self) -> int:
        return len(self._reported)
