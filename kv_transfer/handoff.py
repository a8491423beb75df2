"""Messages between a decode worker and a prefill worker. JSON on the wire; each names itself in `kind`."""

from dataclasses import dataclass, field
from typing import Literal

from engine.protocol import FailureCode, ModelInfo
from engine.request import PrefillReport, Request, SampledToken, TokenLogprobs

TransferKey = tuple[str, int]
"""(request id, generation): what a transfer's messages and blocks are checked against on arrival."""


@dataclass
class SamplerState:
    """Where a sequence's random stream stands. Every draw is a function of (seed, position), so a seed and a count are
    all of it; penalty counts follow from the token ids in the Handoff."""

    seed: int
    num_sampled: int


@dataclass
class Handoff:
    """Everything a decode engine needs to go on with a sequence.

    request            prompt, stop rules, sampling parameters, deadline
    block_table        shared pool: the blocks, now the decode side's, including spare ones to append to.
                       Two pools: empty; the decode side placed arriving blocks where it reserved room.
    first_token        sampled by the prefill engine, exactly once. None: only `num_computed` tokens have KV, all of
    them
                       cached; the decode worker prefills the rest itself (shared pool only)
    num_computed       tokens whose KV is valid in the blocks
    num_blocks         blocks of the whole prompt that the transfer covers (held + sent); 0 when the first
                       token ends the request, which then has no decode leg
    """

    request: Request
    first_token: SampledToken | None
    sampler: SamplerState
    report: PrefillReport
    num_blocks: int = 0
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    kind: Literal["handoff"] = "handoff"

    @property
    def key(self) -> TransferKey:
        return (self.request.request_id, self.request.generation)


# decode -> prefill


@dataclass
class Hello:
    """First message of a decode worker on a channel. `data_address` is where a pushing channel sends blocks."""

    worker: str
    epoch: str
    model: ModelInfo
    data_address: str = ""
    kind: Literal["hello"] = "hello"


@dataclass
class PrefillRequest:
    """Compute a prompt's KV and its first token.

    block_table, num_cached_tokens   local channel: blocks the decode side reserved, and how much of them is valid
    num_held_blocks   two pools: leading blocks the decode pool already has; they need not travel
    local_max_tokens  shared pool: if no more than this many tokens are uncached, only reserve blocks (see Handoff)
    """

    request: Request
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_held_blocks: int = 0
    local_max_tokens: int = 0
    kind: Literal["prefill"] = "prefill"

    @property
    def key(self) -> TransferKey:
        return (self.request.request_id, self.request.generation)


@dataclass
class CancelPrefill:
    """The request is gone. Both sides free what they hold for it; sent at most once, safe at any time."""

    key: TransferKey
    kind: Literal["cancel"] = "cancel"


@dataclass
class TransferDone:
    """Every block of the transfer is in the decode pool: the prefill side's lease ends."""

    key: TransferKey
    kind: Literal["transfer_done"] = "transfer_done"


@dataclass
class AskBlocks:
    """Shared pool: the decode side's stock of append blocks runs low; grant this many, those that are short as soon as
    they come free. Replaces what an earlier ask is still owed."""

    num_blocks: int
    kind: Literal["ask_blocks"] = "ask_blocks"


@dataclass
class ReturnBlocks:
    """Shared pool: a sequence ended or was preempted (`key`), or the stock is larger than needed (no key). Full blocks
    of the first `num_computed` tokens of `token_ids` become cached, the rest free."""

    block_table: list[int]
    key: TransferKey | None = None
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    cache_salt: str = ""
    kind: Literal["return_blocks"] = "return_blocks"


@dataclass
class Heartbeat:
    """Renews every lease of the sender. Echoed by the prefill worker's engine loop."""

    sent: float
    kind: Literal["heartbeat"] = "heartbeat"


# prefill -> decode (Handoff, and a Heartbeat's echo, also travel this way)


@dataclass
class Welcome:
    """Answer to Hello. `refusal` names the field that differs ("" when accepted). `pool` says how to map a shared pool
    (channel-specific)."""

    worker: str
    epoch: str
    refusal: str = ""
    lease_s: float = 30.0
    num_blocks: int = 0
    pool: dict[str, str | int] = field(default_factory=dict)
    kind: Literal["welcome"] = "welcome"


@dataclass
class PrefillFailed:
    key: TransferKey
    code: FailureCode
    message: str
    kind: Literal["prefill_failed"] = "prefill_failed"


@dataclass
class GrantBlocks:
    """Answer to AskBlocks: as many as there were, possibly none."""

    block_ids: list[int]
    kind: Literal["grant_blocks"] = "grant_blocks"


@dataclass
class Reclaimed:
    """The lease lapsed. The decode worker must drop all sequences in this pool and connect anew; blocks of a shared
    pool are taken back when it has closed the connection."""

    kind: Literal["reclaimed"] = "reclaimed"


ToPrefill = Hello | PrefillRequest | CancelPrefill | TransferDone | AskBlocks | ReturnBlocks | Heartbeat
ToDecode = Welcome | Handoff | PrefillFailed | GrantBlocks | Reclaimed | Heartbeat


# between the two ends of a channel that moves GPU memory; no engine sees them


@dataclass
class OfferBlocks:
    """prefill -> decode: entries first, first+1, ... of the transfer lie complete in these blocks of the prefill
    worker's pool."""

    key: TransferKey
    first: int
    block_ids: list[int]
    kind: Literal["offer_blocks"] = "offer_blocks"


@dataclass
class BlocksTaken:
    """decode -> prefill: so many offered blocks of the transfer were read, or will not be."""

    key: TransferKey
    num_blocks: int
    kind: Literal["blocks_taken"] = "blocks_taken"


@dataclass
class Farewell:
    """decode -> prefill: the last message before the connection closes. Nothing that this worker launched runs any
    more."""

    kind: Literal["farewell"] = "farewell"
