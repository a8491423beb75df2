"""Why the dispatcher does not, or no longer, generate a request."""

from engine.protocol import FailureCode


class Overloaded(Exception):
    """As many requests are in flight as the deployment takes (HTTP 429)."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class Draining(Exception):
    """The server is shutting down: it finishes what it has and takes nothing new (HTTP 503)."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class Unavailable(Exception):
    """No worker could serve the request, and none is expected to come up (HTTP 503)."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class GenerationError(Exception):
    """An accepted request ended without a finish reason. `code` says why: its deadline passed, its worker was lost too
    often, it does not fit a worker, or an engine failed."""

    def __init__(self, code: FailureCode, message: str):
        super().__init__(message)
        self.code = code
        self.message = message
