"""WakeFd: lets any thread end another thread's wait in a poller."""

import os
import threading


class WakeFd:
    """A file descriptor (`fileno()`) that is readable after `set` until `clear`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        """From any thread; does nothing once closed."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """By the waiting thread when it waits no more."""
        with self._lock:
            os.close(self._fd)
            self._fd = -1
