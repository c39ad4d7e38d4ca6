"""Bytes that a rank will hold, predicted without allocating them (`txl train --dry-run`, `txl plan`).

A step has phases, and the fullest one is the peak: forward and backward of a micro-batch (`footprint_step` follows them
on tensors without storage), the exchange of what they left, the norm, the update. Weights, optimizer state, memories
and the copy that a checkpoint is written from are counted; they only depend on the ZeRO stage.

On a CPU that is host memory besides what a process holds once it has imported everything, and the C library must be
told to give memory back (`allocator`; training does). On a GPU it is device memory, where a CUDA graph keeps what a
micro-batch needs from everything else. Not predicted: fragmentation, on a
GPU the CUDA context, with offload what then lies in host memory, and evaluation larger than training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from txl_dist.config.load import BatchPlan, Config
from txl_dist.config.schema import EngineSection
from txl_dist.inference.bundle import DTYPES
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.train.engine.deepspeed_config import BUCKET_LEN
from txl_dist.train.engine.muon import is_matrix
from txl_dist.train.footprint.step import Exchange, MicroStep, Peak, follow, replay
from txl_dist.vocabulary_clusters import typical_shares

_MIB = 2**20
LIBRARY_BYTES = {"replicated": 90 * _MIB, "partitioned": 135 * _MIB}
"""Host memory of what torch and DeepSpeed import and start only when an optimizer is built, and of the reader."""

HEAP_FACTOR = 2.0
"""Heap of the C library over the most bytes of small storages alive at once in it."""


def bytes_per_rank(
    config: Config, *, plan: BatchPlan, vocab_size: int, on_gpu: bool, cluster_shares: Sequence[float] = ()
) -> dict[str, float]:
    """Bytes of the fullest rank at its fullest, by what holds them; the sum is the peak.

    `cluster_shares` are those of the tokens, one per cluster of the vocabulary; without them `typical_shares`. With
    offload the optimizer is left out. Temporary copies of gradients and weights are counted as activations; so is a
    start that is fuller than any step.
    """
    engine, world, stage = config.engine, plan.world_size, config.engine.zero_stage
    size, shapes = DTYPES[engine.dtype].itemsize, _parameter_shapes(config, vocab_size=vocab_size)
    lengths = [shape.numel() for shape in shapes.values()]
    owners = world if stage >= 1 else 1
    parameters, own = sum(lengths), sum(lengths) / owners
    matrices = sum(shape.numel() for name, shape in shapes.items() if is_matrix(name, shape))
    gradients = gradient_size(engine) * (own if stage >= 2 else parameters)
    has_masters = stage >= 1 or engine.dtype != "fp32"
    lane_memory = sum(config.train.memory_per_layer(config.model.num_layers)) * config.model.width * size
    moments = (
        config.optim.state_bytes() * (parameters - matrices) + config.optim.state_bytes(of_matrices=True) * matrices
    )
    state = moments / owners + own * (4 if has_masters else 0)
    # A GPU's are allocated whole, one more for the exchange behind the backward pass; a CPU's hold what is touched.
    bucket = BUCKET_LEN * (1 + (world > 1)) if on_gpu else min(BUCKET_LEN, parameters)
    held = {
        "weights": size * (own if stage == 3 else parameters),
        "gradients": gradients,
        "optimizer": 0.0 if on_gpu and engine.offload_optimizer else state,
        "buckets": float(size * bucket) if stage else 0.0,
        # Of all lanes before the step, and after it but for the micro-batch at work.
        "memories": float(lane_memory * (2 * plan.lanes_per_rank - plan.microbatch_lanes)),
    }
    if not on_gpu:
        if config.checkpoint.asynchronous:
            weights = 0 if has_masters else 4 * parameters
            held["checkpoint copy"] = weights + state + lane_memory * plan.lanes_per_rank
        held["libraries"] = float(LIBRARY_BYTES["partitioned" if stage else "replicated"])
    peak = _micro_step_peak(config, plan=plan, vocab_size=vocab_size, cluster_shares=cluster_shares, on_gpu=on_gpu)
    recorded = 0.0
    if engine.replays(on_gpu=on_gpu):
        # All that it needs stays reserved, with the memory that it is given; gradients are handed on as copies.
        recorded = peak.alive + lane_memory * plan.microbatch_lanes
        at_once = max(lengths) + min(BUCKET_LEN, parameters)  # at stage 2: what is handed on, and the bucket's copy
        copies = size * (at_once if stage == 2 else parameters * (plan.num_microbatches == 1))
        peak = peak._replace(alive=copies, large=copies, small=0.0)
    extra = _orthogonalizing(matrices, world=world, stage=stage) if config.optim.kind.orthogonalizes else 0.0
    fullest = max(
        recorded
        + _fullest_phase(plan, peak, lengths, engine=engine, buckets=held["buckets"], in_update=extra, on_gpu=on_gpu),
        # Before the first step: each rank draws all weights, and they are copied into flat tensors.
        (4 + size) * parameters + 4 * own - sum(held.values()) + held["gradients"] + held["buckets"],
    )
    rest = max(0.0, fullest - held["gradients"] - held["buckets"])
    held["scores"] = min(rest, peak.scores)
    held["activations"] = rest - held["scores"]
    return held


def sums_in_fp32(engine: EngineSection) -> bool:
    """Whether gradients of micro-batches are summed in a wider type than they have; see `deepspeed_config`."""
    return engine.precision == "bf16" and engine.zero_stage >= 2


def gradient_size(engine: EngineSection) -> int:
    """Bytes of a value of the gradients that a rank keeps."""
    return 4 if sums_in_fp32(engine) else DTYPES[engine.dtype].itemsize


def _fullest_phase(
    plan: BatchPlan,
    peak: Peak,
    lengths: list[int],
    *,
    engine: EngineSection,
    buckets: float,
    in_update: float,
    on_gpu: bool,
) -> float:
    """Bytes of gradients, buckets and all that is temporary, in the phase of a step that has most of them. `in_update`
    is what the optimizer makes for itself."""
    stage, size, kept_size = engine.zero_stage, DTYPES[engine.dtype].itemsize, gradient_size(engine)
    # A CPU's heap lets nothing go that small storages had, nor what lies between them.
    kept = 0.0 if on_gpu else HEAP_FACTOR * peak.small
    micro_step = peak.alive if on_gpu else peak.large + kept
    accumulates, gradients = plan.num_microbatches > 1, size * sum(lengths)
    if stage == 0:  # the exchange takes a flat copy, the update of half precision one in fp32
        copied = 4 * sum(lengths) if plan.world_size > 1 or size < 4 else 0
        updated = in_update + (copied if size < 4 else 0)
        return max(micro_step + accumulates * gradients, kept + gradients + max(copied, updated))
    own = sum(lengths) / plan.world_size
    standing = buckets if stage == 3 or on_gpu else 0.0
    # The norm: DeepSpeed copies a gradient in fp32, or in fp64 where it is in fp32; on a GPU nothing is copied.
    norm = 0.0 if on_gpu else 2 * kept_size * min(max(lengths), own)
    # The update of a flat copy in fp32. At stage 2 there are flat sums in fp32 from the first micro-batch on.
    is_flat = stage == 2 and sums_in_fp32(engine)
    copies = 0 if is_flat else 4 + kept_size * (kept_size < 4)
    after = kept + standing + kept_size * own + max(norm, copies * own + in_update)
    if stage == 1:  # gradients move into the buckets, which are exchanged as a flat copy
        return max(micro_step + accumulates * gradients + standing, kept + gradients + buckets, after)
    before = kept_size * own if stage == 3 or accumulates or is_flat else 0.0
    return max(micro_step + before + buckets, after)


def _micro_step_peak(
    config: Config, *, plan: BatchPlan, vocab_size: int, cluster_shares: Sequence[float], on_gpu: bool
) -> Peak:
    train, engine, stage = config.train, config.engine, config.engine.zero_stage
    step = MicroStep(
        model=config.model,
        vocab_size=vocab_size,
        cluster_shares=tuple(cluster_shares) or typical_shares((0, *config.model.cutoffs, vocab_size)),
        lanes=plan.microbatch_lanes,
        segment_len=train.segment_len,
        memory_len=train.memory_len,
        memory_lens=train.memory_lens,
        dtype=DTYPES[engine.dtype],
        attention=engine.attention,
        recompute_every=engine.recompute_every if engine.activation_checkpointing else 0,
        is_flat=stage < 3 and not config.optim.kind.needs_whole_tensors,
        on_gpu=on_gpu,
        for_graphs=engine.replays(on_gpu=on_gpu),
    )
    whole: Exchange = "dropped" if plan.num_microbatches > 1 else "stays"
    exchanges: tuple[Exchange, ...] = (whole, whole, "sharded", "gathered")
    exchange = "stays" if engine.replays(on_gpu=on_gpu) else exchanges[stage]
    if exchange == "sharded" and sums_in_fp32(engine):
        exchange = "added"
    return replay(follow(step), exchange=exchange, num_owners=plan.world_size if stage == 2 else 1)


def _orthogonalizing(matrices: int, *, world: int, stage: int) -> float:
    """Bytes of what `muon` makes of so many values of matrices: a rank's share of them is put together, multiplied and
    made fp32, and with others it is sent around before and behind."""
    sent = 0 if world == 1 else 8 * matrices if stage == 0 else 8 * matrices / world
    return 12 * matrices / world + sent


def _parameter_shapes(config: Config, *, vocab_size: int) -> dict[str, torch.Size]:
    with torch.device("meta"):
        network = TransformerXL(config.model, vocab_size=vocab_size)
    return {name: parameter.shape for name, parameter in network.named_parameters()}
