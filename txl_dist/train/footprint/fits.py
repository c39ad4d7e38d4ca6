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
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from txl_dist.config import BatchPlan, Config, check_config, plan_batch
from txl_dist.errors import ConfigError
from txl_dist.infer.bundle import DTYPES
from txl_dist.log import logger
from txl_dist.model.flops import count_parameters, typical_shares
from txl_dist.text.clusters import cluster_edges
from txl_dist.train.engine.deepspeed_config import BUCKET_LEN
from txl_dist.train.footprint.rank import LIBRARY_BYTES, bytes_per_rank

Change = dict[str, Any]
"""Values by `section.key`."""
SURE = {"cpu": 0.95, "cuda": 0.9}
"""Share of the prediction that is surely needed: on CPUs it was at most 3.2 % too high (docs/benchmarks.md), on GPUs it
was never measured."""
_CGROUPS = Path("/sys/fs/cgroup")


def check_fits(config: Config, *, plan: BatchPlan, vocab_size: int, device: torch.device) -> None:
    """Refuse a run that is known not to fit. Raises ConfigError with settings that would, if there are any."""
    on_gpu = device.type == "cuda"
    local_ranks = 1 if on_gpu else min(_local_ranks(plan.world_size), plan.world_size)
    room = room_bytes(device)
    needed = _Needed(vocab_size, on_gpu, local_ranks)
    if needed.at_most(config, plan) <= room:
        return
    logger.info("memory: following a step, to see whether the run fits")
    size = needed.predicted(config, plan)
    if size * needed.sure_share <= room:
        return
    remedy = ", or with ".join(_that_fit(config, plan, needed, room)) or "a smaller model only"
    has = "a GPU has {}" if on_gpu else "this machine has {} left" + f" for {local_ranks} ranks" * (local_ranks > 1)
    predicted, left = (f"{number / 2**30:.1f} GiB" for number in (size, room))
    raise ConfigError(
        f"the run does not fit into memory: {predicted} are predicted, and {has.format(left)}. It would fit with "
        f"{remedy}. --engine.check_memory False starts it all the same."
    )


def room_bytes(device: torch.device) -> float:
    """Of a GPU all that it has; on a CPU what is left."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return host_room_bytes()


def host_room_bytes(*, cgroups: Path = _CGROUPS, of_process: Path = Path("/proc/self/cgroup")) -> float:
    """What processes may still take on this machine: memory and swap, or what the control groups leave of them."""
    room = float(psutil.virtual_memory().available + psutil.swap_memory().free)
    try:
        lines = of_process.read_text(encoding="utf-8").splitlines()
    except OSError:
        return room
    for line in lines:
        _, controllers, place = line.split(":", maxsplit=2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        folder = root / place.lstrip("/")
        groups = [above for above in (folder, *folder.parents) if above.is_relative_to(root)]
        room = min([room, *(_group_room_bytes(group, is_v2=not controllers) for group in groups)])
    return room


def _group_room_bytes(group: Path, *, is_v2: bool) -> float:
    """What a control group leaves, its cached files counted as free; infinite where it sets no limit."""
    names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in names)
        facts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        prefix = "" if is_v2 else "total_"
        cached = sum(int(facts.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file"))
        return int(limit) - int(used) + cached if limit.isdigit() else float("inf")
    except (OSError, ValueError):
        return float("inf")


def _local_ranks(world_size: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", str(world_size))))


class _Needed:
    """Bytes that the ranks of a node need together on a CPU, and one of them on a GPU."""

    def __init__(self, vocab_size: int, on_gpu: bool, local_ranks: int) -> None:
        self.vocab_size, self.on_gpu, self.local_ranks = vocab_size, on_gpu, local_ranks
        self.sure_share = SURE["cuda" if on_gpu else "cpu"]

    def predicted(self, config: Config, plan: BatchPlan) -> float:
        """By following a step."""
        shares = typical_shares(cluster_edges(config.model.cutoffs, vocab_size=self.vocab_size))
        held = bytes_per_rank(config, plan=plan, vocab_size=self.vocab_size, cluster_shares=shares, on_gpu=self.on_gpu)
        return self.local_ranks * sum(held.values())

    def at_most(self, config: Config, plan: BatchPlan) -> float:
        """More than is ever predicted, by a formula."""
        return self.local_ranks * bound_bytes(config, plan=plan, vocab_size=self.vocab_size, on_gpu=self.on_gpu)


def bound_bytes(config: Config, *, plan: BatchPlan, vocab_size: int, on_gpu: bool) -> float:
    """Of a rank: no sharding, nothing recomputed, every score and activation kept, and the heap's waste."""
    model, train, size = config.model, config.train, DTYPES[config.engine.precision].itemsize
    lanes, keys = plan.microbatch_lanes, train.segment_len + train.memory_len
    inner, rows = model.num_heads * model.head_width, lanes * keys
    memories = 3 * model.num_layers * train.memory_len * model.width * plan.lanes_per_rank
    per_layer = rows * (24 * model.width + 10 * inner + 5 * model.ff_width) + keys * 6 * inner
    num_kept = 7 if config.engine.attention == "plain" or not model.scheme.has_distance_terms else 3
    scores = num_kept * lanes * model.num_heads * train.segment_len * keys
    logits = 4 * max(2**22, 64 * (vocab_size + 16 * 8)) + 16 * lanes * train.segment_len * model.width
    values = memories + 2 * (model.num_layers * (per_layer + scores) + logits)
    fixed = 6.0 * BUCKET_LEN * size if on_gpu else LIBRARY_BYTES["partitioned"]
    return 64.0 * count_parameters(model, vocab_size=vocab_size) + 4.0 * values + fixed


