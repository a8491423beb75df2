import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path

from engine.block_hash import hash_blocks

ROOT = Path(__file__).resolve().parents[2]
TOKENS = [5, 0, 151_935, 4_294_967_295, 7, 7, 7, 7, 1, 2, 3]


def test_hashes_are_equal_in_processes_with_different_hash_seeds():
    code = f"from engine.block_hash import hash_blocks; print([h.hex() for h in hash_blocks({TOKENS}, 4, 'tenant')])"
    outputs = set()
    for seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        outputs.add(result.stdout.strip())
    assert outputs == {str([key.hex() for key in hash_blocks(TOKENS, 4, "tenant")])}


def test_a_block_hash_is_blake2b_of_the_parents_hash_and_little_endian_token_words():
    first, second = hash_blocks(TOKENS, 4)
    assert second == hashlib.blake2b(first + struct.pack("<4I", 7, 7, 7, 7), digest_size=16).digest()


def test_only_full_blocks_are_hashed():
    assert [len(hash_blocks(list(range(n)), 4)) for n in (0, 1, 3, 4, 5, 7, 8)] == [0, 0, 0, 1, 1, 1, 2]


def test_a_hash_covers_everything_before_its_block():
    hashes = hash_blocks(TOKENS, 4)
    for position in range(8):
        changed = list(TOKENS)
        changed[position] += 1 if changed[position] < 9 else -1
        other = hash_blocks(changed, 4)
        assert [a == b for a, b in zip(hashes, other)] == [position >= 4, False]


def test_a_prefix_has_the_hashes_of_the_whole():
    assert hash_blocks(TOKENS[:5], 4) == hash_blocks(TOKENS, 4)[:1]


def test_equal_blocks_at_different_depths_have_different_hashes():
    assert len(set(hash_blocks([1, 2, 1, 2, 1, 2], 2))) == 3


def test_salts_share_no_hash():
    by_salt = [hash_blocks(TOKENS, 4, salt) for salt in ("", "a", "b", "aa", "\ud800")]
    assert len({key for hashes in by_salt for key in hashes}) == 10
