"""Prediction of the bytes that a rank will hold, without allocating them (`txl train --dry-run`, `txl plan`).

A step has phases: forward and backward pass of a micro-batch, exchange of the gradients, norm, update. The phase that
needs most memory determines the peak. `footprint.step` follows the first phase on tensors without storage. Weights,
optimizer state, memories and the copy that a checkpoint is written from are added. The sizes of these parts follow from
the settings and the ZeRO stage.

On a CPU the prediction is of host memory, without what a process holds after its imports. It assumes that the C library
returns freed memory, which training arranges (`distributed.malloc`). On a GPU the prediction is of device memory. There
a CUDA graph keeps the memory of a micro-batch separate from all other memory.

The prediction does not count fragmentation, the CUDA context of a GPU, host memory of offloading, and an evaluation
that needs more memory than training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from txl_dist.config.load import BatchPlan, Config
from txl_dist.config.schema import EngineSection
from txl_dist.inference.bundle import DTYPES
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.train.engine.deepspeed_config import BUCKET_LEN
from txl_dist.train.engine.muon import is_matrix
from txl_dist.train.engine.padding import PaddedAxes, pad_widths, padded_width, pads_widths
from txl_dist.train.footprint.step import Exchange, MicroStep, Peak, follow, replay
from txl_dist.vocabulary_clusters import typical_shares

_MIB = 2**20
LIBRARY_BYTES = {"replicated": 90 * _MIB, "partitioned": 135 * _MIB}
"""Host memory in bytes of the reader thread, and of the parts of torch and DeepSpeed that start only with an optimizer.
The keys say whether ZeRO replicates the optimizer state (stage 0) or partitions it (stage 1 or more)."""

HEAP_FACTOR = 2.0
"""Size of the C library's heap, divided by the largest number of bytes of small storages that are alive at once."""


def bytes_per_rank(
    config: Config,
    *,
    plan: BatchPlan,
    vocab_size: int,
    on_gpu: bool,
    runs_triton: bool = True,
    cluster_shares: Sequence[float] = (),
) -> dict[str, float]:
    """Return the largest number of bytes that any rank uses at once, by kind. The sum over the kinds is the peak.

    `cluster_shares` are the shares of the tokens, one per cluster of the vocabulary. Without them `typical_shares` are
    used. `runs_triton` says whether the GPU can run Triton kernels. With offloading the optimizer is not included.
    Temporary copies of gradients and weights count as activations.
    Kept distance scores are counted if engine.keep_scores is "on", and not if it is "auto" (see `with_kept_scores`).
    If the start of the run needs more memory than any step, the additional memory counts as activations too.
    """
    engine = config.engine
    kinds = (config.model.scheme, config.optim.kind)
    is_padded = pads_widths(engine.pad_widths, on_gpu=on_gpu, kinds=kinds)
    sizes, padded = _sizes_of(config, plan=plan, vocab_size=vocab_size, is_padded=is_padded)
    held = _held_bytes(config, sizes, plan=plan, on_gpu=on_gpu)
    peak = _micro_step_peak(
        config,
        plan=plan,
        vocab_size=vocab_size,
        cluster_shares=cluster_shares,
        on_gpu=on_gpu,
        runs_triton=runs_triton,
        is_padded=is_padded,
    )
    recorded = 0.0
    if engine.replays(on_gpu=on_gpu):
        # A graph keeps all that it needs reserved, its input memory included.
        recorded = peak.alive + sizes.lane_memory * plan.microbatch_lanes
        copies = _bytes_copied_from_graph(engine, sizes, plan=plan)
        peak = peak._replace(alive=copies, large=copies, small=0.0)
    in_step = recorded + _fullest_phase(
        plan,
        peak,
        sizes.lengths,
        engine=engine,
        buckets=held["buckets"],
        in_update=_bytes_of_update(config, sizes, plan=plan),
        copies_gradients=not updates_by_kernel(config, on_gpu=on_gpu and runs_triton),
        on_gpu=on_gpu,
    )
    at_start = _bytes_at_start(engine, sizes) - sum(held.values()) + held["gradients"] + held["buckets"]
    # A checkpoint is saved between two steps, from copies of padded parameters without their padding.
    at_save = recorded + held["buckets"] + fragment_copy_bytes(padded, config=config) / sizes.num_owners
    fullest = max(in_step, at_start, at_save)
    temporary = max(0.0, fullest - held["gradients"] - held["buckets"])
    held["scores"] = min(temporary, peak.scores)
    held["activations"] = temporary - held["scores"]
    return held


