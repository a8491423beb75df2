"""Pipeline: a thread that starts pieces of device work and waits for them, so that no engine loop has to."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kv_transfer.channels.mark import Mark

log = logging.getLogger(__name__)

Item = TypeVar("Item")

AT_ONCE = 2
"""The next piece is queued on the device before the last one is over: the link never waits for the thread."""


class Pipeline(Generic[Item]):
    """Pieces are started in the order they were put, and finished in that order. All callbacks run in the thread.

    start(item)          launches; returns the marks at which the item is over, None when there was nothing to launch
    finish(item, error)  the item is over, or `error` came up
    set_up()             first of all; when it raises, on_broken(why) is called, and items put are dropped
    """

    def __init__(
        self,
        name: str,
        start: Callable[[Item], list[Mark] | None],
        finish: Callable[[Item, Exception | None], None],
        set_up: Callable[[], None] | None = None,
        on_broken: Callable[[str], None] | None = None,
    ):
        self._start, self._finish = start, finish
        self._set_up, self._on_broken = set_up, on_broken
        self._changed = threading.Condition()
        self._waiting: deque[Item] = deque()
        self.stopping = False
        self._is_set_up = set_up is None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, *items: Item) -> None:
        """Nothing happens once stopped."""
        with self._changed:
            if not self.stopping:
                self._waiting.extend(items)
                self._changed.notify_all()

    def stop(self) -> None:
        """Start nothing more. Does not wait."""
        with self._changed:
            self.stopping = True
            self._waiting.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and wait until what was started is finished. A thread that is still being set up, which may take until
        a peer comes, is left to itself. Idempotent."""
        self.stop()
        if self._is_set_up and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        if self._set_up is not None:
            try:
                self._set_up()
            except Exception as error:
                was_stopping = self.stopping
                self.stop()
                if self._on_broken is not None and not was_stopping:
                    self._on_broken(str(error))
                return
            self._is_set_up = True
        started: deque[tuple[Item, list[Mark]]] = deque()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self.stopping or started)
                if self.stopping and not started:
                    return
                go_on = bool(self._waiting) and len(started) < AT_ONCE
                item = self._waiting.popleft() if go_on else None
            if item is None:
                self._wait_for(*started.popleft())
            else:
                self._launch(item, started)

    def _launch(self, item: Item, started: deque[tuple[Item, list[Mark]]]) -> None:
        try:
            marks = self._start(item)
        except Exception as error:
            log.exception("moving blocks failed")
            self._finish(item, error)
            return
        if marks is not None:
            started.append((item, marks))

    def _wait_for(self, item: Item, marks: list[Mark]) -> None:
        failure = None
        try:
            for mark in marks:
                mark.wait()
        except Exception as error:
            log.exception("moving blocks failed")
            failure = error
        self._finish(item, failure)
