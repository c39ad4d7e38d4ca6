"""Reports about ranks that did not arrive, or arrived with a problem."""

from __future__ import annotations

import socket

import pytest

from txl_dist.distributed import rendezvous
from txl_dist.distributed.rendezvous import free_port, verdict


def test_who_did_not_come_is_named_in_ranges() -> None:
    found = verdict({0: ["a", ""], 1: ["a", ""], 5: ["c", ""]}, [2, 3, 4, 7], timeout_s=9)
    assert found.startswith("ranks 2-4, 7 of 7 did not arrive within 9 s. Only a (ranks 0-1), c (rank 5) arrived. ")
    assert verdict({0: ["a", ""], 1: ["b", ""]}, [], timeout_s=9) == ""
    assert verdict({0: ["a", ""], 1: ["b", "no GPU"]}, [], timeout_s=9).startswith("b, rank 1: no GPU.")


def test_rank_0_looks_rarely_for_ranks_that_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    looks = 0

    class Clock:
        def monotonic(self) -> float:
            return now_s

        def sleep(self, pause_s: float) -> None:
            nonlocal now_s
            now_s += pause_s

    class Store:
        def check(self, keys: list[str]) -> bool:
            nonlocal looks
            looks += len(keys) > 1
            return now_s > 104

    monkeypatch.setattr(rendezvous, "time", Clock())
    monkeypatch.setattr(rendezvous, "SAY_AFTER_S", 1000.0)
    assert rendezvous._wait_for_ranks(Store(), world_size=32, timeout_s=600) == []  # type: ignore[arg-type]
    assert now_s < 105
    assert looks < 250  # ten per second cost rank 0 about 3 ms of CPU time per second of its wait


def test_a_free_port_can_be_had_and_is_another_while_it_is_had() -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("", port))
        assert free_port() != port


def test_a_free_port_is_not_one_that_an_outgoing_connection_could_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_first_outgoing_port", lambda: 25000)
    assert all(20000 <= free_port() < 25000 for _ in range(100))
    monkeypatch.setattr(rendezvous, "_first_outgoing_port", lambda: 1024)
    assert free_port() >= 1024  # the kernel's choice
