"""`txl train --dry-run`: describe a run without running it.

The command prints settings, batch, data, cost and warnings.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from txl_dist.config.load import Config, changes_to_toml, config_to_toml
from txl_dist.config.schema import paths_of_sets
from txl_dist.data.loader.stream_state import continued
from txl_dist.distributed.collectives import RankInfo, uses_gpu
from txl_dist.model.kernels.attention_launch import runs_triton
from txl_dist.planning.recovery_cost import SPARE_BYTES
from txl_dist.planning.text import per_token
from txl_dist.train.checkpoint.mirror.mirror import mirrored_precision
from txl_dist.train.engine.precision import bf16_support, choose_precision, needs_support
from txl_dist.train.footprint.checkpoint import checkpoint_size
from txl_dist.train.footprint.copies import copies_bytes
from txl_dist.train.footprint.rank import bytes_per_rank
from txl_dist.train.footprint.room import room_bytes
from txl_dist.train.preflight import describe_batch, describe_data, describe_sets, warnings_on_repetition
from txl_dist.train.run_dir import kept_precision
from txl_dist.train.run_plan import plan_run
from txl_dist.train.state import RunContext
from txl_dist.train.warm_start import initial_weights


def dry_run(config: Config, *, world_size: int, resume: str = "auto", shows_all: bool = False) -> Iterator[str]:
    """Yield all lines that `--dry-run` prints: the settings, then the batch, data and cost of the run.

    `resume` is the option of that name. `shows_all` prints every setting, not only the settings that differ from the
    defaults. The mirror is read only if engine.precision is "auto" and the run directory has no run. Raises the same
    TxlError as a real run.
    """
    if uses_gpu():
        device = torch.device("cuda")
    else:
        device = torch.device("cpu")
    ranks = RankInfo(0, world_size, 0, device, num_threads=torch.get_num_threads())
    given = config.engine.precision
    kept = None
    if given == "auto":
        kept = kept_precision(Path(config.run.dir), resume=resume) or mirrored_precision(config)
    answers = [bf16_support(device)] if needs_support(given, kept=kept) else []
    plan = plan_run(config, ranks, precision=choose_precision(given, kept=kept, answers=answers))
    config = plan.saved_settings.config
    first_stage = plan.stages[0]
    corpora = first_stage.context.corpora
    if config.run.init:
        initial_weights(config, corpora.first)
    if shows_all:
        yield config_to_toml(config)
    else:
        yield changes_to_toml(config)
    warnings = list(first_stage.warnings.evaluation)
    stream = corpora.begin
    for context, stage_warnings in plan.stages:
        steps = context.steps
        splits = context.corpora.train
        step_len = context.config.train.step_len
        if config.train.phases:
            yield f"steps {steps.start + 1:,} to {steps.stop:,}:"
        if steps.start:
            stream = continued(stream, context.corpora.begin, splits)
        yield from describe_batch(context, num_parameters=plan.num_parameters, precision_reason=plan.precision.reason)
        end = stream.advanced(len(steps) * step_len)
        yield from describe_data(splits, end, last_step=steps.stop)
        yield from describe_cost(context)
        warnings += stage_warnings.settings
        warnings += warnings_on_repetition(splits, end, step_len=step_len, last_step=steps.stop)
        warnings += stage_warnings.size
        stream = end
    yield from describe_sets(corpora, paths_of_sets(config.eval.sets))
    for warning in dict.fromkeys(warnings):
        yield f"warning: {warning}"


def describe_cost(context: RunContext) -> Iterator[str]:
    """Yield lines about the cost of a phase: operations, predicted bytes per rank, and size of a checkpoint."""
    config = context.config
    vocab_size = context.vocab_size
    device = context.ranks.device
    on_gpu = device.type == "cuda"
    step_flops = sum(context.flops.values()) * context.plan.tokens_per_step
    total_flops = step_flops * len(context.steps)
    yield f"cost: {per_token(context.flops)}, {step_flops / 1e9:,.1f} GFLOP per step, {total_flops:.3g} FLOP in all"
    size = checkpoint_size(config, vocab_size=vocab_size)
    needed = bytes_per_rank(
        config, plan=context.plan, vocab_size=vocab_size, on_gpu=on_gpu, runs_triton=runs_triton(device)
    )
    ranks = context.plan.world_size
    copies = copies_bytes(config, size, ranks=ranks, ranks_per_node=ranks)  # as if all ranks were on one node
    if copies and not on_gpu:
        needed["recovery copies"] = copies
    needed_mib = {name: num_bytes / 2**20 for name, num_bytes in needed.items()}
    total_mib = sum(needed.values()) / 2**20
    listed = ", ".join(f"{name} {mib:,.1f}" for name, mib in needed_mib.items())
    yield f"memory per rank, estimated: {total_mib:,.1f} MiB in addition to the program ({listed})"
    if on_gpu:
        owner = "a GPU"
    else:
        owner = "this machine, left for all its ranks"
    room_mib = room_bytes(device) / 2**20
    yield f"memory of {owner}: {room_mib:,.1f} MiB"
    if copies:
        yield (
            f"recover.spares: {copies / 2**20:,.1f} MiB of host memory per rank for copies of its state, and about "
            f"{SPARE_BYTES / 1e6:.0f} MB per node for the spare"
        )
    yield f"checkpoint: {size}"
