"""What a run is, in the first lines of its log: batch arithmetic, parameters, how attention is computed, data."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from txl_dist.config import Config
from txl_dist.data.read.lanes import epochs_read
from txl_dist.data.read.position import StreamState
from txl_dist.dist import uses_gpu
from txl_dist.infer.bundle import DTYPES
from txl_dist.model.flops import count_parameters
from txl_dist.model.kernels.launch import obstacle
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
    for split, one in zip(job.corpora.train, end.corpora, strict=True):
        read = epochs_read(one.cut(), one.position, num_tokens=split.tokens)
        yield (
            f"data: {split.corpus.location}, split {split.name}: {split.tokens:,} tokens in {len(split.shards):,} "
            f"shards; {one.num_lanes} lanes, {read:.2f} epochs at step {train.max_steps:,}"
        )
