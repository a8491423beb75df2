"""Random words and Gumbel noise of engine/philox.py, in Triton."""

import triton
import triton.language as tl


@triton.jit
def token_words(chunk, seed, position, CHUNK: tl.constexpr):
    """Random words of tokens chunk * CHUNK .. + CHUNK - 1, uint32 `[CHUNK]`; CHUNK is a multiple of 4.

    One counter gives the words of four neighbours, so the generator runs on a quarter as many lanes as tokens.
    """
    quads = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    zero = quads * 0
    w0, w1, w2, w3 = tl.philox(seed, quads, position.to(tl.int32) + zero, zero, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [CHUNK])


@triton.jit
def gumbel(words):
    """Standard Gumbel noise, float64."""
    return -tl.log(-tl.log((words.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit
def rough_gumbel(words):
    """The same in float32, within 1e-5 of it.

    -log(u) loses its digits where u is close to 1, so there it comes from the series in v = 1 - u.
    """
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = ((0xFFFFFFFF - words).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1 + v * (0.5 + v * (0.33333333 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 0.03125, series, -tl.log(u)))
