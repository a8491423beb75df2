"""Request bodies, as OpenAI clients send them, with the extensions that other open servers have.

Fields a server of this kind is known for but that this one does not implement are refused when they would change the
answer (`REFUSED_*`), and accepted when they would not: user, metadata, store, service_tier, safety_identifier,
prompt_cache_key, prompt_cache_retention, prediction have no effect. Fields nobody knows are ignored, as clients expect.

Types are strict: no number in quotes, no true for 1. null is the same as absent.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_SEQUENCES = 2048
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_SALT_CHARS = 256
SMALLEST_PENALTY = 0.01  # logits are divided by it, and must stay finite

MAX_INT = 2**31 - 1  # far beyond any count, and safe in every tensor

TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Positive = Annotated[int, Field(ge=1, le=MAX_INT)]

# A value of several types is told apart by its own type, so that an error speaks of the one that was meant. Tags in
# angle brackets are no part of an error's `param` (router/http_errors.py).


def _string_or_list(value: Any) -> str | None:
    return "<string>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


STRING_OR_LIST = Discriminator(
    _string_or_list, custom_error_type="type", custom_error_message="must be a string or a list"
)
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]

Stops = Annotated[
    Annotated[StopString, Tag("<string>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<list>")],
    STRING_OR_LIST,
]


def _string_or_object(value: Any) -> str | None:
    return "<string>" if isinstance(value, str) else "<object>" if isinstance(value, dict) else None


ToolChoice = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(_string_or_object, custom_error_type="type", custom_error_message="must be a string or an object"),
]

# Field -> values that ask for nothing. Any other value would change the answer, and is refused rather than dropped.
REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "beam_width": (1,),
    "dry_multiplier": (0,),
    "early_stopping": (False,),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora": (),
    "mirostat": (0,),
    "no_repeat_ngram_size": (0,),
    "prompt_logprobs": (),
    "regex": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
REFUSED_COMPLETION = {**REFUSED, "suffix": ("",), "prompt_embeds": (), "response_format": ({"type": "text"},)}
REFUSED_CHAT = {
    **REFUSED,
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def invalid(param: str, message: str) -> PydanticCustomError:
    """A rule that spans fields was broken; `param` is the one to change."""
    return PydanticCustomError("invalid", "{message}", {"param": param, "message": message})


class Body(BaseModel):
    """Unknown fields are kept in `model_extra`, for `refuse` to look at."""

    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True)

    def refuse(self, refused: dict[str, tuple[Any, ...]]) -> None:
        for name, value in (self.model_extra or {}).items():
            if value is not None and name in refused and value not in refused[name]:
                raise invalid(name, "not supported with this value; leave it out")


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class GenerationBody(Body):
    """What completions and chat have in common."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[Real, Field(ge=0, le=2)] | None = Field(None, description="default 1; 0 is greedy")
    top_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = Field(None, description="0 or -1: all tokens")
    min_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Real, Field(ge=SMALLEST_PENALTY, le=10)] | None = None
    frequency_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Real, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(None, description="choice i draws with seed + i")
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="default true")
    add_special_tokens: bool | None = Field(
        None,
        description="tokens the tokenizer adds around a text, such as BOS; default: true for completions, false for "
        "chat, whose template writes its own",
    )
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = Field(
        None, description="cached prefixes are shared only between requests with the same salt"
    )

    @model_validator(mode="after")
    def consistent(self):
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "needs 'stream': true")
        return self

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def _prompt_kind(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return "<text>"
    if not isinstance(prompt, list):
        return None
    first = prompt[0] if prompt else 0
    return "<texts>" if isinstance(first, str) else "<token_lists>" if isinstance(first, list) else "<tokens>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(fail_fast=True), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("<token_lists>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="must be a string, a list of strings, a list of token ids or a list of those",
    ),
]


class CompletionBody(GenerationBody):
    prompt: Prompt
    best_of: int | None = Field(None, description="only the value of n")
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def supported(self):
        self.refuse(REFUSED_COMPLETION)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid("best_of", "supported only when equal to 'n'")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "may be 0 only with 'echo'")
        return self


class ContentPart(Body):
    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def is_text(self):
        if self.type not in ("text", "refusal") or getattr(self, self.type) is None:
            raise ValueError("only parts of type 'text' with a 'text' are supported: this model reads text")
        return self

    @property
    def plain_text(self) -> str:
        return getattr(self, self.type)


Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[ContentPart], Field(fail_fast=True), Tag("<list>")], STRING_OR_LIST
]


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class ChatBody(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = Field(None, description="wins over max_tokens")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: dict[str, Any] | None = Field(None, description="only {'type': 'text'}")
    tools: list[dict[str, Any]] | None = Field(
        None, description="given to the chat template; calls come back as the text the model writes"
    )
    tool_choice: ToolChoice | None = Field(None, description="'auto', or 'none' to hide the tools")
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="given to the chat template, if it has a use for it")
    add_generation_prompt: bool | None = Field(None, description="default true, unless the final message is continued")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def supported(self):
        self.refuse(REFUSED_CHAT)
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs 'logprobs': true")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise invalid("response_format", "only {'type': 'text'} is supported")
        if self.tool_choice not in (None, "auto", "none"):
            raise invalid("tool_choice", "only 'auto' and 'none' are supported: calls cannot be forced")
        if self.tools and self.parallel_tool_calls is False:
            raise invalid("parallel_tool_calls", "false is not supported: the model's text is returned as it is")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise invalid("add_generation_prompt", "must not be true with 'continue_final_message'")
            if self.messages[-1].role != "assistant":
                raise invalid("continue_final_message", "needs a final message of role 'assistant'")
        if reserved := RESERVED_TEMPLATE_VARIABLES & set(self.chat_template_kwargs or ()):
            raise invalid("chat_template_kwargs", f"may not set '{sorted(reserved)[0]}'")
        return self


RESERVED_TEMPLATE_VARIABLES = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


class TokenizeBody(Body):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def one_of(self):
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "give either 'prompt' or 'messages'")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
