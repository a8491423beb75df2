"""Incoming: which transfers a decode end expects, where their blocks go, and the Handoffs held back until they came.

    expect --> active --(Handoff came, all blocks arrived)--> on_complete
                 |-----(a block cannot be taken)------------> on_failed
                 '-----forget

Whichever comes first ends the transfer; nothing is written for it afterwards.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_transfer.channels.mark import PAST, Mark
from kv_transfer.handoff import Handoff, TransferKey

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Transfer:
    """`num_writing` counts writes that have begun and not finished."""

    block_table: list[int]
    ready: Mark
    active: bool = True
    num_writing: int = 0
    arrived: set[int] = field(default_factory=set)
    handoff: Handoff | None = None
    handoff_arrival: float = 0.0

    def is_complete(self) -> bool:
        if self.handoff is None:
            return False
        first, end = self.handoff.report.num_blocks_held, self.handoff.num_blocks
        return len(self.arrived) >= end - first and all(index in self.arrived for index in range(first, end))


@dataclass(eq=False)
class Write:
    """Leave to write entries first, first+1, ... of a transfer, into `block_ids`, once the device is past `ready`."""

    key: TransferKey
    first: int
    block_ids: list[int]
    ready: Mark
    transfer: _Transfer


class Incoming:
    """Thread-safe: the engine expects and forgets, a channel's threads write.

    on_complete(handoff)   the transfer is in the pool; called from the thread that brought the last of it
    on_failed(key, why)    the transfer cannot be completed; what still comes for it is to be dropped
    """

    def __init__(self, on_complete: Callable[[Handoff], None], on_failed: Callable[[TransferKey, str], None]):
        self._on_complete = on_complete
        self._on_failed = on_failed
        self._changed = threading.Condition()
        self._transfers: dict[TransferKey, _Transfer] = {}

    def expect(self, key: TransferKey, block_table: Sequence[int], ready: Mark = PAST) -> None:
        """`ready`: until then the device may still write to these blocks for whoever had them before."""
        with self._changed:
            assert key not in self._transfers, f"transfer {key!r} is expected already"
            self._transfers[key] = _Transfer(list(block_table), ready)

    def forget(self, key: TransferKey, timeout_s: float | None = None) -> bool:
        """Waits for the write that is just under way, if one is. False: that took too long; ask again."""
        with self._changed:
            transfer = self._transfers.get(key)
            if transfer is not None:
                transfer.active = False
                if not self._changed.wait_for(lambda: transfer.num_writing == 0, timeout_s):
                    return False
                self._transfers.pop(key, None)
        return True

    def num_places(self, key: TransferKey) -> int | None:
        """Blocks reserved for a transfer, None when nobody expects it (any more)."""
        with self._changed:
            transfer = self._transfers.get(key)
            return len(transfer.block_table) if transfer is not None and transfer.active else None

    def begin(self, key: TransferKey, first: int, num_blocks: int) -> Write | None:
        """Leave to write; `finish` or `fail` must follow. None: nobody expects this (any more), or there is no room."""
        with self._changed:
            transfer = self._transfers.get(key)
            if transfer is None or not transfer.active:
                return None
            if first + num_blocks <= len(transfer.block_table):
                transfer.num_writing += 1
                return Write(key, first, transfer.block_table[first : first + num_blocks], transfer.ready, transfer)
        last = first + num_blocks - 1
        self.fail(key, f"block {last} has no place among the {len(transfer.block_table)} that were reserved")
        return None

    def finish(self, write: Write) -> None:
        """The blocks are in the pool."""
        transfer = write.transfer
        with self._changed:
            transfer.arrived.update(range(write.first, write.first + len(write.block_ids)))
            complete = self._is_over(write.key, transfer)
            transfer.num_writing -= 1
            self._changed.notify_all()
        if complete:
            self._deliver(transfer)

    def give_up(self, write: Write, reason: str) -> None:
        """The blocks could not be written: the transfer fails."""
        with self._changed:
            write.transfer.num_writing -= 1
            self._changed.notify_all()
            current = self._transfers.get(write.key) is write.transfer
        if current:
            self.fail(write.key, reason)

    def hold(self, handoff: Handoff) -> None:
        """Deliver the handoff once its blocks are here; at once when it has none to wait for. That of a forgotten
        transfer is dropped. report.transfer_ms is measured from here: the handoff leaves when the last chunk is
        computed, and clocks of two hosts are never compared."""
        if handoff.num_blocks <= handoff.report.num_blocks_held:
            self.forget(handoff.key)
            self._on_complete(handoff)
            return
        with self._changed:
            transfer = self._transfers.get(handoff.key)
            if transfer is None:
                return
            num_places = len(transfer.block_table)
            complete = False
            if handoff.num_blocks <= num_places:
                transfer.handoff, transfer.handoff_arrival = handoff, time.monotonic()
                complete = self._is_over(handoff.key, transfer)
        if handoff.num_blocks > num_places:
            self.fail(handoff.key, f"{handoff.num_blocks} blocks for {num_places} places")
        elif complete:
            self._deliver(transfer)

    def fail(self, key: TransferKey, reason: str) -> None:
        """The engine, told by on_failed, forgets the transfer, which waits for writes still under way."""
        with self._changed:
            transfer = self._transfers.get(key)
            was_active = transfer is not None and transfer.active
            if transfer is not None:
                transfer.active = False
        if was_active:
            log.warning("transfer %s failed: %s", key, reason)
            self._on_failed(key, reason)

    def _is_over(self, key: TransferKey, transfer: _Transfer) -> bool:
        """Complete for the first time? The lock is held."""
        if not transfer.active or not transfer.is_complete():
            return False
        transfer.active = False
        if self._transfers.get(key) is transfer:
            del self._transfers[key]
        return True

    def _deliver(self, transfer: _Transfer) -> None:
        assert transfer.handoff is not None
        transfer.handoff.report.transfer_ms = (time.monotonic() - transfer.handoff_arrival) * 1000
        self._on_complete(transfer.handoff)