class _Sizes(NamedTuple):
    """Sizes from which the bytes of a rank follow. Padding in storage is included."""

    lengths: list[int]
    """Number of values of each parameter."""
    parameters: int
    """Number of values of all parameters."""
    matrices: int
    """Number of values of the parameters that are matrices (see `train.engine.muon`)."""
    num_owners: int
    """Number of ranks that divide the optimizer state among them."""
    lane_memory: int
    """Bytes of the memory (hidden states) of one lane (batch row)."""

    @property
    def local(self) -> float:
        """Number of values whose optimizer state a rank owns."""
        return self.parameters / self.num_owners


def _sizes_of(
    config: Config, *, plan: BatchPlan, vocab_size: int, is_padded: bool
) -> tuple[_Sizes, dict[str, PaddedAxes]]:
    """Return the sizes, and the axes of the padded parameters by name."""
    shapes, padded = _stored_parameters(config, vocab_size=vocab_size, is_padded=is_padded)
    lengths = [shape.numel() for shape in shapes.values()]
    matrices = sum(shape.numel() for name, shape in shapes.items() if is_matrix(name, shape))
    if config.engine.zero_stage >= 1:
        num_owners = plan.world_size
    else:
        num_owners = 1
    width = padded_width(config.model.width) if is_padded else config.model.width
    memory_lens = config.train.memory_per_layer(config.model.num_layers)
    lane_memory = sum(memory_lens) * width * DTYPES[config.engine.dtype].itemsize
    return _Sizes(lengths, sum(lengths), matrices, num_owners, lane_memory), padded


def _held_bytes(config: Config, sizes: _Sizes, *, plan: BatchPlan, on_gpu: bool) -> dict[str, float]:
    """Return the bytes that a rank holds throughout a step, by kind."""
    engine = config.engine
    stage = engine.zero_stage
    size = DTYPES[engine.dtype].itemsize
    state = _state_bytes(config, sizes)
    held = {
        "weights": size * (sizes.local if stage == 3 else sizes.parameters),
        "gradients": gradient_size(engine) * (sizes.local if stage >= 2 else sizes.parameters),
        "optimizer": 0.0 if on_gpu and engine.offload_optimizer else state,
        "buckets": float(size * _bucket_len(engine, sizes.parameters, world=plan.world_size, on_gpu=on_gpu)),
        "memories": float(sizes.lane_memory * _num_held_memories(engine, plan=plan, on_gpu=on_gpu)),
    }
    if on_gpu:
        if config.recover.spares:  # before the copy to the host, memories are copied on the device (`PinnedSlotCopy`)
            held["recovery copy"] = float(sizes.lane_memory * plan.lanes_per_rank)
        return held
    if config.checkpoint.asynchronous:
        if _has_masters(engine):
            weights = 0
        else:
            weights = 4 * sizes.parameters
        held["checkpoint copy"] = weights + state + sizes.lane_memory * plan.lanes_per_rank
    held["libraries"] = float(LIBRARY_BYTES["partitioned" if stage else "replicated"])
    return held


def _num_held_memories(engine: EngineSection, *, plan: BatchPlan, on_gpu: bool) -> int:
    """Return the number of lane memories besides the result of the current micro-batch.

    These are the memories of all lanes before the step, and after it those of the other micro-batches. The memory of a
    single micro-batch lies in the storage of its CUDA graph (see `train.engine.cuda_graph`).
    """
    if engine.replays(on_gpu=on_gpu) and plan.num_microbatches == 1:
        return 0
    return 2 * plan.lanes_per_rank - plan.microbatch_lanes


def _has_masters(engine: EngineSection) -> bool:
    """Return whether the engine keeps fp32 weights besides the weights that the model computes with."""
    return engine.zero_stage >= 1 or engine.dtype != "fp32"


def _state_bytes(config: Config, sizes: _Sizes) -> float:
    """Return the bytes of a rank's optimizer state, with the fp32 weights if the engine keeps such weights."""
    moments_of_others = config.optim.state_bytes() * (sizes.parameters - sizes.matrices)
    moments_of_matrices = config.optim.state_bytes(of_matrices=True) * sizes.matrices
    if _has_masters(config.engine):
        masters = 4 * sizes.local
    else:
        masters = 0
    return (moments_of_others + moments_of_matrices) / sizes.num_owners + masters


