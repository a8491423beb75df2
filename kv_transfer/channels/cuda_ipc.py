"""`cuda_ipc`: two processes of one GPU on one pool; block ids change owner, no byte moves.

The pool is the prefill worker's. Welcome.pool holds its IPC handle; the decode worker maps it before Welcome comes out
of `poll`. Each process launches on a stream of its own, and streams of two processes are not ordered with each other.
What keeps a block from being written, or read half-written, by both:

    a process touches a block only in work it launches while the block is its own, and
    a message that gives blocks away leaves only when all work launched before it is over.

So when the receiver learns that a block is its own, nothing that the sender launched can touch it, and the sender
launches nothing more that does. For each way a block takes:

    prefill -> decode     Handoff, GrantBlocks. The prefill engine has waited for its step before it sends them, so they
                          leave at once; the rule holds here whatever the engine launches ahead.
    decode -> prefill     ReturnBlocks. The decode engine launches a step ahead: when it learns that a sequence ended,
                          one more step that writes that sequence's next KV may be under way. The message waits for it
                          in a queue (milliseconds), the engine does not.
    decode worker ends    its end waits for its GPU work, says Farewell, and closes; then the blocks are taken back.
    decode worker dies    there is no Farewell. The driver ends a dead process's work when it tears its context down,
                          perhaps after the connection broke: the prefill end reports the loss TEARDOWN_S later.
    prefill worker dies   the decode worker's mapping keeps the memory alive; its sequences end, nobody reads it again.

Queued messages keep their order among themselves, and AskBlocks queues behind a ReturnBlocks, which it would be undone
by. All others overtake: they give no block away.

MPS lets the kernels of both processes share the GPU; without it they take turns. Neither changes the argument.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from engine.kv_pool import KVLayout, KVPool
from engine.wire import Connection
from kv_transfer.channel import ChannelError, ChannelServer, DecodeEnd, KVChannel, Wake
from kv_transfer.channels.control import ControlDecodeEnd, ControlPrefillEnd, ControlServer
from kv_transfer.channels.gpu_memory import MappedPool, export_pool, make_gpu_pool
from kv_transfer.channels.mark import PAST, Mark, mark_work, wait_for_work
from kv_transfer.channels.pool_description import PoolDescription
from kv_transfer.channels.shared_pool import SharedPoolDecodeEnd, SharedPoolPrefillEnd
from kv_transfer.cuda_driver import driver
from kv_transfer.handoff import (
    AskBlocks,
    BlocksTaken,
    Farewell,
    GrantBlocks,
    Handoff,
    Hello,
    ReturnBlocks,
    ToDecode,
    ToPrefill,
    Welcome,
)

TEARDOWN_S = 1.0
"""A killed process's GPU work is over by then: what it had launched is at most a step and a prompt chunk."""


class WorkOrder:
    """Sends messages, each when the device is past what the sending thread had launched before it."""

    def __init__(self, device: torch.device, send: Callable[[Any], None]):
        self._device = device
        self._send = send
        self._changed = threading.Condition()
        self._queue: deque[tuple[Any, Mark]] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def send(self, message: Any) -> None:
        """Never waits."""
        mark = mark_work(self._device)
        with self._changed:
            if mark is not PAST or self._queue:
                self._queue.append((message, mark))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kv-work-order", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
                return
        self._send(message)

    def close(self) -> None:
        """Wait for what is queued, and for everything this process has launched. Idempotent."""
        wait_for_work(self._device)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if not self._queue:
                    return
                message, mark = self._queue[0]
            mark.wait()
            self._send(message)
            with self._changed:
                self._queue.popleft()


class CudaIpcPrefillEnd(SharedPoolPrefillEnd, ControlPrefillEnd):
    def __init__(self, device: torch.device, connection: Connection, wake: Wake, server: ControlServer):
        self._order = WorkOrder(device, connection.send)
        self._left_in_good_order = False
        self._teardown: threading.Timer | None = None
        super().__init__(connection, wake, server)

    def send(self, message: ToDecode) -> None:
        if isinstance(message, (Handoff, GrantBlocks)):
            self._order.send(message)
        else:
            super().send(message)

    def close(self) -> None:
        if self._announced:
            self._order.close()
        super().close()
        if self._teardown is not None:
            self._teardown.cancel()

    def on_channel_message(self, message: BlocksTaken | Farewell) -> None:
        self._left_in_good_order |= isinstance(message, Farewell)

    def on_control_lost(self, reason: str) -> None:
        if self._left_in_good_order or not self._announced:
            super().on_control_lost(reason)
            return
        self._teardown = threading.Timer(TEARDOWN_S, super().on_control_lost, [reason])
        self._teardown.name, self._teardown.daemon = "kv-teardown", True
        self._teardown.start()


class CudaIpcDecodeEnd(SharedPoolDecodeEnd, ControlDecodeEnd):
    def __init__(self, address: str, wake: Wake, device: torch.device, open_pool: Callable[[PoolDescription], KVPool]):
        self._open_pool = open_pool
        self._order = WorkOrder(device, lambda message: self._connection.send(message))
        super().__init__("cuda_ipc", address, wake)

    def send(self, message: ToPrefill) -> None:
        if isinstance(message, (ReturnBlocks, AskBlocks)):
            self._order.send(message)
        else:
            super().send(message)

    def close(self) -> None:
        """Waits for this worker's GPU work, which may still write to the pool."""
        self._order.close()
        self._connection.send(Farewell())
        super().close()
        self.pool = None

    def on_message(self, message: ToDecode) -> None:
        if isinstance(message, Welcome) and not message.refusal:
            try:
                self.pool = self._open_pool(message.pool)
            except ChannelError as error:
                message = replace(message, refusal=str(error))
        super().on_message(message)


class CudaIpcChannel(KVChannel):
    name = "cuda_ipc"
    shares_pool = True

    def make_pool(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> KVPool:
        return make_gpu_pool(self.name, layout, num_blocks, device)

    def serve(self, pool: KVPool, welcome: Welcome, wake: Wake, host: str = "127.0.0.1") -> ChannelServer:
        """Raises ChannelError when the pool cannot be shared, or the host's address not be used."""
        welcome.pool = self.describe(pool)
        return ControlServer(host, wake, partial(CudaIpcPrefillEnd, pool.tensor.device))

    def connect(self, address: str, pool: KVPool | None, hello: Hello, wake: Wake) -> DecodeEnd:
        """`pool` is not used: the end's own `pool` is the prefill worker's, once Welcome came."""
        end = CudaIpcDecodeEnd(address, wake, self.device(), self.open_pool)
        end.send(hello)
        return end

    def device(self) -> torch.device:
        """Where this process computes."""
        return torch.device("cuda", torch.cuda.current_device())

    def describe(self, pool: KVPool) -> PoolDescription:
        return export_pool(self.name, pool)

    def open_pool(self, description: PoolDescription) -> KVPool:
        """Map a pool that another process described. Raises ChannelError when that is not possible, or it is on
        another GPU."""
        index = self.device().index
        mapped = MappedPool(self.name, description, index)
        here = driver().uuid(index)
        if mapped.gpu != here:
            raise ChannelError(
                f"channel 'cuda_ipc' shares a pool on one GPU, but the prefill worker is on GPU {mapped.gpu} and this "
                f"worker on {here}; use channel cuda_p2p"
            )
        return mapped.pool()
