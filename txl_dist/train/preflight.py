"""Checks before training starts: errors for settings that cannot work, warnings, and lines for the log.

The errors are raised before the model is built and before any file is written.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from txl_dist.config.load import BatchPlan, Config
from txl_dist.console.formatting import counted
from txl_dist.data.loader.corpora import Corpora, lacks_eval_split
from txl_dist.data.loader.corpus import Corpus
from txl_dist.data.loader.lanes import epochs_read
from txl_dist.data.loader.shards import Split
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.distributed.collectives import uses_gpu
from txl_dist.errors import ConfigError, DataError, TxlError, UnreachableError
from txl_dist.inference.bundle import DTYPES
from txl_dist.model.flops import has_projections
from txl_dist.model.kernels.attention_launch import (
    unsupported_device_reason,
    unsupported_reason,
    unsupported_shape_reason,
)
from txl_dist.train.engine.precision import ChosenPrecision
from txl_dist.train.state import RunContext

MANY_EPOCHS = 20
"""A run warns if it reads a training split more often than this number of times. In Muennighoff et al. 2023 ("Scaling
Data-Constrained Language Models", arXiv 2305.16264), text that is read 4 times is nearly as good as new text. After
about 15 epochs, the value of reading the text again has fallen to a third."""
LARGE_SHARE = 0.1
"""A run warns if one step reads at least this share of a training split."""
LARGE_MODEL = 10
"""A run warns if the model has more than this number of parameters per token of training text. In the Transformer-XL
paper (arXiv 1901.02860) the largest ratio without stronger regularization is 3: 277 million parameters for the 90
million tokens of enwik8. For Penn Treebank the ratio is 26 (24 million for 0.9 million), and the paper regularized that
model more strongly."""


def check_text(corpora: Corpora, *, segment_len: int, eval_segment_len: int = 1, sample_prompt: str | None) -> None:
    """Raise ConfigError for a split that is too short, and for a sample prompt that the tokenizer cannot encode.

    A training split needs `segment_len` + 1 tokens per lane (batch row with its own token stream). A validation split
    needs `eval_segment_len` + 1 tokens. `sample_prompt` is None if the run writes no sample texts.
    """
    for split, state in zip(corpora.train, corpora.begin.corpora, strict=True):
        needed = state.num_lanes * (segment_len + 1)
        if split.tokens < needed:
            raise ConfigError(
                f"split {split.name!r} of {split.corpus.location} has {counted(split.tokens, 'token')}, but a step "
                f"with train.num_lanes={state.num_lanes} and train.segment_len={segment_len} needs {needed:,} tokens, "
                "including the last target of each lane (batch row). Prepare more text, or lower train.num_lanes or "
                "train.segment_len."
            )
    if sample_prompt is not None:
        _check_prompt(sample_prompt, corpora.first)
    for split in corpora.eval.values():
        if split.tokens <= eval_segment_len:
            segment = ""
            remedy = "Prepare more validation text"
            if eval_segment_len > 1:
                segment = f" (train.segment_len={segment_len} and one more)"
                remedy += ", lower train.segment_len,"
            raise ConfigError(
                f"split {split.name!r} of {split.corpus.location} has {counted(split.tokens, 'token')}, but an "
                f"evaluation needs at least {eval_segment_len + 1:,}{segment}. {remedy} or switch evaluation off with "
                '--data.eval_split "".'
            )


def _check_prompt(prompt: str, corpus: Corpus) -> None:
    """Raise ConfigError if the tokenizer of the corpus cannot encode `prompt`, the value of `metrics.sample_prompt`."""
    try:
        corpus.tokenizer.encode_prompt(prompt)
    except TxlError as error:
        raise ConfigError(
            f"metrics.sample_prompt={prompt!r} cannot be encoded by the tokenizer of {corpus.location}: {error} "
            "Choose another metrics.sample_prompt."
        ) from error


class StageWarnings(NamedTuple):
    """Warnings that the settings, corpora and model size of one phase of a run cause, one sentence each.

    Rank 0 logs them at the start of the phase. Warnings about a checkpoint are not included.
    """

    cache: list[str]
    """Warnings about the size of the cache for remote shards."""
    evaluation: list[str]
    """Warnings about a missing validation split."""
    size: list[str]
    """Warnings about a model that is too large for its text."""
    settings: list[str]
    """Warnings about settings that have no effect or reduce precision."""


def warnings_on_stage(context: RunContext, num_parameters: int, precision: ChosenPrecision) -> StageWarnings:
    """Return the warnings to log before a phase of a run starts. `num_parameters` is the size of the model, and
    `precision` the precision of the run."""
    config = context.config
    splits = context.corpora.train
    return StageWarnings(
        cache=warnings_on_cache(config, splits, lanes_per_rank=context.plan.lanes_per_rank),
        evaluation=warnings_on_evaluation(config, context.corpora.first),
        size=warnings_on_size(num_parameters, tokens=sum(split.tokens for split in splits)),
        settings=[*precision.warnings, *warnings_on_settings(config, plan=context.plan)],
    )


def warnings_on_evaluation(config: Config, corpus: Corpus) -> list[str]:
    """Return a warning if the corpus lacks the default validation split, and the settings name no other split and no
    held-out set."""
    if config.eval.sets or not lacks_eval_split(config.data, corpus):
        return []
    if config.checkpoint.keep_best:
        without = ", and checkpoint.keep_best has no effect"
    else:
        without = ""
    return [
        f"{corpus.location} has no split {config.data.eval_split!r} (it has {', '.join(corpus.split_names)}): "
        f"training runs without evaluation{without}. To make a validation split, prepare the corpus with --valid PATH "
        "or --valid-fraction. To evaluate another split, set --data.eval_split SPLIT. To silence this warning, set "
        '--data.eval_split ""'
    ]


def check_hardware(config: Config, *, device: torch.device) -> None:
    """Raise ConfigError for settings that the device does not support, and if training would run on the CPU of a
    machine with GPUs.

    The CPU is accepted if the user chose the CPU: torch is built without CUDA, or DS_ACCELERATOR or
    CUDA_VISIBLE_DEVICES is set.
    """
    # The user has chosen the CPU by a torch without CUDA, or by a variable that hides the GPUs.
    chosen = not torch.version.cuda or any(name in os.environ for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"))
    if device.type == "cpu" and not chosen and (drivers := drivers_of_gpus()):
        raise ConfigError(
            f"nvidia-smi lists {counted(len(drivers), 'GPU')} (driver {drivers[0]}), but torch for CUDA "
            f"{torch.version.cuda} cannot use them, so training would run on the CPU. Update the driver, or "
            f"install torch for an older CUDA (see txl doctor). To train on the CPU, set DS_ACCELERATOR=cpu."
        )
    if config.engine.precision == "fp16" and device.type == "cpu":
        raise ConfigError(
            "engine.precision=fp16 needs a GPU: DeepSpeed has no fp16 on the CPU. Use --engine.precision "
            "fp32, or bf16 on a CPU with instructions for it (see txl doctor)."
        )
    if config.engine.precision == "tf32" and not _has_tf32(device):
        raise ConfigError(
            "engine.precision=tf32 needs a GPU of compute capability 8.0 (Ampere) or later. "
            "Use --engine.precision fp32, which writes the same checkpoints."
        )
    if config.engine.cuda_graph == "on" and device.type == "cpu":
        raise ConfigError("engine.cuda_graph=on needs a GPU. On a CPU, set engine.cuda_graph to off or auto.")
    if config.engine.attention == "triton":
        model = config.model
        dtype = DTYPES[config.engine.dtype]
        reason = unsupported_shape_reason(
            dtype,
            head_width=model.head_width,
            has_position_bias=model.scheme.has_position_bias,
            in_any_order=model.any_order,
        )
        if reason is None:
            reason = unsupported_device_reason(torch.empty(0, device=device))
        if reason is not None:
            raise ConfigError(
                f"engine.attention=triton cannot run: {reason}. Use --engine.attention auto, which uses the "
                f"Triton kernels only where they can run."
            )


def _has_tf32(device: torch.device) -> bool:
    """Return whether the device can compute matrix products in TF32: a GPU of compute capability 8.0 (Ampere) or
    later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def drivers_of_gpus() -> list[str]:
    """Return the driver version of each GPU that nvidia-smi lists. The list is empty if nvidia-smi fails or is
    missing."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def warnings_on_settings(config: Config, *, plan: BatchPlan) -> list[str]:
    """Return a warning for each setting that has no effect, and a warning if gradients are summed in bf16."""
    model = config.model
    train = config.train
    warnings: list[str] = []
    if any(model.tie_projections) and not has_projections(model):
        warnings.append("model.tie_projections has no effect: embeddings as wide as the model need no projection")
    if model.div_value > 1 and not model.cutoffs:
        warnings.append("model.div_value has no effect on widths without model.cutoffs")
    if config.engine.keep_scores == "on" and config.engine.attention in ("plain", "fused"):
        warnings.append(f"engine.keep_scores=on has no effect with engine.attention={config.engine.attention}")
    if config.engine.recompute_every > 1 and not config.engine.activation_checkpointing:
        warnings.append("engine.recompute_every has no effect without engine.activation_checkpointing")
    if not model.scheme.has_distance_terms and config.engine.attention != "auto" and not uses_gpu():
        warnings.append(
            f"engine.attention has no effect with model.positions={model.positions}, which uses torch's own attention"
        )
    if train.memory_len == 0 and not train.phases:
        if train.initial_memory != "empty":
            warnings.append("train.initial_memory has no effect without a memory (train.memory_len=0)")
        if model.absolute_with_memory:
            warnings.append("model.absolute_with_memory has no effect without a memory (train.memory_len=0)")
    metrics = config.metrics
    for key in ("entity", "name", "group", "tags", "id"):
        if getattr(metrics, f"wandb_{key}") and not metrics.wandb:
            warnings.append(f"metrics.wandb_{key} has no effect without metrics.wandb (the name of the project)")
    if config.optim.schedule == "constant" and config.optim.min_lr:
        warnings.append("optim.min_lr has no effect with optim.schedule=constant")
    if config.engine.precision == "bf16" and config.engine.zero_stage < 2 and plan.num_microbatches > 1:
        warnings.append(
            f"gradients of {plan.num_microbatches} micro-batches are summed in bf16. With engine.zero_stage=2 the sum "
            "is in fp32"
        )
    return warnings


def warnings_on_repetition(splits: Sequence[Split], end: StreamState, *, step_len: int, last_step: int) -> list[str]:
    """Return a warning for each training split that a phase of a run repeats too often.

    A split is repeated too often if it is read more than `MANY_EPOCHS` times by step `last_step`, the end of the phase,
    or if one step reads at least `LARGE_SHARE` of it. `end` is the position of the lanes at that step.
    """
    warnings: list[str] = []
    for split, state in zip(splits, end.corpora, strict=True):
        per_step = state.num_lanes * step_len
        epochs = epochs_read(state.cut(), state.position, num_tokens=split.tokens)
        if epochs <= MANY_EPOCHS and per_step < LARGE_SHARE * split.tokens:
            continue
        warnings.append(
            f"split {split.name!r} of {split.corpus.location} has {split.tokens:,} tokens. A step reads "
            f"{counted(per_step, 'token')} ({counted(state.num_lanes, 'lane')} x {step_len} tokens), which is "
            f"{100 * per_step / split.tokens:.3g} % of the split. By step {last_step:,} the split will have been read "
            f"{epochs:,.0f} times. A model memorizes a text that is this small for the run. Lower train.num_lanes, "
            "train.segment_len or train.max_steps, or prepare more text"
        )
    return warnings


def warnings_on_size(parameters: int, *, tokens: int) -> list[str]:
    """Return a warning if a model has more than `LARGE_MODEL` parameters per token of its training text."""
    if parameters <= LARGE_MODEL * tokens:
        return []
    return [
        f"the model has {parameters:,} parameters for {tokens:,} tokens of text, {parameters / tokens:,.0f} per token. "
        f"A model with more than {LARGE_MODEL} parameters per token memorizes the text. Lower model.width or "
        "model.num_layers, or prepare more text"
    ]


def warnings_on_cache(config: Config, splits: Sequence[Split], *, lanes_per_rank: int) -> list[str]:
    """Return a warning if `data.cache_gib` is too small for the shards that one rank can need at the same time."""
    if not config.data.cache_dir:
        return []
    largest = sorted((info.bytes for split in splits for info in split.shards), reverse=True)
    # One shard per lane, one that is being closed, and prefetched ones as far as there is room.
    needed_gib = sum(largest[: lanes_per_rank + 2]) / 2**30
    if needed_gib <= config.data.cache_gib:
        return []
    return [
        f"the {counted(lanes_per_rank, 'lane')} of a rank may need {needed_gib:.1f} GiB of shards at once, but "
        f"data.cache_gib={config.data.cache_gib:g}. All ranks of a node share this cache, and the run ends if the "
        "cache has no room for a shard. Raise data.cache_gib"
    ]


def describe_batch(context: RunContext, *, num_parameters: int, precision_reason: str = "") -> Iterator[str]:
    """Yield two lines for the log at the start of a phase: the sizes of the batch, then the size and options of the
    model.

    `precision_reason` says why engine.precision=auto has chosen the precision. It is empty if the user has named it.
    """
    config = context.config
    plan = context.plan
    train = config.train
    engine = config.engine
    precision: str = engine.precision
    if precision_reason:
        precision += f" (auto: {precision_reason})"
    yield (
        f"batch: {counted(train.num_lanes, 'lane')} x {counted(train.step_len, 'token')} = "
        f"{plan.tokens_per_step:,} tokens per step; "
        f"{counted(plan.world_size, 'rank')} x {counted(plan.num_microbatches, 'micro-batch', 'micro-batches')} x "
        f"{counted(plan.microbatch_lanes, 'lane')}"
    )
    yield (
        f"model: {num_parameters:,} parameters, vocabulary {context.vocab_size:,}, "
        f"memory {counted(train.memory_len, 'token')}; "
        f"ZeRO-{engine.zero_stage}, {precision}, attention {_attention(config)}"
        f"{', CUDA graphs' if engine.replays(on_gpu=uses_gpu()) else ''}"
    )


def _attention(config: Config) -> str:
    """Return the name of the attention implementation, for the log.

    If `engine.attention` is auto on a GPU and the Triton kernels of attention, or all of them, cannot run, the reason
    is added.
    """
    model = config.model
    chosen = config.engine.attention
    if chosen != "auto":
        return chosen if model.scheme.has_distance_terms else "by torch"
    shape = (1, 1, model.num_heads, model.head_width)
    device = torch.device("cuda" if uses_gpu() else "cpu")
    query = torch.empty(shape, dtype=DTYPES[config.engine.dtype], device=device)
    broken = unsupported_device_reason(query) if query.is_cuda else None
    if not model.scheme.has_distance_terms:
        return f"by torch (no Triton kernels: {broken})" if broken else "by torch"
    reason = broken or unsupported_reason(
        query, has_position_bias=model.scheme.has_position_bias, in_any_order=model.any_order
    )
    if reason is None:
        if config.engine.keep_scores == "on":
            return "triton with kept scores"
        return "triton"
    if query.is_cuda:
        return f"fused (not by Triton: {reason})"
    return "fused"


def describe_sets(corpora: Corpora, sets: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for the log for each held-out set. `sets` are the names and paths of the sets."""
    for name, _ in sets:
        split = corpora.eval[f"eval_{name}"]
        yield f"held-out set {name}: {split.corpus.location}, split {split.name}: {split.tokens:,} tokens"


def describe_data(splits: Sequence[Split], end: StreamState, *, last_step: int) -> Iterator[str]:
    """Yield a line for the log for each training split.

    The line contains the size of the split, its lanes, and how often the split will have been read at the end of a
    phase. `last_step` is the last step of the phase, and `end` is the position of the lanes at that step.
    """
    for split, state in zip(splits, end.corpora, strict=True):
        read = epochs_read(state.cut(), state.position, num_tokens=split.tokens)
        yield (
            f"data: {split.corpus.location}, split {split.name}: {split.tokens:,} tokens in "
            f"{counted(len(split.shards), 'shard')}; {counted(state.num_lanes, 'lane')}, {read:.2f} epochs at step "
            f"{last_step:,}"
        )


def check_shards(corpora: Corpora, *, skips_damage: bool) -> list[str]:
    """Check that the shards exist and have the right sizes.

    Returns a sentence for each training split with damage that the run skips. Raises DataError for other damage.
    """
    warnings: list[str] = []
    for split in (*corpora.train, *corpora.eval.values()):
        try:
            split.check_files()
        except DataError as error:
            if split not in corpora.train or not skips_damage or isinstance(error, UnreachableError):
                raise
            warnings.append(str(error))
    return warnings
