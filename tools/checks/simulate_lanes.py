"""Compute which tokens every rank reads at every step, without a model, and check that each token is read once.

`python -m tools.checks.simulate_lanes` simulates 4,096 lanes (batch rows) on 512 ranks, 1,000 shards and 10,000 steps.
These are about 21 billion tokens in two and a half epochs. `--ramp-to 8192` doubles lanes and ranks after half of the
steps, in the middle of an epoch.

For each rank the program computes the positions of its lanes at all steps with `LanePlan`, as the loader does, but for
all steps at once. It then checks three facts. The pieces that a lane reads in an epoch are consecutive, so they form
one range per lane (or per range of unread tokens, after the number of lanes has changed). The ranges of all lanes do
not overlap. Their sum is the whole epoch, except for fewer tokens than there are lanes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.data.loader.lanes import SHARD_ORDER, LanePartition, LanePlan, hashed_order, lanes_of_rank

Int64s = npt.NDArray[np.int64]

BYTES_PER_TOKEN = 2
SEED = 1


class Pieces(NamedTuple):
    """Ranges of tokens [first, end) of an epoch, each read by a lane at a step. All fields have the shape [pieces]."""

    epoch: Int64s
    first: Int64s
    end: Int64s
    lane: Int64s
    step: Int64s


class RankFacts(NamedTuple):
    """Figures of one rank over the run."""

    max_open_shards: int
    """Largest number of different shards in one step, including a shard that is entered during the step."""
    shards: int
    """Number of shards opened over the run. A shard counts again in each epoch."""
    tokens: int


def tokens_at(plan: LanePlan, lane: Int64s, position: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return (epoch, token in its order, remaining tokens of the piece) for many positions. `LanePlan.token_at` finds
    the same for one."""
    is_first = position < plan.first_stripe_len
    in_rest = plan.token_in_rest(lane, np.minimum(position, max(plan.first_stripe_len - 1, 0)))
    behind = plan.token_after_rest(lane, np.maximum(position, plan.first_stripe_len))
    epoch, token, _, left = (np.where(is_first, *values) for values in zip(in_rest, behind, strict=True))
    return epoch, token, left


