"""The file of a running job in its run directory, through which an agent without a rank finds the coordinator.

Agents of ranks learn the address over the process group. Agents of spare nodes, and agents that are started again in
place of lost ones, belong to no process group. The file can be left over from an earlier job. Then the
connection fails, or another program with another key closes it.

The file is written once rank 0 has locked the run directory. A job that ends before that has no file. The agents of
spare nodes notice its end with `StoreWatch`.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
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
    """Random key that each message to the coordinator must contain."""


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


class StoreWatch:
    """Connection of a spare node's agent to the store through which ranks connect at the start.

    The first process of rank 0, or torchrun, holds the store. Its end is the end of a job that has no file yet.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Take the store's address from MASTER_ADDR and MASTER_PORT. Nothing is watched without them."""
        self.has_ended = False
        """Whether the store was there, and is gone."""
        self._peer: socket.socket | None = None
        self._place: tuple[str, int] | None = None
        with suppress(KeyError, ValueError):
            self._place = (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))

    @property
    def has_begun(self) -> bool:
        """Whether the store was ever there."""
        return self.has_ended or self._peer is not None

    def look(self) -> None:
        """Connect to the store if it is not connected, else notice its end. Takes up to a second. Call it often."""
        if self._place is None or self.has_ended:
            return
        if self._peer is None:
            with suppress(OSError):
                self._peer = socket.create_connection(self._place, timeout=1.0)
                self._peer.setblocking(False)
            return
        try:
            self.has_ended = not self._peer.recv(1 << 10)
        except BlockingIOError:
            return
        except OSError:
            self.has_ended = True

    def close(self) -> None:
        """End the connection to the store."""
        if self._peer is not None:
            self._peer.close()
