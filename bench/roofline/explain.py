"""What would change if: one thing changed at a time, everything else as it was."""

from dataclasses import dataclass, replace

from bench.roofline.cost import (
    Decoding,
    Workload,
    body_bytes,
    floors,
    head_bytes,
    kv_bytes_per_token,
    with_precision,
)
from bench.roofline.devices import Ceilings
from bench.roofline.shape import Shape

ACCEPTANCE_LENGTHS = (2.0, 3.0, 4.0)
BATCHES = (1, 8, 16, 64)
BLOCK_SIZES = (16, 64, 256)


@dataclass(frozen=True)
class Change:
    """Floors after the change: ms/token, ms, tokens/s."""

    what: str
    chat_ms: float
    long_ms: float
    burst_tokens_per_s: float
    why: str


def explain(shape: Shape, decoding: Decoding, workload: Workload, ceilings: Ceilings) -> list[Change]:
    """The first row is the present state. Precisions above the present one are not listed."""

    def row(what: str, why: str, changed: Decoding = decoding, shapes: Workload = workload) -> Change:
        chat, long, burst = (floor.value for floor in floors(shape, changed, shapes, ceilings))
        return Change(what, chat, long, burst, why)

    now = decoding.precision
    rows = [row("as it is", f"weights {now.weight_bits:g}, head {now.head_bits:g}, KV {now.kv_bits:g} bits")]
    for bits in (8, 4):
        if bits < now.weight_bits:
            changed = with_precision(decoding, weight_bits=bits)
            gigabytes = body_bytes(shape, changed.precision) / 1e9
            rows.append(row(f"weights {bits} bits", f"a step reads {gigabytes:.2f} GB of layer weights", changed))
    if now.head_bits > 8:
        changed = with_precision(decoding, head_bits=8)
        gigabytes = head_bytes(shape, changed.precision) / 1e9
        rows.append(row("head 8 bits", f"a step reads {gigabytes:.2f} GB of head", changed))
    for bits in (8, 4):
        if bits < now.kv_bits:
            changed = with_precision(decoding, kv_bits=bits)
            kilobytes = kv_bytes_per_token(shape, changed.precision) / 1e3
            rows.append(
                row(f"KV {bits} bits", f"{kilobytes:.1f} kB a token, read by each step of its sequence", changed)
            )
    for length in ACCEPTANCE_LENGTHS:
        changed = replace(decoding, acceptance_length=length)
        why = "each pass over weights and KV gives more tokens; a drafter's own reads: --drafter-gb"
        rows.append(row(f"acceptance length {length:g}", why, changed))
    for batch in BATCHES:
        if batch != workload.batch:
            why = "all sequences share one read of the weights, none shares another's KV"
            rows.append(row(f"burst of {batch}", why, shapes=replace(workload, batch=batch)))
    return rows


@dataclass(frozen=True)
class BlockChange:
    """Of KV blocks of `block_size` tokens: what the last, half-filled block of a sequence wastes on average, how many
    sequences of the burst fit beside the weights, and prompt tokens computed again on a hit of a whole long prompt."""

    block_size: int
    wasted_tokens: float
    sequences_that_fit: int
    recomputed_tokens: int


def explain_blocks(shape: Shape, decoding: Decoding, workload: Workload, ceilings: Ceilings) -> list[BlockChange]:
    """No floor depends on the block size; memory and reuse do.

    A prefix match ends at a whole block and at least one token before the prompt's end.
    """
    precision = decoding.precision
    embedding = 0.0 if shape.tied else shape.head_parameters * 2.0
    weights = body_bytes(shape, precision) + head_bytes(shape, precision) + embedding
    room = max(0.0, ceilings.memory_gb * 1e9 - weights)
    rows = []
    for size in sorted({*BLOCK_SIZES, decoding.block_size}):
        tokens = sum(workload.burst)
        blocks = -(-tokens // size)
        prompt = workload.long[0]
        rows.append(
            BlockChange(
                block_size=size,
                wasted_tokens=(size - 1) / 2,
                sequences_that_fit=int(room // (blocks * size * kv_bytes_per_token(shape, precision))),
                recomputed_tokens=prompt - (prompt - 1) // size * size,
            )
        )
    return rows
