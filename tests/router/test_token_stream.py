"""Tokens reach whoever waits for them in order, by the shortcut or without."""

import asyncio

from engine.request import TokenDelta
from router.token_stream import TokenStream
from tests.router.fake_worker import async_test


def delta(token_id: int, finish: bool = False) -> TokenDelta:
    return TokenDelta("r", 0, [token_id], finish_reason="length" if finish else None)


class Consumer:
    """Iterates a stream; `got` has what came by iteration and, marked "shortcut", what came by that."""

    def __init__(self, stream: TokenStream):
        self.stream, self.got, self.takes = stream, [], True
        stream.shortcut = self._shortcut
        self.task = asyncio.create_task(self._iterate())

    def _shortcut(self, delta: TokenDelta) -> bool:
        if self.takes and delta.finish_reason is None:
            self.got.append(("shortcut", delta.token_ids[0]))
            return True
        return False

    async def _iterate(self) -> None:
        async for delta in self.stream:
            self.got.append(delta.token_ids[0])


@async_test
async def test_the_shortcut_is_for_a_consumer_that_waits_with_nothing_queued():
    stream = TokenStream("r", lambda: None)
    stream.put(delta(0))
    consumer = Consumer(stream)
    stream.put(delta(1))  # the consumer has not run yet, and there is one before this
    await asyncio.sleep(0)
    stream.put(delta(2))
    stream.put(delta(3))
    assert consumer.got == [0, 1, ("shortcut", 2), ("shortcut", 3)]
    consumer.takes = False
    stream.put(delta(4))
    consumer.takes = True
    stream.put(delta(5))  # behind one that is queued
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stream.put(delta(6))
    stream.put(delta(7, finish=True))
    await consumer.task
    assert consumer.got[4:] == [4, 5, ("shortcut", 6), 7]


@async_test
async def test_a_closed_stream_takes_no_shortcut():
    stream = TokenStream("r", lambda: None)
    consumer = Consumer(stream)
    await asyncio.sleep(0)
    stream.close()
    stream.put(delta(1))
    await consumer.task
    assert consumer.got == []
