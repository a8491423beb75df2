"""How long a prompt chunk may be while sequences run beside it."""

import time

MIN_CHUNK_TOKENS = 64
WEIGHT = 0.2  # of the newest measurement in a running mean


class Pace:
    """Measures turns of the engine loop: those without a chunk give the time of a decode step, the others the prompt
    tokens a second. With a target for the time between a sequence's tokens, the chunk is what fits beside a step."""

    def __init__(self, target_ms: float | None):
        self.target_ms = target_ms
        self.step_ms = 0.0
        self.tokens_per_ms = 0.0
        self._began = 0.0

    def chunk_tokens(self) -> int | None:
        """Most prompt tokens for the next chunk, None for as many as the engine takes."""
        if self.target_ms is None:
            return None
        return max(MIN_CHUNK_TOKENS, int((self.target_ms - self.step_ms) * self.tokens_per_ms))

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self, chunk_tokens: int, is_running: bool) -> None:
        """A turn has ended: `chunk_tokens` prompt tokens were computed in it; `is_running`: and a decode step."""
        if self.target_ms is None or not is_running:
            return
        spent_ms = (time.monotonic() - self._began) * 1000
        if chunk_tokens == 0:
            self.step_ms += WEIGHT * (spent_ms - self.step_ms)
        elif spent_ms > self.step_ms:
            rate = chunk_tokens / (spent_ms - self.step_ms)
            self.tokens_per_ms += (WEIGHT if self.tokens_per_ms else 1.0) * (rate - self.tokens_per_ms)
