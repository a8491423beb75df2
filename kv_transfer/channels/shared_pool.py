"""What is alike in channels whose ends share one pool: blocks change owner with the Handoff, no byte moves."""

from collections.abc import Sequence

from kv_transfer.channel import DecodeEnd, PrefillEnd
from kv_transfer.handoff import TransferKey


class SharedPoolPrefillEnd(PrefillEnd):
    def send_blocks(self, key: TransferKey, first: int, block_ids: Sequence[int]) -> int:
        return 0

    def is_moving(self, key: TransferKey) -> bool:
        return False

    def abandon(self, key: TransferKey) -> None:
        pass


class SharedPoolDecodeEnd(DecodeEnd):
    def expect(self, key: TransferKey, block_table: Sequence[int]) -> None:
        pass

    def forget(self, key: TransferKey) -> None:
        pass
