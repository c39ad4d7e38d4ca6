"""What a run would need and bring on GPUs that are not at hand: the facts behind `txl plan`.

Memory comes from `train.footprint`, which follows the step on tensors without storage; time from `timing`. Every ZeRO
stage is tried with every micro-batch that is a power of two dividing a rank's lanes, and again with blocks recomputed
where that decides whether it fits. Chosen is the fastest that fits, or of those within 2 % of it the one that needs
least memory. All of it is predicted, not measured. `plan_text` makes sentences of the facts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from txl_dist.config import Config, changed, check_config, check_vocabulary, config_changes, plan_batch
from txl_dist.errors import ConfigError
from txl_dist.infer.bundle import DTYPES
from txl_dist.model.flops import count_parameters, flops_by_part, typical_shares
from txl_dist.model.kernels.launch import mismatch
from txl_dist.ops.plan import scaling
from txl_dist.ops.plan.hardware import CONTEXT_GIB, FRAGMENTED_SHARE, Cluster, Gpu
from txl_dist.ops.plan.timing import AttentionKind, StepTime, Work, step_time
from txl_dist.text.clusters import cluster_edges
from txl_dist.train.footprint.rank import bytes_per_rank

ENOUGH = 0.98
"""Of the fastest, from which on less memory counts more than speed."""
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
"""Unexpected interruptions of Llama 3's pre-training on H100 (Dubey et al. 2024, table 5)."""
RESTART_S = 300.0
"""Lost at a failure besides the steps since the last checkpoint. A guess."""
COPY_GB_S = 10.0
"""From a GPU into host memory, which is what a step waits for when saving is asynchronous. A guess for PCIe."""
WRITE_GB_S = 1.0
"""Onto the file system that all ranks share, when it is not. A guess."""

FUSED_BUFFER_LEN = 2**25
"""Scores that fused attention makes at once on a GPU."""
MOST_SIZES = 6
"""Micro-batches that are tried: the largest so many."""


@dataclass(frozen=True)
class Question:
    """What is planned for."""

    cluster: Cluster
    gpus: int
    vocab_size: int
    corpus_tokens: int = 0
    """Of an epoch; 0 if not known."""
    budget_tokens: int = 0
    """To train on in all; 0 means what train.max_steps makes."""


class Option(NamedTuple):
    """One way to run it."""

    config: Config
    needed_bytes: float
    """Per rank; between the smallest and the largest micro-batch it is interpolated, which is never too little."""
    step: StepTime
    tokens_per_s: float


def make_plan(config: Config, *, question: Question) -> dict[str, Any]:
    """Facts for JSON, `plan_text` and pictures. Raises ConfigError for settings or numbers that cannot be."""
    check_config(config)
    _check_question(question)
    check_vocabulary(config.model, vocab_size=question.vocab_size)
    used, notes = usable_gpus(config.train.num_lanes, gpus=question.gpus)
    if config.engine.offload_optimizer or config.engine.offload_parameters:
        notes.append("offloading to host memory is in the bytes, but not in the time, which will be longer.")
    planner = _Planner(config, question, used)
    options = list(planner.options())
    chosen = planner.choose(options)
    return {
        "predicted_not_measured": True,
        "gpu": question.cluster.gpu.device,
        "gpus": question.gpus,
        "gpus_used": used,
        "gpus_per_node": question.cluster.gpus_per_node,
        "bus_gb_s": question.cluster.gpu.bus_gb_s,
        "network_gb_s": question.cluster.network_gb_s,
        "notes": notes,
        "parameters": planner.parameters,
        "vocab_size": question.vocab_size,
        "tokens_per_step": config.train.num_lanes * config.train.segment_len,
        "flops_per_token": planner.flops,
        "memory_gib": {
            "gpu": question.cluster.gpu.memory_gib,
            "context": CONTEXT_GIB,
            "fragmentation": (question.cluster.gpu.memory_gib - CONTEXT_GIB) * FRAGMENTED_SHARE,
            "usable": question.cluster.gpu.usable_bytes / 2**30,
        },
        "options": [planner.row(option) for option in options],
        "as_configured": planner.as_configured(),
        "chosen": None if chosen is None else planner.details(chosen),
        "checkpoint": None if chosen is None else planner.checkpoint(chosen),
        "scaling": None if chosen is None else planner.scaling(chosen),
    }


