"""What every handler needs, and the rules that every generating request passes before it is dispatched."""

import secrets
import time
import uuid
from dataclasses import dataclass
from functools import cached_property

from engine.config import CPU_MAX_RUNNING, DeploymentConfig
from engine.protocol import ModelInfo
from engine.request import Request, SamplingParams
from router.dispatcher import Dispatcher
from router.divergence import PromptHistory
from router.generation import Choice
from router.http_errors import ApiError, bad_request, unavailable
from router.metrics import Metrics
from router.schemas import MAX_SEQUENCES, GenerationBody
from router.stop_strings import StopStrings
from router.tokenizer import Tokenizer

SEED_RANGE = 2**64
SMALLEST_TOP_P = 1e-9  # keeps the best token alone
SMALLEST_TEMPERATURE = 1e-5  # below it logits divided by it overflow, and the best token wins anyway
DEFAULT_TEMPERATURE = 1.0  # OpenAI's; a model's generation_config does not change it


@dataclass
class Service:
    dispatcher: Dispatcher
    tokenizer: Tokenizer
    config: DeploymentConfig
    metrics: Metrics | None
    history: PromptHistory | None
    started: int

    @cached_property
    def model_name(self) -> str:
        return self.config.router.served_model_name or self.tokenizer.model_dir.resolve().name

    @property
    def model(self) -> ModelInfo:
        """Raises ApiError (503) until a worker has told what it serves."""
        if self.dispatcher.model is None:
            raise unavailable("no worker is up yet; try again")
        return self.dispatcher.model

    def check_model_name(self, name: str | None) -> None:
        """There is one model, so any name means it, unless the configuration names it."""
        if name is not None and self.config.router.served_model_name not in (None, name):
            raise ApiError(
                404, f"no such model; this server has '{self.model_name}'", param="model", code="model_not_found"
            )

    def check_text(self, text: str, param: str) -> None:
        """Raises ApiError (400) for a text that cannot fit the context however it is tokenized."""
        fewest, limit = self.tokenizer.fewest_tokens(text), self.model.max_model_len
        if fewest >= limit:
            raise bad_request(
                f"the prompt has at least {fewest} tokens, but the context holds {limit} with at least one of output",
                param,
                "context_length_exceeded",
            )

    def check_num_sequences(self, num_sequences: int) -> None:
        """More than the queue ever holds would be a 429 for ever."""
        config = self.config
        most = config.router.max_waiting + config.topology.decode_workers * (
            config.decode.max_running or CPU_MAX_RUNNING
        )
        if num_sequences > most:
            raise bad_request(
                f"prompts x n = {num_sequences} sequences in one request; this server holds at most {most}", param="n"
            )


@dataclass
class Prompt:
    """text: as the client sent it, None when it sent token ids."""

    token_ids: list[int]
    text: str | None = None


def new_response_id(kind: str) -> str:
    """Made here, never taken from a client. A response's sequences are numbered behind it."""
    return f"{kind}-{uuid.uuid4().hex}"


