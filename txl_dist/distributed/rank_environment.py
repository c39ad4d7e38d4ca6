"""Environment variables that describe this rank: read and checked before torch is imported.

Some or all of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT may be left over from another job. Then a
process that was started alone would wait for ranks that nobody starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from txl_dist.errors import ConfigError

RUN_ALONE = "To run alone: unset WORLD_SIZE RANK LOCAL_RANK MASTER_ADDR MASTER_PORT"


class RankEnvironment(NamedTuple):
    """Place of this process in a job; rank 0 of 1 without any variable."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    """Number of ranks on this machine."""
    num_threads: int
    """Number of CPU threads that OMP_NUM_THREADS gives; 0 if it is not set."""
    address: str
    """HOST:PORT where the ranks meet; empty if it is not set."""


def read_rank_environment(environment: Mapping[str, str]) -> RankEnvironment:
    """Return the place that the variables describe. Raises ConfigError if they contradict each other."""

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
            f"the variables RANK={rank} and WORLD_SIZE={world_size} contradict each other: ranks count from 0. "
            f"Start with `txl launch`, the deepspeed launcher or torchrun. {RUN_ALONE}"
        )
    if world_size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        raise ConfigError(
            f"WORLD_SIZE={world_size}, but MASTER_ADDR or MASTER_PORT is not set: the ranks cannot find each other. "
            f"Start with `txl launch`, the deepspeed launcher or torchrun, or set these variables. {RUN_ALONE}"
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
    """Return the words of a command without the launcher's `--local_rank=N`, which LOCAL_RANK says too.

    The `deepspeed` launcher puts that word before the command.
    """
    return [word for word in words if not word.startswith(("--local_rank=", "--local-rank="))]


def format_ranks(ranks: Sequence[int]) -> str:
    """Write ranks with their noun and as ranges: "rank 3", or "ranks 0-2, 5" for 0, 1, 2, 5. Empty for none."""
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
