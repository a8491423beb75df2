"""When each phase of a run began and ended, announced as it begins."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.progress import say


@dataclass
class Phase:
    """Seconds from the start of the run; end_s None: it is running."""

    server: str
    name: str
    start_s: float
    end_s: float | None = None


class Timeline:
    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self._start = time.monotonic()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._start

    @contextmanager
    def phase(self, server: str, name: str) -> Iterator[Phase]:
        """A phase is listed however it ends."""
        say(f"{server}: {name}")
        current = Phase(server, name, self.now_s)
        self.phases.append(current)
        try:
            yield current
        finally:
            current.end_s = self.now_s
