"""A channel with both of its ends, and what tests do with it: fill blocks, move transfers, wait for messages."""

import os
import threading
import time

import torch

from engine.kv_pool import KVLayout
from engine.protocol import ModelInfo
from engine.request import PrefillReport, Request, SampledToken, SamplingParams, TokenLogprobs
from kv_transfer.channel import ChannelClosed, DecodeEnd, PrefillEnd
from kv_transfer.channels.local import local_pair
from kv_transfer.handoff import Handoff, Hello, SamplerState, Welcome
from tests.kv_transfer.channels import channel_of

WAIT_S = 20
NUM_BLOCKS = 64
# 64 KiB a block: large enough for a channel that copies small frames to leave larger ones in place.
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, block_size=64, head_dim=32, dtype=torch.float32)


def model_info(layout: KVLayout) -> ModelInfo:
    return ModelInfo(
        name="tiny",
        fingerprint="f",
        dtype="float32",
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        layout=layout.describe(),
        vocab_size=512,
        max_model_len=1024,
        eos_token_ids=[0],
    )


def make_handoff(key, num_blocks=0, num_held=0) -> Handoff:
    request_id, generation = key
    request = Request(request_id, [1, 2, 3], SamplingParams(max_tokens=4, logit_bias={5: -1.0}), generation=generation)
    token = SampledToken(7, TokenLogprobs(7, -0.25, [(7, -0.25), (9, -1.5)]))
    report = PrefillReport(where="remote", num_prompt_tokens=3, num_blocks_held=num_held)
    return Handoff(request, token, SamplerState(seed=1, num_sampled=1), report, num_blocks=num_blocks)


def decode_device(device: str) -> str:
    """Where the decode pool is: on the second GPU where there is one."""
    return "cuda:1" if device == "cuda" and torch.cuda.device_count() > 1 else device


class Joined:
    """Both ends of one channel in this process, past Hello and Welcome.

    Where the ends share a pool, `decode_pool` is the decode end's mapping of it and a transfer's destination is the
    blocks themselves; otherwise destinations are blocks of a second pool, in another order.
    """

    def __init__(self, name: str, layout: KVLayout = LAYOUT, num_blocks: int = NUM_BLOCKS):
        self.channel, device = channel_of(name)
        self.server = None
        self.prefill_wake, self.decode_wake = threading.Event(), threading.Event()
        self.prefill_pool = self.channel.make_pool(layout, num_blocks, device)
        self.received: list = []
        self.prefill: PrefillEnd
        self.decode: DecodeEnd
        if name == "local":
            self.prefill, self.decode = local_pair(self.prefill_pool, self.prefill_wake.set, self.decode_wake.set)
            self.decode_pool = self.decode.pool
            return
        own_pool = (
            None if self.channel.shares_pool else self.channel.make_pool(layout, num_blocks, decode_device(device))
        )
        self.welcome = Welcome("prefill-0", "epoch-p", num_blocks=num_blocks)
        self.server = self.channel.serve(self.prefill_pool, self.welcome, self.prefill_wake.set)
        self.decode, self.prefill, self.hello = self.join(own_pool, self.decode_wake.set)
        self.decode_pool = own_pool or self.decode.pool

    def join(self, own_pool, wake, worker="decode-0"):
        """Connect one more decode worker: (its end, the prefill end, the Hello that arrived)."""
        hello = Hello(worker, "epoch-d", model_info(self.prefill_pool.layout))
        decode = self.channel.connect(self.server.address, own_pool, hello, wake)
        accepted = wait_for(self.server.accept, self.prefill_wake)
        assert len(accepted) == 1
        (arrived,) = wait_messages(accepted[0], self.prefill_wake, 1)
        accepted[0].send(self.welcome)
        (welcome,) = wait_messages(decode, self.decode_wake, 1)
        assert welcome == self.welcome
        return decode, accepted[0], arrived

    def close(self):
        self.decode.close()
        self.prefill.close()
        if self.server is not None:
            self.server.close()

    def destination(self, block_ids: list[int]) -> list[int]:
        if self.channel.shares_pool:
            return list(block_ids)
        return [self.decode_pool.num_blocks - 1 - block_id for block_id in block_ids]

    def fill(self, block_ids, seed=0) -> dict[int, torch.Tensor]:
        """Write distinct values to blocks of the prefill pool; returns what was written."""
        generator = torch.Generator().manual_seed(seed)
        written = {}
        for block_id in block_ids:
            values = torch.randn(self.prefill_pool.layout.block_shape, generator=generator)
            self.prefill_pool.tensor[block_id].copy_(values)
            written[block_id] = values
        return written

    def wait_decode(self, count=1):
        return wait_messages(self.decode, self.decode_wake, count)

    def wait_prefill(self, count=1):
        return wait_messages(self.prefill, self.prefill_wake, count)

    def barrier(self, block_id, name="barrier"):
        """Pass one whole transfer; blocks given to the channel before it have been dealt with when this returns."""
        key = (name, 0)
        self.decode.expect(key, self.destination([block_id]))
        self.prefill.send_blocks(key, 0, [block_id])
        self.prefill.send(make_handoff(key, num_blocks=1))
        messages = []
        while not messages or not isinstance(messages[-1], Handoff) or messages[-1].key != key:
            messages += self.wait_decode(1)
        return messages[:-1]


def wait_for(question, wake: threading.Event):
    """Ask until the answer is not empty, each time the channel woke us."""
    deadline = time.monotonic() + WAIT_S
    while True:
        wake.clear()  # before asking: a wake that comes after the answer is not lost
        answer = question()
        if answer:
            return answer
        assert wake.wait(deadline - time.monotonic()), f"nothing came within {WAIT_S} s"


def wait_messages(end, wake, count):
    messages = []
    while len(messages) < count:
        messages += wait_for(end.poll, wake)
    return messages


def wait_closed(end, wake):
    """(messages that came before it, reason)"""
    messages = []
    try:
        while True:
            messages += wait_for(end.poll, wake)
    except ChannelClosed as error:
        return messages, str(error)


def wait_true(question):
    deadline = time.monotonic() + WAIT_S
    while not question():
        assert time.monotonic() < deadline, f"not true within {WAIT_S} s"
        time.sleep(0.002)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
