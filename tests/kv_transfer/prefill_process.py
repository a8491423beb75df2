"""A prefill worker's channel side as a process of its own: python -m tests.kv_transfer.prefill_process CHANNEL

Prints "address HOST:PORT". Answers a PrefillRequest with blocks 0..n-1 (block i filled with i + 1; n: prompt length)
and a Handoff, but keeps the Handoff and the last block back when the request id is "stall". Answers AskBlocks(i) with
the first value it sees in block i. Ends when its input ends.
"""

import sys
import threading

import torch

from kv_transfer.channel import ChannelClosed
from kv_transfer.handoff import AskBlocks, GrantBlocks, Hello, PrefillRequest, Welcome
from tests.kv_transfer.channels import channel_of
from tests.kv_transfer.joined import LAYOUT, make_handoff


def answer(end, pool, welcome, message):
    if isinstance(message, Hello):
        end.send(welcome)
    elif isinstance(message, AskBlocks):
        end.send(GrantBlocks([int(pool.tensor[message.num_blocks].flatten()[0])]))
    elif isinstance(message, PrefillRequest):
        num_blocks = len(message.request.prompt_token_ids)
        for i in range(num_blocks):
            pool.tensor[i].fill_(i + 1)
        if pool.tensor.device.type == "cuda":
            torch.cuda.synchronize()  # as an engine does, which waits for its step
        stall = message.request.request_id == "stall"
        end.send_blocks(message.key, 0, list(range(num_blocks - stall)))
        if not stall:
            end.send(make_handoff(message.key, num_blocks=num_blocks))


def main() -> None:
    channel, device = channel_of(sys.argv[1])
    pool = channel.make_pool(LAYOUT, 16, device)
    welcome = Welcome("prefill-0", "epoch-p", num_blocks=16)
    wake = threading.Event()
    server = channel.serve(pool, welcome, wake.set)
    print("address", server.address, flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set(), wake.set()), daemon=True).start()
    ends = []
    while not ended.is_set():
        wake.wait()
        wake.clear()
        ends += server.accept()
        for end in list(ends):
            try:
                for message in end.poll():
                    answer(end, pool, welcome, message)
            except ChannelClosed:
                end.close()
                ends.remove(end)
    server.close()


if __name__ == "__main__":
    main()
