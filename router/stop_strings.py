"""Cutting a growing text at the first stop string, holding back no more than could still become one."""


class StopStrings:
    """The answer is the text before the stop string that is completed first (of those that end at the same character,
    the longest), so it does not depend on how the text was split into pieces.

    include: the stop string itself stays in the answer.
    """

    def __init__(self, stops: list[str], include: bool = False):
        assert all(stops), "an empty stop string"
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.hit: str | None = None
        """The stop string that ended the text."""

    @property
    def is_empty(self) -> bool:
        return not self._stops

    def push(self, text: str, armed: bool = True) -> str:
        """Add text and return what may be shown. Once `hit` is set nothing more must be pushed. With armed=False no
        stop string may end within `text` (it may begin there)."""
        assert self.hit is None, "text after a stop string"
        if not self._stops:
            return text
        buffer = self._held + text
        if armed and (match := self._first_match(buffer, len(self._held))):
            start, self.hit = match
            self._held = ""
            return buffer[: start + len(self.hit)] if self._include else buffer[:start]
        num_held = self._num_held(buffer)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held]

    def flush(self) -> str:
        """The text ended: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, num_old: int) -> tuple[int, str] | None:
        """(start, stop string) of the match that ends first, and ends after the `num_old` characters seen before."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _num_held(self, buffer: str) -> int:
        """Length of the longest tail that a stop string begins with."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[len(buffer) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
