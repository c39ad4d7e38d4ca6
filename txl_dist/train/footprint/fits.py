"""Whether a run fits into the memory that is there, asked before anything is built, and which settings would.

    bound        an upper bound in a formula, at once; what fits by it is asked no further
    prediction   `footprint`, which follows a step: tenths of a second, or seconds for long segments on a CPU
    refusal      only where the prediction, less the largest error that was measured, is more than there is

On a CPU all ranks of the node share what the system and the control groups leave them; on a GPU each rank has a
device. Rank 0 asks for its own node. It gives up: evaluation larger than training, host memory of offloading, what
others will take later, and nodes that are smaller than the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from txl_dist.config.load import BatchPlan, Config, changed, check_config, plan_batch
from txl_dist.console.formatting import counted
from txl_dist.console.logging import logger
from txl_dist.distributed.collectives import local_world_size
from txl_dist.errors import ConfigError
from txl_dist.inference.bundle import DTYPES
from txl_dist.model.flops import count_parameters
from txl_dist.model.fused_softmax import CHUNK_LOGITS, CHUNK_ROWS
from txl_dist.train.engine.deepspeed_config import BUCKET_LEN
from txl_dist.train.footprint.rank import LIBRARY_BYTES, bytes_per_rank
from txl_dist.train.footprint.room import room_bytes

Change = dict[str, Any]
"""Values by `section.key`."""
SURE = {"cpu": 0.95, "cuda": 0.9}
"""Share of the prediction that is surely needed: on CPUs it was at most 3.2 % too high (docs/benchmarks.md), on GPUs it
was never measured."""


def check_fits(config: Config, *, plan: BatchPlan, vocab_size: int, device: torch.device) -> None:
    """Refuse a run that is known not to fit. Raises ConfigError with settings that would, if there are any."""
    on_gpu, room, sure = device.type == "cuda", room_bytes(device), SURE[device.type]
    num_sharing = 1 if on_gpu else min(local_world_size(plan.world_size), plan.world_size)
    if num_sharing * bound_bytes(config, plan=plan, vocab_size=vocab_size, on_gpu=on_gpu) <= room:
        return

    def needed(config: Config, plan: BatchPlan) -> float:
        return num_sharing * sum(bytes_per_rank(config, plan=plan, vocab_size=vocab_size, on_gpu=on_gpu).values())

    def fits(change: Change, world_size: int = plan.world_size) -> bool:
        one = changed(config, change)
        try:
            check_config(one)
            return needed(one, plan_batch(one.train, world_size=world_size)) / sure <= room
        except ConfigError:
            return False

    logger.info("memory: following a step, to see whether the run fits")
    size = needed(config, plan)
    if size * sure <= room:
        return
    machines = "" if on_gpu else f", {num_sharing} on each machine"
    remedy = ", or with ".join(_that_fit(config, plan, fits, on_gpu=on_gpu, machines=machines))
    has = "a GPU has {}" if on_gpu else "this machine has {} left" + f" for {num_sharing} ranks" * (num_sharing > 1)
    predicted, left = (f"{number / 2**30:.1f} GiB" for number in (size, room))
    raise ConfigError(
        f"the run does not fit into memory: {predicted} are predicted, and {has.format(left)}. It would fit with "
        f"{remedy or 'a smaller model only'}. --engine.check_memory False starts it all the same."
    )


def bound_bytes(config: Config, *, plan: BatchPlan, vocab_size: int, on_gpu: bool) -> float:
    """Of a rank: no sharding, nothing recomputed, every score and activation kept, and the heap's waste."""
    model, train, size = config.model, config.train, DTYPES[config.engine.dtype].itemsize
    lanes, keys = plan.microbatch_lanes, train.segment_len + train.memory_len
    inner, rows = model.num_heads * model.head_width, lanes * keys
    copies = 5 if config.engine.replays(on_gpu=on_gpu) else 3
    memories = copies * sum(train.memory_per_layer(model.num_layers)) * model.width * plan.lanes_per_rank
    per_layer = rows * (24 * model.width + 10 * inner + 5 * model.ff_width) + keys * 6 * inner
    num_kept = 7 if config.engine.attention == "plain" or not model.scheme.has_distance_terms else 3
    scores = num_kept * lanes * model.num_heads * train.segment_len * keys
    kind = "cuda" if on_gpu else "cpu"
    chunk = max(CHUNK_LOGITS[kind], CHUNK_ROWS[kind] * (vocab_size + 16 * 8))
    logits = 4 * chunk + 16 * lanes * train.segment_len * model.width
    values = memories + 2 * (model.num_layers * (per_layer + scores) + logits)
    fixed = 6.0 * BUCKET_LEN * size if on_gpu else LIBRARY_BYTES["partitioned"]
    return 64.0 * count_parameters(model, vocab_size=vocab_size) + 4.0 * values + fixed


def _that_fit(
    config: Config, plan: BatchPlan, fits: Callable[..., bool], *, on_gpu: bool, machines: str
) -> Iterator[str]:
    """Settings that surely fit: each that does alone; where none does, the first so many together; and more ranks."""
    engine, lanes = config.engine, config.train.num_lanes
    sizes = [size for size in range(1, plan.microbatch_lanes) if plan.lanes_per_rank % size == 0]
    eager: Change = {"engine.cuda_graph": "off"} if engine.replays(on_gpu=on_gpu) else {}
    smaller: list[Change] = [{"train.microbatch_lanes": size} for size in sizes]
    recomputed: Change = {} if engine.activation_checkpointing else {"engine.activation_checkpointing": True}
    recomputed |= eager
    sharded: list[Change] = [{"engine.zero_stage": stage} for stage in range(engine.zero_stage + 1, 4)]
    offloaded: list[Change] = []
    if on_gpu and not engine.offload_optimizer:
        stages = [{"engine.zero_stage": 1}] if engine.zero_stage == 0 else [{}]
        offloaded = [stage | {"engine.offload_optimizer": True} for stage in (*stages, *sharded[-1:])]
    found = [next(filter(fits, reversed(smaller)))] if smaller and fits(smaller[0]) else []
    families = ([eager], [recomputed], sharded, offloaded)
    found += [change for family in families if (change := next(filter(fits, family), {}))]
    if not found:
        least = (smaller[0] if smaller else {}) | recomputed
        found += [least | more for more in ({}, *sharded, *offloaded) if fits(least | more)][:1]
    yield from (" ".join(f"--{name} {value}" for name, value in change.items()) for change in found)
    for ranks in (ranks for ranks in range(2 * plan.world_size, lanes + 1, plan.world_size) if lanes % ranks == 0):
        size = math.gcd(lanes // ranks, plan.microbatch_lanes)
        if fits({"train.microbatch_lanes": size}, ranks):
            flag = "" if size == plan.microbatch_lanes else f", and --train.microbatch_lanes {size}"
            yield f"{counted(ranks, 'rank')}{machines}{flag}"
            return
