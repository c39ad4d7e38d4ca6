"""Reports about ranks that did not arrive, or arrived with a problem."""

from __future__ import annotations

import socket

from txl_dist.distributed.rendezvous import free_port, verdict


def test_who_did_not_come_is_named_in_ranges() -> None:
    found = verdict({0: ["a", ""], 1: ["a", ""], 5: ["c", ""]}, [2, 3, 4, 7], timeout_s=9)
    assert found.startswith("ranks 2-4, 7 of 7 did not arrive within 9 s. Only a (ranks 0-1), c (rank 5) arrived. ")
    assert verdict({0: ["a", ""], 1: ["b", ""]}, [], timeout_s=9) == ""
    assert verdict({0: ["a", ""], 1: ["b", "no GPU"]}, [], timeout_s=9).startswith("b, rank 1: no GPU.")


def test_a_free_port_can_be_had_and_is_another_while_it_is_had() -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("", port))
        assert free_port() != port
