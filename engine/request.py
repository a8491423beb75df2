"""A generation request and the bookkeeping of its tokens, the same on both engines."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass
class SamplingParams:
    """How tokens are chosen and when they stop. Every field is resolved by the router; engines never default.

    max_tokens      most tokens to generate, at least 1
    min_tokens      end-of-sequence and stop tokens cannot be sampled before this many tokens
    temperature     0 is greedy
    top_p, top_k, min_p   nucleus mass; number kept (0: all); floor relative to the best probability
    seed            64-bit; with the token's position it fixes every random choice (engine/sampling.py)
    logprobs        None: none; n: the sampled token's logprob and those of the n most likely tokens
    prompt_logprobs None: none; n: the same for each prompt token (such a request reuses no cached block)
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    eos_token_ids: list[int] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)


@dataclass
class Request:
    """One sequence to generate.

    request_id        made by the router, never by a client
    generation        attempt number; raised each time the router submits the request again
    output_token_ids  tokens an earlier attempt already delivered; generation goes on after them
    cache_salt        prefix blocks are shared only between requests with the same salt
    arrival, deadline Unix times in seconds
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    generation: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    cache_salt: str = ""
    arrival: float = 0.0
    deadline: float = float("inf")


@dataclass
class TokenLogprobs:
    """Natural-log probabilities at one position under the unmodified model distribution (before temperature,
    penalties and bias). `top` lists (token id, logprob), most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass
class PrefillReport:
    """What really happened to a prompt, measured where it happened.

    num_cached_tokens      prompt tokens whose KV was reused, not computed (counted once, at first admission)
    num_blocks_held        leading blocks the decode pool already had, so they did not travel
    num_blocks_sent        blocks moved over the channel; num_bytes_sent: their bytes
    queue_ms, prefill_ms   waiting for and inside the prefill engine
    transfer_ms            last chunk computed -> blocks usable on the decode side (the exposed part)
    worker                 name of the worker that prefilled; filled in by the router
    """

    where: Literal["local", "remote"] = "local"
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_blocks_held: int = 0
    num_blocks_sent: int = 0
    num_bytes_sent: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    worker: str = ""


@dataclass
class TokenDelta:
    """New tokens of one request, from its decode worker to the router. `finish_reason` is set once, on the last one;
    `stop_token_id` names the token that ended it. `prefill` and `prompt_logprobs` (None for the first prompt token)
    come with the first delta only."""

    request_id: str
    generation: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prefill: PrefillReport | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Sequence:
    """A request's tokens so far and its stop rules. `append` is the only way a token gets in, on either engine."""

    def __init__(self, request: Request):
        self.request = request
        self.output_token_ids = list(request.output_token_ids)
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def token_ids(self) -> list[int]:
        return self.request.prompt_token_ids + self.output_token_ids

    def __len__(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def banned_token_ids(self) -> list[int]:
        """Tokens that may not be sampled next: what would end the sequence before min_tokens."""
        sampling = self.sampling
        if len(self.output_token_ids) >= sampling.min_tokens:
            return []
        return sorted(set(sampling.stop_token_ids) | set(sampling.eos_token_ids))

    def append(self, token_id: int) -> FinishReason | None:
        """Add a sampled token and apply the stop rules."""
        assert self.finish_reason is None, "token appended to a finished sequence"
        self.output_token_ids.append(token_id)
        sampling = self.sampling
        if len(self.output_token_ids) > sampling.min_tokens:
            ends = token_id in sampling.eos_token_ids and not sampling.ignore_eos
            if ends or token_id in sampling.stop_token_ids:
                self.finish_reason, self.stop_token_id = "stop", token_id
                return self.finish_reason
        if len(self.output_token_ids) >= sampling.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason
