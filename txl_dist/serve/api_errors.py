"""Error responses to clients, in OpenAI's form: status, message, type, field and code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from starlette.responses import Response

from txl_dist.config.foreign_names import COUNTERPARTS
from txl_dist.console.suggest import did_you_mean
from txl_dist.errors import escaped

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MAX_MESSAGE_LEN = 1000
_FIELDS_OF_FLAGS = {
    "max_tokens": "max_tokens",
    "num_samples": "n",
    "prompt": "prompt",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop",
    "log_probs": "logprobs",
}
"""Request fields of a completion, by the name of the flag of `txl generate` that has the same meaning."""


def _foreign_fields() -> dict[str, str]:
    """Return this server's field for each name that other programs use as a command-line flag or in an HTTP API."""
    fields = {
        "max_output_tokens": "max_tokens",
        "max_tokens_to_sample": "max_tokens",
        "inputs": "prompt",
        "repeat_penalty": "repetition_penalty",
    }
    for row in COUNTERPARTS:
        if row.here in _FIELDS_OF_FLAGS:
            for name in row.foreign.split():
                fields.setdefault(name, _FIELDS_OF_FLAGS[row.here])
    return fields


FOREIGN_FIELDS = _foreign_fields()
"""Request fields of this server, by the names that other programs have for them. Error messages suggest the fields."""
CHAT_FIELDS = {
    "messages",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "parallel_tool_calls",
    "response_format",
    "modalities",
    "audio",
    "prediction",
    "reasoning",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
    "instructions",
    "conversation",
    "previous_response_id",
    "moderation",
}
"""Fields of chat completions and of OpenAI's responses API. These fields have no meaning for a base model."""


class APIError(Exception):
    """Refusal of a request, which the client gets as an HTTP error. Routes and checks raise it.

    The message says what is wrong and how to correct it. `param` is the request field with the fault, and `code` names
    the kind of fault.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the JSON object for the response, in the form that OpenAI's clients expect."""
        if self.status < 500:
            default_type = "invalid_request_error"
        else:
            default_type = "server_error"
        message = escaped(self.message)[:_MAX_MESSAGE_LEN]
        if self.param is None:
            param = None
        else:
            param = escaped(self.param)[:_MAX_MESSAGE_LEN]
        return {
            "error": {
                "message": message,
                "type": _TYPES.get(self.status, default_type),
                "param": param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """Return the HTTP response, with the headers that its status requires."""
        headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}, 401: {"WWW-Authenticate": "Bearer"}}
        content = json.dumps(self.body()).encode()
        return Response(content, self.status, headers.get(self.status), media_type="application/json")


def from_validation(error: ValidationError, *, fields: Mapping[str, FieldInfo]) -> APIError:
    """Return the API error for the first problem that pydantic found in a request body with these `fields`."""
    problem = _first_problem(error)
    location = problem["loc"]
    if problem["type"] == "json_invalid":
        return APIError(400, f"the body is not JSON: {problem['ctx']['error']}. Correct the body.", code="invalid_json")
    if problem["type"] == "value_error" and not location:
        reason = _reason(problem)
        first_word = reason.partition(" ")[0]
        field = first_word if first_word in fields else None
        return APIError(400, f"{reason}.", param=field, code="invalid_value")
    if not location:
        return APIError(400, "the body must be a JSON object, {...}.", code="invalid_json")
    param = str(location[0])
    if problem["type"] == "extra_forbidden":
        if len(location) > 1:
            message = f"{param}: unknown field {str(location[-1])!r}. Remove this field."
        else:
            message = _unknown_field(param, known=sorted(fields))
        return APIError(400, message, param=param, code="unknown_parameter")
    if param in fields:
        description = fields[param].description or ""
    else:
        description = ""
    reason = _reason(problem)
    if description.startswith("Not supported"):
        reason = f"n{description[1:]} Remove this field"
    return APIError(400, f"{param}: {reason}.", param=param, code="invalid_value")


def _first_problem(error: ValidationError) -> ErrorDetails:
    """Return the first problem of a body.

    If a field can have several forms, the problem of the form that fits best is returned.
    """
    problems = error.errors(include_url=False)
    field = problems[0]["loc"][:1]
    of_field = [problem for problem in problems if problem["loc"][:1] == field]
    return max(of_field, key=lambda problem: len(problem["loc"]))


def _unknown_field(name: str, *, known: list[str]) -> str:
    if name in CHAT_FIELDS:
        return (
            f"unknown field {name!r}: this field is for chat models. A base model continues a text. Remove the field, "
            "and give the text as `prompt`."
        )
    field = FOREIGN_FIELDS.get(name)
    if field in known:
        hint = f" Use {field} instead."
    else:
        hint = did_you_mean(name, known)
    return f"unknown field {name!r}.{hint} Known fields: {', '.join(known)}."


def _reason(problem: ErrorDetails) -> str:
    """Return pydantic's message in lower case, followed by the wrong value. A value of more than 40 characters is
    shortened."""
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    message = message[:1].lower() + message[1:]
    if problem["type"] in ("missing", "value_error"):
        return message
    value = repr(problem["input"])
    if len(value) > 40:
        value = value[:37] + "..."
    return f"{message}, not {value}"
