"""Descriptions of the routes for /openapi.json: responses, request bodies, and the schemas of these bodies.

Routes read their bodies themselves, so FastAPI does not know the types of requests. `describe_requests` adds these
types.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from txl_dist.serve import api_schema
from txl_dist.serve.api_schema import CompletionRequest, DetokenizeRequest, MemoryRequest, TokenizeRequest

UPLOAD = "application/octet-stream"
"""Content type of a memory file."""
ANY_ERROR = (400, 404, 408, 413, 415, 429, 500, 503)
"""HTTP statuses of the errors that a route can return if it runs the model."""
MEMORY_ERRORS = (404, 408, 413, 429, 503)
"""HTTP statuses of the errors that a route for a stored memory can return."""
_MEANINGS = {
    400: "The request is not valid. `param` names the field.",
    401: "The key is missing or wrong.",
    404: "The model or the memory does not exist, or the memory has expired.",
    408: "The body arrived too slowly, or the request timed out before any of its texts had begun.",
    413: "The body is too long.",
    415: "The content type is not supported.",
    429: "Too many requests are waiting. Try again after Retry-After seconds.",
    500: "A defect, or a model whose probabilities are not finite.",
    503: "The server is stopping, or has no space for a memory.",
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
COMPLETION_RESPONSE: dict[str, Any] = {
    "model": api_schema.CompletionResponse,
    "description": "The texts. With `stream`, pieces of the texts, each a CompletionResponse in a server-sent event.",
    "content": {"text/event-stream": {"schema": _EVENT}},
}
FILE_RESPONSE: dict[str, Any] = {"content": {UPLOAD: _BINARY}}
METRICS_RESPONSE: dict[str, Any] = {"content": {"text/plain": {"schema": {"type": "string"}}}}


def responses(*errors: int, success: dict[str, Any], status: int = 200) -> dict[int | str, dict[str, Any]]:
    """Return the description of a route's responses by status: success, 401, and the statuses in `errors`.

    `success` describes the successful response, whose status is `status`.
    """
    by_status: dict[int | str, dict[str, Any]] = {}
    for code in (401, *errors):
        by_status[code] = {"model": api_schema.Error, "description": _MEANINGS[code]}
    by_status[status] = success
    return by_status


def json_response(model: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a JSON response. The text of the description is the docstring of `model`."""
    return {"model": model, "description": model.__doc__}


def request_body(model: type[BaseModel], *, accepts_file: bool = False) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body is of this type. `accepts_file` also allows a memory file."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    content: dict[str, Any] = {"application/json": {"schema": reference}}
    if accepts_file:
        content[UPLOAD] = _BINARY
    return {"requestBody": {"required": True, "content": content}}


def describe_requests(app: FastAPI) -> None:
    """Add the types of request bodies to the app's OpenAPI description, and remove status 422, which no route sends."""
    make_description = app.openapi

    def openapi() -> dict[str, Any]:
        description = make_description()
        for model in (CompletionRequest, MemoryRequest, TokenizeRequest, DetokenizeRequest):
            model_schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            nested_schemas = model_schema.pop("$defs", {})
            description["components"]["schemas"] |= {**nested_schemas, model.__name__: model_schema}
        for operations in description["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return description

    app.openapi = openapi  # type: ignore[method-assign]
