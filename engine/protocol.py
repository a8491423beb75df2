"""Messages between the router and its workers. JSON on the wire (engine/wire.py); each names itself in `kind`."""

from dataclasses import dataclass, field
from typing import Literal

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
class Outputs:
    """All that one engine step produced for the router."""

    deltas: list[TokenDelta] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    kind: Literal["outputs"] = "outputs"


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