def _that_fit(config: Config, plan: BatchPlan, needed: _Needed, room: float) -> Iterator[str]:
    """Settings that surely fit: each that does alone; where none does, the first so many together; and more ranks."""

    def fits(change: Change, world_size: int = plan.world_size) -> bool:
        one = _changed(config, change)
        try:
            check_config(one)
            return needed.predicted(one, plan_batch(one.train, world_size=world_size)) / needed.sure_share <= room
        except ConfigError:
            return False

    engine, lanes = config.engine, config.train.num_lanes
    sizes = [size for size in range(1, plan.microbatch_lanes) if plan.lanes_per_rank % size == 0]
    smaller: list[Change] = [{"train.microbatch_lanes": size} for size in sizes]
    recomputed: Change = {} if engine.activation_checkpointing else {"engine.activation_checkpointing": True}
    recomputed |= {"engine.cuda_graph": False} if engine.cuda_graph else {}
    sharded: list[Change] = [{"engine.zero_stage": stage} for stage in range(engine.zero_stage + 1, 4)]
    offloaded: list[Change] = []
    if needed.on_gpu and not engine.offload_optimizer:
        stages = [{"engine.zero_stage": 1}] if engine.zero_stage == 0 else [{}]
        offloaded = [stage | {"engine.offload_optimizer": True} for stage in (*stages, *sharded[-1:])]
    found = [next(filter(fits, reversed(smaller)))] if smaller and fits(smaller[0]) else []
    found += [change for family in ([recomputed], sharded, offloaded) if (change := next(filter(fits, family), {}))]
    if not found:
        least = (smaller[0] if smaller else {}) | recomputed
        found += [least | more for more in ({}, *sharded, *offloaded) if fits(least | more)][:1]
    yield from (" ".join(f"--{name} {value}" for name, value in change.items()) for change in found)
    for ranks in (ranks for ranks in range(2 * plan.world_size, lanes + 1, plan.world_size) if lanes % ranks == 0):
        size = math.gcd(lanes // ranks, plan.microbatch_lanes)
        if fits({"train.microbatch_lanes": size}, ranks):
            machines = "" if needed.on_gpu else f", {needed.local_ranks} on each machine"
            flag = "" if size == plan.microbatch_lanes else f", and --train.microbatch_lanes {size}"
            yield f"{ranks} ranks{machines}{flag}"
            return


def _changed(config: Config, change: Change) -> Config:
    for name, value in change.items():
        section, _, key = name.partition(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})
    return config
