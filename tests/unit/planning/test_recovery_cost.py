"""The arithmetic of recovery inside the job, computed again by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from txl_dist.planning.recovery_cost import FAILURES_PER_GPU_HOUR, RECOVER_S, RecoveryCost, recovery_cost

GIB = 2**30


def cost(**values: Any) -> RecoveryCost:
    """64 GPUs in 8 nodes: 128 GiB of state, 64 GiB of memories, steps of 1 s."""
    defaults = {
        "state_bytes": 128 * GIB,
        "memory_bytes": 64 * GIB,
        "gpus": 64,
        "gpus_per_node": 8,
        "is_sharded": True,
        "step_s": 1.0,
        "overlap_s": 0.9,
        "copy_gb_s": 10.0,
        "network_gb_s": 50.0,
        "copy_every": 1,
        "partner_every": 1,
        "wait_s": 2.0,
        "restart_s": 300.0,
    }
    return recovery_cost(**(defaults | values))


def test_a_rank_stores_its_part_of_the_state_and_of_the_memories() -> None:
    assert cost().version_gib == pytest.approx(2 + 1)


def test_at_stage_0_each_node_stores_the_whole_state() -> None:
    assert cost(is_sharded=False).version_gib == pytest.approx(128 / 8 + 1)


def test_a_node_holds_two_versions_of_its_own_ranks_and_two_of_its_neighbour() -> None:
    assert cost().host_gib == pytest.approx(8 * 3 * 4)
    assert cost(partner_every=2).host_gib == pytest.approx(8 * 3 * 5)
    assert cost(gpus=8).host_gib == pytest.approx(8 * 24 * 2)


def test_the_times_of_the_copies_are_bytes_over_bandwidth_and_those_of_their_hashes() -> None:
    hash_s = 3 * GIB / 20e9
    one_stream_s = 3 * GIB / 2.6e9
    assert cost(network_gb_s=50.0).partner_s == pytest.approx(one_stream_s + hash_s)
    assert cost(network_gb_s=10.0).partner_s == pytest.approx(8 * 3 * GIB / 10e9 + hash_s)
    seconds = 3 * GIB / 10e9 + hash_s, one_stream_s + hash_s
    assert (cost().copy_s, cost().partner_s) == pytest.approx(seconds)
    assert cost().step_pct == pytest.approx(100 * sum(seconds))
    assert cost(partner_every=4).step_pct == pytest.approx(100 * (seconds[0] + seconds[1] / 4))


def test_a_step_waits_for_what_does_not_overlap() -> None:
    copy_s, partner_s = cost().copy_s, cost().partner_s
    assert cost(overlap_s=copy_s + partner_s).wait_pct == pytest.approx(0.0)
    assert cost(overlap_s=copy_s).wait_pct == pytest.approx(100 * partner_s)
    assert cost(overlap_s=copy_s, partner_every=4).wait_pct == pytest.approx(25 * partner_s)
    assert cost(overlap_s=0.0, partner_every=4).wait_pct == pytest.approx(100 * (copy_s + partner_s / 4))


def test_one_node_has_no_partner() -> None:
    alone = cost(gpus=8, partner_every=4)
    assert not alone.has_partner
    assert (alone.partner_s, alone.most_repeated_steps) == (0.0, 0)


def test_with_k_steps_between_copies_a_lost_node_repeats_at_most_k_minus_1() -> None:
    assert [cost(partner_every=k).most_repeated_steps for k in (1, 2, 10)] == [0, 1, 9]


def test_copies_every_n_steps_cost_an_nth_and_repeat_at_most_n_minus_1_more() -> None:
    often, rare = cost(overlap_s=0.0, partner_every=4), cost(overlap_s=0.0, partner_every=4, copy_every=3)
    assert (rare.step_pct, rare.wait_pct) == pytest.approx((often.step_pct / 3, often.wait_pct / 3))
    assert (rare.host_gib, rare.copy_every, rare.partner_steps, rare.most_repeated_steps) == (often.host_gib, 3, 12, 11)
    assert cost(gpus=8, partner_every=4, copy_every=3).most_repeated_steps == 2


def test_a_thousand_gpus_fail_as_often_as_llama_3_did() -> None:
    assert cost().reference.between_failures_s == pytest.approx(54 * 86_400 * 16_384 / 419 / 1000)
    assert 50 < cost().reference.between_failures_s / 3600 < 51


def test_goodput_is_what_saving_copies_and_failures_leave() -> None:
    one = cost(partner_every=3, overlap_s=0.2)
    assert one.wait_pct > 10
    between_s = 3600 / FAILURES_PER_GPU_HOUR / 64
    interval_s = math.sqrt(2 * 2.0 * between_s)
    without = 2.0 / interval_s + interval_s / 2 / between_s + 300 / between_s
    share = 2.0 / interval_s + one.wait_pct / 100 + (RECOVER_S + 1.5) / between_s
    assert one.goodput.without_pct == pytest.approx(100 * (1 - without))
    assert one.goodput.with_pct == pytest.approx(100 * (1 - share))


def test_small_copies_gain_goodput_and_large_ones_may_lose_it() -> None:
    sizes = {"state_bytes": 16 * GIB, "memory_bytes": 8 * GIB}
    small, large = cost(**sizes), cost(**sizes, overlap_s=0.2)
    assert small.reference.with_pct > small.reference.without_pct
    assert large.reference.with_pct < large.reference.without_pct


def test_time_that_does_not_suffice_is_a_goodput_of_zero() -> None:
    assert cost(step_s=0.01, overlap_s=0.009).goodput.with_pct == 0.0
