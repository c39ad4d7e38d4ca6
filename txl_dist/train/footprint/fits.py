"""Check that a run fits into memory, before anything is built. The error names settings with which the run would fit.

    bound        an upper bound by a formula, at once. If the run fits by the bound, nothing is predicted
    prediction   `footprint`, which follows a step: tenths of a second, or seconds for long segments on a CPU
    refusal      only if the prediction, less the largest measured error, is more than the available memory

On a CPU all ranks of the node share the memory that the system and the control groups leave, also for the copies of
recovery. On a GPU each rank has a device. Rank 0 checks its own node. The check does not count an evaluation that needs
more memory than training, host memory of offloading, or memory that other processes will take later. It does not find
other nodes that have less memory than the node of rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from txl_dist.config.load import BatchPlan, Config, changed, check_config, plan_batch
from txl_dist.config.schema import EngineSection
from txl_dist.console.formatting import counted
from txl_dist.console.logging import logger
from txl_dist.distributed.collectives import local_world_size
from txl_dist.errors import ConfigError
from txl_dist.inference.bundle import DTYPES
from txl_dist.model.fused_softmax import CHUNK_LOGITS, CHUNK_ROWS
from txl_dist.model.kernels.attention_launch import runs_triton
from txl_dist.train.engine.deepspeed_config import BUCKET_LEN
from txl_dist.train.footprint.checkpoint import checkpoint_size
from txl_dist.train.footprint.copies import copies_bytes
from txl_dist.train.footprint.rank import LIBRARY_BYTES, bytes_per_rank
from txl_dist.train.footprint.room import room_bytes

Change = dict[str, Any]
"""Change of settings: the new value of each changed `section.key`."""
SURE = {"cpu": 0.95, "cuda": 0.9}
"""Fraction of the predicted bytes that a run certainly needs, by kind of device. A run is refused only if this fraction
does not fit. On CPUs the prediction was at most 3.2 % too high (tools/experiments/notebook/benchmarks.md). On GPUs its
error was never measured."""


def check_fits(
    config: Config,
    *,
    plan: BatchPlan,
    num_parameters: int,
    vocab_size: int,
    device: torch.device,
    makes_copies: bool = False,
) -> None:
    """Raise ConfigError if a run certainly does not fit into memory.

    The message lists settings with which the run fits, if there are any. `num_parameters` is the number of the model's
    parameters. `makes_copies` says that recovery will allocate its copies, which on a CPU are in the same memory.
    """
    on_gpu = device.type == "cuda"
    room = room_bytes(device)
    sure = SURE[device.type]
    if on_gpu:
        num_sharing = 1
    else:
        num_sharing = min(local_world_size(plan.world_size), plan.world_size)
    bound = bound_bytes(config, plan=plan, num_parameters=num_parameters, vocab_size=vocab_size, on_gpu=on_gpu)
    counts_copies = makes_copies and not on_gpu

    def needed_for_copies(config: Config, plan: BatchPlan) -> float:
        size = checkpoint_size(config, vocab_size=vocab_size)
        return copies_bytes(config, size, ranks=plan.world_size, ranks_per_node=num_sharing)

    if counts_copies:
        bound += needed_for_copies(config, plan)
    if num_sharing * bound <= room:
        return

    def needed(config: Config, plan: BatchPlan) -> float:
        by_holder = bytes_per_rank(
            config, plan=plan, vocab_size=vocab_size, on_gpu=on_gpu, runs_triton=runs_triton(device)
        )
        of_copies = needed_for_copies(config, plan) if counts_copies else 0.0
        return num_sharing * (sum(by_holder.values()) + of_copies)

    def fits(change: Change, world_size: int = plan.world_size) -> bool:
        variant = changed(config, change)
        try:
            check_config(variant)
            return needed(variant, plan_batch(variant.train, world_size=world_size)) / sure <= room
        except ConfigError:
            return False

    logger.info("memory: predicting the memory of a step, to check that the run fits")
    size = needed(config, plan)
    if size * sure <= room:
        return
    changes = _changes_that_fit(config, plan, fits, on_gpu=on_gpu, has_copies=counts_copies)
    remedies = [_as_flags(change) for change in changes]
    if on_gpu:
        machines = ""
    else:
        machines = f", {num_sharing} on each machine"
    remedies += _ranks_that_fit(config, plan, fits, machines=machines)
    remedy = ", or with ".join(remedies)
    predicted = f"{size / 2**30:.1f} GiB"
    if counts_copies:
        bytes_of_copies = num_sharing * needed_for_copies(config, plan)
        predicted += f" ({bytes_of_copies / 2**30:.1f} GiB of them for the copies of recover.spares=1)"
    left = f"{room / 2**30:.1f} GiB"
    if on_gpu:
        has = f"a GPU has {left}"
    else:
        has = f"this machine has {left} left"
        if num_sharing > 1:
            has += f" for {num_sharing} ranks"
    raise ConfigError(
        f"the run does not fit into memory: it is predicted to use {predicted}, but {has}. The run would fit with "
        f"{remedy or 'a smaller model only'}. To start the run anyway, use --engine.check_memory False."
    )


def gpu_room(device: torch.device) -> float:
    """Return the bytes of GPU memory that a step may be predicted to use, with a margin. On a CPU they are 0."""
    if device.type != "cuda":
        return 0.0
    return SURE["cuda"] * room_bytes(device)


def with_kept_scores(config: Config, *, plan: BatchPlan, vocab_size: int, room: float) -> Config:
    """Return the settings with engine.keep_scores = "on" or "off" in place of "auto".

    Distance scores are kept if a step with them is predicted to need at most `room` bytes of GPU memory. Otherwise they
    are given up, before anything else. Without a GPU `room` is 0. The results of training do not depend on the choice.
    """
    if config.engine.keep_scores != "auto":
        return config
    kept = changed(config, {"engine.keep_scores": "on"})
    if room and sum(bytes_per_rank(kept, plan=plan, vocab_size=vocab_size, on_gpu=True).values()) <= room:
        return kept
    return changed(config, {"engine.keep_scores": "off"})


def bound_bytes(config: Config, *, plan: BatchPlan, num_parameters: int, vocab_size: int, on_gpu: bool) -> float:
    """Return an upper bound on the bytes of memory that a rank uses.

    The bound assumes no sharding and no recomputation. It assumes that every attention score and activation is kept,
    and adds the memory that the C library's heap wastes.
    """
    model = config.model
    train = config.train
    size = DTYPES[config.engine.dtype].itemsize
    lanes = plan.microbatch_lanes
    keys = train.segment_len + train.memory_len
    inner = model.num_heads * model.head_width
    rows = lanes * keys
    if config.engine.replays(on_gpu=on_gpu):
        copies = 5
    else:
        copies = 3
    if on_gpu:
        copies += config.recover.spares
    memories = copies * sum(train.memory_per_layer(model.num_layers)) * model.width * plan.lanes_per_rank
    num_queries = train.segment_len + train.num_targets
    rows += lanes * train.num_targets
    per_layer = rows * (24 * model.width + 10 * inner + 5 * model.ff_width) + keys * 6 * inner
    if config.engine.attention == "plain" or not model.scheme.has_distance_terms:
        num_kept = 7
    else:
        num_kept = 3
    scores = num_kept * lanes * model.num_heads * num_queries * keys
    if on_gpu:
        kind = "cuda"
    else:
        kind = "cpu"
    columns = vocab_size + 16 * 8
    chunk = max(CHUNK_LOGITS[kind], CHUNK_ROWS[kind] * columns)
    if on_gpu:  # where a chunk may have more logits than there are
        chunk = min(chunk, lanes * train.segment_len * columns)
    logits = 4 * chunk + 16 * lanes * train.segment_len * model.width
    values = memories + 2 * (model.num_layers * (per_layer + scores) + logits)
    if on_gpu:
        fixed = 6.0 * BUCKET_LEN * size
    else:
        fixed = LIBRARY_BYTES["partitioned"]
    return 64.0 * num_parameters + 4.0 * values + fixed


def _changes_that_fit(
    config: Config, plan: BatchPlan, fits: Callable[..., bool], *, on_gpu: bool, has_copies: bool
) -> list[Change]:
    """List changes of settings with which the run certainly fits.

    For each kind of change, the list has the smallest change that suffices. If no kind suffices alone, several kinds
    are combined, and the list has the first combination that fits.
    """
    engine = config.engine
    without_scores: Change = {"engine.keep_scores": "off"} if engine.keep_scores == "on" else {}
    without_graphs: Change = {"engine.cuda_graph": "off"} if engine.replays(on_gpu=on_gpu) else {}
    recomputed: Change = {} if engine.activation_checkpointing else {"engine.activation_checkpointing": True}
    recomputed |= without_graphs
    # From the smallest micro-batch to the largest, each of a size that divides the lanes of a rank.
    smaller: list[Change] = []
    for size in range(1, plan.microbatch_lanes):
        if plan.lanes_per_rank % size == 0:
            smaller.append({"train.microbatch_lanes": size})
    sharded: list[Change] = [{"engine.zero_stage": stage} for stage in range(engine.zero_stage + 1, 4)]
    if on_gpu:
        offloaded = _offloading_changes(engine, sharded)
    else:
        offloaded = []

    fewer_copies = _changes_of_copies(config) if has_copies else []
    found: list[Change] = []
    if smaller and fits(smaller[0]):
        found.append(_first_that_fits(reversed(smaller), fits))
    for kind in ([without_scores], [without_graphs], [recomputed], sharded, offloaded, fewer_copies):
        change = _first_that_fits(kind, fits)
        if change:
            found.append(change)
    if found:
        return found
    least = (smaller[0] if smaller else {}) | recomputed
    for copies in ({}, *fewer_copies):
        combined = _first_that_fits((least | copies | more for more in ({}, *sharded, *offloaded)), fits)
        if combined:
            return [combined]
    return []


def _changes_of_copies(config: Config) -> list[Change]:
    """List the changes with which recovery keeps fewer copies, or none, from the smallest change to the largest."""
    changes: list[Change] = []
    sent_always: Change = {}
    if config.recover.partner_every > 1:
        sent_always = {"recover.partner_every": 1}
        changes.append(sent_always)
    on_node: Change = {}
    if config.recover.copies == "partner":
        on_node = sent_always | {"recover.copies": "node"}
        changes.append(on_node)
    return [*changes, on_node | {"recover.spares": 0}]


def _offloading_changes(engine: EngineSection, sharded: list[Change]) -> list[Change]:
    """List the changes that offload the optimizer: first with the lowest ZeRO stage that allows offloading, then with
    the last change in `sharded`, which shards most."""
    if engine.offload_optimizer:
        return []
    least: Change = {"engine.zero_stage": 1} if engine.zero_stage == 0 else {}
    most = sharded[-1:]
    return [stage | {"engine.offload_optimizer": True} for stage in (least, *most)]


def _first_that_fits(changes: Iterable[Change], fits: Callable[..., bool]) -> Change:
    """Return the first change with which the run fits, or an empty change if there is none."""
    return next(filter(fits, changes), {})


def _as_flags(change: Change) -> str:
    """Return a change as flags of the command line, for instance `--engine.zero_stage 2`."""
    return " ".join(f"--{name} {value}" for name, value in change.items())


def _ranks_that_fit(config: Config, plan: BatchPlan, fits: Callable[..., bool], *, machines: str) -> list[str]:
    """Return a list with one text, which names the smallest number of ranks above the present number with which the run
    fits.

    The list is empty if the run fits with no number of ranks.
    """
    lanes = config.train.num_lanes
    for ranks in range(2 * plan.world_size, lanes + 1, plan.world_size):
        if lanes % ranks:
            continue
        size = math.gcd(lanes // ranks, plan.microbatch_lanes)
        if fits({"train.microbatch_lanes": size}, ranks):
            if size == plan.microbatch_lanes:
                flag = ""
            else:
                flag = f", and --train.microbatch_lanes {size}"
            return [f"{counted(ranks, 'rank')}{machines}{flag}"]
    return []