def _check_question(question: Question) -> None:
    """Generous bounds: what lies outside is a slip, and may overflow."""
    cluster = question.cluster
    for flag, value, least, most in (
        ("--gpus", question.gpus, 1, 10**6),
        ("--gpus-per-node", cluster.gpus_per_node, 1, 10**6),
        ("--interconnect", cluster.network_gb_s, 1e-3, 10**6),
        ("--intra-node", cluster.gpu.bus_gb_s, 1e-3, 10**6),
        ("--tokens", question.budget_tokens, 0, 10**18),
        ("--vocab-size", question.vocab_size, 2, 10**9),
    ):
        if not least <= value <= most:  # which NaN is not
            raise ConfigError(f"{flag} {value} cannot be: give {least:,} to {most:,}.")


def usable_gpus(num_lanes: int, *, gpus: int) -> tuple[int, list[str]]:
    """(the most of so many GPUs that the lanes divide among, sentences about the rest)."""
    used = scaling.largest_divisor(num_lanes, at_most=gpus)
    if used == gpus:
        return used, []
    above = next((count for count in range(gpus + 1, num_lanes + 1) if num_lanes % count == 0), None)
    more = f" the next number above is {above}," if above else ""
    lanes = gpus * max(1, round(num_lanes / gpus))
    return used, [
        f"train.num_lanes={num_lanes} does not divide among {gpus} GPUs: planned for {used};{more} "
        f"or give --train.num_lanes {lanes} and use all {gpus}."
    ]


def attention_kind(config: Config, *, gpu: Gpu) -> AttentionKind:
    """How attention will be computed on such a GPU, by engine.attention."""
    model, dtype = config.model, DTYPES[config.engine.precision]
    unfit = mismatch(dtype, head_width=model.head_width, has_position_bias=model.scheme.has_position_bias)
    if config.engine.attention == "plain":
        return "plain"
    has_kernels = config.engine.attention in ("auto", "triton") and unfit is None and gpu.has_bf16
    return "kernels" if has_kernels else "fused"


