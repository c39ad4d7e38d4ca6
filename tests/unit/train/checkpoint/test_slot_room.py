"""Copies that do not fit are refused with the bytes needed and a setting that fits."""

from __future__ import annotations

from txl_dist.train.checkpoint.slot_room import RankCopies, node_bytes, room_problem

GIB = 2**30


def copies(room_gib: float, *, partner: bool = True) -> list[RankCopies]:
    """Two nodes with two ranks each, of 1 GiB per version."""
    partners = [2, 3, 0, 1] if partner else [None] * 4
    return [RankCopies("ab"[rank // 2], GIB, room_gib * GIB, partners[rank]) for rank in range(4)]


def test_a_node_needs_its_own_slots_and_two_per_rank_of_its_neighbour() -> None:
    assert node_bytes(copies(0), num_slots=2) == {"a": 8 * GIB, "b": 8 * GIB}
    assert node_bytes(copies(0), num_slots=3) == {"a": 10 * GIB, "b": 10 * GIB}
    assert node_bytes(copies(0, partner=False), num_slots=2) == {"a": 4 * GIB, "b": 4 * GIB}


def test_nothing_is_said_of_copies_that_fit() -> None:
    assert room_problem(copies(8.0), num_slots=2) == ""


def test_the_setting_that_fits_is_named() -> None:
    rare = room_problem(copies(9.0), num_slots=3)
    assert "They need 10.00 GiB on a, but 9.00 GiB are free." in rare
    assert "Set recover.partner_every to 1, which needs 8.00 GiB." in rare
    assert "Set recover.copies to node, which needs 4.00 GiB." in room_problem(copies(7.0), num_slots=2)
    assert "set recover.spares to 0" in room_problem(copies(3.0), num_slots=2)
    assert "set recover.spares to 0" in room_problem(copies(3.0, partner=False), num_slots=2)


def test_the_fullest_node_is_named() -> None:
    uneven = copies(8.0)
    uneven[3] = uneven[3]._replace(room=1.0 * GIB)
    assert "They need 8.00 GiB on b, but 1.00 GiB are free." in room_problem(uneven, num_slots=2)
