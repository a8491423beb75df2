"""POST /v1/completions.

Differences from OpenAI's: `echo` with `logprobs` scores the prompt, also with `max_tokens` 0; `stop_reason` names the
stop string or stop token that ended a choice; `return_token_ids` adds `prompt_token_ids` and `token_ids` to each
choice; `usage.prefill` tells what each prompt's prefill cost (router/generation.py).
"""

from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.request import TokenLogprobs
from router.body import read_body
from router.detokenizer import Vocabulary
from router.generation import Choice, Piece
from router.logprobs import CompletionLogprobs
from router.respond import ResponseForm, respond
from router.schemas import CompletionBody
from router.service import Prompt, Service, make_choices, new_response_id, now

DEFAULT_MAX_TOKENS = 16


async def create_completion(service: Service, request: Request) -> Response:
    arrival = now()
    body = await read_body(request, CompletionBody)
    service.check_model_name(body.model)
    prompts = await read_prompts(service, body)
    response_id = new_response_id("cmpl")
    scores_prompt = body.echo and body.logprobs is not None
    choices = make_choices(
        service,
        body,
        prompts,
        response_id=response_id,
        arrival=arrival,
        param="prompt",
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if scores_prompt else None,
        continues=True,
    )
    vocabulary, skip_special = service.tokenizer.vocabulary, body.skip_special_tokens is not False
    echoes = [echo(prompt, vocabulary, skip_special) for prompt in prompts] if body.echo else []
    for choice in choices:
        choice.shows_token_ids = bool(body.return_token_ids)
        if body.echo:
            choice.prompt_text, choice.prompt_offsets = echoes[choice.prompt_index]
            choice.num_chars = len(choice.prompt_text)
    form = CompletionForm(response_id, int(arrival), service.model_name, vocabulary)
    return await respond(service, request, choices, form, stream=bool(body.stream), include_usage=body.include_usage)


async def read_prompts(service: Service, body: CompletionBody) -> list[Prompt]:
    """The body's prompts, long texts tokenized off the event loop. Raises ApiError (400) for a text that cannot fit."""
    prompt, tokenizer = body.prompt, service.tokenizer
    if isinstance(prompt, list) and not isinstance(prompt[0], str):
        lists = prompt if isinstance(prompt[0], list) else [prompt]
        return [Prompt(token_ids) for token_ids in lists]
    texts = [prompt] if isinstance(prompt, str) else prompt
    add_special = body.add_special_tokens is not False

    def encode() -> list[Prompt]:
        for text in texts:
            service.check_text(text, "prompt")
        return [Prompt(tokenizer.encode(text, add_special), text) for text in texts]

    return await tokenizer.run(sum(map(len, texts)), encode)


def echo(prompt: Prompt, vocabulary: Vocabulary, skip_special: bool) -> tuple[str, list[int]]:
    """The prompt's text, as it came or, for token ids, as they read; and the characters before each of its tokens."""
    detokenizer = vocabulary.detokenizer(skip_special)
    offsets, num_chars, parts = [], 0, []
    for token_id in prompt.token_ids:
        offsets.append(num_chars)
        parts.append(detokenizer.push([token_id]))
        num_chars += len(parts[-1])
    parts.append(detokenizer.finish())
    return "".join(parts) if prompt.text is None else prompt.text, offsets


class CompletionForm(ResponseForm):
    kind = chunk_kind = "text_completion"
    plain_head = '"text":'
    plain_tail = ""

    def __init__(self, response_id: str, created: int, model_name: str, vocabulary: Vocabulary):
        super().__init__(response_id, created, model_name)
        self._vocabulary = vocabulary

    def chunk_choice(self, piece: Piece) -> dict[str, Any]:
        return self._choice(piece.choice, [piece])

    def whole_choice(self, choice: Choice, pieces: list[Piece]) -> dict[str, Any]:
        return self._choice(choice, pieces)

    def _choice(self, choice: Choice, pieces: list[Piece]) -> dict[str, Any]:
        echoed = (choice.prompt_text or "") if pieces[0].is_first else ""
        result: dict[str, Any] = {
            "index": choice.index,
            "text": echoed + "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(choice, pieces),
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
        }
        if choice.shows_token_ids:
            if pieces[0].is_first:
                result["prompt_token_ids"] = choice.request.prompt_token_ids
            result["token_ids"] = [token_id for piece in pieces for token_id in piece.token_ids]
        return result

    def _logprobs(self, choice: Choice, pieces: list[Piece]) -> dict[str, Any] | None:
        if choice.request.sampling.logprobs is None:
            return None
        result = CompletionLogprobs()
        for piece in pieces:
            if piece.is_first and choice.prompt_offsets is not None:
                scores: list[TokenLogprobs | None] = piece.prompt_logprobs or []
                prompt = zip(choice.request.prompt_token_ids, scores, choice.prompt_offsets, strict=True)
                for token_id, score, offset in prompt:
                    result.add(token_id, score, offset, self._vocabulary)
            for token_id, entry, offset in zip(piece.token_ids, piece.logprobs or [], piece.offsets, strict=True):
                result.add(token_id, entry, offset, self._vocabulary)
        return vars(result)
