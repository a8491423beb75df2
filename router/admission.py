"""When a refused client should try again."""

import math
import time
from collections import deque

WINDOW_S = 30.0
MAX_SAMPLES = 256
DEFAULT_S = 5.0
MIN_S, MAX_S = 1.0, 60.0


class CompletionRate:
    """How fast requests have ended of late. Times are `time.monotonic()` seconds."""

    def __init__(self) -> None:
        self._ended_at: deque[float] = deque(maxlen=MAX_SAMPLES)

    def count(self, now: float | None = None) -> None:
        """A request ended."""
        self._ended_at.append(time.monotonic() if now is None else now)

    def retry_after_s(self, num_requests: int, now: float | None = None) -> float:
        """Whole seconds until that many more will have ended at the rate of the last half minute, from 1 to 60; 5 when
        nothing has ended in it."""
        now = time.monotonic() if now is None else now
        recent = [ended for ended in self._ended_at if now - ended <= WINDOW_S]
        if not recent:
            return DEFAULT_S
        rate = len(recent) / max(1.0, now - recent[0])
        return min(MAX_S, max(MIN_S, math.ceil(num_requests / rate)))
