"""Request bodies: read up to a limit, parsed and validated in one step, described in the OpenAPI schema."""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from router.http_errors import ApiError, from_validation
from router.sse import ClientGone

MAX_BODY_BYTES = 16 * 2**20

B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, model: type[B]) -> B:
    """Raises ApiError: 413 beyond MAX_BODY_BYTES (without reading on), 415 for another type than JSON, 400 for what
    does not parse or validate. Invalid UTF-8 and lone surrogates are not JSON."""
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(415, "the body must be JSON; send it with 'Content-Type: application/json'")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    chunks = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks += message.get("body", b"")
        if len(chunks) > MAX_BODY_BYTES:
            raise _too_large()
        if not message.get("more_body", False):
            break
    try:
        return model.model_validate_json(bytes(chunks))
    except ValidationError as error:
        raise from_validation(error) from None


def _too_large() -> ApiError:
    return ApiError(413, f"the request body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose handler calls `read_body` with `model`. Its parts go to the schema's
    components, see `component_schemas`."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def component_schemas(models: list[type[BaseModel]]) -> dict[str, Any]:
    """JSON schemas of the models and all they refer to, by name."""
    schemas: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    return schemas
