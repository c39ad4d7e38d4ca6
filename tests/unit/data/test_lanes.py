"""The arithmetic of lanes against a naive reading of its definition."""

from __future__ import annotations

import numpy as np
import pytest

from txl_dist.data.lanes import LanePlan, hash64, hashed_order, lanes_of_rank
from txl_dist.errors import ConfigError, DataError

DOCUMENTS = [[5, 1, 9], [30], [2, 2, 2, 2, 1], [7, 4]]
NUM_TOKENS = sum(map(sum, DOCUMENTS))


def make_plan(num_lanes: int, *, seed: int = 3) -> LanePlan:
    lengths = [np.array(shard, dtype=np.int64) for shard in DOCUMENTS]
    totals = [int(shard.sum()) for shard in lengths]
    return LanePlan(totals, num_lanes=num_lanes, seed=seed, document_tokens=lengths.__getitem__, num_cached=3)


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
    with pytest.raises(DataError, match=f"{NUM_TOKENS} tokens, fewer than the {NUM_TOKENS + 1} lanes"):
        make_plan(NUM_TOKENS + 1)
