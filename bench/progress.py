"""Progress of long commands, on standard error: a live bar with rich on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

PLAIN_INTERVAL_S = 5.0


class Progress:
    """Counts steps of one stage. Use as a context manager; `update` may be called as often as one likes."""

    def __init__(self, title: str, total: int):
        self.title, self.total = title, total
        self.done, self.detail = 0, ""
        self._started = self._printed = time.monotonic()
        self._bar = live_bar() if sys.stderr.isatty() else None
        self._task = self._bar.add_task(title, total=total, detail="") if self._bar else None

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        else:
            self._print()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        else:
            self._print()

    def update(self, done: int, detail: str) -> None:
        self.done, self.detail = done, detail
        if self._bar:
            self._bar.update(self._task, completed=done, detail=detail)
        elif time.monotonic() - self._printed >= PLAIN_INTERVAL_S:
            self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        elapsed = self._printed - self._started
        print(
            f"    {self.title}: {self.done}/{self.total} {self.detail} ({elapsed:.0f} s)", file=sys.stderr, flush=True
        )


def say(text: str) -> None:
    """Announce a stage."""
    print(f"==> {text}", file=sys.stderr, flush=True)


def live_bar() -> Any:
    """rich's progress bar, or None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
    except ImportError:
        return None
    columns = (
        TextColumn("    {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    return RichProgress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
