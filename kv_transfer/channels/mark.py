"""Marks: points in a device's work that another stream, thread or process has to stay behind."""

from typing import Protocol

import torch


class Mark(Protocol):
    """`after(stream)` lets work that is launched on a CUDA stream from now on run behind the mark; `wait` keeps the
    calling thread (not the interpreter) until the device is past it."""

    def wait(self) -> None: ...

    def after(self, stream: torch.cuda.Stream) -> None: ...


class Past:
    """Over already."""

    def wait(self) -> None:
        pass

    def after(self, stream: torch.cuda.Stream) -> None:
        pass


class EventMark:
    """The work that was launched on a stream until now. `sleep`: `wait` gives the core away, and returns some 50 us
    late."""

    def __init__(self, stream: torch.cuda.Stream, sleep: bool):
        self._event = torch.cuda.Event(blocking=sleep)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def after(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


PAST = Past()


def wait_for_work(device: torch.device) -> None:
    """Wait for everything that this process has launched on the device, on any stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark_work(device: torch.device) -> Mark:
    """The work that the calling thread's current stream has been given. PAST when that is over, and always on a CPU."""
    if device.type == "cpu":
        return PAST
    stream = torch.cuda.current_stream(device)
    return PAST if stream.query() else EventMark(stream, sleep=True)
