"""POST /v1/chat/completions.

Differences from OpenAI's: tools are given to the chat template and calls come back as the text the model writes;
`max_tokens` defaults to the rest of the context; `stop_reason` names the stop string or stop token that ended a
choice; `return_token_ids` adds `prompt_token_ids` to the response and `token_ids` to each choice; `usage.prefill`
tells what each prompt's prefill cost (router/generation.py).
"""

import math
from typing import Any

from fastapi import Request
from starlette.responses import Response

from router.body import read_body
from router.detokenizer import Vocabulary
from router.generation import Choice, Piece
from router.http_errors import bad_request
from router.logprobs import chat_logprobs
from router.messages import template_messages
from router.respond import ResponseForm, respond
from router.schemas import ChatBody, ChatMessage
from router.service import Prompt, Service, make_choices, new_response_id, now
from router.tokenizer import TemplateError


async def create_chat_completion(service: Service, request: Request) -> Response:
    arrival = now()
    body = await read_body(request, ChatBody)
    service.check_model_name(body.model)
    prompt = await read_chat(service, body)
    response_id = new_response_id("chatcmpl")
    choices = make_choices(
        service,
        body,
        [prompt],
        response_id=response_id,
        arrival=arrival,
        param="messages",
        max_tokens=body.max_completion_tokens or body.max_tokens,
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        continues=bool(body.continue_final_message),
    )
    for choice in choices:
        choice.shows_token_ids = bool(body.return_token_ids)
    form = ChatForm(response_id, int(arrival), service.model_name, service.tokenizer.vocabulary)
    return await respond(service, request, choices, form, stream=bool(body.stream), include_usage=body.include_usage)


async def read_chat(service: Service, body: ChatBody) -> Prompt:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if not service.tokenizer.template_mentions("reasoning_effort"):
            raise bad_request("this model's chat template has no reasoning_effort; leave it out", "reasoning_effort")
        variables["reasoning_effort"] = body.reasoning_effort
    continues = bool(body.continue_final_message)
    return await render_prompt(
        service,
        body.messages,
        tools=None if body.tool_choice == "none" else body.tools,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        variables=variables,
        add_special_tokens=bool(body.add_special_tokens),
        must_fit=True,
    )


async def render_prompt(
    service: Service,
    messages: list[ChatMessage],
    *,
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    variables: dict[str, Any] | None = None,
    add_special_tokens: bool = False,
    must_fit: bool = False,
) -> Prompt:
    """A chat as the model reads it, rendered and tokenized, off the event loop when it is long. Raises ApiError (400),
    with must_fit also for a text that cannot fit the context."""
    tokenizer = service.tokenizer
    if not tokenizer.has_chat_template:
        raise bad_request("this model has no chat template; use /v1/completions", "messages")
    plain = template_messages(messages, service.config.router.strip_system_lines)

    def render() -> Prompt:
        text = tokenizer.render_chat(
            plain, tools or None, add_generation_prompt, continue_final_message, variables or {}
        )
        if must_fit:
            service.check_text(text, "messages")
        return Prompt(tokenizer.encode(text, add_special_tokens), text)

    try:
        return await tokenizer.run(math.inf if tools or variables else num_chars(plain), render)
    except TemplateError as error:
        raise bad_request(str(error), "messages") from error


def num_chars(messages: list[dict[str, Any]]) -> float:
    """Characters of messages' texts; infinite where there is more than text."""
    if any("tool_calls" in message for message in messages):
        return math.inf
    return sum(len(message.get("content") or "") for message in messages)


class ChatForm(ResponseForm):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    plain_head = '"delta":{"content":'
    plain_tail = "}"

    def __init__(self, response_id: str, created: int, model_name: str, vocabulary: Vocabulary):
        super().__init__(response_id, created, model_name)
        self._vocabulary = vocabulary

    def chunk_choice(self, piece: Piece) -> dict[str, Any]:
        delta = {"role": "assistant", "content": piece.text} if piece.is_first else {"content": piece.text}
        return self._choice("delta", delta, piece.choice, [piece])

    def whole_choice(self, choice: Choice, pieces: list[Piece]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces)}
        return self._choice("message", message, choice, pieces)

    def _choice(self, key: str, message: dict[str, str], choice: Choice, pieces: list[Piece]) -> dict[str, Any]:
        entries = [entry for piece in pieces for entry in piece.logprobs or []]
        has_logprobs = choice.request.sampling.logprobs is not None
        result: dict[str, Any] = {
            "index": choice.index,
            key: message,
            "logprobs": chat_logprobs(entries, self._vocabulary) if has_logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
        }
        if choice.shows_token_ids:
            result["token_ids"] = [token_id for piece in pieces for token_id in piece.token_ids]
        return result

    def extras(self, choices: list[Choice]) -> dict[str, Any]:
        return {"prompt_token_ids": choices[0].request.prompt_token_ids} if choices[0].shows_token_ids else {}
