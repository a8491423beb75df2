import math

import numpy as np
import pytest

from engine.philox import gumbel, philox4x32, token_words

# Known-answer vectors for philox4x32 with 10 rounds, published with Random123.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_of_plain_integers(counter, key):
    """The generator as its paper states it, one counter, Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    words = philox4x32([np.array([word]) for word in counter], key)
    assert words.dtype == np.uint32 and words.tolist() == [list(expected)]
    assert philox_of_plain_integers(counter, key) == list(expected)


def test_a_word_is_addressed_by_seed_position_and_token_alone():
    seed, position = 0x0123456789ABCDEF, 77
    for token_ids in ([0], [3], [2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8], [5, 1000, 151_935], [40_001, 40_002, 40_006]):
        expected = [
            philox_of_plain_integers((t // 4, position, 0, 0), (0x89ABCDEF, 0x01234567))[t % 4] for t in token_ids
        ]
        assert token_words(seed, position, np.array(token_ids)).tolist() == expected
    assert token_words(seed, position, np.array([], dtype=np.int64)).tolist() == []


def test_dense_and_sparse_token_sets_get_the_same_words():
    everything = token_words(9, 3, np.arange(50_001))
    some = np.sort(np.random.default_rng(0).choice(50_001, 700, replace=False))
    assert np.array_equal(token_words(9, 3, some), everything[some])
    assert np.array_equal(token_words(9, 3, np.arange(12_345, 50_001)), everything[12_345:])


def test_both_halves_of_the_seed_and_the_position_matter():
    token_ids = np.arange(64)
    streams = [(0, 0), (1, 0), (1 << 32, 0), (0, 1), ((1 << 32) | 1, 0)]
    words = [token_words(seed, position, token_ids).tobytes() for seed, position in streams]
    assert len(set(words)) == len(words)


def test_gumbel_is_finite_at_the_extreme_words_and_follows_the_formula():
    words = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], dtype=np.uint32)
    expected = [-math.log(-math.log((int(word) + 0.5) / 2**32)) for word in words]
    assert np.all(np.isfinite(gumbel(words)))
    assert gumbel(words) == pytest.approx(expected, rel=1e-12)
