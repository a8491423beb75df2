"""Chained block hashes: a block's hash names its tokens and everything before them.

The same in every process and on every machine, whatever PYTHONHASHSEED is: the router and each worker compute them
for themselves and compare.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
TOKEN_BYTES = 4


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as unsigned 32-bit little-endian words, `TOKEN_BYTES` each.

    Raises struct.error for an id outside 0 .. 2**32 - 1.
    """
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def root_hash(salt: str = "") -> bytes:
    """Parent of a prompt's first block. Prompts with different salts share no hash."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, person=b"baton-kv-root").digest()


def hash_block(parent: bytes, tokens: bytes) -> bytes:
    """Hash of the block with these encoded tokens after the block (or root) `parent`: BLAKE2b (RFC 7693), 16 bytes."""
    return blake2b(parent + tokens, digest_size=HASH_BYTES).digest()


def hash_blocks(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Chained hashes of the full blocks of `token_ids`, first to last; a partial last block has none."""
    num_tokens = len(token_ids) // block_size * block_size
    tokens = encode_tokens(token_ids[:num_tokens])
    step = block_size * TOKEN_BYTES
    parent = root_hash(salt)
    hashes = []
    for start in range(0, len(tokens), step):
        parent = hash_block(parent, tokens[start : start + step])
        hashes.append(parent)
    return hashes
