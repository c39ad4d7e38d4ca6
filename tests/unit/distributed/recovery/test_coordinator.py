"""Decisions of the coordinator under a clock that the test moves: who is replaced, when ranks meet, when a job ends."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from txl_dist.distributed.connection import MAX_LINE_BYTES, Message
from txl_dist.distributed.recovery.coordinator import (
    KILLED_S,
    READY_S,
    REPLACED_S,
    Coordinator,
    MessageError,
    RefusedError,
)
from txl_dist.distributed.recovery.verdicts import PER_HOUR, Loss
from txl_dist.errors import HANG

LIMIT_S = 60.0
DONE = {"kind": "end", "code": 0, "reason": ""}
"""Message that ends an agent at the end of the run."""


def decoded(message: Message, shared: bytes) -> Message:
    """A message as an agent receives it."""
    if not shared:
        return message
    whole: Message = json.loads(json.dumps(message)[:-1] + ", " + shared.decode())
    return whole


class Job:
    """A coordinator with agents that answer as told."""

    def __init__(
        self,
        nodes: str = "aaa",
        *,
        silent_s: float = 6.0,
        max_in_row: int = 3,
        on_loss: str = "stop",
        max_ranks: int = 4,
        num_ranks: int = 0,
        age_s: float = 2 * LIMIT_S,
    ) -> None:
        """`nodes` has a letter per agent: its node. The first `num_ranks` agents have ranks, or all of them. The ranks
        have met `age_s` seconds ago."""
        self.now_s = 100.0
        size = num_ranks or len(nodes)
        self.coordinator = Coordinator(
            size, silent_s=silent_s, max_in_row=max_in_row, on_loss=on_loss, max_ranks=max_ranks
        )
        for number, node in enumerate(nodes):
            self.greet(number, node)
        self.now_s += age_s
        self.coordinator.excuse(age_s, self.now_s)
        self.told()

    def greet(self, number: int, node: str, *, settings: str = "hash", code: str = "ours 1") -> None:
        place = {"host": node, "node": node, "address": f"address of {node}"}
        self.tell(
            number,
            "hello",
            **place,
            seat=[f"seat {number}"],
            pid=0 if self.coordinator._is_complete else 10 + number,  # who joins later has no process yet
            process=[number],
            partner=[number, "key"],
            settings_hash=settings,
            code=code,
        )

    def tell(self, rank: int, kind: str, **values: Any) -> None:
        self.coordinator.receive(rank, {"kind": kind, **values}, self.now_s)

    def told(self) -> list[tuple[int, dict[str, Any]]]:
        """What was sent since this was last asked."""
        return [(number, decoded(message, shared)) for number, message, shared in self.coordinator.take_messages()]

    def kinds(self) -> list[tuple[int, str]]:
        return [(rank, message["kind"]) for rank, message in self.told()]

    def status(
        self, rank: int, *, silent_s: float = 0.1, idle_s: float = 0.1, waits: bool = False, step: int = 5
    ) -> None:
        self.tell(rank, "status", status=[silent_s, idle_s, LIMIT_S, step, "step", waits])

    def lose(self, rank: int, *, step: int = 5, phase: str = "step", cause: str = "SIGKILL") -> None:
        self.tell(rank, "died", cause=cause, status=[0.1, 0.1, LIMIT_S, step, phase, False])

    def lose_agent(self, number: int) -> None:
        self.coordinator.lose_agent(number, self.now_s)

    def tick(self, seconds: float = 0.0, *, heard: str = "") -> None:
        """Judge the job after so many seconds. `heard` has the numbers of agents that have sent a status."""
        self.now_s += seconds
        for number in heard:
            self.status(int(number))
        self.coordinator.tick(self.now_s)

    def ranks(self) -> dict[int, int]:
        """The rank of each agent in the last plan that was sent. Reads all messages."""
        plans = {number: message for number, message in self.told() if message["kind"] == "plan"}
        return {number: plan["rank"] for number, plan in plans.items()}

    def make_ready(self, *ranks: int, port: int = 7) -> None:
        """All of these ranks are ready for the newest generation. Those that have no process get one before."""
        for rank in ranks:
            if not self.coordinator._agents[rank].is_alive:
                self.tell(rank, "started", pid=30 + rank)
            self.tell(rank, "ready", generation=self.coordinator.generation, port=port)

    def recover(self, *ranks: int, step: int = 100) -> None:
        """All of these ranks become ready, and make a step."""
        generation = self.coordinator.generation
        self.make_ready(*ranks)
        for rank in ranks:
            self.tell(rank, "stepped", generation=generation, step=step)
        self.told()


def test_a_death_gives_a_plan_to_all_and_a_replacement_to_the_first_agent_of_the_node() -> None:
    job = Job()
    job.lose(2)
    assert job.kinds() == [(0, "plan"), (1, "plan"), (2, "plan"), (0, "replace")]
    assert "rank 2 on a (pid 12) was lost at step 5, in phase `step`: SIGKILL" in job.coordinator.lines[0]


def test_ranks_meet_only_when_all_are_ready_for_the_newest_plan() -> None:
    job = Job()
    job.lose(2)
    for rank in (0, 1):
        job.tell(rank, "ready", generation=2, port=7)
    job.lose(1)
    job.told()
    job.make_ready(0, 2, port=8)
    job.tell(1, "ready", generation=2, port=0)
    assert job.kinds() == []
    job.make_ready(1, port=0)
    assert job.told() == [(rank, {"kind": "meet", "generation": 3, "port": 8}) for rank in range(3)]


def test_a_silent_rank_is_killed_only_if_another_one_makes_no_progress() -> None:
    job = Job()
    job.status(0, silent_s=7)
    job.status(1, idle_s=1)
    job.status(2, idle_s=1)
    job.coordinator.tick(job.now_s)
    assert job.kinds() == []
    job.status(1, idle_s=4)
    job.coordinator.tick(job.now_s)
    assert job.kinds() == [(0, "kill")]
    job.coordinator.tick(job.now_s)
    assert job.kinds() == []
    job.lose(0)
    assert "frozen: no heartbeat for 7.0 s" in job.coordinator.lines[0]


def test_of_ranks_without_progress_the_one_that_the_others_wait_for_is_killed() -> None:
    job = Job()
    for rank in range(3):
        job.status(rank, idle_s=LIMIT_S + 1, waits=rank != 1)
    job.coordinator.tick(job.now_s)
    assert job.told() == [(1, {"kind": "kill", "dump": True})]
    job.status(0, idle_s=LIMIT_S + 2, waits=False)  # an error has taken it out of its collective
    job.coordinator.tick(job.now_s)
    assert job.kinds() == []


def test_a_survivor_that_hangs_in_a_recovery_is_killed_and_not_the_replacement_that_waits_for_it() -> None:
    """A replacement is at step 0 until it begins its first step."""
    job = Job("aa")
    job.status(0, idle_s=LIMIT_S + 1, waits=False, step=10)
    job.status(1, idle_s=LIMIT_S + 1, waits=True, step=0)
    job.coordinator.tick(job.now_s)
    assert job.kinds() == [(0, "kill")]


def test_a_rank_that_holds_the_interpreter_since_its_last_collective_is_killed_and_not_those_that_wait() -> None:
    """Its last heartbeat said that it waits. Its limit ends before the silence limit."""
    job = Job("aa", silent_s=3 * LIMIT_S)
    job.status(0, idle_s=LIMIT_S + 1, silent_s=LIMIT_S + 1, waits=True)
    job.status(1, idle_s=LIMIT_S + 1, waits=True)
    job.coordinator.tick(job.now_s)
    assert job.kinds() == [(0, "kill")]


def test_the_same_loss_twice_ends_the_job_with_its_reason() -> None:
    job = Job()
    job.lose(1)
    for rank in range(3):
        job.tell(rank, "ready", generation=2, port=7)
    job.told()
    job.lose(1)
    assert job.kinds() == [(0, "end"), (1, "end"), (2, "end")]
    assert "The same happened before at this step" in job.coordinator.lines[-1]


@pytest.mark.parametrize("kind", ["frozen", "hung"])
def test_a_rank_that_freezes_or_hangs_twice_at_a_step_ends_the_job_however_long_it_took(kind: str) -> None:
    job = Job()
    for seconds in (1, 2):
        for rank in range(3):
            is_stuck = rank == 1
            stopped_s = LIMIT_S + seconds if kind == "hung" else 6.0 + seconds
            silent_s = stopped_s if kind == "frozen" and is_stuck else 0.1
            job.status(rank, silent_s=silent_s, idle_s=stopped_s, waits=not is_stuck)
        job.tick()
        assert (1, "kill") in job.kinds()
        job.lose(1)
        assert kind in job.coordinator.lines[-1]
        job.make_ready(0, 1, 2)
        job.now_s += 2 * LIMIT_S
    assert "The same happened before at this step" in job.coordinator.lines[-1]


def test_the_seconds_to_notice_a_hang_count_from_its_last_progress() -> None:
    """A rank that hangs still sends heartbeats."""
    job = Job()
    for rank in range(3):
        job.status(rank, idle_s=LIMIT_S + 1, waits=rank != 1)
    job.tick()
    job.told()
    job.tell(1, "died", cause="SIGABRT", status=[0.2, LIMIT_S + 2, LIMIT_S, 5, "step", False])
    plan = next(message for _, message in job.told() if message["kind"] == "plan")
    assert [Loss(*loss).notice_s for loss in plan["losses"]] == [LIMIT_S + 2]


@pytest.mark.parametrize(("silent_s", "noticed_s"), [(3.0, 0.0), (7.0, 2.0)])
def test_the_seconds_to_notice_a_later_loss_of_a_recovery_end_with_the_first_loss(
    silent_s: float, noticed_s: float
) -> None:
    """What follows is a part of the time to regroup."""
    job = Job()
    job.lose(1)
    job.told()
    job.now_s += 5.0
    job.tell(2, "died", cause="frozen: no heartbeat", status=[silent_s, silent_s, LIMIT_S, 5, "leave", False])
    plan = next(message for _, message in job.told() if message["kind"] == "plan")
    assert [Loss(*loss).notice_s for loss in plan["losses"]][1] == noticed_s


def test_ranks_that_have_waited_long_for_the_first_meeting_do_not_count_as_hung() -> None:
    job = Job(age_s=0.0)
    for rank in range(3):
        job.status(rank, idle_s=10 * LIMIT_S)
    job.tick(1.0)
    assert job.kinds() == []
    job.now_s += LIMIT_S
    for rank in range(3):
        job.status(rank, idle_s=11 * LIMIT_S, waits=rank != 1)
    job.tick()
    assert job.kinds() == [(1, "kill")]


def test_the_same_loss_after_a_finished_step_is_a_new_one() -> None:
    job = Job()
    job.lose(1)
    job.recover(0, 1, 2)
    job.lose(1)
    assert (0, "replace") in job.kinds()


def test_too_many_losses_without_a_step_end_the_job() -> None:
    job = Job(max_in_row=2)
    for number in range(3):
        assert not job.coordinator.is_ended
        job.lose(number, step=number)
        job.make_ready(0, 1, 2)
    assert job.coordinator.is_ended
    assert "recover.max_in_row=2" in job.coordinator.lines[-1]


def test_replacements_that_die_before_they_are_ready_are_losses_in_a_row() -> None:
    job = Job(max_in_row=2)
    for _ in range(2):
        job.lose(1, step=0, phase="begin")
        assert not job.coordinator.is_ended
    job.lose(1, step=0, phase="begin")
    assert "recover.max_in_row=2" in job.coordinator.lines[-1]


def test_all_ranks_at_once_are_one_failure() -> None:
    job = Job(max_in_row=1)
    for rank in range(3):
        job.lose(rank)
    assert not job.coordinator.is_ended
    assert job.kinds().count((0, "replace")) == 3


def test_ranks_lost_at_once_get_one_plan_and_its_line_fits_for_1000_ranks() -> None:
    """The agents of a node have the same letter here."""
    job = Job("".join(chr(ord("a") + number // 8) for number in range(1000)))
    for rank in range(1000):
        job.lose(rank, step=123_456)
    plans = [sent for sent in job.coordinator.take_messages() if sent.message["kind"] == "plan"]
    assert [plan.number for plan in plans] == list(range(1000))
    assert all(plan.shared is plans[0].shared for plan in plans), "the losses are encoded and kept once"
    assert max(len(json.dumps(plan.message)) for plan in plans) < 100
    last = decoded(plans[-1].message, plans[-1].shared)
    assert len(last["losses"]) == 1000
    assert (last["rank"], last["local_rank"], last["local_size"]) == (999, 7, 8)
    assert 5 * len(json.dumps(last)) < MAX_LINE_BYTES  # names of hosts may be longer


def test_ranks_lost_at_once_are_one_recovery_of_the_hour() -> None:
    job = Job("a" * (PER_HOUR + 1))
    for rank in range(PER_HOUR + 1):
        job.lose(rank)
    assert not job.coordinator.is_ended


def test_too_many_recoveries_within_an_hour_end_the_job() -> None:
    job = Job()
    for number in range(PER_HOUR):
        job.now_s += 10
        job.lose(1, step=number)
        job.recover(0, 1, 2, step=number)
    assert not job.coordinator.is_ended
    job.lose(1, step=PER_HOUR)
    assert job.coordinator.is_ended


def test_a_survivor_that_does_not_leave_is_replaced_too() -> None:
    job = Job()
    job.lose(2)
    job.tell(0, "ready", generation=2, port=7)
    job.told()
    job.tick(READY_S + 1, heard="012")
    assert job.kinds() == [(1, "kill")]


def test_a_replacement_that_never_comes_ends_the_job() -> None:
    job = Job()
    job.lose(2)
    job.coordinator.tick(job.now_s + REPLACED_S + 1)
    assert job.coordinator.is_ended


def test_an_error_of_a_rank_ends_the_job_without_a_line_of_the_coordinator() -> None:
    job = Job()
    job.tell(1, "left", code=2)
    assert job.kinds() == [(0, "end"), (1, "end"), (2, "end")]
    assert job.coordinator.lines == []


def test_a_failed_rank_ends_the_job_on_all_ranks_with_its_exit_code_and_reason() -> None:
    job = Job()
    job.tell(1, "failed", code=2, reason="ConfigError: no such setting")
    job.tell(1, "left", code=2)
    ends = [message for _, message in job.told()]
    assert [message["code"] for message in ends] == [2, 2, 2]
    assert "rank 1 on" in ends[0]["reason"]
    assert "ConfigError: no such setting" in ends[0]["reason"]
    assert job.coordinator.lines == []
    job.lose(2)
    assert job.kinds() == []  # nothing is replaced any more


def test_the_end_of_an_agent_ends_the_job_unless_its_rank_has_left() -> None:
    job = Job()
    job.tell(1, "left", code=0)
    job.lose_agent(1)
    assert not job.coordinator.is_ended
    job.lose_agent(2)
    assert job.coordinator.is_ended


def test_a_rank_that_its_spares_cannot_replace_ends_the_job_that_is_to_stop() -> None:
    job = Job(on_loss="stop")
    job.lose(2)
    job.told()
    job.tell(0, "unfilled", seat=["seat 2"])
    assert job.kinds() == [(0, "end"), (1, "end"), (2, "end")]
    assert "rank 2 on a cannot be replaced, because the spares there have failed" in job.coordinator.lines[-1]


def test_a_job_shrinks_to_the_largest_number_of_ranks_that_divides_the_lanes() -> None:
    job = Job("aaaa", on_loss="shrink", max_ranks=4)
    job.lose(1)
    job.told()
    job.tell(0, "unfilled", seat=["seat 1"])
    assert job.ranks() == {0: 0, 1: -1, 2: 1, 3: -1}
    assert "The job continues with 2 of 4 ranks" in job.coordinator.lines[-1]
    for number in (0, 2):
        job.tell(number, "ready", generation=3, port=7)
    assert [kind for _, kind in job.kinds()] == ["meet"] * 4


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_shrink_keeps_a_rank_with_a_process_and_no_rank_that_waits_for_one(order: tuple[int, ...]) -> None:
    job = Job("aaaa", on_loss="shrink", max_ranks=4)
    for rank in order:
        job.lose(rank)
    for rank in order:
        job.tell(0, "unfilled", seat=[f"seat {rank}"])
    assert not job.coordinator.is_ended
    assert job.ranks() == {0: -1, 1: -1, 2: -1, 3: 0}


def test_after_a_shrink_the_first_agent_of_the_node_reads_the_slots_of_idle_agents() -> None:
    job = Job("aaab", on_loss="shrink", max_ranks=2)
    job.lose(1)
    job.told()
    job.tell(0, "unfilled", seat=["seat 1"])
    plans = {number: message for number, message in job.told() if message["kind"] == "plan"}
    assert plans[0]["others"] == [["seat 1"]]
    assert plans[0]["idle"] == plans[2]["idle"] == [["", 1, "key"], ["address of b", 3, "key"]]
    assert (plans[0]["rank"], plans[0]["world_size"], plans[0]["local_rank"], plans[0]["local_size"]) == (0, 2, 0, 2)
    assert (plans[2]["rank"], plans[2]["world_size"], plans[2]["local_rank"], plans[2]["local_size"]) == (1, 2, 1, 2)
    assert plans[2]["others"] == []


def test_rank_0_moves_to_another_agent_and_the_others_learn_its_address() -> None:
    job = Job("abb", on_loss="shrink", max_ranks=2)
    job.lose(0)
    job.told()
    job.tell(0, "unfilled", seat=["seat 0"])
    plans = {number: message for number, message in job.told() if message["kind"] == "plan"}
    assert {number: plan["rank"] for number, plan in plans.items()} == {0: -1, 1: 0, 2: 1}
    assert {plan["host"] for plan in plans.values()} == {"address of b"}
    assert {plan["holder"][0] for plan in plans.values()} == {"seat 0"}  # it keeps the lock of the run directory


def test_a_process_of_an_agent_that_has_no_rank_any_more_is_killed_and_its_end_is_no_loss() -> None:
    job = Job("aaaa", on_loss="shrink", max_ranks=4)
    job.lose(1)
    job.lose(3)
    job.tell(0, "unfilled", seat=["seat 1"])
    assert job.ranks() == {0: 0, 1: -1, 2: 1, 3: -1}
    job.tell(3, "started", pid=30)  # its replacement came too late
    assert job.told() == [(3, {"kind": "kill", "dump": False})]
    job.lose(3)
    assert job.kinds() == []
    assert job.coordinator.generation == 4


def test_a_hang_is_found_after_a_rank_that_was_being_killed_has_lost_its_place() -> None:
    job = Job("aaaa", on_loss="shrink", max_ranks=4)
    for number in range(4):
        job.status(number, idle_s=LIMIT_S + 1, waits=number != 3)
    job.tick()
    assert job.kinds() == [(3, "kill")]
    job.lose(1)
    job.tell(0, "unfilled", seat=["seat 1"])
    job.recover(0, 2)
    job.now_s += LIMIT_S + 1
    for number in (0, 2):
        job.status(number, idle_s=LIMIT_S + 1, waits=number == 0)
    job.tick()
    assert job.kinds() == [(2, "kill")]


def test_a_waiting_rank_that_lacks_a_processor_is_not_killed_in_place_of_the_one_that_hangs() -> None:
    """Half of the limit is shorter than the silence limit."""
    job = Job("aaa", silent_s=LIMIT_S)
    for rank in range(3):
        job.status(rank, idle_s=LIMIT_S + 1, silent_s=0.6 * LIMIT_S if rank == 1 else 0.1, waits=rank != 2)
    job.tick()
    assert [rank for rank, kind in job.kinds() if kind == "kill"] == [2]


def test_the_time_in_which_a_rank_waits_for_the_others_to_become_ready_is_no_hang() -> None:
    job = Job()
    job.lose(2)
    job.tick(READY_S - 1, heard="012")
    job.make_ready(0, 1, 2)
    job.told()
    for number in range(3):
        job.status(number, idle_s=LIMIT_S + 1, waits=number != 1)
    job.tick(1.0)
    assert job.told() == []
    job.now_s += LIMIT_S
    for number in range(3):
        job.status(number, idle_s=2 * LIMIT_S, waits=number != 1)
    job.tick()
    assert job.told() == [(1, {"kind": "kill", "dump": True})]


@pytest.mark.parametrize("is_agent", [False, True])
def test_a_rank_lost_after_another_has_ended_has_finished_the_run_too(is_agent: bool) -> None:
    """The ranks leave together, after a barrier. The third rank may have found this barrier broken."""
    job = Job()
    job.tell(1, "left", code=0)
    if is_agent:
        job.lose_agent(2)
    else:
        job.lose(2)
    assert job.coordinator.lines[-1].endswith(", after the end of the run")
    assert [(number, message) for number, message in job.told() if number == 0] == [(0, DONE)]


def test_an_agent_that_is_silent_when_the_other_ranks_have_finished_ends_no_finished_run() -> None:
    job = Job("aab")
    for rank in (0, 1):
        job.tell(rank, "left", code=0)
    job.tick(7.0)
    assert job.coordinator.is_ended
    assert job.coordinator.lines[-1].endswith("its agent was lost, after the end of the run")
    assert job.told() == []
    assert job.coordinator.silent_here == []  # it is on another node


def test_agents_without_a_rank_end_when_an_agent_is_lost_after_the_end_of_the_run() -> None:
    job = Job("abc", num_ranks=2)
    job.lose(0)
    job.tell(0, "unfilled", seat=["seat 0"])  # agent 2 has rank 0 now, and agent 0 has none
    job.recover(2, 1)
    job.tell(2, "left", code=0)
    job.lose_agent(1)
    assert job.told() == [(0, {"kind": "end", "code": 0, "reason": ""})]


def test_a_request_to_stop_at_an_agent_without_a_rank_reaches_rank_0() -> None:
    job = Job("abc", num_ranks=2)
    job.tell(2, "stop", reason="SIGTERM", withdrawn="")
    assert job.told() == [(0, {"kind": "stop"})]
    job.tell(1, "stop", reason="SIGTERM", withdrawn="")  # its rank obeys by itself
    assert job.told() == []


def test_the_same_request_at_many_agents_without_a_rank_reaches_rank_0_once() -> None:
    job = Job("abcdd", num_ranks=2)
    for number in (2, 3, 4):
        job.tell(number, "stop", reason="SIGTERM", withdrawn="")
    assert job.told() == [(0, {"kind": "stop"})]


def test_the_end_of_a_spare_node_that_has_lost_an_agent_does_not_stop_the_job() -> None:
    job = Job("abcc", num_ranks=2)
    job.lose_agent(3)
    job.tell(2, "stop", reason="SIGTERM", withdrawn="")  # its launcher ends the node
    assert job.told() == []


def test_a_signal_of_the_launcher_that_comes_before_the_loss_of_another_agent_does_not_stop_the_job() -> None:
    job = Job("abb", on_loss="wait")
    job.tell(2, "stop", reason="SIGTERM", withdrawn="")  # its launcher has noticed the end of agent 1 first
    job.lose_agent(1)
    job.tick(1.0, heard="02")
    assert not job.coordinator.is_ended
    job.tell(0, "stop", reason="SIGTERM", withdrawn="")
    job.tick(1.0, heard="02")
    assert job.coordinator.is_ended


def test_the_file_stop_outlives_the_loss_of_an_agent_beside_the_coordinator() -> None:
    job = Job("aa", on_loss="wait")
    job.tell(0, "stop", reason="the file STOP", withdrawn="")
    job.lose_agent(1)
    job.tick(1.0, heard="0")
    assert job.coordinator.is_ended


def test_a_request_to_stop_of_two_nodes_outlives_the_loss_of_an_agent_of_one() -> None:
    job = Job("abb", on_loss="wait")
    for number in (2, 0):
        job.tell(number, "stop", reason="SIGTERM", withdrawn="")
    job.lose_agent(1)
    job.tick(1.0, heard="02")
    assert job.coordinator.is_ended


def test_a_replacement_is_asked_for_again_if_the_agent_that_has_the_spare_is_lost() -> None:
    job = Job("abbc", on_loss="wait")
    job.lose(2)
    assert (1, "replace") in job.kinds()
    job.lose_agent(1)
    asked = [(number, message["seat"]) for number, message in job.told() if message["kind"] == "replace"]
    assert asked == [(2, ["seat 2"])]


@pytest.mark.parametrize(("code", "then"), [(75, 75), (0, 0)])
def test_an_agent_that_comes_after_the_end_of_the_job_is_told_the_end(code: int, then: int) -> None:
    job = Job("ab")
    for rank in (0, 1):
        job.tell(rank, "left", code=code)
    job.told()
    job.greet(2, "c")
    assert [(number, message["kind"], message["code"]) for number, message in job.told()] == [(2, "end", then)]


def test_a_stop_file_that_was_removed_in_time_does_not_end_a_later_wait() -> None:
    job = Job("ab", on_loss="wait")
    job.tell(0, "stop", reason="the file STOP", withdrawn="")
    job.tell(0, "stop", reason="", withdrawn="the file STOP")
    job.lose_agent(1)
    job.tick(1.0, heard="0")
    assert not job.coordinator.is_ended
    job.tell(0, "stop", reason="SIGTERM", withdrawn="")
    job.tick(1.0, heard="0")
    assert "asked to stop by SIGTERM" in job.coordinator.lines[-1]


def test_a_silent_agent_beside_the_coordinator_is_to_be_killed_at_the_end() -> None:
    job = Job("aa", on_loss="shrink")
    job.tick(4.0, heard="0")
    job.status(0, idle_s=7.0)
    job.now_s += 4.0
    job.status(0, idle_s=11.0)
    job.tick()
    assert job.coordinator.silent_here == [[1]]


def test_replacements_that_die_before_their_first_step_are_no_repetition() -> None:
    job = Job()
    for _ in range(3):
        job.lose(1, step=0, phase="leave")
    assert not job.coordinator.is_ended


def test_a_rank_that_ends_while_another_is_replaced_says_that_the_run_is_done() -> None:
    job = Job()
    job.lose(0)
    job.told()
    job.tell(1, "left", code=0)
    assert job.coordinator.is_ended
    assert job.told() == [(0, DONE), (2, DONE)]


def test_an_agent_that_loses_its_rank_while_stuck_ranks_are_judged_gets_no_order_to_kill() -> None:
    job = Job("aab", on_loss="shrink", max_ranks=1)
    job.status(1)
    job.now_s += 7
    job.status(0, idle_s=7)
    job.status(2, silent_s=7)
    job.tick()  # agent 1 is silent, and rank 2 is frozen
    told = job.told()
    assert [message["rank"] for _, message in told if message["kind"] == "plan"] == [0, -1, -1]
    assert "kill" not in [message["kind"] for _, message in told]


def test_a_job_without_enough_ranks_for_the_lanes_ends() -> None:
    job = Job("a", on_loss="shrink")
    job.lose(0)
    job.tell(0, "unfilled", seat=["seat 0"])
    assert job.coordinator.is_ended


def test_a_job_that_waits_says_so_every_minute_and_asks_the_spare_again() -> None:
    job = Job(on_loss="wait")
    job.lose(2)
    job.tell(0, "unfilled", seat=["seat 2"])
    job.recover(0, 1)
    job.tick()
    assert "the job waits for rank 2 on a" in job.coordinator.lines[-1]
    assert job.kinds() == [(0, "replace")]
    job.tick(30, heard="012")
    assert job.kinds() == []
    job.tick(REPLACED_S, heard="012")
    assert job.kinds() == [(0, "replace")]
    assert not job.coordinator.is_ended
    job.tell(2, "started", pid=30)
    job.tick(10, heard="012")
    assert job.kinds() == []
    job.tell(2, "ready", generation=2, port=0)
    assert [kind for _, kind in job.kinds()] == ["meet"] * 3


def test_a_job_that_waits_ends_when_it_is_asked_to_stop() -> None:
    job = Job("ab", on_loss="wait")
    job.lose_agent(1)
    job.tick()
    assert "Start RANK=1 again" in job.coordinator.lines[-1]
    assert not job.coordinator.is_ended
    job.told()
    job.tell(0, "stop", reason="SIGTERM", withdrawn="")
    job.tick()
    assert [message["code"] for _, message in job.told()] == [HANG, HANG]
    assert "asked to stop by SIGTERM while it waited for rank 1 on b" in job.coordinator.lines[-1]


def test_ranks_do_not_meet_without_a_rank_that_was_ready_when_its_agent_was_lost() -> None:
    job = Job("abc", on_loss="wait")
    job.lose(2)
    for rank in (0, 1):
        job.tell(rank, "ready", generation=2, port=7)
    job.lose_agent(1)
    job.tell(2, "started", pid=30)
    job.told()
    job.tell(2, "ready", generation=2, port=0)
    assert job.kinds() == []
    job.tick(1, heard="02")
    assert "the job waits for rank 1 on b" in job.coordinator.lines[-1]
    job.greet(1, "b")
    job.told()
    job.make_ready(0, 1, 2)
    assert [kind for _, kind in job.kinds()] == ["meet"] * 3


def test_a_late_message_of_a_dead_process_does_not_make_its_rank_ready() -> None:
    job = Job()
    job.lose(0)
    job.lose(2)
    job.tell(2, "ready", generation=3, port=0)  # it was read after the loss was noticed
    job.make_ready(0, 1)
    assert "meet" not in {kind for _, kind in job.kinds()}
    job.make_ready(2)
    assert [kind for _, kind in job.kinds()] == ["meet"] * 3


def freeze(job: Job, frozen: int) -> None:
    """Let a rank freeze, so that it is killed."""
    for rank in range(3):
        job.status(rank, silent_s=7.0 if rank == frozen else 0.1, idle_s=7.0)
    job.tick()
    assert job.kinds() == [(frozen, "kill")]


def test_an_order_to_kill_ends_with_the_process_that_it_was_about() -> None:
    job = Job()
    freeze(job, 1)
    job.tell(1, "started", pid=31)  # the process had died before, and its replacement is here
    job.tick(KILLED_S + 1, heard="012")
    assert not job.coordinator.lines
    job.lose(1)
    assert (0, "replace") in job.kinds()


def test_a_rank_that_cannot_be_ended_counts_as_lost_and_is_replaced_when_its_process_has_ended() -> None:
    job = Job()
    freeze(job, 1)
    job.tick(KILLED_S + 1, heard="012")
    assert job.kinds() == [(0, "plan"), (1, "plan"), (2, "plan")]
    assert "rank 1 on a (pid 11) was lost" in job.coordinator.lines[-1]
    assert "SIGKILL did not end it within 20 s" in job.coordinator.lines[-1]
    for rank in (0, 2):
        job.tell(rank, "ready", generation=2, port=7)
    job.tick(KILLED_S + 1, heard="012")
    assert job.kinds() == []
    job.lose(1)
    assert job.kinds() == [(0, "replace")]
    job.tell(1, "started", pid=30)
    job.tell(1, "ready", generation=2, port=7)
    assert [kind for _, kind in job.kinds()] == ["meet"] * 3
    job.lose(1, step=6)
    assert (0, "replace") in job.kinds()


def test_a_survivor_that_cannot_be_ended_counts_as_lost_too() -> None:
    job = Job()
    job.lose(2)
    job.tell(0, "ready", generation=2, port=7)
    job.tick(READY_S + 1, heard="012")
    assert (1, "kill") in job.kinds()
    job.tick(KILLED_S + 1, heard="012")
    assert job.coordinator.generation == 3
    assert "rank 1 on a (pid 11) was lost" in job.coordinator.lines[-1]


def test_a_request_to_stop_ends_a_job_whose_rank_cannot_be_ended() -> None:
    job = Job(on_loss="wait")
    freeze(job, 1)
    job.tick(KILLED_S + 1, heard="012")
    job.tell(0, "stop", reason="SIGTERM", withdrawn="")
    job.tick(READY_S + 1, heard="012")
    assert "asked to stop by SIGTERM while it waited for rank 1" in job.coordinator.lines[-1]


@pytest.mark.parametrize("on_loss", ["stop", "wait", "shrink"])
def test_on_loss_decides_about_a_rank_that_cannot_be_ended(on_loss: str) -> None:
    job = Job(on_loss=on_loss, max_ranks=2)
    freeze(job, 1)
    job.tick(KILLED_S + 1, heard="012")
    for rank in (0, 2):
        job.tell(rank, "ready", generation=2, port=7)
    job.told()
    job.tick(REPLACED_S + 1, heard="012")
    told = job.told()
    assert job.coordinator.is_ended == (on_loss == "stop")
    if on_loss == "wait":
        assert "SIGKILL does not end pid 11 on a" in job.coordinator.lines[-1]
        assert told == []
    if on_loss == "shrink":
        assert [message["rank"] for _, message in told] == [0, -1, 1]


def test_a_rank_that_cannot_be_ended_gets_no_second_process_when_an_agent_of_its_node_is_lost() -> None:
    job = Job("aaa", on_loss="wait")
    freeze(job, 1)
    job.tick(KILLED_S + 1, heard="012")
    job.told()
    job.lose_agent(2)
    assert (0, "replace") not in job.kinds()
    job.lose(1)
    assert (0, "replace") in job.kinds()


def test_a_process_that_ends_late_after_sigkill_leaves_its_replacement_the_whole_time() -> None:
    job = Job()
    freeze(job, 1)
    job.tick(KILLED_S + 1, heard="012")
    for rank in (0, 2):
        job.tell(rank, "ready", generation=2, port=7)
    job.tick(REPLACED_S - 1, heard="012")
    job.lose(1)
    job.tick(2, heard="012")
    assert not job.coordinator.is_ended
    job.tell(1, "started", pid=30)
    job.tell(1, "ready", generation=2, port=7)
    assert [kind for _, kind in job.kinds()][-3:] == ["meet"] * 3


def test_a_rank_that_ends_by_itself_after_it_was_to_be_killed_is_no_loss() -> None:
    job = Job()
    freeze(job, 1)
    job.tell(1, "left", code=0)
    job.tick(KILLED_S + 1, heard="012")
    assert job.kinds() == []
    assert not job.coordinator.is_ended


def test_a_job_whose_replacement_is_missing_for_long_ends_when_it_is_asked_to_stop() -> None:
    job = Job(on_loss="wait")
    job.lose(2)
    job.recover(0, 1)
    job.tell(0, "stop", reason="SIGTERM", withdrawn="")
    job.tick(READY_S / 2, heard="012")
    assert not job.coordinator.is_ended
    job.tick(READY_S, heard="012")
    assert "asked to stop by SIGTERM while it waited for rank 2" in job.coordinator.lines[-1]


def test_a_request_to_stop_is_left_to_the_ranks_while_none_is_waited_for() -> None:
    job = Job("aa", on_loss="wait")
    job.tell(0, "stop", reason="SIGTERM", withdrawn="")
    job.lose(1)
    job.tick(1, heard="0")
    assert not job.coordinator.is_ended


def test_repeated_steps_do_not_end_a_row_of_losses_but_are_no_part_of_the_next_recovery() -> None:
    """A copy is several steps old, and a later one of the repeated steps kills its rank again."""
    job = Job()
    job.lose(1, step=15)
    job.recover(0, 1, 2, step=11)
    job.lose(0, step=13, cause="SIGSEGV")
    plan = next(message for _, message in job.told() if message["kind"] == "plan")
    assert ([Loss(*loss).step for loss in plan["losses"]], plan["repeat_until"]) == ([13], 15)
    job.recover(0, 1, 2, step=11)
    job.lose(1, step=15)
    assert job.coordinator.is_ended
    assert "The same happened before at this step" in job.coordinator.lines[-1]


def test_losses_at_different_repeated_steps_are_no_row() -> None:
    """A run that has returned to an old checkpoint repeats many steps, and finishes some between two losses."""
    job = Job()
    job.lose(1, step=1000)
    for step in range(100, 600, 100):
        job.recover(0, 1, 2, step=step - 50)
        job.lose(step // 100 % 3, step=step)
    assert not job.coordinator.is_ended


def test_a_row_of_losses_ends_when_all_ranks_are_past_the_step_of_the_loss() -> None:
    job = Job()
    for _ in range(4):
        job.lose(1, step=15)
        job.recover(0, 1, 2, step=11)
        for rank in range(3):
            job.tell(rank, "stepped", generation=job.coordinator.generation, step=15)
    assert not job.coordinator.is_ended


@pytest.mark.parametrize("phase", ["report", "evaluate", "save", "rewind", "callbacks"])
def test_the_same_loss_after_a_finished_step_ends_the_job(phase: str) -> None:
    """The copies are some steps old. The ranks finish the step again, and its evaluation kills a rank again."""
    job = Job()
    job.lose(1, step=15, phase=phase)
    job.recover(0, 1, 2, step=11)
    for rank in range(3):
        job.tell(rank, "stepped", generation=job.coordinator.generation, step=15)
    job.lose(1, step=15, phase=phase)
    assert "The same happened before at this step" in job.coordinator.lines[-1]


def test_the_same_loss_in_a_later_evaluation_is_no_repetition() -> None:
    job = Job()
    for step in (15, 20, 15):
        job.lose(1, step=step, phase="evaluate")
        job.recover(0, 1, 2, step=11)
        for rank in range(3):
            job.tell(rank, "stepped", generation=job.coordinator.generation, step=step + 1)
    assert not job.coordinator.is_ended


def test_a_lost_agent_that_connects_again_takes_its_rank_back() -> None:
    job = Job("ab", on_loss="wait")
    job.lose_agent(1)
    assert job.kinds() == [(0, "plan"), (1, "plan")]
    job.tick(READY_S + REPLACED_S)
    assert not job.coordinator.is_ended
    job.greet(1, "c")
    told = job.told()
    assert (1, {"kind": "replace", "seat": ["seat 1"]}) in told
    assert [message["rank"] for number, message in told if message["kind"] == "plan" and number == 1] == [1]


def test_an_agent_without_a_rank_on_another_node_takes_the_rank_of_a_lost_agent() -> None:
    job = Job("aabbcc", num_ranks=4, on_loss="stop")
    job.lose_agent(2)
    job.lose_agent(3)
    told = job.told()
    plans = {number: message["rank"] for number, message in told if message["kind"] == "plan"}
    assert plans == {0: 0, 1: 1, 2: -1, 3: -1, 4: 2, 5: 3}
    asked = [(number, message["seat"]) for number, message in told if message["kind"] == "replace"]
    assert asked == [(4, ["seat 4"]), (4, ["seat 5"])]
    assert not job.coordinator.is_ended


def test_a_silent_agent_counts_as_lost_only_if_the_others_make_no_progress() -> None:
    job = Job("ab", on_loss="shrink", max_ranks=2)
    for number in (0, 1):
        job.status(number)
    job.now_s += 7
    job.status(0, idle_s=1)
    job.tick()
    assert job.kinds() == []
    job.status(0, idle_s=7)
    job.tick()
    assert job.coordinator.dropped == [1]
    assert job.ranks() == {0: 0, 1: -1}


def test_a_silent_agent_without_a_rank_gets_none_until_it_answers_again() -> None:
    job = Job("abcd", num_ranks=2, on_loss="wait")
    job.tick(7, heard="012")
    job.tick(heard="012")
    lines = [line for line in job.coordinator.lines if "silent" in line]
    assert len(lines) == 1
    assert "agent 3 on d, which has no rank, was silent for 6 s" in lines[0]
    job.lose_agent(1)
    assert job.ranks() == {0: 0, 1: -1, 2: 1, 3: -1}
    job.lose_agent(2)
    job.status(3)
    assert "agent 3 on d answers again" in job.coordinator.lines[-2]
    assert job.ranks() == {0: 0, 1: -1, 2: -1, 3: 1}


def test_an_agent_that_is_silent_before_its_rank_has_started_is_replaced_too() -> None:
    job = Job("abcd", num_ranks=2)
    job.lose_agent(1)
    assert job.ranks() == {0: 0, 1: -1, 2: 1, 3: -1}
    job.tell(2, "started", pid=30)
    job.tick(7, heard="03")
    assert job.coordinator.dropped == [2]
    assert job.ranks() == {0: 0, 1: -1, 2: -1, 3: 1}


def test_all_silent_agents_of_a_node_are_lost_at_once_and_never_count_as_a_repetition() -> None:
    job = Job("aabbcc", on_loss="shrink", max_ranks=12)
    job.now_s += 7
    for number in (0, 1, 4, 5):
        job.status(number, idle_s=7)
    job.tick()
    assert job.coordinator.dropped == [2, 3]
    assert job.ranks() == {0: 0, 1: 1, 2: -1, 3: -1, 4: 2, 5: 3}
    job.lose_agent(4)
    job.lose_agent(5)  # it has become rank 2 as agent 4 was, at the same step
    assert not job.coordinator.is_ended
    assert job.ranks() == {0: 0, 1: 1, 2: -1, 3: -1, 4: -1, 5: -1}


@pytest.mark.parametrize(("joins", "taker"), [(False, 3), (True, 4)])
def test_an_idle_agent_takes_the_rank_of_a_lost_one_rather_on_another_node(joins: bool, taker: int) -> None:
    job = Job("aaaa", on_loss="shrink", max_ranks=4)
    job.lose_agent(2)
    assert job.ranks() == {0: 0, 1: 1, 2: -1, 3: -1}
    job.recover(0, 1)
    if joins:
        job.greet(4, "b")
    job.lose_agent(1)
    assert job.ranks()[taker] == 1


def test_a_node_of_many_ranks_is_one_failure_and_moves_to_the_spare_node() -> None:
    job = Job("aa" + 8 * "b" + 8 * "c", num_ranks=10, max_in_row=1)
    job.now_s += 7
    for number in (0, 1, *range(10, 18)):
        job.status(number, idle_s=7)
    job.tick()
    assert job.coordinator.dropped == list(range(2, 10))
    assert not job.coordinator.is_ended
    assert job.ranks() == {0: 0, 1: 1} | {2 + rank: -1 for rank in range(8)} | {
        10 + rank: 2 + rank for rank in range(8)
    }


def test_nobody_is_silent_after_a_pause_of_the_coordinator_itself() -> None:
    job = Job("ab", on_loss="shrink", max_ranks=2)
    for number in (0, 1):
        job.status(number)
    job.now_s += 20
    job.coordinator.excuse(19, job.now_s)
    job.tick()
    assert job.coordinator.dropped == []
    job.tick(6)
    assert job.coordinator.dropped != []


def test_statuses_are_confirmed_with_the_time_at_which_the_agent_has_sent_them() -> None:
    """An agent kills its rank when its newest confirmed status is old, before its rank is given away."""
    job = Job("ab", on_loss="shrink", max_ranks=2)
    status = [0.1, 0.1, LIMIT_S, 5, "step", False]
    job.tell(1, "status", status=status, sent_s=3.5)
    job.now_s += 0.1
    job.tell(1, "status", status=status, sent_s=3.6)
    job.now_s += 1.0
    job.tell(1, "status", status=status, sent_s=4.6)
    assert job.told() == [(1, {"kind": "heard", "sent_s": 3.5}), (1, {"kind": "heard", "sent_s": 4.6})]


def test_idle_agents_end_with_the_code_of_the_job() -> None:
    job = Job("aab", num_ranks=2)
    job.tell(0, "left", code=0)
    assert job.kinds() == []
    job.tell(1, "left", code=0)
    assert job.told() == [(2, {"kind": "end", "code": 0, "reason": ""})]
    job = Job("aab", num_ranks=2)
    job.tell(0, "left", code=75)
    assert [message["code"] for number, message in job.told() if number == 2] == [75]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"settings": "others"}, "its settings are not those of the job"),
        ({"code": "ours 2"}, "it has ours 2, but the job runs ours 1. Install the versions of the job"),
    ],
    ids=["settings", "code"],
)
def test_an_agent_with_other_settings_or_code_is_refused_and_the_job_still_waits_for_one_with_its_own(
    other: dict[str, str], why: str
) -> None:
    job = Job("ab", on_loss="wait")
    job.lose_agent(1)
    job.told()
    with pytest.raises(RefusedError, match=why):
        job.greet(1, "b", **other)
    assert job.told() == []
    job.greet(1, "b")
    assert (1, "plan") in job.kinds()


def test_a_death_before_all_agents_are_known_ends_the_job() -> None:
    coordinator = Coordinator(2, silent_s=6, max_in_row=3)
    hello = {
        "kind": "hello",
        "host": "a",
        "node": "a",
        "address": "",
        "seat": [],
        "pid": 1,
        "process": [],
        "partner": [],
        "settings_hash": "",
        "code": "",
    }
    coordinator.receive(0, hello, 0.0)
    coordinator.receive(0, {"kind": "died", "cause": "SIGKILL", "status": [0, 0, 0, 0, "start", False]}, 1.0)
    assert coordinator.is_ended


@pytest.mark.parametrize(
    "message",
    [
        *({"kind": kind} for kind in ("dance", "hello", "status", "started", "died", "unfilled", "ready", "stepped")),
        *({"kind": kind} for kind in ("failed", "left", "stop")),
        {},
        {"kind": "status", "status": [1]},
        {"kind": "ready", "generation": 2, "port": "x"},
        {"kind": "died", "cause": "SIGKILL", "status": [1, 2, 3, "step", "step", False]},
    ],
    ids=str,
)
def test_a_message_that_cannot_be_used_is_refused_and_changes_nothing(message: dict[str, Any]) -> None:
    job = Job()
    before = copy.deepcopy(vars(job.coordinator))
    with pytest.raises(MessageError):
        job.coordinator.receive(0, message, 200.0)
    assert vars(job.coordinator) == before
