"""The partner of a rank: the agent on the next node that keeps copies of the rank's state.

A job that has only one node left has no partners. Its agent can still have copies that it keeps for lost nodes.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import closing

from txl_dist.console.logging import logger
from txl_dist.distributed.collectives import gather_objects
from txl_dist.distributed.recovery.partner import PartnerAddress, PartnerConnection, partner_of
from txl_dist.distributed.recovery.seat import node_name
from txl_dist.distributed.recovery.slot_file import SlotFile, Version
from txl_dist.errors import LostRankError, TrainingError


class Partner:
    """Connection to the agent that keeps copies of this rank's state, and to all others that may have kept them."""

    def __init__(
        self, own_rank: int, partner_rank: int | None, addresses: Sequence[PartnerAddress], *, every: int
    ) -> None:
        """Connect to the agent of `partner_rank`. `addresses` has the server of every rank's agent, and then those of
        agents that have no rank.

        A version is sent every `every` steps. With None no version is sent, and copies can only be fetched. Raises
        LostRankError if the agent is gone.
        """
        self.rank = partner_rank
        self.every = every
        self._own_rank = own_rank
        self._addresses = addresses
        self._connection: PartnerConnection | None = None
        if partner_rank is not None:
            try:
                self._connection = PartnerConnection(addresses[partner_rank])
            except OSError as error:
                raise LostRankError(self._describe(error)) from error

    def close(self) -> None:
        """Close the connection. The agent keeps the copies."""
        if self._connection is not None:
            self._connection.close()

    def send(self, slot: SlotFile, *, kept: int) -> None:
        """Send the version in a slot, and wait for the acknowledgement. The version number `kept` is not replaced.

        The partner must have a rank. A version that arrives damaged is sent once more. Raises LostRankError if the
        agent is gone, and TrainingError if it cannot keep the version.
        """
        try:
            self._put(slot, kept=kept)
        except (ConnectionError, TimeoutError) as error:
            raise LostRankError(self._describe(error)) from error
        except OSError as error:
            remedy = "Free host memory on that node"
            if error.errno == errno.EIO:
                remedy = "The copy arrived damaged twice. Test the memory and the network of both nodes"
            raise TrainingError(f"{self._describe(error)}. {remedy}, or set recover.copies to node.") from error

    def _put(self, slot: SlotFile, *, kept: int) -> None:
        """Send the version in a slot, and once more if it arrives damaged. Raises OSError."""
        assert self._connection is not None
        try:
            self._connection.put(slot, kept=kept)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            logger.warning("recovery: a copy for the agent of rank %d arrived damaged. It is sent again", self.rank)
            self._connection.put(slot, kept=kept)

    def versions(self, world_size: int) -> dict[int, list[Version]]:
        """Return the versions that the agent of this rank has, by the agent's number.

        Rank 0 also asks the agents that have no rank. Their numbers begin with `world_size`, the number of
        ranks. Raises LostRankError if the agent of this rank is gone.
        """
        found = {}
        idle = range(world_size, len(self._addresses)) if self._own_rank == 0 else ()
        for number in (self._own_rank, *idle):
            try:
                with closing(PartnerConnection(self._addresses[number])) as connection:
                    found[number] = connection.versions()
            except OSError as error:
                if number == self._own_rank:
                    raise LostRankError(f"the agent of rank {self._own_rank} is gone: {error}") from error
        return found

    def fetch(self, version: Version, keeper: int, into: SlotFile) -> bool:
        """Fetch a version from the agent with this number into a slot. Returns whether it has arrived whole."""
        try:
            with closing(PartnerConnection(self._addresses[keeper])) as connection:
                connection.get(version, into)
        except OSError as error:
            host = self._addresses[keeper].host
            logger.warning("recovery: the agent at %s cannot send version %d: %s", host, version.serial, error)
            return False
        return True

    def _describe(self, error: OSError) -> str:
        assert self.rank is not None
        host = self._addresses[self.rank].host
        return f"the agent of rank {self.rank} at {host} keeps no copy of the state of rank {self._own_rank}: {error}"


def find_partner(own: PartnerAddress, *, rank: int, every: int, idle: Sequence[PartnerAddress] = ()) -> Partner:
    """Connect this rank to its partner, which has no rank if the job has only one node. All ranks call it together.

    `own` is the address of the server in this rank's agent. `idle` are those of agents that have no rank, the
    same on all ranks. Raises LostRankError if the partner is gone.
    """
    places = gather_objects((node_name(), own))
    partner_rank = partner_of(rank, [node for node, _ in places])
    return Partner(rank, partner_rank, [*(address for _, address in places), *idle], every=every)