def make_choices(
    service: Service,
    body: GenerationBody,
    prompts: list[Prompt],
    *,
    response_id: str,
    arrival: float,
    param: str,
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None,
    continues: bool,
    prompt_logprobs: int | None = None,
) -> list[Choice]:
    """`n` sequences for each prompt, checked against the model and complete: the engines default nothing.

    param               the field the prompt came in, for errors
    max_tokens          as the client asked; default_max_tokens (None: the rest of the context) is cut to what fits
    continues           the answer goes on with the prompt's text, so a leading space of it is kept
    """
    model = service.model
    n = body.n or 1
    if len(prompts) * n > MAX_SEQUENCES:
        raise bad_request(f"at most {MAX_SEQUENCES} sequences a request (prompts times n)", "n")
    check_token_ids(body.stop_token_ids or [], model, "stop_token_ids")
    stop_token_ids = list(dict.fromkeys(body.stop_token_ids or []))
    bias = logit_bias(body, model)
    choices: list[Choice] = []
    for prompt_index, prompt in enumerate(prompts):
        check_token_ids(prompt.token_ids, model, param)
        room = room_for_output(len(prompt.token_ids), max_tokens, model, param)
        wanted = max_tokens if max_tokens is not None else default_max_tokens
        limit = room if wanted is None else min(room, wanted)
        if (body.min_tokens or 0) > limit:
            raise bad_request(f"min_tokens is {body.min_tokens}, but at most {limit} tokens may follow", "min_tokens")
        for number in range(n):
            seed = secrets.randbits(64) if body.seed is None else (body.seed + number) % SEED_RANGE
            sampling = SamplingParams(
                max_tokens=max(1, limit),
                min_tokens=body.min_tokens or 0,
                temperature=temperature(body.temperature),
                top_p=1.0 if body.top_p is None else max(body.top_p, SMALLEST_TOP_P),
                top_k=max(0, body.top_k or 0),
                min_p=body.min_p or 0.0,
                seed=seed,
                repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
                frequency_penalty=body.frequency_penalty or 0.0,
                presence_penalty=body.presence_penalty or 0.0,
                logit_bias=bias,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                ignore_eos=bool(body.ignore_eos),
                eos_token_ids=list(model.eos_token_ids),
                stop_token_ids=stop_token_ids,
            )
            index = len(choices)
            request = Request(
                request_id=f"{response_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=sampling,
                cache_salt=body.cache_salt or "",
                arrival=arrival,
                deadline=arrival + service.config.router.request_timeout_s,
            )
            skip_special = body.skip_special_tokens is not False
            include_stop = bool(body.include_stop_str_in_output)
            choices.append(
                Choice(
                    index=index,
                    prompt_index=prompt_index,
                    request=request,
                    detokenizer=service.tokenizer.vocabulary.detokenizer(skip_special, continues),
                    stops=StopStrings(body.stops, include_stop),
                    include_stop=include_stop,
                    keeps_no_token=max_tokens == 0,
                )
            )
    return choices


def temperature(asked: float | None) -> float:
    if asked is None:
        return DEFAULT_TEMPERATURE
    return asked if asked >= SMALLEST_TEMPERATURE else 0.0


def room_for_output(num_prompt: int, max_tokens: int | None, model: ModelInfo, param: str) -> int:
    """Tokens that may follow the prompt. Raises ApiError (400) with the counts when it, or it and max_tokens, do not
    fit."""
    limit = model.max_model_len
    if num_prompt == 0:
        raise bad_request(f"{param} has no tokens", param)
    if num_prompt >= limit:
        raise bad_request(
            f"the prompt has {num_prompt} tokens, but the context holds {limit} with at least one of output",
            param,
            "context_length_exceeded",
        )
    if max_tokens is not None and num_prompt + max_tokens > limit:
        raise bad_request(
            f"the prompt's {num_prompt} tokens and max_tokens {max_tokens} are {num_prompt + max_tokens}, "
            f"but the context holds {limit}",
            param,
            "context_length_exceeded",
        )
    return limit - num_prompt


def check_token_ids(token_ids: list[int], model: ModelInfo, param: str) -> None:
    """Raises ApiError (400) for an id outside the model's vocabulary."""
    if token_ids and (max(token_ids) >= model.vocab_size or min(token_ids) < 0):
        raise bad_request(f"{param}: token ids must be 0 to {model.vocab_size - 1}", param, "invalid_token_id")


def logit_bias(body: GenerationBody, model: ModelInfo) -> dict[int, float]:
    """The body's logit_bias with its keys, decimal strings in JSON, as token ids."""
    bias: dict[int, float] = {}
    for key, value in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise bad_request("logit_bias: keys must be token ids", "logit_bias", "invalid_token_id")
        bias[int(key)] = value
    check_token_ids(list(bias), model, "logit_bias")
    return bias


def now() -> float:
    """Unix time in seconds, the clock of Request.arrival and Request.deadline."""
    return time.time()
