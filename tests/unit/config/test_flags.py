"""Options of commands have their bounds on their fields, and a value out of bounds gives one line with its flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
from pydantic import Field

from txl_dist.config.flags import Rule, check_bounds, flag_of
from txl_dist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    num_lanes: Annotated[int, Field(ge=1), Rule("1 or more lanes")] = 4
    lengths: Annotated[tuple[Annotated[int, Field(ge=0, le=9)], ...], Rule("0 to 9 tokens")] = (3,)
    share: Annotated[float, Field(ge=0, lt=1), Rule("0 or more and below 1")] = 0.5
    free: int = -7


def test_values_within_their_bounds_are_accepted() -> None:
    check_bounds(Options())
    check_bounds(Options(num_lanes=1, lengths=(0, 9), share=0.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(num_lanes=0), r"^--num-lanes 0: it must be 1 or more lanes\.$"),
        (Options(lengths=(3, 10)), r"^--lengths 10: it must be 0 to 9 tokens\.$"),
        (Options(share=1.0), r"^--share 1\.0: it must be 0 or more and below 1\.$"),
        (Options(share=float("nan")), r"^--share nan: it must be 0 or more and below 1\.$"),
    ],
)
def test_a_value_out_of_bounds_is_named_with_its_flag_and_its_rule(options: Options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_bounds(options)


def test_a_flag_has_hyphens() -> None:
    assert flag_of("max_num_seqs") == "--max-num-seqs"
