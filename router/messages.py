"""Chat messages as clients send them, to the form chat templates understand."""

import re
from typing import Any

from pydantic_core import from_json

from router.http_errors import bad_request
from router.schemas import ChatMessage, ContentPart

PART_SEPARATOR = "\n"
SYSTEM_ROLES = ("system", "developer")


def template_messages(messages: list[ChatMessage], strip_lines: list[re.Pattern[str]]) -> list[dict[str, Any]]:
    """Plain dictionaries with string contents.

    Content parts are joined by a newline; the developer role becomes system; the JSON text of a tool call's arguments
    becomes the object it spells; keys this service does not know (name, tool_call_id, reasoning_content, ...) pass
    through. Lines of system messages that fully match one of `strip_lines` are left out: a line that differs in each
    request would end every cached prefix where it stands.

    Raises ApiError (400) for a message without content.
    """
    return [_template_message(index, message, strip_lines) for index, message in enumerate(messages)]


def _template_message(index: int, message: ChatMessage, strip_lines: list[re.Pattern[str]]) -> dict[str, Any]:
    content = _flatten(message.content)
    if content is None:
        if not message.tool_calls:
            raise bad_request("content may be null only beside tool_calls", f"messages.{index}.content")
        content = ""
    if message.role in SYSTEM_ROLES and strip_lines:
        content = _strip_lines(content, strip_lines)
    role = "system" if message.role in SYSTEM_ROLES else message.role
    result: dict[str, Any] = {**(message.model_extra or {}), "role": role, "content": content}
    if message.tool_calls:
        result["tool_calls"] = [_template_tool_call(call) for call in message.tool_calls]
    return result


def _flatten(content: str | list[ContentPart] | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return PART_SEPARATOR.join(part.plain_text for part in content)


def _strip_lines(text: str, patterns: list[re.Pattern[str]]) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not any(pattern.fullmatch(line.strip()) for pattern in patterns))


def _template_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = from_json(function["arguments"])  # as strict as for the body: no lone surrogates, bounded depth
    except ValueError:  # a model wrote it, and clients send it back as it was
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
