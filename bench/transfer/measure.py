"""The decode worker's end of the channel that is measured."""

import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from bench.facts import ROOT
from bench.stats import Summary, summarize
from bench.transfer.setting import Setting
from engine.protocol import ModelInfo
from engine.request import Request, SamplingParams
from kv_transfer.channel import ChannelClosed, ChannelError, DecodeEnd
from kv_transfer.channels import get_channel
from kv_transfer.handoff import (
    Handoff,
    Heartbeat,
    Hello,
    PrefillFailed,
    PrefillRequest,
    TransferDone,
    Welcome,
)

Kind = TypeVar("Kind", Welcome, Handoff, Heartbeat)

WAIT_S = 60.0
NUM_PARTS = 4
WARMUPS = 2


@dataclass
class Point:
    """One size. Milliseconds from the moment the channel was given the blocks to that when the Handoff came out with
    all of them in place; `exposed_ms` the same for the last of NUM_PARTS parts, the others sent while it was
    computed."""

    num_blocks: int
    num_bytes: int
    handoff_ms: Summary
    exposed_ms: Summary

    @property
    def gb_per_s(self) -> float | None:
        """Of the median. None when no byte moved."""
        return self.num_bytes / self.handoff_ms.p50 / 1e6 if self.num_bytes and self.handoff_ms.p50 else None


@dataclass
class Measured:
    """`round_trip_ms`: a message there and back, through both ends' queues."""

    channel: str
    device: str
    round_trip_ms: Summary
    points: list[Point] = field(default_factory=list)


class DecodeSide:
    """`with DecodeSide(setting, environment) as side`: joined to a prefill side in another process.

    Raises ChannelError when the channel does not work here; the message says why."""

    def __init__(self, setting: Setting, environment: dict[str, str]):
        self.setting = setting
        self._environment = environment
        self._numbers = itertools.count()
        self._wake = threading.Event()

    def __enter__(self) -> "DecodeSide":
        setting = self.setting
        channel = get_channel(setting.channel)
        pool = None if channel.shares_pool else channel.make_pool(setting.layout, setting.num_blocks, setting.device)
        setting.synchronize()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.transfer.prefill_side", setting.dump()],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self._end = self._join(channel.connect, pool)
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()
        self._process.communicate()  # its input ends, and so does it

    def round_trip_ms(self, repeats: int) -> Summary:
        def once() -> float:
            start = time.monotonic()
            self._end.send(Heartbeat(start))
            self._wait_for(Heartbeat)
            return (time.monotonic() - start) * 1000

        return summarize([once() for _ in range(WARMUPS + repeats)][WARMUPS:])

    def measure(self, num_blocks: int, repeats: int) -> Point:
        num_bytes = 0
        times: dict[int, list[float]] = {1: [], NUM_PARTS: []}
        for number in range(WARMUPS + repeats):
            for num_parts, measured in times.items():
                handoff, latency_ms = self._transfer(num_blocks, num_parts)
                num_bytes = handoff.report.num_bytes_sent
                if number >= WARMUPS:
                    measured.append(latency_ms)
        return Point(num_blocks, num_bytes, summarize(times[1]), summarize(times[NUM_PARTS]))

    def _transfer(self, num_blocks: int, num_parts: int) -> tuple[Handoff, float]:
        request = Request(f"r{next(self._numbers)}", [0] * num_blocks, SamplingParams(max_tokens=2))
        message = PrefillRequest(request, local_max_tokens=min(num_parts, num_blocks))
        table = list(range(num_blocks))
        if self.setting.scattered:
            table = random.Random(-num_blocks).sample(range(self.setting.num_blocks), num_blocks)
        self._end.expect(message.key, table)
        self._end.send(message)
        handoff = self._wait_for(Handoff)
        latency_ms = time.monotonic() * 1000 - handoff.report.queue_ms
        self._end.forget(message.key)
        self._end.send(TransferDone(message.key))
        return handoff, latency_ms

    def _join(self, connect: Callable[..., DecodeEnd], pool: object) -> DecodeEnd:
        assert self._process.stdout is not None and self._process.stderr is not None
        lines = iter(self._process.stdout.readline, "")
        address = next((line.split()[1] for line in lines if line.startswith("address ")), None)
        if address is None:
            last = self._process.stderr.read().strip().rpartition("\n")[2]
            raise ChannelError(last or "the prefill side ended without a word")
        layout = self.setting.layout
        model = ModelInfo("qwen3-4b", "", "float16", 64, layout.block_bytes, layout.describe(), 1, 1, [])
        self._end = connect(address, pool, Hello("decode", "epoch", model), self._wake.set)
        welcome = self._wait_for(Welcome)
        if welcome.refusal:
            raise ChannelError(welcome.refusal)
        return self._end

    def _wait_for(self, kind: type[Kind]) -> Kind:
        deadline = time.monotonic() + WAIT_S
        while True:
            self._wake.clear()
            try:
                messages = self._end.poll()
            except ChannelClosed as closed:
                raise ChannelError(str(closed)) from None
            for message in messages:
                if isinstance(message, PrefillFailed):
                    raise ChannelError(message.message)
                if isinstance(message, kind):
                    return message
            if not self._wake.wait(deadline - time.monotonic()):
                raise ChannelError(f"no {kind.__name__} within {WAIT_S:g} s")
