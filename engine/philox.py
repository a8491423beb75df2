"""Philox-4x32-10, the counter-based random generator behind every seeded draw.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Being a pure function of (key,
counter), it gives a token's random word without drawing the ones before it: on any device, in any order, for any
subset of the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float64]

NUM_ROUNDS = 10

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD_MASK = 0xFFFFFFFF
_LOW_HALF = np.uint64(_WORD_MASK)
_HALF = np.uint64(32)
_CHUNK = 8192  # counters at a time: the rounds' temporaries stay in a CPU core's cache


def philox4x32(counter: Sequence[int | Ids], key: tuple[int, int]) -> Words:
    """Four random words for each counter: uint32 `[n, 4]`.

    counter: its four words, each below 2**32, at least one of them an array `[n]`; key: two words below 2**32.
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # The low halves of two 64-bit products pass on as they are, the high halves are mixed with the other words.
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0)
        c2 = (p0 >> _HALF) ^ c3 ^ np.uint64(k1)
        c1 = p1 & _LOW_HALF
        c3 = p0 & _LOW_HALF
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD_MASK, (k1 + _KEY_STEPS[1]) & _WORD_MASK
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def token_words(seed: int, position: int, token_ids: Ids) -> Words:
    """The random word of each token id at one position of a sequence: uint32, shaped like the ascending `token_ids`.

    key = (seed mod 2**32, seed >> 32 mod 2**32), counter = (token_id // 4, position, 0, 0), lane = token_id mod 4.
    """
    quads = token_ids >> 2
    if len(quads) == 0:
        return np.empty(0, dtype=np.uint32)
    first, last = int(quads[0]), int(quads[-1])
    is_dense = len(quads) > last - first  # then a counter each for neighbours in fours, else one for each token
    counters = np.arange(first, last + 1) if is_dense else quads
    words = np.empty((len(counters), 4), dtype=np.uint32)
    key = (seed & _WORD_MASK, (seed >> 32) & _WORD_MASK)
    for start in range(0, len(counters), _CHUNK):
        words[start : start + _CHUNK] = philox4x32((counters[start : start + _CHUNK], position, 0, 0), key)
    return words.reshape(-1)[token_ids - 4 * first if is_dense else 4 * np.arange(len(quads)) + (token_ids & 3)]


def gumbel(words: Words) -> Floats:
    """Standard Gumbel noise from random words: -log(-log(u)), u = (word + 0.5) * 2**-32, never 0 or 1. float64."""
    return -np.log(-np.log((words + 0.5) * 2.0**-32))
