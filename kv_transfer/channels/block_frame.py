"""One KV block on the wire of a channel that moves bytes: a header, then the block's bytes as a frame of their own.

    header   checksum u32 | generation u32 | table index u32 | request id, UTF-8      (big-endian)

The checksum is CRC-32 over the header behind it and the block, so a block is never written at a corrupted index.
"""

import struct
import zlib
from dataclasses import dataclass

from kv_transfer.handoff import TransferKey

_FIXED = struct.Struct(">III")
_CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class BlockHeader:
    """`index`: the block's place in the transfer's block table."""

    key: TransferKey
    index: int
    checksum: int

    @classmethod
    def of(cls, key: TransferKey, index: int, body: bytes | memoryview) -> "BlockHeader":
        """Reads all of `body` for the checksum (without the GIL)."""
        unsummed = cls(key, index, 0)
        return cls(key, index, unsummed.sum_of(body))

    @classmethod
    def unpack(cls, data: bytes) -> "BlockHeader":
        """Raises ValueError when `data` is not a header."""
        if len(data) < _FIXED.size:
            raise ValueError(f"a block header has at least {_FIXED.size} bytes, not {len(data)}")
        checksum, generation, index = _FIXED.unpack_from(data)
        return cls((data[_FIXED.size :].decode(), generation), index, checksum)

    def pack(self) -> bytes:
        request_id, generation = self.key
        return _FIXED.pack(self.checksum, generation, self.index) + request_id.encode()

    def sum_of(self, body: bytes | memoryview) -> int:
        """The checksum this header should carry for `body`."""
        return zlib.crc32(body, zlib.crc32(self.pack()[_CHECKSUM_BYTES:]))
