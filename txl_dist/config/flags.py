"""Bounds of a command's options. The bounds are declared on the options' fields, in the same way as for settings.

    @dataclass(frozen=True, kw_only=True)
    class Options:
        port: Annotated[int, Field(ge=0, lt=2**16), Rule("0 ... 65535")] = 8000

pydantic compares a value with its annotation. `check_bounds` turns pydantic's error into one line for the command
line.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, get_type_hints

from pydantic import TypeAdapter, ValidationError

from txl_dist.console.formatting import flag_of
from txl_dist.errors import ConfigError


class Rule(NamedTuple):
    """Description of an option's bounds for messages, such as "1 or more tokens"."""

    text: str


def check_bounds(options: Any) -> None:
    """Check the fields of a dataclass of options that have a `Rule`.

    Raises ConfigError, which names the flag and the rule, for the first value that is out of bounds.
    """
    annotations = get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        annotation = annotations[field.name]
        rules = [mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Rule)]
        if not rules:
            continue
        try:
            TypeAdapter(annotation).validate_python(getattr(options, field.name))
        except ValidationError as error:
            wrong = error.errors()[0]["input"]
            raise ConfigError(f"{flag_of(field.name)} {wrong}: it must be {rules[0].text}.") from error