def pieces_of(plan: LanePlan, lanes: range, *, steps: int, segment_len: int) -> Pieces:
    """Return all ranges that some lanes read in `steps` steps, ordered by lane and step."""
    lane, step = (grid.reshape(-1) for grid in np.meshgrid(np.array(lanes), np.arange(steps), indexing="ij"))
    position, remaining = step * segment_len, np.full(len(lane), segment_len)
    found: list[Pieces] = []
    while len(lane):
        epoch, first, left = tokens_at(plan, lane, position)
        count = np.minimum(left, remaining)
        found.append(Pieces(epoch, first, first + count, lane, step))
        goes_on = remaining > count
        lane, step = lane[goes_on], step[goes_on]
        position, remaining = (position + count)[goes_on], (remaining - count)[goes_on]
    # The sort is stable, so a segment's second piece stays after its first.
    joined = Pieces(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
    order = np.argsort(joined.lane * steps + joined.step, kind="stable")
    return Pieces(*(values[order] for values in joined))


def merged(pieces: Pieces) -> Pieces:
    """Join consecutive pieces of a lane. The result contains the ranges of each lane."""
    breaks = (
        (pieces.lane[1:] != pieces.lane[:-1])
        | (pieces.epoch[1:] != pieces.epoch[:-1])
        | (pieces.first[1:] != pieces.end[:-1])
    )
    begins = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    ends = np.append(begins[1:], len(pieces.first)) - 1
    return Pieces(
        pieces.epoch[begins], pieces.first[begins], pieces.end[ends], pieces.lane[begins], pieces.step[begins]
    )


def facts_of(shard_tokens: Int64s, pieces: Pieces, *, steps: int) -> RankFacts:
    """Count the shards that the rank has open."""
    num_shards = len(shard_tokens)
    shards = np.empty((2, len(pieces.first)), np.int64)
    for epoch in np.unique(pieces.epoch):
        here = pieces.epoch == epoch
        order = hashed_order(num_shards, SEED, int(epoch), SHARD_ORDER)
        starts = np.cumsum(shard_tokens[order]) - shard_tokens[order]
        for row, token in enumerate((pieces.first[here], pieces.end[here] - 1)):
            shards[row, here] = order[starts.searchsorted(token, side="right") - 1]
    opened = (pieces.epoch * num_shards + shards).reshape(-1)
    size = int(opened.max()) + 1
    per_step = np.unique(np.tile(pieces.step, 2) * size + opened)
    open_shards = np.bincount(per_step // size, minlength=steps)
    return RankFacts(int(open_shards.max()), len(np.unique(opened)), int((pieces.end - pieces.first).sum()))


def check_each_token_once(ranges: list[Pieces], *, num_tokens: int, most_left_out: int) -> Iterator[str]:
    """Yield a line per epoch. Raises AssertionError if a token was read twice, or if a finished epoch has too many
    unread tokens."""
    joined = Pieces(*(np.concatenate(parts) for parts in zip(*ranges, strict=True)))
    last = int(joined.epoch.max())
    for epoch in range(last + 1):
        here = joined.epoch == epoch
        order = np.argsort(joined.first[here])
        first, end = joined.first[here][order], joined.end[here][order]
        assert (first[1:] >= end[:-1]).all(), f"epoch {epoch}: a token was read twice"
        read = int((end - first).sum())
        if epoch < last:
            assert num_tokens - read < most_left_out, f"epoch {epoch}: {num_tokens - read} tokens were left out"
        yield f"epoch {epoch}: {read:,} of {num_tokens:,} tokens, none twice, {num_tokens - read:,} not" + (
            " (left out)" if epoch < last else " (yet)"
        )


def main() -> None:
    """Simulate the run and print the figures and the checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--segment-len", type=int, default=512)
    parser.add_argument("--ramp-to", type=int, default=0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    tokens = np.random.default_rng(0).integers(7_000_000, 10_000_000, arguments.shards)
    num_tokens = int(tokens.sum())
    phases = [(arguments.lanes, arguments.ranks, arguments.steps)]
    if arguments.ramp_to:
        half, factor = arguments.steps // 2, arguments.ramp_to // arguments.lanes
        phases = [(arguments.lanes, arguments.ranks, half), (arguments.ramp_to, arguments.ranks * factor, half)]
    print(f"{arguments.shards:,} shards, {num_tokens:,} tokens, segments of {arguments.segment_len}")
    cut, ranges = LanePartition(phases[0][0]), []
    for num_lanes, world_size, steps in phases:
        cut = LanePartition(num_lanes, cut.epoch, cut.unread)
        facts = []
        for rank in range(world_size):
            # Each rank makes its own plan. Ranks share nothing.
            plan = LanePlan(tokens, cut, seed=SEED, document_tokens=lambda shard: tokens[shard : shard + 1])
            lanes = lanes_of_rank(num_lanes, rank=rank, world_size=world_size)
            pieces = pieces_of(plan, lanes, steps=steps, segment_len=arguments.segment_len)
            facts.append(facts_of(tokens, pieces, steps=steps))
            ranges.append(merged(pieces))
        for name, values in zip(RankFacts._fields, np.array(facts).T, strict=True):
            print(
                f"{num_lanes:,} lanes, {world_size} ranks, {steps:,} steps; {name.replace('_', ' ')} per rank: ", end=""
            )
            print(f"smallest {values.min():,}, mean {values.mean():,.1f}, largest {values.max():,}")
        print(f"bytes of tokens per rank: {facts[0].tokens * BYTES_PER_TOKEN:,}")
        epoch, rest = plan.rest_of_epoch(steps * arguments.segment_len)
        cut = LanePartition(num_lanes, epoch, rest)
    most_left_out = max(num_lanes for num_lanes, _, _ in phases)
    for line in check_each_token_once(ranges, num_tokens=num_tokens, most_left_out=most_left_out):
        print(line)
    print(f"{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
