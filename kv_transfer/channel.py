"""KVChannel: the one interface through which KV blocks and handoffs pass between a prefill and a decode engine.

A channel joins one prefill worker to one decode worker. Its two ends are not alike: the prefill end offers blocks, the
decode end says where they go. Control messages (kv_transfer/handoff.py) and blocks share its order: a Handoff comes
out of the decode end's `poll` only after every block of its transfer is in the decode pool.

Nothing here blocks: `send*` queue, `poll` returns what has arrived. The ends may use threads inside; they call `wake`
(given at construction) from any thread when `poll` has something new, and touch the pool only in the block ranges they
were given.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from engine.kv_pool import KVLayout, KVPool
from kv_transfer.handoff import Hello, ToDecode, ToPrefill, TransferKey, Welcome

Wake = Callable[[], None]


class ChannelError(RuntimeError):
    """A channel cannot be opened or configured; the message names the channel, the cause and the remedy."""


class ChannelClosed(RuntimeError):
    """The other end is gone. Raised by `poll` after everything that arrived before was returned."""


class PrefillEnd(ABC):
    """The prefill worker's end: one for each decode worker."""

    peer: str
    """Name of the decode worker (known once its Hello was polled)."""

    @abstractmethod
    def poll(self) -> list[ToPrefill]:
        """Messages that arrived since the last call, in order (Hello included). Raises ChannelClosed."""

    @abstractmethod
    def send(self, message: ToDecode) -> None:
        """Queue a message. A Handoff is delivered after the blocks its transfer was given by `send_blocks`."""

    @abstractmethod
    def send_blocks(self, key: TransferKey, first: int, block_ids: Sequence[int]) -> int:
        """Start moving `block_ids` as entries first, first+1, ... of the transfer's block table. Returns at once, with
        the number of bytes that will travel (0 on a shared pool). What they hold is complete: the device is past the
        step that computed it. The blocks must not be written until `is_moving(key)` is False."""

    @abstractmethod
    def is_moving(self, key: TransferKey) -> bool:
        """True while this end may still read pool memory for the transfer."""

    @abstractmethod
    def abandon(self, key: TransferKey) -> None:
        """Stop moving a transfer's blocks as soon as possible. Idempotent; `is_moving` tells when it has stopped."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


class DecodeEnd(ABC):
    """The decode worker's end: one for each prefill worker."""

    pool: KVPool | None
    """A pool shared with the prefill worker, mapped here (shared-pool channels, set before Welcome is polled), else
    None."""

    @abstractmethod
    def poll(self) -> list[ToDecode]:
        """Messages that arrived, in order (Welcome first). Transfers that failed (checksum, stale or unknown key is
        dropped and counted, not failed) come as PrefillFailed with code `worker_lost`. Raises ChannelClosed."""

    @abstractmethod
    def send(self, message: ToPrefill) -> None:
        """Queue a message."""

    @abstractmethod
    def expect(self, key: TransferKey, block_table: Sequence[int]) -> None:
        """Blocks of this transfer go to these blocks of the decode pool: entry i of the transfer to block_table[i].
        No-op on a shared pool."""

    @abstractmethod
    def forget(self, key: TransferKey) -> None:
        """Blocks of this transfer that arrive from now on are dropped; when this returns no byte of it will be written
        to the pool. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


class ChannelServer(ABC):
    """Accepts decode workers on a prefill worker."""

    address: str
    """Where decode workers connect, "host:port"."""

    @abstractmethod
    def accept(self) -> list[PrefillEnd]:
        """Ends that connected since the last call."""

    @abstractmethod
    def close(self) -> None:
        """Closes the listener and every end. Idempotent."""


class KVChannel(ABC):
    """A kind of channel. Implementations live in kv_transfer/channels/, `get_channel(name)` finds one."""

    name: str
    shares_pool: bool
    """True: both ends use one pool, owned by the prefill worker, and block ids change owner instead of bytes moving."""

    @abstractmethod
    def make_pool(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> KVPool:
        """A prefill worker's pool on "cpu" or "cuda", allocated so that this channel can move it. Raises ChannelError
        when the channel does not reach that device."""

    @abstractmethod
    def serve(self, pool: KVPool, welcome: Welcome, wake: Wake, host: str = "127.0.0.1") -> ChannelServer:
        """Prefill side: listen. Each Hello is answered by the engine, which sends `welcome` or a refusal; the channel
        fills in `welcome.pool`."""

    @abstractmethod
    def connect(self, address: str, pool: KVPool | None, hello: Hello, wake: Wake) -> DecodeEnd:
        """Decode side: connect to a prefill worker and send `hello` (with `data_address` filled in by the channel).
        Raises ChannelError when nobody answers."""
