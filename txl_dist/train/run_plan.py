"""The plan of a run: all values that follow from its settings, ranks and corpora. They are derived once.

    settings -> phases -> batch plan, corpora, warnings of each phase -> number of parameters

The start, the dry run, the report of a run and its checkpoints read these values and derive none of them again. To make
a plan, nothing is written, no checkpoint is read, and no large memory is allocated. So every rank can make the plan,
and settings that do not fit are refused before anything is changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from txl_dist.config.load import BatchPlan, Config, changed, check_config, check_vocabulary, plan_batch
from txl_dist.config.phases import SavedSettings, check_phases, each_phase, saved_settings
from txl_dist.data.loader.corpora import Corpora, first_stream, open_corpora
from txl_dist.data.loader.lanes import lanes_of_rank
from txl_dist.data.loader.target_sampler import TargetSettings
from txl_dist.distributed.collectives import RankInfo
from txl_dist.errors import ConfigError
from txl_dist.model.flops import count_parameters, flops_by_part, peak_tflops
from txl_dist.model.kernels.attention_launch import runs_triton
from txl_dist.train.engine.precision import ChosenPrecision
from txl_dist.train.footprint.fits import gpu_room, with_kept_scores
from txl_dist.train.preflight import StageWarnings, check_hardware, check_text, warnings_on_stage
from txl_dist.train.report.loggers import check_sinks
from txl_dist.train.state import EvaluationPlan, RunContext


class Stage(NamedTuple):
    """Part of a run with constant settings (a phase): its context, and the warnings for the user."""

    context: RunContext
    warnings: StageWarnings


class RunPlan(NamedTuple):
    """All values that are known about a run before its start. They are the same on every rank, except the rank's
    lanes."""

    saved_settings: SavedSettings
    run_dir: Path
    """Folder of the run."""
    ranks: RankInfo
    stages: tuple[Stage, ...]
    """Phases that have at least one step, in order."""
    num_parameters: int
    """Number of trainable values of the model. Each tied tensor counts once."""
    precision: ChosenPrecision
    """Precision of the run, with the reason for it."""

    def stage_at(self, step: int) -> Stage:
        """Return the phase that follows `step` finished steps. After the end of the run this is the last phase."""
        for stage in self.stages:
            if step < stage.context.steps.stop:
                return stage
        return self.stages[-1]


def plan_run(config: Config, ranks: RankInfo, *, precision: ChosenPrecision | None = None) -> RunPlan:
    """Plan a run on these ranks.

    `precision` replaces engine.precision in all settings of the plan. It is needed if engine.precision is "auto".
    Raises TxlError if the settings, the hardware, the number of ranks and the corpora do not fit together.
    """
    if precision is None:
        precision = ChosenPrecision(config.engine.chosen_precision)
    elif precision.word != config.engine.precision:
        config = changed(config, {"engine.precision": precision.word})
    check_phases(config)
    phases = list(each_phase(config))
    settings = saved_settings(config)
    contexts: list[RunContext] = []
    for steps, stage_config in phases:
        if contexts:
            opened = contexts[0].corpora
        else:
            opened = None
        contexts.append(_plan_stage(stage_config, settings, ranks, steps, opened))
    num_parameters = count_parameters(config.model, vocab_size=contexts[0].vocab_size)
    stages = tuple(Stage(context, warnings_on_stage(context, num_parameters, precision)) for context in contexts)
    return RunPlan(settings, contexts[0].run_dir, ranks, stages, num_parameters, precision)


def _plan_stage(
    config: Config, settings: SavedSettings, ranks: RankInfo, steps: range, opened: Corpora | None
) -> RunContext:
    """Check one phase and derive its context. `opened` are the corpora that an earlier phase has opened, or None.

    Raises TxlError for the same reasons as `plan_run`.
    """
    data = config.data
    train = config.train
    metrics = config.metrics
    check_config(config)
    check_hardware(config, device=ranks.device)
    check_sinks(metrics)
    plan = plan_batch(train, world_size=ranks.world_size)
    if opened is None:
        corpora = open_corpora(data, num_lanes=train.num_lanes, seed=config.run.seed, evaluation=config.eval)
    else:
        try:
            begin = first_stream(opened.train, data, num_lanes=train.num_lanes, seed=config.run.seed)
        except ConfigError as error:
            raise ConfigError(f"train.phases, steps {steps.start + 1} to {steps.stop}: {error}") from error
        corpora = opened._replace(begin=begin)
    check_vocabulary(config.model, vocab_size=corpora.first.vocab_size)
    if metrics.sample_every_steps:
        prompt = metrics.sample_prompt
    else:
        prompt = None
    # XLNet's objective predicts tokens of whole segments only.
    eval_segment_len = train.segment_len if train.is_permutation else 1
    check_text(corpora, segment_len=train.segment_len, eval_segment_len=eval_segment_len, sample_prompt=prompt)
    if runs_triton(ranks.device):  # only the Triton kernels keep scores
        room = gpu_room(ranks.device)
        config = with_kept_scores(config, plan=plan, vocab_size=corpora.first.vocab_size, room=room)
    return stage_context(config, settings, plan, ranks, corpora, steps=steps)


def stage_context(
    config: Config, settings: SavedSettings, plan: BatchPlan, ranks: RankInfo, corpora: Corpora, *, steps: range
) -> RunContext:
    """Derive the context of one phase from its settings, which are already checked."""
    train = config.train
    vocab_size = corpora.first.vocab_size
    evaluation = evaluation_plan(config)
    return RunContext(
        config=config,
        saved_settings=settings,
        steps=steps,
        plan=plan,
        ranks=ranks,
        corpora=corpora,
        run_dir=Path(config.run.dir),
        vocab_size=vocab_size,
        lanes=lanes_of_rank(train.num_lanes, rank=ranks.rank, world_size=ranks.world_size),
        scored_len=train.scored_len,
        unscored=train.unscored,
        target_settings=TargetSettings.of(train) if train.is_permutation else None,
        evaluation=evaluation,
        flops=flops_by_part(
            config.model,
            vocab_size=vocab_size,
            segment_len=train.segment_len,
            memory_lens=train.memory_per_layer(config.model.num_layers),
            microbatch_lanes=plan.microbatch_lanes,
            step_len=train.step_len,
            num_targets=train.num_targets,
        ),
        peak_flops=_peak_flops(ranks, precision=config.engine.precision, tflops=config.metrics.peak_tflops),
    )


def _peak_flops(ranks: RankInfo, *, precision: str, tflops: float) -> float:
    """Return the peak rate of all devices together in operations per second, or 0 if it is not known.

    `tflops` is the peak of one device in 1e12 operations per second. If it is 0, the peak is looked up by the device's
    name.
    """
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        name = torch.cuda.get_device_name(ranks.device)
    else:
        name = ranks.device.type
    return ranks.world_size * (tflops or peak_tflops(name, precision=precision)) * 1e12


def evaluation_plan(config: Config) -> EvaluationPlan:
    """Derive the lengths of an evaluation. A length that the settings do not give is the same as in training."""
    train = config.train
    evaluation = config.eval
    return EvaluationPlan(
        num_lanes=evaluation.num_lanes,
        segment_len=evaluation.segment_len or train.segment_len,
        overlap_len=evaluation.overlap_len,
        memory_len=train.memory_len if evaluation.memory_len < 0 else evaluation.memory_len,
        max_tokens=evaluation.max_tokens,
        with_accuracy=evaluation.accuracy,
    )
