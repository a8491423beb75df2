"""BlockPuller: fetches the blocks that a prefill worker offers into the places that are reserved for them."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.channels.block_copier import BlockCopier
from kv_transfer.channels.incoming import Incoming, Write
from kv_transfer.channels.mark import Mark
from kv_transfer.channels.pipeline import Pipeline
from kv_transfer.handoff import OfferBlocks, TransferKey

PIECE_BYTES = 256 << 20
"""Fetched at a time: `Incoming.forget` waits for that much (0.7 ms over NVLink)."""


@dataclass(eq=False)
class _Piece:
    key: TransferKey
    first: int
    sources: list[int]
    offered_at: float
    write: Write | None = None


class BlockPuller:
    """
    on_taken(key, n)   n offered blocks were read or will not be; called from the pipeline's thread
    max_age_s          blocks offered longer ago when they have been copied count as lost: the prefill worker, which may
                       not have heard from this process for all that time, could have used them for something else
    """

    def __init__(
        self,
        copier: BlockCopier,
        block_bytes: int,
        incoming: Incoming,
        on_taken: Callable[[TransferKey, int], None],
        max_age_s: float,
    ):
        self._copier = copier
        self._piece_blocks = max(1, PIECE_BYTES // block_bytes)
        self._incoming = incoming
        self._on_taken = on_taken
        self._max_age_s = max_age_s
        self._pipeline: Pipeline[_Piece] = Pipeline("kv-pull", self._start, self._finish)

    def offer(self, offer: OfferBlocks) -> None:
        """Queue offered blocks. Nothing happens once stopped."""
        now, step = time.monotonic(), self._piece_blocks
        self._pipeline.put(
            *(
                _Piece(offer.key, offer.first + start, offer.block_ids[start : start + step], now)
                for start in range(0, len(offer.block_ids), step)
            )
        )

    def stop(self) -> None:
        """Start no further copy, and complete no transfer. Does not wait."""
        self._pipeline.stop()

    def close(self) -> None:
        """Stop and wait for the copies under way; nothing is written afterwards. Idempotent."""
        self._pipeline.close()

    def _start(self, piece: _Piece) -> list[Mark] | None:
        piece.write = self._incoming.begin(piece.key, piece.first, len(piece.sources))
        if piece.write is None:
            self._on_taken(piece.key, len(piece.sources))
            return None
        return self._copier.copy(piece.sources, piece.write.block_ids, piece.write.ready)

    def _finish(self, piece: _Piece, error: Exception | None) -> None:
        assert piece.write is not None
        age_s = time.monotonic() - piece.offered_at
        if error is not None:
            self._incoming.give_up(piece.write, f"copying failed: {error}")
        elif self._pipeline.stopping:
            self._incoming.give_up(piece.write, "the prefill worker left in the middle of the transfer")
        elif age_s > self._max_age_s:
            self._incoming.give_up(piece.write, f"its blocks were fetched {age_s:.1f} s after they were offered")
        else:
            self._incoming.finish(piece.write)
        self._on_taken(piece.key, len(piece.sources))
