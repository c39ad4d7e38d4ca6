"""The seat of a rank: all that an agent gives to the process that is the rank, and to each replacement of it.

A seat outlives its processes. The agent holds it: a Unix socket for messages, a page with the rank's status, and
files in memory for copies of the rank's state. The process opens the files as /proc/AGENT/fd/NUMBER.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from txl_dist.distributed.processes import process_id
from txl_dist.io.files import parse_object, typed

SEAT = "TXL_RECOVERY_SEAT"
"""Environment variable with the seat of a process, as JSON. An agent sets it for its rank and for a spare."""
CONFIG_COPY = "TXL_RECOVERY_CONFIG"
"""Environment variable with the path of the agent's copy of the configuration file. Its rank and its spares read this
copy, so a replacement has the settings of the job's start even if the file was changed since."""
GENERATION = "TXL_GENERATION"
"""Environment variable with the generation in which a process is: 1 at the start of a job, plus 1 per recovery."""
NODE = "TXL_NODE"
"""Environment variable with the name of this node. Tests set it to run several pretended nodes on one machine."""
PLACE = ("RANK", "LOCAL_RANK", "CROSS_RANK", "GROUP_RANK", "ROLE_RANK", "CUDA_VISIBLE_DEVICES")
"""Environment variables that differ between the ranks of a node. A replacement takes those of the lost rank."""


class Seat(NamedTuple):
    """Place of one rank in the job, which a replacement process can take. JSON stores it as a list."""

    address: str
    """Name of the agent's Unix socket in the abstract namespace, without the leading zero byte."""
    agent: int
    """Pid of the agent."""
    status: int
    """Number of the agent's descriptor of the status page."""
    slots: list[int]
    """Numbers of the agent's descriptors of the files for copies of the rank's state."""
    coordinator: list[str]
    """[port, key] of the coordinator, for the first process of rank 0. Empty for others."""
    variables: dict[str, str]
    """Environment variables of the rank (`PLACE`)."""
    partner: list[str] = []  # noqa: RUF012 - a NamedTuple's default is not shared state
    """[port, key] of the server that keeps copies of other nodes' ranks. Empty with recover.copies=node."""
    is_spare: bool = False
    """Whether the process is a spare, which has no rank yet."""
    silent_s: float = 0.0
    """Value of the setting `recover.silent_s`."""
    code: str = ""
    """Versions of the code of the job, from `code_version`."""
    plugins: str = ""
    """Plugins of the job with their versions, from `plugins_text`."""

    def path_of(self, descriptor: int) -> str:
        """Return the path at which other processes of this node open a file of the agent."""
        return f"/proc/{self.agent}/fd/{descriptor}"

    def to_json(self) -> str:
        """Return the seat as text for the environment variable."""
        return json.dumps(self)


def node_name() -> str:
    """Return the name of this node, which the processes of one machine and pid namespace share."""
    process = process_id()
    return os.environ.get(NODE) or f"{process.host} {process.place}"


class AgentOptions(NamedTuple):
    """Settings of an agent. JSON stores them as an object."""

    silent_s: float
    """Value of the setting `recover.silent_s`."""
    max_in_row: int
    """Value of the setting `recover.max_in_row`."""
    copies: str = "node"
    """Value of the setting `recover.copies`."""
    on_loss: str = "stop"
    """Value of the setting `recover.on_loss`."""
    max_ranks: int = 1
    """Largest possible number of ranks. Each smaller number of ranks must divide it."""
    spare_nodes: int = 0
    """Value of the setting `recover.spare_nodes`."""
    run_dir: str = ""
    """Value of the setting `run.dir`."""
    settings_hash: str = ""
    """Hash of the settings that all agents of a job must have in common."""
    plugins: str = ""
    """Plugins of the job with their versions, from `plugins_text`. All agents of a job must have the same."""
    join_s: float = 600.0
    """Seconds within which an agent without a rank must find the job. Its ranks must meet in half of that time."""


def read_seat(environment: Mapping[str, str]) -> Seat | None:
    """Return the seat that an agent has set in this environment, or None without an agent."""
    text = environment.get(SEAT)
    if not text:
        return None
    return seat_of(parse_object(f'{{"seat": {text}}}')["seat"])


def seat_of(values: object) -> Seat:
    """Return the seat that JSON values describe. Raises ValueError for other values."""
    return typed(Seat, values)


def place_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those of the variables `PLACE` that are set."""
    return {name: environment[name] for name in PLACE if name in environment}


def take_seat(seat: Seat) -> None:
    """Set the environment of this process to that of a rank with this seat. Called by a replacement after its fork."""
    os.environ.update(seat.variables)
    os.environ[SEAT] = seat.to_json()
