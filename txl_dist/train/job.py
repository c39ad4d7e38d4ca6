"""Everything that can be refused before anything expensive is built or anything is written."""

from __future__ import annotations

import torch

from txl_dist.config import BatchPlan, Config, check_config, check_vocabulary, plan_batch
from txl_dist.data.corpus import Corpus, open_corpus
from txl_dist.errors import ConfigError
from txl_dist.model.flops import has_projections


def check_job(config: Config, *, device: torch.device, world_size: int) -> tuple[BatchPlan, Corpus]:
    """Check settings against each other, the hardware, the ranks and the corpus. Raises TxlError."""
    check_config(config)
    check_hardware(config, device=device)
    plan = plan_batch(config.train, world_size=world_size)
    corpus = open_corpus(config.data.path)
    check_vocabulary(config.model, vocab_size=corpus.vocab_size)
    split = corpus.split(config.data.train_split)
    needed = config.train.num_lanes * (config.train.segment_len + 1)
    if split.tokens < needed:
        raise ConfigError(
            f"split {split.name!r} of {config.data.path} has {split.tokens:,} tokens; train.num_lanes="
            f"{config.train.num_lanes} lanes of one segment (train.segment_len={config.train.segment_len}, plus a "
            f"target) need {needed:,}. Prepare more text, or lower train.num_lanes or train.segment_len."
        )
    if config.data.eval_split and corpus.split(config.data.eval_split).tokens < 2:
        raise ConfigError(
            f"split {config.data.eval_split!r} of {config.data.path} has fewer than two tokens to evaluate. "
            'Prepare more held-out text, or switch evaluation off with --data.eval_split "".'
        )
    return plan, corpus


def check_hardware(config: Config, *, device: torch.device) -> None:
    """Refuse what the device cannot do. Raises ConfigError."""
    if config.engine.precision == "fp16" and device.type == "cpu":
        raise ConfigError(
            "engine.precision=fp16 needs a GPU: DeepSpeed has no fp16 on the CPU. "
            "Use --engine.precision fp32 (fast here) or bf16 (emulated on most CPUs, very slow)."
        )


def remarks(config: Config, *, plan: BatchPlan) -> list[str]:
    """What the user should know: settings without effect, and one trap; a sentence each."""
    model, found = config.model, []
    if any(model.tie_projections) and not has_projections(model):
        found.append("model.tie_projections has no effect: embeddings as wide as the model need no projection")
    if model.div_value > 1 and not model.cutoffs:
        found.append("model.div_value has no effect on widths without model.cutoffs")
    if config.optim.schedule == "constant" and config.optim.min_lr:
        found.append("optim.min_lr has no effect with optim.schedule=constant")
    if config.engine.precision == "bf16" and config.engine.zero_stage < 2 and plan.num_microbatches > 1:
        found.append(
            f"gradients of {plan.num_microbatches} micro-batches are summed in bf16; engine.zero_stage 2 sums in fp32"
        )
    return found
