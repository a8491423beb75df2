"""What a decode step and a prefill must move and compute, and the floor on time that follows.

    floor = max(bytes / bandwidth, FLOPs / matrix rate)

taken over each step. Nothing else is counted: no launches, no attention overheads, no HTTP. A measured time below its
floor means that something was not counted.
"""

from dataclasses import dataclass, replace
from typing import Any

from bench.roofline.devices import Ceilings
from bench.roofline.shape import Shape

SCALE_BITS = 16


@dataclass(frozen=True)
class Precision:
    """Bits of each stored value. Below 16 bits, every `group_size` weights of a body matrix share one 16-bit scale; the
    head has one scale a row, which is not counted; keys and values have one scale and one zero a head and token."""

    weight_bits: float = 16
    head_bits: float = 16
    kv_bits: float = 16
    group_size: int = 128


@dataclass(frozen=True)
class Decoding:
    """acceptance_length: tokens kept for each pass of the model, 1 without speculation. drafter_gb: bytes, in 10^9,
    that the drafter reads for each pass. block_size: tokens in a KV block."""

    precision: Precision = Precision()
    acceptance_length: float = 1.0
    drafter_gb: float = 0.0
    block_size: int = 64


@dataclass(frozen=True)
class Workload:
    """Prompt and output tokens of the three scenarios, and how many requests the burst has."""

    chat: tuple[int, int] = (250, 256)
    long: tuple[int, int] = (4096, 16)
    burst: tuple[int, int] = (250, 128)
    batch: int = 32


@dataclass(frozen=True)
class Work:
    """Of one step or of many."""

    bytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.bytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s)

    def bound(self, ceilings: Ceilings) -> str:
        memory = self.bytes / ceilings.bytes_per_s >= self.flops / ceilings.flops_per_s
        return "memory" if memory else "compute"


@dataclass(frozen=True)
class Floor:
    """value in the scenario's metric: ms/token, ms, or tokens/s (which is a ceiling then)."""

    scenario: str
    metric: str
    value: float
    bytes: float
    flops: float
    bound: str


def body_bytes(shape: Shape, precision: Precision) -> float:
    scale = SCALE_BITS / precision.group_size if precision.weight_bits < 16 else 0.0
    return shape.body_parameters * (precision.weight_bits + scale) / 8


def head_bytes(shape: Shape, precision: Precision) -> float:
    return shape.head_parameters * precision.head_bits / 8


def kv_bytes_per_token(shape: Shape, precision: Precision) -> float:
    scales = 0.0
    if precision.kv_bits < 16:
        scales = shape.kv_values_per_token / shape.head_dim * 2 * SCALE_BITS
    return (shape.kv_values_per_token * precision.kv_bits + scales) / 8


def decode_step(shape: Shape, decoding: Decoding, batch: int, context: float) -> Work:
    """One pass of the model for `batch` sequences of `context` tokens each; gives acceptance_length tokens a sequence.

    Weights and head are read once, every sequence's KV once. With speculation a pass computes at least the accepted
    tokens (rounded up), which is counted as FLOPs.
    """
    precision = decoding.precision
    rows = batch * max(1.0, decoding.acceptance_length)
    weights = body_bytes(shape, precision) + head_bytes(shape, precision) + decoding.drafter_gb * 1e9
    kv = batch * context * kv_bytes_per_token(shape, precision)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * context
    return Work(weights + kv, rows * (2 * (shape.body_parameters + shape.head_parameters) + attention))


def prefill(shape: Shape, decoding: Decoding, tokens: int, prompts: int = 1) -> Work:
    """`prompts` prompts of `tokens` tokens: causal attention computes half of all pairs; the head one row each;
    weights are read once, KV is written once."""
    precision = decoding.precision
    matrices = 2 * shape.body_parameters * tokens + 2 * shape.head_parameters
    attention = 4 * shape.layers * shape.heads * shape.head_dim * tokens * tokens / 2
    moved = body_bytes(shape, precision) + head_bytes(shape, precision)
    return Work(moved + prompts * tokens * kv_bytes_per_token(shape, precision), prompts * (matrices + attention))


def floors(shape: Shape, decoding: Decoding, workload: Workload, ceilings: Ceilings) -> list[Floor]:
    """Of chat, long prompt and burst, in this order."""
    prompt, output = workload.chat
    step = decode_step(shape, decoding, 1, prompt + output / 2)
    tpot_ms = step.seconds(ceilings) / decoding.acceptance_length * 1e3
    chat = Floor("chat", "ms/token", tpot_ms, step.bytes, step.flops, step.bound(ceilings))

    document = prefill(shape, decoding, workload.long[0])
    long = Floor(
        "long",
        "ms to first token",
        document.seconds(ceilings) * 1e3,
        document.bytes,
        document.flops,
        document.bound(ceilings),
    )

    prompt, output = workload.burst
    first = prefill(shape, decoding, prompt, workload.batch)
    many = decode_step(shape, decoding, workload.batch, prompt + output / 2)
    steps = (output - 1) / decoding.acceptance_length
    seconds = first.seconds(ceilings) + steps * many.seconds(ceilings)
    burst = Floor(
        "burst",
        "tokens/s",
        workload.batch * output / seconds,
        first.bytes + steps * many.bytes,
        first.flops + steps * many.flops,
        f"prefill {first.bound(ceilings)}, decode {many.bound(ceilings)}",
    )
    return [chat, long, burst]


def with_precision(decoding: Decoding, **changes: Any) -> Decoding:
    return replace(decoding, precision=replace(decoding.precision, **changes))
