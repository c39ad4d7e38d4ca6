"""Reads and checks the environment variables that describe this rank, before torch is imported.

RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT may also be left over from another job, all or some of them.
Then a process that was started alone would wait for ranks that nobody starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from txl_dist.errors import ConfigError

RUN_ALONE = "To run alone: unset WORLD_SIZE RANK LOCAL_RANK MASTER_ADDR MASTER_PORT"


class RankEnvironment(NamedTuple):
    """The place of this process in a job; rank 0 of 1 without any variable."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    """Ranks on this machine."""
    num_threads: int
    """CPU threads by OMP_NUM_THREADS; 0 if it is not set."""
    address: str
    """HOST:PORT where the ranks meet; empty if it is not set."""


def read_rank_environment(environment: Mapping[str, str]) -> RankEnvironment:
    """Return the place that the variables give. Raises ConfigError if they contradict each other."""

    def number(name: str, default: int) -> int:
        text = environment.get(name, str(default))
        try:
            return int(text)
        except ValueError:
            raise ConfigError(
                f"the variable {name}={text!r} must be an integer. Fix the launcher. {RUN_ALONE}"
            ) from None

    rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(
            f"the variables RANK={rank} and WORLD_SIZE={world_size} contradict each other: ranks count from 0. "
            f"Start with `txl launch`, the deepspeed launcher or torchrun. {RUN_ALONE}"
        )
    if world_size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        raise ConfigError(
            f"WORLD_SIZE={world_size}, but MASTER_ADDR or MASTER_PORT is not set: the ranks cannot find each other. "
            f"Start with `txl launch`, the deepspeed launcher or torchrun, or set them. {RUN_ALONE}"
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


def format_ranks(ranks: Sequence[int]) -> str:
    """Return 0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
