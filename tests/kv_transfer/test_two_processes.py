"""Channels between real processes, and what is left when one is killed."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.request import Request, SamplingParams
from kv_transfer.handoff import AskBlocks, Hello, PrefillRequest
from tests.kv_transfer.channels import ON_CPU, ON_GPU, ON_TWO_GPUS, WITH_NIXL, channel_of, needs_gpus, needs_nixl
from tests.kv_transfer.joined import LAYOUT, decode_device, model_info, wait_closed, wait_messages

ROOT = Path(__file__).resolve().parents[2]


class Decode:
    """A decode end here, joined to a prefill process."""

    def __init__(self, name):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv_transfer.prefill_process", name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        lines = iter(self.process.stdout.readline, "")  # a channel's library may print, too
        address = next(line.split()[1] for line in lines if line.startswith("address "))
        channel, device = channel_of(name)
        self.wake = threading.Event()
        own_pool = None if channel.shares_pool else channel.make_pool(LAYOUT, 16, decode_device(device))
        hello = Hello("decode-0", "epoch-d", model_info(LAYOUT))
        self.end = channel.connect(address, own_pool, hello, self.wake.set)
        self.wait(1)
        self.pool = own_pool or self.end.pool

    def wait(self, count):
        return wait_messages(self.end, self.wake, count)

    def request(self, request_id, num_tokens, table):
        request = Request(request_id, [1] * num_tokens, SamplingParams(max_tokens=2))
        self.end.expect((request_id, 0), table)
        self.end.send(PrefillRequest(request))

    def close(self):
        self.end.close()
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(20) in (0, -9)


@pytest.fixture(params=[*ON_CPU, *needs_gpus(ON_GPU, 1), *needs_gpus(ON_TWO_GPUS, 2), *needs_nixl(WITH_NIXL)])
def decode(request):
    decode = Decode(request.param)
    yield decode
    decode.close()


def test_blocks_cross_and_a_killed_prefill_process_leaves_nothing(decode):
    shared = decode.end.pool is not None
    before = set(os.listdir("/dev/shm"))
    decode.request("whole", 8, list(range(8)))
    (handoff,) = decode.wait(1)
    assert handoff.key == ("whole", 0)
    assert [float(decode.pool.tensor[i].min()) for i in range(8)] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert [float(decode.pool.tensor[i].max()) for i in range(8)] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    if shared:  # the decode engine appends to blocks it owns; the prefill side sees them for the next turn
        decode.pool.tensor[3].fill_(123.0)
        decode.end.send(AskBlocks(3))
        assert decode.wait(1)[0].block_ids == [123]

    decode.request("stall", 8, list(range(8, 16)))
    decode.process.kill()
    messages, reason = wait_closed(decode.end, decode.wake)
    assert messages == []
    assert "the prefill worker is gone" in reason
    assert float(decode.pool.tensor[7].max()) == 8.0  # still mapped, still whole
    assert set(os.listdir("/dev/shm")) <= before
