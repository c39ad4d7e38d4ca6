"""`txl train --dry-run`: description of a run without running it: settings, batch, data, cost, warnings."""

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
    """Yield all that `--dry-run` prints: the settings, then the run that follows from them.

    `shows_all` prints every setting, not only those that differ from the defaults.

    Raises TxlError where a real run would.
    """
    device = torch.device("cuda" if uses_gpu() else "cpu")
    ranks = RankInfo(0, world_size, 0, device, num_threads=torch.get_num_threads())
    jobs = check_jobs(config, ranks=ranks)
    _, first_job = jobs[0]
    first_corpus = first_job.corpora.first
    if config.run.init:
        initial_weights(config, first_corpus)
    if shows_all:
        yield config_to_toml(config)
    else:
        yield changes_to_toml(config)
    warnings = warnings_on_evaluation(config, first_corpus)
    stream = first_job.corpora.begin
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
        num_tokens = sum(split.tokens for split in job.corpora.train)
        warnings += warnings_on_size(parameters, tokens=num_tokens)
        stream = stream.advanced(len(steps) * job.config.train.segment_len)
    for warning in dict.fromkeys(warnings):
        yield f"warning: {warning}"


def describe_cost(job: RunContext, *, num_steps: int) -> Iterator[str]:
    """Yield the operations of so many steps, the predicted bytes per rank, and the size of a checkpoint."""
    config = job.config
    device = job.ranks.device
    on_gpu = device.type == "cuda"
    flops = flops_by_part(
        config.model,
        vocab_size=job.vocab_size,
        segment_len=config.train.segment_len,
        memory_lens=config.train.memory_per_layer(config.model.num_layers),
        microbatch_lanes=job.plan.microbatch_lanes,
    )
    step_flops = sum(flops.values()) * job.plan.tokens_per_step
    total_flops = step_flops * num_steps
    yield f"cost: {per_token(flops)}, {step_flops / 1e9:,.1f} GFLOP per step, {total_flops:.3g} FLOP in all"
    needed = bytes_per_rank(config, plan=job.plan, vocab_size=job.vocab_size, on_gpu=on_gpu)
    needed_mib = {name: size / 2**20 for name, size in needed.items()}
    total_mib = sum(needed.values()) / 2**20
    listed = ", ".join(f"{name} {mib:,.1f}" for name, mib in needed_mib.items())
    yield f"memory per rank, estimated: {total_mib:,.1f} MiB besides the program ({listed})"
    owner = "a GPU" if on_gpu else "this machine, left for all its ranks"
    yield f"memory of {owner}: {room_bytes(device) / 2**20:,.1f} MiB"
    yield f"checkpoint: {checkpoint_size(config, vocab_size=job.vocab_size)}"
