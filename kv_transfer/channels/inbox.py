"""Inbox: messages from any thread, polled by an engine loop."""

from collections import deque
from typing import Generic, TypeVar

from kv_transfer.channel import ChannelClosed, Wake

Message = TypeVar("Message")


class Inbox(Generic[Message]):
    """`put` and `close` come from any thread and wake the loop; `poll` from the loop's."""

    def __init__(self, wake: Wake):
        self._wake = wake
        self._messages: deque[Message] = deque()
        self._closed_because: str | None = None

    def put(self, message: Message) -> None:
        self._messages.append(message)
        self._wake()

    def close(self, reason: str) -> None:
        """Nothing more will be put. The first reason stays. Idempotent."""
        if self._closed_because is None:
            self._closed_because = reason
            self._wake()

    def poll(self) -> list[Message]:
        """All that arrived, in order. Raises ChannelClosed when closed and everything was returned."""
        reason = self._closed_because  # read first: what was put before `close` is in the queue now
        messages = [self._messages.popleft() for _ in range(len(self._messages))]
        if reason is not None and not messages:
            raise ChannelClosed(reason)
        return messages