def _bytes_copied_from_graph(engine: EngineSection, sizes: _Sizes, *, plan: BatchPlan) -> float:
    """Return the bytes of the gradients that are copied from the recorded gradients of a CUDA graph at once."""
    size = DTYPES[engine.dtype].itemsize
    if engine.zero_stage == 2:  # the largest copy, and the bucket's flat copy
        return size * (max(sizes.lengths) + min(BUCKET_LEN, sizes.parameters))
    if plan.num_microbatches == 1:
        return size * sizes.parameters
    return 0


def _bytes_of_update(config: Config, sizes: _Sizes, *, plan: BatchPlan) -> float:
    """Return the bytes that the optimizer allocates during an update."""
    if not config.optim.kind.orthogonalizes:
        return 0.0
    return _orthogonalizing(sizes.matrices, world=plan.world_size, stage=config.engine.zero_stage)


def _bytes_at_start(engine: EngineSection, sizes: _Sizes) -> float:
    """Return the bytes before the first step: each rank draws all weights, and copies them into flat tensors."""
    return (4 + DTYPES[engine.dtype].itemsize) * sizes.parameters + 4 * sizes.local


def _bucket_len(engine: EngineSection, parameters: int, *, world: int, on_gpu: bool) -> int:
    """Return the number of values that DeepSpeed's buckets contain.

    On a GPU buckets are allocated whole, and there is one more bucket for the exchange during the backward pass. On a
    CPU only the part of a bucket that is used takes memory. One rank at stage 1 exchanges nothing (see `ZeroEngine`).
    """
    stays_in_place = engine.zero_stage == 1 and world == 1 and not engine.offload_optimizer
    if engine.zero_stage == 0 or stays_in_place:
        return 0
    if not on_gpu:
        return min(BUCKET_LEN, parameters)
    if world > 1:
        return 2 * BUCKET_LEN
    return BUCKET_LEN


def updates_by_kernel(config: Config, *, on_gpu: bool) -> bool:
    """Return whether the Triton kernel of Adam makes the update, if the GPU can run Triton kernels. The kernel reads
    gradients where they lie (see `train.engine.adam_update`)."""
    engine = config.engine
    is_on_device = on_gpu and engine.zero_stage in (1, 2) and not engine.offload_optimizer
    return is_on_device and config.optim.name in ("adam", "adamw") and engine.attention in ("auto", "triton")


def sums_in_fp32(engine: EngineSection) -> bool:
    """Return whether gradients of several micro-batches are summed in fp32 although each gradient is in bf16 (see
    `deepspeed_config`)."""
    return engine.precision == "bf16" and engine.zero_stage >= 2


def gradient_size(engine: EngineSection) -> int:
    """Return the bytes of one value of the gradients that a rank keeps."""
    if sums_in_fp32(engine):
        return 4
    return DTYPES[engine.dtype].itemsize


def _fullest_phase(
    plan: BatchPlan,
    peak: Peak,
    lengths: list[int],
    *,
    engine: EngineSection,
    buckets: float,
    in_update: float,
    copies_gradients: bool,
    on_gpu: bool,
) -> float:
    """Return the bytes of gradients, buckets and temporary tensors in the phase of a step that needs most memory.

    `in_update` are the bytes that the optimizer allocates during the update. `copies_gradients` says whether stages 1
    to 3 copy the gradients to a flat tensor for the update.
    """
    stage = engine.zero_stage
    size = DTYPES[engine.dtype].itemsize
    kept_size = gradient_size(engine)
    # A CPU's heap returns neither what small storages had nor what lies between them.
    if on_gpu:
        heap = 0.0
    else:
        heap = HEAP_FACTOR * peak.small
    if on_gpu:
        micro_step = peak.alive
    else:
        micro_step = peak.large + heap
    accumulates = plan.num_microbatches > 1
    gradients = size * sum(lengths)
    if accumulates:
        accumulated = gradients
    else:
        accumulated = 0
    if stage == 0:  # the exchange takes a flat copy, the update of half precision one in fp32
        if plan.world_size > 1 or size < 4:
            copied = 4 * sum(lengths)
        else:
            copied = 0
        if size < 4:
            updated = in_update + copied
        else:
            updated = in_update
        return max(micro_step + accumulated, heap + gradients + max(copied, updated))
    local = sum(lengths) / plan.world_size
    if stage == 3 or on_gpu:
        standing_buckets = buckets
    else:
        standing_buckets = 0.0
    # For the norm DeepSpeed copies a gradient in fp32, or in fp64 if it is in fp32. On a GPU nothing is copied.
    if on_gpu:
        norm = 0.0
    else:
        norm = 2 * kept_size * min(max(lengths), local)
    # The update takes a flat copy in fp32. At stage 2 there are flat sums in fp32 from the first micro-batch on.
    is_flat = stage == 2 and sums_in_fp32(engine)
    if kept_size < 4:
        copy_size = 4 + kept_size
    else:
        copy_size = 4
    if is_flat or not copies_gradients:
        copy_size = 0
    after = heap + standing_buckets + kept_size * local + max(norm, copy_size * local + in_update)
    if stage == 1:  # gradients move into the buckets, which are exchanged as a flat copy
        return max(micro_step + accumulated + standing_buckets, heap + gradients + buckets, after)
    if stage == 3 or accumulates or is_flat:
        before = kept_size * local
    else:
        before = 0.0
    return max(micro_step + before + buckets, after)


