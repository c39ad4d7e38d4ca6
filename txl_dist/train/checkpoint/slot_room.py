"""Whether the copies of all ranks fit into the host memory of each node. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from txl_dist.console.formatting import format_bytes
from txl_dist.distributed.recovery.partner import NUM_PARTNER_SLOTS


class RankCopies(NamedTuple):
    """Copies of one rank's state."""

    node: str
    """Name of the rank's node."""
    num_bytes: int
    """Size of one version in bytes."""
    room: float
    """Bytes of host memory that are free on the node."""
    partner: int | None
    """Rank whose agent keeps copies too, or None."""


def node_bytes(copies: Sequence[RankCopies], *, num_slots: int) -> dict[str, int]:
    """Return the bytes that all copies on each node need. Each rank has `num_slots` slots of its own."""
    needed = dict.fromkeys((rank.node for rank in copies), 0)
    for rank in copies:
        needed[rank.node] += num_slots * rank.num_bytes
        if rank.partner is not None:
            needed[copies[rank.partner].node] += NUM_PARTNER_SLOTS * rank.num_bytes
    return needed


def room_problem(copies: Sequence[RankCopies], *, num_slots: int) -> str:
    """Return what is wrong if the copies do not fit, with the setting that would fit. Otherwise return an empty text.

    `copies` has one entry per rank.
    """
    room: dict[str, float] = {}
    for rank in copies:
        room[rank.node] = min(rank.room, room.get(rank.node, rank.room))

    def fits(needed: dict[str, int]) -> bool:
        return all(size <= room[node] for node, size in needed.items())

    needed = node_bytes(copies, num_slots=num_slots)
    if fits(needed):
        return ""
    node = max(needed, key=lambda node: needed[node] - room[node])
    has_partner = copies[0].partner is not None
    kind = "partner" if has_partner else "node"
    fewer = node_bytes(copies, num_slots=2)
    own = node_bytes([rank._replace(partner=None) for rank in copies], num_slots=2)
    if num_slots > 2 and fits(fewer):
        remedy = f"Set recover.partner_every to 1, which needs {format_bytes(fewer[node])}."
    elif has_partner and fits(own):
        remedy = f"Set recover.copies to node, which needs {format_bytes(own[node])}."
    else:
        remedy = "Start fewer ranks per node, or set recover.spares to 0."
    return (
        f"recover.spares=1 with recover.copies={kind} keeps copies of each rank's state in host memory. They need "
        f"{format_bytes(needed[node])} on {node.split()[0]}, but {format_bytes(int(room[node]))} are free. {remedy}"
    )
