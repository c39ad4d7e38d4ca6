"""Environment variables that describe this rank: read and checked before torch is imported.

Some of the variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT can be left over from another job. A
process that was started alone would then wait for ranks that do not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from txl_dist.errors import ConfigError

RUN_ALONE = "To run alone: unset WORLD_SIZE RANK LOCAL_RANK MASTER_ADDR MASTER_PORT"


class RankEnvironment(NamedTuple):
    """Place of this process in a job, as environment variables describe it. Without these variables the job has one
    rank, rank 0."""

    rank: int
    """Number of this process in the job, from 0 to `world_size` - 1."""
    world_size: int
    """Number of ranks (processes) in the job."""
    local_rank: int
    """Number of this process on its machine, counted from 0."""
    local_size: int
    """Number of ranks on this machine."""
    num_threads: int
    """Number of CPU threads from OMP_NUM_THREADS. It is 0 if this variable is not set."""
    address: str
    """Address HOST:PORT at which the ranks meet. It is empty for a single rank."""


def read_rank_environment(environment: Mapping[str, str]) -> RankEnvironment:
    """Return the place of this process that the variables describe.

    Raises ConfigError if the variables are not numbers, contradict each other or are incomplete.
    """

    def number(name: str, default: int) -> int:
        text = environment.get(name, str(default))
        try:
            return int(text)
        except ValueError:
            raise ConfigError(
                f"the variable {name}={text!r} must be an integer. Fix the launcher. {RUN_ALONE}"
            ) from None

    rank = number("RANK", 0)
    world_size = number("WORLD_SIZE", 1)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(
            f"the variables RANK={rank} and WORLD_SIZE={world_size} contradict each other: RANK must be from "
            f"0 to WORLD_SIZE - 1. Start with `txl launch`, the deepspeed launcher or torchrun. {RUN_ALONE}"
        )
    if world_size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        raise ConfigError(
            f"WORLD_SIZE={world_size}, but MASTER_ADDR or MASTER_PORT is not set: the ranks cannot find each other. "
            f"Start with `txl launch`, the deepspeed launcher or torchrun, or set both variables. {RUN_ALONE}"
        )
    port = number("MASTER_PORT", 0)
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=number("LOCAL_RANK", 0),
        local_size=number("LOCAL_WORLD_SIZE", number("LOCAL_SIZE", world_size)),
        num_threads=number("OMP_NUM_THREADS", 0),
        address=f"{environment['MASTER_ADDR']}:{port}" if world_size > 1 else "",
    )


def without_local_rank(words: Sequence[str]) -> list[str]:
    """Return the words of a command without `--local_rank=N`.

    The `deepspeed` launcher adds this word to the command, and sets the variable LOCAL_RANK to the same value.
    """
    return [word for word in words if not word.startswith(("--local_rank=", "--local-rank="))]


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text with ranges: "rank 3", or "ranks 0-2, 5" for 0, 1, 2, 5. The text is empty if there are no
    ranks."""
    if not ranks:
        return ""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    texts = []
    for first, *others in ranges:
        texts.append(f"{first}-{others[-1]}" if others else str(first))
    if len(ranks) == 1:
        noun = "rank"
    else:
        noun = "ranks"
    return f"{noun} {', '.join(texts)}"