class _Planner:
    """One question about one configuration."""

    def __init__(self, config: Config, question: Question, gpus: int) -> None:
        self.given, self.question, self.gpus, self.gpu = config, question, gpus, question.cluster.gpu
        self.shares = typical_shares(cluster_edges(config.model.cutoffs, vocab_size=question.vocab_size))
        self.parameters = count_parameters(config.model, vocab_size=question.vocab_size)
        self.flops = flops_by_part(
            config.model,
            vocab_size=question.vocab_size,
            segment_len=config.train.segment_len,
            memory_len=config.train.memory_len,
            microbatch_lanes=config.train.microbatch_lanes,
        )
        precision = config.engine.precision
        if precision == "fp32" or (precision == "bf16" and not self.gpu.has_bf16):
            precision = "bf16" if self.gpu.has_bf16 else "fp16"
        self.base = changed(config, {"engine.precision": precision, "engine.cuda_graph": False})

    def work(self, config: Config) -> Work:
        """Of a rank, by these settings. Raises ConfigError if the lanes do not divide."""
        train, engine = config.train, config.engine
        plan = plan_batch(train, world_size=self.gpus)
        return Work(
            model=config.model,
            vocab_size=self.question.vocab_size,
            shares=self.shares,
            parameters=self.parameters,
            segment_len=train.segment_len,
            memory_len=train.memory_len,
            microbatch_lanes=plan.microbatch_lanes,
            num_microbatches=plan.num_microbatches,
            world_size=self.gpus,
            zero_stage=engine.zero_stage,
            precision=engine.precision,
            attention=attention_kind(config, gpu=self.gpu),
            recomputed=1 / engine.recompute_every if engine.activation_checkpointing else 0.0,
            graphed=engine.cuda_graph,
            needs_whole_tensors=config.optim.kind.needs_whole_tensors,
        )

    def options(self) -> Iterator[Option]:
        """All stages and micro-batches that the settings allow; recomputed too where some micro-batch does not fit."""
        lanes = self.given.train.num_lanes // self.gpus
        sizes = [2**power for power in range(lanes.bit_length()) if lanes % 2**power == 0][-MOST_SIZES:]
        for stage in range(4):
            for recompute in (False, True):
                settings = {"engine.zero_stage": stage, "engine.activation_checkpointing": recompute}
                config = changed(self.base, settings)
                if not _is_valid(config):
                    continue
                row = self._counted([self._option(changed(config, {"train.microbatch_lanes": size})) for size in sizes])
                yield from row
                if all(self.fits(option) for option in row):
                    break

    def _counted(self, row: list[Option]) -> list[Option]:
        """The row, of rising micro-batches, with bytes counted at both ends and a line between, as they are convex."""
        first, last = self.needed_bytes(row[0]), self.needed_bytes(row[-1])
        low, high = (option.config.train.microbatch_lanes for option in (first, last))
        engine = last.config.engine
        # All but the last accumulate gradients, which up to stage 1 are held twice then.
        twice_bytes = self.parameters * DTYPES[engine.precision].itemsize if engine.zero_stage < 2 else 0
        rise = max(0.0, last.needed_bytes + twice_bytes - first.needed_bytes)
        between = [
            option._replace(
                needed_bytes=first.needed_bytes + rise * (option.config.train.microbatch_lanes - low) / (high - low)
            )
            for option in row[1:-1]
        ]
        return [first, *between, last][: len(row)]

    def _option(self, config: Config, needed_bytes: float = math.nan) -> Option:
        work = self.work(config)
        step = step_time(work, self.question.cluster)
        return Option(config, needed_bytes, step, work.tokens_per_step / step.total_s)

    def needed(self, config: Config) -> dict[str, float]:
        """Bytes per rank, by what holds them."""
        kind, in_fp32 = attention_kind(config, gpu=self.gpu), DTYPES[config.engine.precision].itemsize == 4
        # The footprint of the fused function is that of a CPU, whose blocks are small and many: it takes a minute. So
        # where it replaces the kernels its probabilities are counted here, and in fp32 plain attention is the bound.
        followed = changed(config, {"engine.attention": "plain" if kind == "plain" or in_fp32 else "auto"})
        plan = plan_batch(config.train, world_size=self.gpus)
        needed = bytes_per_rank(followed, plan=plan, vocab_size=self.question.vocab_size, on_gpu=True)
        if kind == "fused" and not in_fp32:
            needed["scores"] += _kept_scores_bytes(config)
        return needed

    def needed_bytes(self, option: Option) -> Option:
        """The option with its bytes counted."""
        return option._replace(needed_bytes=sum(self.needed(option.config).values()))

    def fits(self, option: Option) -> bool:
        """With the reserves left free."""
        return option.needed_bytes <= self.gpu.usable_bytes

    def choose(self, options: list[Option]) -> Option | None:
        """The best that fits, with a CUDA graph where that helps."""
        fitting = [option for option in options if self.fits(option)]
        for option in list(fitting):
            graphed = changed(option.config, {"engine.cuda_graph": True})
            if _is_valid(graphed):
                fitting.append(self._option(graphed, option.needed_bytes))
        if not fitting:
            return None
        enough = ENOUGH * max(option.tokens_per_s for option in fitting)
        good = [option for option in fitting if option.tokens_per_s >= enough]
        return self.needed_bytes(min(good, key=lambda one: (one.needed_bytes, one.config.engine.cuda_graph)))

    def row(self, option: Option) -> dict[str, Any]:
        """Of the table."""
        engine = option.config.engine
        return {
            "zero_stage": engine.zero_stage,
            "microbatch_lanes": option.config.train.microbatch_lanes,
            "activation_checkpointing": engine.activation_checkpointing,
            "precision": engine.precision,
            "cuda_graph": engine.cuda_graph,
            "needed_gib": option.needed_bytes / 2**30,
            "fits": self.fits(option),
            "tokens_per_s": option.tokens_per_s,
            "step_ms": 1e3 * option.step.total_s,
        }

    def details(self, option: Option) -> dict[str, Any]:
        """The row with what is behind it, and what comes of it."""
        rate, config = option.tokens_per_s, option.config
        tokens = self.question.budget_tokens or self.given.train.max_steps * self.work(config).tokens_per_step
        peak = self.gpu.flops(config.engine.precision) * self.gpus
        step, attention = option.step._asdict(), attention_kind(config, gpu=self.gpu)
        return self.row(option) | {
            "memory_is_bound": attention == "fused" and config.engine.precision == "fp32",
            "attention": attention,
            "needed_by_part_gib": {name: size / 2**30 for name, size in self.needed(config).items()},
            "step_by_part_ms": {name: 1e3 * part for name, part in step.items()},
            "mfu_pct": 100 * rate * sum(self.flops.values()) / peak if peak else None,
            "budget_tokens": tokens,
            "epochs": tokens / self.question.corpus_tokens if self.question.corpus_tokens else None,
            "days": tokens / rate / 86_400,
            "gpu_hours": tokens / rate / 3600 * self.gpus,
            "flags": [f"--{change.key} {change.new}" for change in config_changes(self.given, config)],
        }

    def as_configured(self) -> dict[str, Any]:
        """What the settings as they are would do, or why they cannot."""
        if self.given.engine.precision == "bf16" and not self.gpu.has_bf16:
            return {"error": f"{self.gpu.device} has no bf16."}
        try:
            return self.details(self.needed_bytes(self._option(self.given)))
        except ConfigError as error:
            return {"error": str(error)}

    def checkpoint(self, option: Option) -> dict[str, Any]:
        """Size, and the interval at which saving and repeating cost least (Young 1974)."""
        train, model = self.given.train, self.given.model
        memories = (
            model.num_layers * train.memory_len * model.width * train.num_lanes * self.work(option.config).num_bytes
        )
        size = 12.0 * self.parameters + memories  # fp32 weights and two moments
        is_asynchronous = self.given.checkpoint.asynchronous
        wait_s = size / self.gpus / (COPY_GB_S * 1e9) if is_asynchronous else size / (WRITE_GB_S * 1e9)
        wait_s = max(1.0, wait_s)
        mean_s = 3600 / (FAILURES_PER_GPU_HOUR * self.gpus)
        tokens = self.question.budget_tokens or train.max_steps * train.num_lanes * train.segment_len
        length_s = tokens / option.tokens_per_s
        interval_s = min(math.sqrt(2 * wait_s * mean_s), max(length_s / 10, 100 * wait_s), length_s)
        return {
            "size_gib": size / 2**30,
            "wait_s": wait_s,
            "mean_hours_between_failures": mean_s / 3600,
            "failures_expected": length_s / mean_s,
            "interval_s": interval_s,
            "every_steps": max(1, round(interval_s / option.step.total_s)),
            "lost_pct": 100 * (wait_s / interval_s + (interval_s / 2 + RESTART_S) / mean_s),
        }

    def scaling(self, option: Option) -> dict[str, Any]:
        """Points of both curves, and where they break."""
        work, cluster, needed = self.work(option.config), self.question.cluster, self.needed(option.config)
        # On fewer GPUs micro-batches may be larger, beside states that nobody shares: 16 bytes per parameter.
        per_lane = (needed["activations"] + needed["memories"] + needed["scores"]) / work.microbatch_lanes
        fitting = int((self.gpu.usable_bytes - 16 * self.parameters) / max(1.0, per_lane))
        largest = replace(work, microbatch_lanes=max(work.microbatch_lanes, fitting))
        curves = {
            "strong": scaling.strong(largest, cluster, num_lanes=self.given.train.num_lanes),
            "weak": scaling.weak(work, cluster),
        }
        return {
            name: {
                "points": [point._asdict() for point in points],
                "breaks_at": broken._asdict() if (broken := scaling.breaking_point(points)) else None,
            }
            for name, points in curves.items()
        }


def _kept_scores_bytes(config: Config) -> float:
    """Probabilities that fused attention keeps for the backward pass, and the numbers of its buffer, thrice."""
    model, train, size = config.model, config.train, DTYPES[config.engine.precision].itemsize
    layers = 1 if config.engine.activation_checkpointing else model.num_layers
    seen = train.memory_len + (train.segment_len + 1) / 2
    each = size + (1 if model.attention_dropout else 0)
    pairs = train.microbatch_lanes * model.num_heads * train.segment_len * seen
    return layers * pairs * each + 3 * size * min(FUSED_BUFFER_LEN, pairs)


def _is_valid(config: Config) -> bool:
    try:
        check_config(config)
    except ConfigError:
        return False
    return True
