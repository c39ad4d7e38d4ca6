"""What a run would be, before it runs: batch arithmetic, parameters, memory, operations (`txl train --dry-run`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from txl_dist.config import BatchPlan, Config, config_to_toml
from txl_dist.data.read.lanes import epochs_read
from txl_dist.data.read.position import StreamState
from txl_dist.dist import Ranks, uses_gpu
from txl_dist.infer.bundle import DTYPES
from txl_dist.model.flops import count_parameters, flops_by_part, typical_shares
from txl_dist.model.kernels.launch import obstacle
from txl_dist.text.clusters import cluster_edges
from txl_dist.train.footprint.fits import room_bytes
from txl_dist.train.footprint.rank import bytes_per_rank
from txl_dist.train.initial import initial_weights
from txl_dist.train.preflight import (
    check_job,
    remarks,
    remarks_on_evaluation,
    remarks_on_repetition,
)
from txl_dist.train.state import Job


def describe_batch(job: Job) -> Iterator[str]:
    """Lines for the log at the start of a run."""
    config, plan, vocab_size = job.config, job.plan, job.vocab_size
    train, engine = config.train, config.engine
    yield (
        f"batch: {train.num_lanes} lanes x {train.segment_len} tokens = {plan.tokens_per_step:,} tokens per step; "
        f"{plan.world_size} ranks x {plan.num_microbatches} micro-batches x {plan.microbatch_lanes} lanes"
    )
    parameters = count_parameters(config.model, vocab_size=vocab_size)
    yield (
        f"model: {parameters:,} parameters, vocabulary {vocab_size:,}, memory {train.memory_len} tokens; "
        f"ZeRO-{engine.zero_stage}, {engine.precision}, attention {_attention(config)}"
    )


def _attention(config: Config) -> str:
    """How it will be computed, and on a GPU why not by the kernels."""
    model, chosen = config.model, config.engine.attention
    if not model.scheme.has_distance_terms:
        return "by torch"
    if chosen != "auto":
        return chosen
    shape, device = (1, 1, model.num_heads, model.head_width), torch.device("cuda" if uses_gpu() else "cpu")
    query = torch.empty(shape, dtype=DTYPES[config.engine.precision], device=device)
    reason = obstacle(query, has_position_bias=model.scheme.has_position_bias)
    if reason is None:
        return "triton"
    return f"fused (not by Triton: {reason})" if query.is_cuda else "fused"


def describe_data(job: Job, stream: StreamState, *, step: int = 0) -> Iterator[str]:
    """A line per corpus: its lanes, and how often the run will have read it when it goes on from this step."""
    train = job.config.train
    end = stream.advanced((train.max_steps - step) * train.segment_len)
    for split, one in zip(job.splits, end.corpora, strict=True):
        read = epochs_read(one.cut(), one.position, num_tokens=split.tokens)
        yield (
            f"data: {split.corpus.location}, split {split.name}: {split.tokens:,} tokens in {len(split.shards):,} "
            f"shards; {one.num_lanes} lanes, {read:.2f} epochs at step {train.max_steps:,}"
        )


def describe_cost(config: Config, *, plan: BatchPlan, vocab_size: int, on_gpu: bool) -> Iterator[str]:
    """Lines for a dry run: operations and predicted bytes per rank."""
    train = config.train
    shares = typical_shares(cluster_edges(config.model.cutoffs, vocab_size=vocab_size))
    parts = flops_by_part(
        config.model,
        vocab_size=vocab_size,
        segment_len=train.segment_len,
        memory_len=train.memory_len,
        microbatch_lanes=plan.microbatch_lanes,
        cluster_shares=shares,
    )
    flops = sum(parts.values())
    listed = ", ".join(f"{name} {100 * part / flops:.0f}%" for name, part in parts.items() if part)
    total = flops * plan.tokens_per_step
    yield (
        f"cost: {flops / 1e6:,.2f} MFLOP per token ({listed}), {total / 1e9:,.1f} GFLOP per step, "
        f"{total * train.max_steps:.3g} FLOP in all"
    )
    held = bytes_per_rank(config, plan=plan, vocab_size=vocab_size, cluster_shares=shares, on_gpu=on_gpu)
    listed = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in held.items())
    room = room_bytes(torch.device("cuda" if on_gpu else "cpu"))
    yield f"memory per rank, estimated: {sum(held.values()) / 2**20:,.1f} MiB besides the program ({listed})"
    yield f"memory of {'a GPU' if on_gpu else 'this machine, left for all its ranks'}: {room / 2**20:,.1f} MiB"


def dry_run(config: Config, *, world_size: int) -> Iterator[str]:
    """Everything `--dry-run` prints. Raises TxlError where a real run would."""
    device = torch.device("cuda" if uses_gpu() else "cpu")
    job = check_job(config, ranks=Ranks(0, world_size, 0, device, num_threads=torch.get_num_threads()))
    if config.run.init:
        initial_weights(config, job.corpora[0])
    yield config_to_toml(config)
    yield from describe_batch(job)
    yield from describe_data(job, job.stream)
    yield from describe_cost(config, plan=job.plan, vocab_size=job.vocab_size, on_gpu=device.type == "cuda")
    warnings = remarks(config, plan=job.plan) + remarks_on_evaluation(config, job.corpora)
    warnings += remarks_on_repetition(config, job.splits, job.stream)
    yield from (f"warning: {sentence}" for sentence in warnings)
