"""What other threads tell an engine loop."""

import threading
from collections import deque
from typing import Any


class Inbox:
    """A queue the loop can sleep on. `wake` ends the sleep without adding anything: there is news elsewhere."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._news = threading.Event()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._news.set()

    def wake(self) -> None:
        self._news.set()

    def take(self, timeout_s: float) -> list[Any]:
        """Everything that arrived. Waits for news up to `timeout_s` (0: not at all)."""
        if timeout_s > 0:
            self._news.wait(timeout_s)
        self._news.clear()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items
