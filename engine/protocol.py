"""Messages between the router and its workers. JSON on the wire (engine/wire.py); each names itself in `kind`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from engine.request import Request, TokenDelta

Role = Literal["prefill", "decode"]
FailureCode = Literal["deadline", "worker_lost", "too_long", "internal"]


@dataclass
class PoolCounts:
    """Blocks by owner. free + cached + leased + in_use == total, always."""

    total: int
    free: int
    cached: int
    leased: int
    in_use: int


@dataclass
class ModelInfo:
    """What must be equal on two workers that exchange KV blocks, and what the router tells clients."""

    name: str
    fingerprint: str  # hash of the model's config and weight files' sizes and names
    dtype: str
    block_size: int
    block_bytes: int
    layout: str  # shape of one block, named
    vocab_size: int
    max_model_len: int  # most tokens (prompt plus output) one request may have on this worker
    eos_token_ids: list[int]


# worker -> router


@dataclass
class Register:
    """First message of a worker. `epoch` is new each time the process starts. `channel_address` is where decode
    workers reach a prefill worker ("" for a decode worker). `max_running` is a decode worker's batch limit (for a
    prefill worker: prompts per step). `hosts_prefill`: a decode worker that can prefill by itself."""

    name: str
    role: Role
    epoch: str
    pid: int
    model: ModelInfo
    num_blocks: int
    max_running: int
    channel: str
    channel_address: str = ""
    hosts_prefill: bool = False
    device: str = "cpu"
    kind: Literal["register"] = "register"


@dataclass
class Failure:
    """A request ended without a normal finish. `worker_lost` may be submitted again by the router, others may not."""

    request_id: str
    generation: int
    code: FailureCode
    message: str


@dataclass
class PackedOutputs:
    """Outputs on the wire. A delta that holds nothing but tokens, as almost all do, is one entry in each of three
    columns, which costs a tenth of what an object of its own does; the others are in `rich`, and `rich_at` has their
    places among all deltas, ascending."""

    request_ids: list[str] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    rich: list[TokenDelta] = field(default_factory=list)
    rich_at: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    kind: Literal["outputs"] = "outputs"


@dataclass
class Outputs:
    """All that one engine step produced for the router. Travels as PackedOutputs."""

    deltas: list[TokenDelta] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    kind: Literal["outputs"] = "outputs"

    def packed(self) -> PackedOutputs:
        packed = PackedOutputs(failures=self.failures)
        request_ids, generations, token_ids = packed.request_ids, packed.generations, packed.token_ids
        for place, delta in enumerate(self.deltas):
            if _is_plain(delta):
                request_ids.append(delta.request_id)
                generations.append(delta.generation)
                token_ids.append(delta.token_ids)
            else:
                packed.rich.append(delta)
                packed.rich_at.append(place)
        return packed

    @staticmethod
    def unpacked(packed: PackedOutputs) -> "Outputs":
        """Raises ValueError when columns differ in length or a place does not exist."""
        columns = zip(packed.request_ids, packed.generations, packed.token_ids, strict=True)
        deltas = [TokenDelta(*row) for row in columns]
        for place, delta in zip(packed.rich_at, packed.rich, strict=True):
            if not 0 <= place <= len(deltas):
                raise ValueError(f"place {place} among {len(deltas)} deltas")
            deltas.insert(place, delta)
        return Outputs(deltas, packed.failures)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        packed = handler.generate_schema(PackedOutputs)
        to_packed = core_schema.plain_serializer_function_ser_schema(cls.packed, return_schema=packed)
        return core_schema.no_info_after_validator_function(cls.unpacked, packed, serialization=to_packed)


def _is_plain(delta: TokenDelta) -> bool:
    return (
        delta.finish_reason is None
        and delta.logprobs is None
        and delta.prefill is None
        and delta.stop_token_id is None
        and delta.prompt_logprobs is None
    )


@dataclass
class WorkerStats:
    """Sent about once a second and after each change of the cache. Counters never go down within an epoch.
    blocks_added/removed are chained block hashes (hex) that entered or left this worker's prefix index."""

    running: int
    waiting: int
    pool: PoolCounts
    counters: dict[str, float] = field(default_factory=dict)
    blocks_added: list[str] = field(default_factory=list)
    blocks_removed: list[str] = field(default_factory=list)
    kind: Literal["stats"] = "stats"


@dataclass
class Pong:
    """Answer to Ping from inside the engine loop. `prefill_peers` are the prefill workers whose engine loop answered
    this decode worker's heartbeat lately."""

    nonce: int
    prefill_peers: list[str] = field(default_factory=list)
    kind: Literal["pong"] = "pong"


@dataclass
class Flushed:
    nonce: int
    num_blocks: int
    kind: Literal["flushed"] = "flushed"


# router -> worker


@dataclass
class Refused:
    """The registration is not accepted (model or layout differs from the fleet's); the worker exits with `reason`."""

    reason: str
    kind: Literal["refused"] = "refused"


@dataclass
class Peer:
    name: str
    address: str
    epoch: str


@dataclass
class Peers:
    """The prefill workers that are up. Sent to decode workers on registration and on every change."""

    prefill: list[Peer]
    kind: Literal["peers"] = "peers"


@dataclass
class Submit:
    """Generate. `prefill_worker` is the router's choice for a prompt that the decode worker does not prefill itself
    (None: it must)."""

    request: Request
    prefill_worker: str | None = None
    kind: Literal["submit"] = "submit"


@dataclass
class Abort:
    request_id: str
    kind: Literal["abort"] = "abort"


@dataclass
class Ping:
    nonce: int
    kind: Literal["ping"] = "ping"


@dataclass
class Flush:
    """Empty the prefix cache (blocks in use stay)."""

    nonce: int
    kind: Literal["flush"] = "flush"


ToRouter = Register | Outputs | WorkerStats | Pong | Flushed
ToWorker = Refused | Peers | Submit | Abort | Ping | Flush
