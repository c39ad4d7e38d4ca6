"""What a run would be, without running it: `txl train --dry-run`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from txl_dist.config.load import Config, changes_to_toml, config_to_toml
from txl_dist.data.loader.stream_state import continued
from txl_dist.distributed.collectives import RankInfo, uses_gpu
from txl_dist.model.flops import count_parameters, flops_by_part
from txl_dist.planning.text import per_token
from txl_dist.train.footprint.checkpoint import checkpoint_size
from txl_dist.train.footprint.rank import bytes_per_rank
from txl_dist.train.footprint.room import room_bytes
from txl_dist.train.preflight import (
    check_jobs,
    describe_batch,
    describe_data,
    warnings_on_evaluation,
    warnings_on_repetition,
    warnings_on_settings,
    warnings_on_size,
)
from txl_dist.train.state import RunContext
from txl_dist.train.warm_start import initial_weights


def dry_run(config: Config, *, world_size: int, shows_all: bool = False) -> Iterator[str]:
    """Everything `--dry-run` prints: settings, then what they make of a run. Raises TxlError where a real run would.

    `shows_all`: every setting, not only those that differ from the defaults.
    """
    device = torch.device("cuda" if uses_gpu() else "cpu")
    ranks = RankInfo(0, world_size, 0, device, num_threads=torch.get_num_threads())
    jobs = check_jobs(config, ranks=ranks)
    first = jobs[0][1].corpora.first
    if config.run.init:
        initial_weights(config, first)
    yield config_to_toml(config) if shows_all else changes_to_toml(config)
    warnings = warnings_on_evaluation(config, first)
    stream = jobs[0][1].corpora.begin
    for steps, job in jobs:
        if config.train.phases:
            yield f"steps {steps.start + 1:,} to {steps.stop:,}:"
        if steps.start:
            stream = continued(stream, job.corpora.begin, job.corpora.train)
        yield from describe_batch(job)
        yield from describe_data(job, stream, step=steps.start)
        yield from describe_cost(job, num_steps=len(steps))
        warnings += warnings_on_settings(job.config, plan=job.plan)
        warnings += warnings_on_repetition(job.config, job.corpora.train, stream, step=steps.start)
        parameters = count_parameters(job.config.model, vocab_size=job.vocab_size)
        warnings += warnings_on_size(parameters, tokens=sum(split.tokens for split in job.corpora.train))
        stream = stream.advanced(len(steps) * job.config.train.segment_len)
    yield from (f"warning: {sentence}" for sentence in dict.fromkeys(warnings))


def describe_cost(job: RunContext, *, num_steps: int) -> Iterator[str]:
    """Lines for a dry run: operations of so many steps, and predicted bytes per rank."""
    train, device, on_gpu = job.config.train, job.ranks.device, job.ranks.device.type == "cuda"
    parts = flops_by_part(
        job.config.model,
        vocab_size=job.vocab_size,
        segment_len=train.segment_len,
        memory_lens=train.memory_per_layer(job.config.model.num_layers),
        microbatch_lanes=job.plan.microbatch_lanes,
    )
    total = sum(parts.values()) * job.plan.tokens_per_step
    yield f"cost: {per_token(parts)}, {total / 1e9:,.1f} GFLOP per step, {total * num_steps:.3g} FLOP in all"
    held = bytes_per_rank(job.config, plan=job.plan, vocab_size=job.vocab_size, on_gpu=on_gpu)
    listed = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in held.items())
    yield f"memory per rank, estimated: {sum(held.values()) / 2**20:,.1f} MiB besides the program ({listed})"
    whose = "a GPU" if on_gpu else "this machine, left for all its ranks"
    yield f"memory of {whose}: {room_bytes(device) / 2**20:,.1f} MiB"
    yield f"checkpoint: {checkpoint_size(job.config, vocab_size=job.vocab_size)}"