def _micro_step_peak(
    config: Config,
    *,
    plan: BatchPlan,
    vocab_size: int,
    cluster_shares: Sequence[float],
    on_gpu: bool,
    runs_triton: bool,
    is_padded: bool,
) -> Peak:
    """Return the peak of forward and backward pass of one micro-batch, with the gradients that the ZeRO stage keeps.

    `is_padded` says whether the engine pads widths.
    """
    train = config.train
    engine = config.engine
    stage = config.engine.zero_stage
    step = MicroStep(
        model=config.model,
        vocab_size=vocab_size,
        cluster_shares=tuple(cluster_shares) or typical_shares((0, *config.model.cutoffs, vocab_size)),
        lanes=plan.microbatch_lanes,
        segment_len=train.segment_len,
        memory_len=train.memory_len,
        memory_lens=train.memory_lens,
        step_len=train.step_len,
        num_targets=train.num_targets,
        dtype=DTYPES[engine.dtype],
        attention="fused" if engine.attention == "auto" and not runs_triton else engine.attention,
        recompute_every=engine.recompute_every if engine.activation_checkpointing else 0,
        is_flat=stage < 3 and not config.optim.kind.needs_whole_tensors,
        on_gpu=on_gpu,
        keeps_scores=engine.keep_scores == "on",
        for_graphs=engine.replays(on_gpu=on_gpu),
        pads_widths=is_padded,
    )
    exchange = _exchange_of(engine, plan=plan, on_gpu=on_gpu)
    return replay(follow(step), exchange=exchange, num_owners=plan.world_size if stage == 2 else 1)


def _exchange_of(engine: EngineSection, *, plan: BatchPlan, on_gpu: bool) -> Exchange:
    """Return what happens to a complete gradient at this ZeRO stage, as a value of `Exchange`."""
    if engine.replays(on_gpu=on_gpu):
        return "stays"
    if engine.zero_stage == 3:
        return "gathered"
    if engine.zero_stage == 2:
        if sums_in_fp32(engine):
            return "added"
        return "sharded"
    if plan.num_microbatches > 1:
        return "dropped"
    return "stays"


def _orthogonalizing(matrices: int, *, world: int, stage: int) -> float:
    """Return the bytes that the optimizer muon uses during an update. `matrices` is the total number of values in all
    matrices.

    A rank joins its share of the values, multiplies matrices, and converts the result to fp32. If there are several
    ranks, they exchange values before and after the multiplications.
    """
    if world == 1:
        exchanged = 0.0
    elif stage == 0:
        exchanged = 8.0 * matrices
    else:
        exchanged = 8 * matrices / world
    return 12 * matrices / world + exchanged


def fragment_copy_bytes(padded: Mapping[str, PaddedAxes], *, config: Config) -> float:
    """Return the bytes that a save copies from padded parameters, on all ranks together. The copies are fp32 weights
    and optimizer state without the padding (see `train.engine.partitions`).

    A parameter whose rows are not padded is not copied. With offloading the copies are in host memory, and not counted.
    """
    if config.engine.offload_optimizer:
        return 0.0
    num_bytes = 0
    for name, axes in padded.items():
        if axes.stored[1:] != axes.sizes[1:]:
            value_bytes = 4 + config.optim.state_bytes(of_matrices=is_matrix(name, axes.shape))
            num_bytes += value_bytes * math.prod(axes.shape)
    return float(num_bytes)


def _stored_parameters(
    config: Config, *, vocab_size: int, is_padded: bool
) -> tuple[dict[str, torch.Size], dict[str, PaddedAxes]]:
    """Return the shape in storage of each parameter, and the axes of the padded parameters, by name."""
    with torch.device("meta"):
        network = TransformerXL(config.model, vocab_size=vocab_size)
        padded = pad_widths(network) if is_padded else {}
    return {name: parameter.shape for name, parameter in network.named_parameters()}, padded
