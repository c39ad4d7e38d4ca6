"""The arithmetic of lanes, compared with a naive implementation of its definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.checks.simulate_lanes import tokens_at
from txl_dist.data.loader.lanes import (
    LanePartition,
    LanePlan,
    allot_lanes,
    epochs_read,
    hash64,
    hashed_order,
    lanes_of_rank,
    merged,
    outside,
    owners_of_lanes,
)
from txl_dist.errors import ConfigError, DataError

DOCUMENTS = [[5, 1, 9], [30], [2, 2, 2, 2, 1], [7, 4]]
NUM_TOKENS = sum(map(sum, DOCUMENTS))


def make_plan(num_lanes: int, *, seed: int = 3) -> LanePlan:
    lengths = [np.array(shard, dtype=np.int64) for shard in DOCUMENTS]
    totals = [int(shard.sum()) for shard in lengths]
    return LanePlan(totals, LanePartition(num_lanes), seed=seed, document_tokens=lengths.__getitem__, num_cached=3)


def naive_epoch(epoch: int, *, seed: int = 3) -> list[tuple[int, int, int]]:
    """(shard, document, offset) of every token of an epoch in order."""
    return [
        (int(shard), int(document), offset)
        for shard in hashed_order(len(DOCUMENTS), seed, epoch, 1)
        for document in hashed_order(len(DOCUMENTS[shard]), seed, epoch, 2, int(shard))
        for offset in range(DOCUMENTS[shard][document])
    ]


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 7, NUM_TOKENS])
def test_every_token_is_where_the_definition_puts_it(num_lanes: int) -> None:
    plan = make_plan(num_lanes)
    stripe_len = NUM_TOKENS // num_lanes
    assert plan.stripe_len == stripe_len
    for epoch in range(3):
        order = naive_epoch(epoch)
        for lane in range(num_lanes):
            begins = set()
            for in_stripe in range(stripe_len):
                position = epoch * stripe_len + in_stripe
                stretch = plan.locate(lane, position)
                assert (stretch.epoch, stretch.shard, stretch.document, stretch.offset) == (
                    epoch,
                    *order[lane * stripe_len + in_stripe],
                )
                assert 1 <= stretch.length <= stripe_len - in_stripe
                assert stretch.begin == position - min(stretch.offset, in_stripe)
                begins.add(stretch.begin)
            pieces = {token[:2] for token in order[lane * stripe_len : (lane + 1) * stripe_len]}
            assert len(begins) == len(pieces), "one beginning per piece of a document"


def test_lanes_read_each_token_of_an_epoch_once_and_leave_out_fewer_than_their_number() -> None:
    for num_lanes in (1, 4, 6, 11):
        plan = make_plan(num_lanes)
        read = [
            plan.locate(lane, plan.stripe_len + p)[1:4] for lane in range(num_lanes) for p in range(plan.stripe_len)
        ]
        assert len(set(read)) == len(read)
        assert NUM_TOKENS - len(read) < num_lanes


def test_epochs_and_seeds_have_other_orders() -> None:
    orders = {tuple(naive_epoch(epoch, seed=seed)) for epoch in range(3) for seed in (1, 2)}
    assert len(orders) == 6


def test_the_hash_is_frozen() -> None:
    assert int(hash64(1, 2, 3)) == 0x48CF5028B6DF10DB
    assert hashed_order(8, 1, 0, 1).tolist() == [7, 6, 4, 0, 2, 5, 1, 3]
    assert sorted(hashed_order(1000, 5).tolist()) == list(range(1000))
    assert int(hash64(-1)) == int(hash64((1 << 64) - 1)), "any integer is a seed"


def test_ranks_share_the_lanes_without_gap_or_overlap() -> None:
    for world_size in (1, 2, 4, 8):
        ranges = [lanes_of_rank(8, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert [lane for lanes in ranges for lane in lanes] == list(range(8))
    with pytest.raises(ConfigError, match="8 lanes"):
        lanes_of_rank(8, rank=0, world_size=3)


def test_more_lanes_than_tokens_are_refused() -> None:
    with pytest.raises(DataError, match=f"only {NUM_TOKENS} tokens for {NUM_TOKENS + 1} lanes"):
        make_plan(NUM_TOKENS + 1)


@given(
    shards=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=6),
    seed=st.integers(0, 2**63 - 1),
    cuts=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 70)), min_size=1, max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_however_often_lanes_are_cut_anew_each_epoch_is_read_once(
    shards: list[list[int]], seed: int, cuts: list[tuple[int, int]]
) -> None:
    lengths = [np.array(shard, dtype=np.int64) for shard in shards]
    num_tokens = sum(map(sum, shards))
    read: list[tuple[int, int, int, int]] = []
    cut, left_out = LanePartition(1), 0
    for num_lanes, position in cuts:
        cut = LanePartition(min(num_lanes, num_tokens), cut.epoch, cut.unread)
        totals = [int(shard.sum()) for shard in lengths]
        plan = LanePlan(totals, cut, seed=seed, document_tokens=lengths.__getitem__, num_cached=2)
        for lane in range(cut.num_lanes):
            at = 0
            while at < position:
                stretch = plan.locate(lane, at)
                assert stretch.begin <= at
                count = min(stretch.length, position - at)
                read += [(*stretch[:3], stretch.offset + i) for i in range(count)]
                at += count
        epoch, rest = plan.rest_of_epoch(position)
        assert list(rest) == sorted(rest)
        left_out += (epoch - cut.epoch) * cut.num_lanes
        cut = LanePartition(cut.num_lanes, epoch, rest)
    assert len(set(read)) == len(read), "no token twice in an epoch"
    unread = sum(end - first for first, end in cut.unread) or num_tokens
    missing = num_tokens * (cut.epoch + 1) - unread - len(read)
    assert 0 <= missing <= left_out, "fewer than num_lanes tokens are left out of an epoch, none of the present one"


SKIPS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 12)), max_size=4)
"""(first position, length) of ranges that may overlap."""


@given(
    shards=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=6),
    seed=st.integers(0, 2**63 - 1),
    cuts=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 70), SKIPS), min_size=1, max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_what_lanes_skip_is_never_read_and_all_else_of_each_epoch_once(
    shards: list[list[int]], seed: int, cuts: list[tuple[int, int, list[tuple[int, int]]]]
) -> None:
    lengths = [np.array(shard, dtype=np.int64) for shard in shards]
    totals = [int(shard.sum()) for shard in lengths]
    num_tokens = sum(totals)
    read: list[tuple[int, ...]] = []
    skipped: list[tuple[int, ...]] = []
    cut, left_out = LanePartition(1), 0
    for num_lanes, position, skipping in cuts:
        cut = LanePartition(min(num_lanes, num_tokens), cut.epoch, cut.unread)
        plan = LanePlan(totals, cut, seed=seed, document_tokens=lengths.__getitem__, num_cached=2)
        skips = merged(sorted((first, first + length) for first, length in skipping))
        position, _ = next(outside(skips, position, 1000))
        epoch, rest = plan.rest_of_epoch(position, skips)
        for at in range(110):
            is_skipped = any(first <= at < end for first, end in skips)
            for token in [plan.locate(lane, at)[:4] for lane in range(cut.num_lanes)]:
                if is_skipped and token[0] <= epoch:  # skips of later epochs are forgotten
                    skipped.append(token)
                elif at < position:
                    read.append(token)
        left_out += (epoch - cut.epoch) * cut.num_lanes
        cut = LanePartition(cut.num_lanes, epoch, rest)
    everything = read + skipped
    assert len(set(everything)) == len(everything), "no token twice in an epoch, nor one that was to be skipped"
    unread = sum(end - first for first, end in cut.unread) or num_tokens
    missing = num_tokens * (cut.epoch + 1) - unread - len(everything)
    assert 0 <= missing <= left_out, "fewer than num_lanes tokens are left out of an epoch, none of the present one"


@given(ranges=SKIPS, first=st.integers(0, 60), length=st.integers(0, 60))
def test_ranges_are_merged_and_left_out_as_their_positions_are(
    ranges: list[tuple[int, int]], first: int, length: int
) -> None:
    skips = merged(sorted((begin, begin + size) for begin, size in ranges))
    skipped = {at for begin, size in ranges for at in range(begin, begin + size)}
    assert [at for begin, end in skips for at in range(begin, end)] == sorted(skipped)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(skips)), "none touch"
    kept = [at for begin, end in outside(skips, first, first + length) for at in range(begin, end)]
    assert kept == [at for at in range(first, first + length) if at not in skipped]


def test_a_cut_in_the_middle_of_an_epoch_goes_on_with_what_no_lane_has_read() -> None:
    plan = make_plan(4)
    epoch, rest = plan.rest_of_epoch(plan.stripe_len + 5)
    starts = [lane * plan.stripe_len for lane in range(4)]
    assert epoch == 1
    assert rest[:3] == tuple((start + 5, start + plan.stripe_len) for start in starts[:3])
    assert rest[3] == (starts[3] + 5, NUM_TOKENS), "what four lanes would have left out is dealt out too"
    assert plan.rest_of_epoch(plan.stripe_len) == (1, ()), "at a border the whole next epoch"
    lengths = [np.array(shard, dtype=np.int64) for shard in DOCUMENTS]
    anew = LanePlan(
        [int(shard.sum()) for shard in lengths],
        LanePartition(3, epoch, rest),
        seed=3,
        document_tokens=lengths.__getitem__,
    )
    order = naive_epoch(1)
    unread = [order[token] for first, end in rest for token in range(first, end)]
    assert anew.first_stripe_len == len(unread) // 3
    for lane in range(3):
        for at in range(anew.first_stripe_len):
            assert anew.locate(lane, at)[1:4] == unread[lane * anew.first_stripe_len + at]
    assert anew.locate(2, anew.first_stripe_len)[:1] == (2,), "then the next whole epoch"


@given(
    num_lanes=st.integers(1, 40),
    rest=st.sampled_from([(), ((3, 9), (20, 41), (50, 66))]),
    data=st.data(),
)
def test_many_lanes_and_positions_at_once_are_found_as_one_by_one(
    num_lanes: int, rest: tuple[tuple[int, int], ...], data: st.DataObject
) -> None:
    plan = LanePlan(
        [40, 26], LanePartition(num_lanes, 2, rest), seed=0, document_tokens=lambda shard: np.ones(40, np.int64)
    )
    lanes = np.array(data.draw(st.lists(st.integers(0, num_lanes - 1), min_size=1, max_size=9)))
    positions = np.array(data.draw(st.lists(st.integers(0, 300), min_size=len(lanes), max_size=len(lanes))))
    together = np.array(tokens_at(plan, lanes, positions)).T.tolist()
    one_by_one = [plan.token_at(int(lane), int(p)) for lane, p in zip(lanes, positions, strict=True)]
    assert together == [[epoch, token, left] for epoch, token, _, left in one_by_one]


def test_lanes_are_allotted_by_weight_and_every_weight_gets_its_share() -> None:
    assert allot_lanes(32, [0.7, 0.3]) == (22, 10)
    assert allot_lanes(8, [5]) == (8,)
    assert allot_lanes(3, [1, 1]) == (2, 1), "a tie falls to the first"
    assert allot_lanes(6, [1, 0, 2]) == (2, 0, 4), "a weight of 0 pauses a corpus"
    with pytest.raises(ConfigError, match="corpus 1 gets none of the 4 lanes"):
        allot_lanes(4, [1000, 1, 500])
    with pytest.raises(ConfigError, match="positive"):
        allot_lanes(4, [0, 0])


@given(weights=st.lists(st.floats(0.05, 1), min_size=1, max_size=6), num_lanes=st.integers(200, 1000))
def test_no_share_is_off_by_a_lane_or_more(weights: list[float], num_lanes: int) -> None:
    lanes = allot_lanes(num_lanes, weights)
    assert sum(lanes) == num_lanes
    assert all(abs(n - w / sum(weights) * num_lanes) < 1 for n, w in zip(lanes, weights, strict=True))


def test_owners_are_frozen_spread_and_number_the_lanes_of_each_corpus() -> None:
    owners, numbers = owners_of_lanes([5, 0, 3], seed=7)
    assert owners.tolist() == [0, 0, 2, 0, 0, 0, 2, 2]
    for corpus, count in enumerate([5, 0, 3]):
        assert numbers[owners == corpus].tolist() == list(range(count))
    assert owners_of_lanes([4], seed=7)[1].tolist() == [0, 1, 2, 3]


def test_epochs_are_counted_over_cuts() -> None:
    assert epochs_read(LanePartition(4), 0, num_tokens=100) == 0
    assert epochs_read(LanePartition(4), 30, num_tokens=100) == pytest.approx(1.2)
    rest = ((10, 25), (35, 50), (60, 75), (85, 100))
    assert epochs_read(LanePartition(2, 0, rest), 0, num_tokens=100) == pytest.approx(0.4)
    assert epochs_read(LanePartition(2, 0, rest), 30, num_tokens=100) == pytest.approx(1)
    assert epochs_read(LanePartition(0, 3, rest), 0, num_tokens=100) == pytest.approx(3.4), "paused"


@given(
    shards=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=2, max_size=8),
    num_lanes=st.integers(1, 5),
    is_cut_anew=st.booleans(),
)
@settings(deadline=None)
@pytest.mark.slow
def test_the_shard_after_is_the_one_that_the_lane_reads_next(
    shards: list[list[int]], num_lanes: int, is_cut_anew: bool
) -> None:
    lengths = [np.array(shard, dtype=np.int64) for shard in shards]
    totals = [int(shard.sum()) for shard in lengths]
    num_tokens = sum(totals)
    rest = ((1, num_tokens // 3 + 2), (num_tokens // 2 + 2, num_tokens)) if is_cut_anew and num_tokens > 12 else ()
    cut = LanePartition(min(num_lanes, max(1, num_tokens // 8)), 1, rest)
    plan = LanePlan(totals, cut, seed=5, document_tokens=lengths.__getitem__)
    for lane in range(cut.num_lanes):
        for position in range(2 * plan.stripe_len):
            here = plan.locate(lane, position)
            behind = plan.locate(lane, position + here.shard_left)
            assert plan.shard_after(lane, position, here) == behind.shard
            assert all(plan.locate(lane, position + i).shard == here.shard for i in range(here.shard_left))


def test_a_shard_that_changes_its_documents_is_ordered_anew() -> None:
    lengths = [np.array([5, 5, 5], dtype=np.int64), np.array([7], dtype=np.int64)]
    plan = LanePlan([15, 7], LanePartition(1), seed=0, document_tokens=lambda shard: lengths[shard])
    before = [plan.locate(0, position)[1:4] for position in range(22)]
    lengths[0] = np.array([15], dtype=np.int64)  # lost: one document stands for all
    assert sorted(plan.locate(0, position)[1:4] for position in range(22)) == sorted(
        [(0, 0, offset) for offset in range(15)] + [(1, 0, offset) for offset in range(7)]
    )
    lengths[0] = np.array([5, 5, 5], dtype=np.int64)
    assert [plan.locate(0, position)[1:4] for position in range(22)] == before
