"""What a client is told that cannot have what it asked for, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from starlette.responses import Response

from txl_dist.console.suggest import did_you_mean
from txl_dist.errors import escaped

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_LONGEST = 1000
FOREIGN_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_tokens_to_sample": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "input": "prompt",
    "inputs": "prompt",
    "text": "prompt",
    "num_return_sequences": "n",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "top_logprobs": "logprobs",
}
"""Names that other programs have for a field, and ours."""
CHAT_FIELDS = {
    *("messages", "tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "response_format"),
    *("modalities", "audio", "prediction", "reasoning", "reasoning_effort", "verbosity", "web_search_options"),
    *("instructions", "conversation", "previous_response_id", "moderation"),
}
"""Fields of chat completions and responses, which have no meaning for a base model."""


class APIError(Exception):
    """A request cannot be answered: what is wrong, where, and the remedy. `param` is the field that it is about."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = escaped(self.message)[:_LONGEST]
        param = None if self.param is None else escaped(self.param)[:_LONGEST]
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> Response:
        """For HTTP."""
        headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}, 401: {"WWW-Authenticate": "Bearer"}}
        content = json.dumps(self.body()).encode()
        return Response(content, self.status, headers.get(self.status), media_type="application/json")


def of_validation(error: ValidationError, *, known: Mapping[str, FieldInfo]) -> APIError:
    """Of the first thing that is wrong with a body; `known` are its fields."""
    found = error.errors(include_url=False)
    # Where a value may have several forms, of the one that it fits best.
    first = max((one for one in found if one["loc"][:1] == found[0]["loc"][:1]), key=lambda one: len(one["loc"]))
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is no JSON: {first['ctx']['error']}. Mend it.", code="invalid_json")
    if first["type"] == "value_error" and not first["loc"]:
        reason = _reason(first)
        param = reason.partition(" ")[0]
        return APIError(400, f"{reason}.", param=param if param in known else None, code="invalid_value")
    if not first["loc"]:
        return APIError(400, "the body must be a JSON object, {...}.", code="invalid_json")
    param = str(first["loc"][0])
    if first["type"] == "extra_forbidden" and len(first["loc"]) > 1:
        message = f"{param}: unknown field {str(first['loc'][-1])!r}. Leave it out."
        return APIError(400, message, param=param, code="unknown_parameter")
    if first["type"] == "extra_forbidden":
        return APIError(400, _unknown_field(param, known=sorted(known)), param=param, code="unknown_parameter")
    about = known[param].description or "" if param in known else ""
    reason = f"n{about[1:]} Leave it out" if about.startswith("Not supported") else _reason(first)
    return APIError(400, f"{param}: {reason}.", param=param, code="invalid_value")


def _unknown_field(name: str, *, known: list[str]) -> str:
    if name in CHAT_FIELDS:
        return (
            f"unknown field {name!r}: it is for chat models. A base model continues a text. Leave the field out, "
            "and give the text as `prompt`."
        )
    meant = FOREIGN_FIELDS.get(name)
    hint = f" Its name here is {meant}." if meant in known else did_you_mean(name, known)
    return f"unknown field {name!r}.{hint} There are {', '.join(known)}."


def _reason(found: ErrorDetails) -> str:
    reason = found["msg"].removeprefix("Value error, ").rstrip(".")
    if found["type"] in ("missing", "value_error"):
        return reason[:1].lower() + reason[1:]
    given = repr(found["input"])
    return f"{reason[:1].lower() + reason[1:]}, not {given if len(given) <= 40 else given[:37] + '...'}"
