"""The prefill worker's end of the channel that is measured, in a process of its own.

Answers a PrefillRequest for n blocks (its prompt's length) in `local_max_tokens` parts, Setting.gap_ms apart, then a
Handoff whose report.queue_ms is when its last part was given to the channel (time.monotonic of this host, in ms).
"""

import argparse
import random
import sys
import threading
import time

from bench.transfer.setting import Setting
from engine.request import PrefillReport
from kv_transfer.channel import ChannelClosed, ChannelError, PrefillEnd
from kv_transfer.channels import get_channel
from kv_transfer.handoff import Handoff, Heartbeat, Hello, PrefillRequest, SamplerState, Welcome


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("setting", type=Setting.load)
    setting: Setting = parser.parse_args().setting
    try:
        serve(setting)
    except ChannelError as error:
        sys.exit(str(error))


def serve(setting: Setting) -> None:
    channel = get_channel(setting.channel)
    pool = channel.make_pool(setting.layout, setting.num_blocks, setting.device)
    setting.synchronize()
    welcome = Welcome("prefill", "epoch", num_blocks=setting.num_blocks)
    wake = threading.Event()
    server = channel.serve(pool, welcome, wake.set)
    print("address", server.address, flush=True)
    ended = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        ended.set()
        wake.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    ends: list[PrefillEnd] = []
    while not ended.is_set():
        wake.wait()
        wake.clear()
        ends += server.accept()
        for end in list(ends):
            try:
                messages = end.poll()
            except ChannelClosed:
                ends.remove(end)
                continue
            for message in messages:
                if isinstance(message, Hello):
                    end.send(welcome)
                elif isinstance(message, Heartbeat):
                    end.send(message)
                elif isinstance(message, PrefillRequest):
                    answer(end, message, setting)
    server.close()


def answer(end: PrefillEnd, message: PrefillRequest, setting: Setting) -> None:
    num_blocks, num_parts = len(message.request.prompt_token_ids), message.local_max_tokens
    block_ids = list(range(num_blocks))
    if setting.scattered:
        block_ids = random.Random(num_blocks).sample(range(setting.num_blocks), num_blocks)
    bounds = [num_blocks * part // num_parts for part in range(num_parts + 1)]
    for first, until in zip(bounds, bounds[1:]):
        if first:
            time.sleep(setting.gap_ms / 1000)
        given_at = time.monotonic()
        end.send_blocks(message.key, first, block_ids[first:until])
    report = PrefillReport(where="remote", num_prompt_tokens=num_blocks, queue_ms=given_at * 1000)
    end.send(Handoff(message.request, None, SamplerState(0, 0), report, num_blocks=num_blocks))
    while end.is_moving(message.key):
        time.sleep(0.0001)


if __name__ == "__main__":
    main()
