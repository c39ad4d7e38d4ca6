"""The file of a running job in its run directory, through which an agent without a rank finds the coordinator.

Agents of ranks learn the address over the process group. Agents of spare nodes, and agents that are started again in
place of lost ones, belong to no process group. The file can be left over from an earlier job. Then nobody listens at
the address, or somebody with another key, who closes the connection.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from txl_dist.artifacts import COORDINATOR
from txl_dist.io.files import parse_object, typed


class JobAddress(NamedTuple):
    """Address of a coordinator. JSON stores it as a list."""

    host: str
    port: int
    key: str
    """Word that each message to the coordinator must carry."""


def publish_job(run_dir: Path, address: JobAddress) -> None:
    """Write the address of the coordinator. Only this user can read the file. Raises OSError if that fails."""
    path = run_dir / COORDINATOR
    new = path.with_name(f"{COORDINATOR}.tmp")
    descriptor = os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"address": address}, file)
    os.replace(new, path)


def find_job(run_dir: Path) -> JobAddress | None:
    """Return the address of the coordinator of a run, or None if there is no file with one."""
    with suppress(OSError, ValueError, KeyError):
        return typed(JobAddress, parse_object((run_dir / COORDINATOR).read_bytes())["address"])
    return None


def withdraw_job(run_dir: Path, address: JobAddress) -> None:
    """Remove the file, if it has this address."""
    if find_job(run_dir) == address:
        with suppress(OSError):
            (run_dir / COORDINATOR).unlink()
