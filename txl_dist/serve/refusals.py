"""What a client is told that cannot have what it asked for, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response

from txl_dist.console import escaped
from txl_dist.suggest import did_you_mean

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_LONGEST = 1000


class RefusalError(Exception):
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


def of_validation(error: ValidationError, *, known: Iterable[str]) -> RefusalError:
    """Of the first thing that is wrong with a body; `known` are the names of its fields."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return RefusalError(400, f"the body is no JSON: {first['ctx']['error']}. Mend it.", code="invalid_json")
    if first["type"] == "value_error" and not first["loc"]:
        return RefusalError(400, f"{_reason(first)}.", code="invalid_value")
    if not first["loc"]:
        return RefusalError(400, "the body must be a JSON object, {...}.", code="invalid_json")
    param = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        names = sorted(known)
        hint = did_you_mean(param, names)
        message = f"unknown field {param!r}.{hint} There are {', '.join(names)}."
        return RefusalError(400, message, param=param, code="unknown_parameter")
    return RefusalError(400, f"{param}: {_reason(first)}.", param=param, code="invalid_value")


def _reason(found: ErrorDetails) -> str:
    reason = found["msg"].removeprefix("Value error, ").rstrip(".")
    if found["type"] in ("missing", "value_error"):
        return reason[:1].lower() + reason[1:]
    given = repr(found["input"])
    return f"{reason[:1].lower() + reason[1:]}, not {given if len(given) <= 40 else given[:37] + '...'}"
