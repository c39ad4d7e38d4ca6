"""Predicted memory and speed of a run on GPUs that this machine does not have: the facts of `txl plan`.

Memory is computed by `train.footprint`, which runs a step on tensors without storage. Time is computed by `timing`. An
option is a ZeRO stage with a micro-batch size that divides the number of a rank's lanes (batch rows). The six largest
sizes and the configured size are tried with every ZeRO stage. If an option does not fit into GPU memory, all options of
its ZeRO stage are tried again with recomputed blocks. Among the options that fit and are at most 2 % slower than the
fastest, the option with the least memory is chosen. All figures are predicted, not measured. The module `text` writes
the facts as sentences.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from txl_dist.config.load import Config, changed, check_vocabulary, config_changes, plan_batch
from txl_dist.config.phases import check_phases, each_phase
from txl_dist.config.schema import EngineSection
from txl_dist.console.formatting import counted
from txl_dist.errors import ConfigError
from txl_dist.inference.bundle import DTYPES
from txl_dist.model.flops import count_parameters, flops_by_part
from txl_dist.model.kernels.attention_launch import unsupported_shape_reason
from txl_dist.planning import scaling
from txl_dist.planning.hardware import Gpu, GpuCluster
from txl_dist.planning.recovery_cost import FAILURES_PER_GPU_HOUR, RecoveryCost, recovery_cost
from txl_dist.planning.scaling import Point
from txl_dist.planning.timing import NETWORK_SHARE, AttentionKind, StepTime, Work, step_time
from txl_dist.train.footprint.checkpoint import checkpoint_size
from txl_dist.train.footprint.rank import bytes_per_rank, updates_by_kernel
from txl_dist.vocabulary_clusters import cluster_edges, typical_shares

ENOUGH = 0.98
"""Fraction of the fastest option's speed that is fast enough. Among the options with at least this speed, the option
with the least memory is chosen."""
RESTART_S = 300.0
"""Seconds that a restart after a failure takes. In addition, steps since the last checkpoint are lost. The value is a
guess."""
COPY_GB_S = 10.0
"""Speed of the copy from a GPU into host memory in GB/s. A step waits for this copy if saving is asynchronous. The
value is a guess for PCIe."""
WRITE_GB_S = 1.0
"""Speed in GB/s at which all ranks together write to the file system. A step waits for the writing if saving is not
asynchronous. The value is a guess."""

FUSED_BUFFER_LEN = 2**25
"""Number of scores that fused attention computes at a time on a GPU."""
MOST_SIZES = 6
"""Number of micro-batch sizes that are tried, the largest first. The configured size is tried too."""


@dataclass(frozen=True)
class PlanOptions:
    """Request for a plan: the cluster, the number of GPUs, and the number of tokens."""

    cluster: GpuCluster
    gpus: int
    vocab_size: int
    corpus_tokens: int = 0
    """Tokens of one epoch. A value of 0 means that the number is unknown."""
    budget_tokens: int = 0
    """Tokens to train on in total. A value of 0 means that train.max_steps sets the number."""


@dataclass(frozen=True)
class Option:
    """Combination of engine settings that a plan considers: ZeRO stage, micro-batch and recomputation, with the
    predicted memory and speed."""

    config: Config
    attention: AttentionKind
    keeps_scores: bool
    """True if the Triton kernels keep distance scores for the backward pass."""
    needed_gib: float
    """Memory per rank in GiB. For micro-batches between the smallest and the largest one, the memory is interpolated
    with an error of about 1 %."""
    fits: bool
    """True if `needed_gib` is at most the usable memory of the GPU, which excludes the reserves for CUDA and for
    fragments."""
    step: StepTime
    tokens_per_s: float

    @property
    def engine(self) -> EngineSection:
        """Settings of the section `engine` with which a run uses this option."""
        return self.config.engine

    @property
    def lanes(self) -> int:
        """Number of lanes (batch rows) in a micro-batch."""
        return self.config.train.microbatch_lanes


@dataclass(frozen=True)
class SavingPlan:
    """Recommended interval between checkpoints: the interval at which saving checkpoints and repeating lost steps take
    the least time in total (Young 1974)."""

    size_gib: float
    """Size of one checkpoint in GiB."""
    size_by_part_gib: dict[str, float]
    """Size of the parts of a checkpoint in GiB: weights, optimizer and memories."""
    wait_s: float
    """Seconds that training waits at a step with a checkpoint."""
    between_failures_s: float
    """Expected seconds between two failures of any GPU."""
    failures_expected: float
    """Expected number of failures during the run."""
    interval_s: float
    """Seconds between two checkpoints."""
    every_steps: int
    """Steps between two checkpoints."""
    lost_pct: float
    """Percentage of the time that is lost by waiting, repeating steps and restarting."""


@dataclass(frozen=True)
class PhasePlan:
    """Prediction for one phase of the run (`train.phases`), with the chosen engine settings."""

    first_step: int
    last_step: int
    num_lanes: int
    segment_len: int
    memory_len: int
    microbatch_lanes: int
    needed_gib: float
    """Memory per rank in GiB."""
    fits: bool
    """True if `needed_gib` is at most the usable memory of the GPU."""
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class PlannedOption(Option):
    """Option that the plan recommends, with the time and cost of the run. The memory of this option is counted, not
    interpolated."""

    flags: list[str]
    """Command-line flags that turn the given settings into this option."""
    needed_by_part_gib: dict[str, float]
    """Memory per rank in GiB, by purpose."""
    mfu_pct: float
    budget_tokens: int
    epochs: float | None
    """Number of epochs of training. It is None if the size of the corpus is unknown."""
    length_s: float
    """Seconds that the whole run takes."""
    gpu_hours: float
    stages: list[PhasePlan]
    """Predictions for the phases, in order. The list is empty for a run with only one phase."""
    saving: SavingPlan
    recovery: RecoveryCost
    """Cost and gain of recovery inside the job, which GPUs do not have yet."""
    strong: list[Point]
    """Points of the curve of strong scaling (constant global batch)."""
    weak: list[Point]
    """Points of the curve of weak scaling (constant number of lanes per GPU)."""


@dataclass(frozen=True)
class Plan:
    """All facts of a plan. `text` prints them, `scaling.picture` draws them, and `txl plan` writes them as JSON."""

    question: PlanOptions
    gpus_used: int
    notes: list[str]
    """Sentences about the plan for people, such as a warning about GPUs that are not used."""
    parameters: int
    tokens_per_step: int
    flops_per_token: dict[str, float]
    """Operations of a training step per token, by the part of the model that needs them."""
    usable_gib: float
    """Usable memory of a GPU in GiB: its memory minus CONTEXT_GIB, minus FRAGMENTED_SHARE of the rest."""
    options: list[Option]
    as_configured: Option | str
    """Prediction for the settings without changes, or the reason why a run with these settings is impossible."""
    chosen: PlannedOption | None
    """Option that the plan recommends. None if no option fits."""
    predicted_not_measured: bool = True
    """Always True, so that readers of the JSON file see that all figures are predictions."""

    def as_json(self) -> str:
        """Return the plan as JSON. In the JSON, an option contains only those settings in which the options differ from
        each other."""

        def tried(config: Config) -> dict[str, Any]:
            return {"microbatch_lanes": config.train.microbatch_lanes, **config.engine.model_dump(mode="json")}

        return json.dumps(asdict(self), default=tried, indent=1, allow_nan=False)


def make_plan(config: Config, *, question: PlanOptions) -> Plan:
    """Predict memory and speed of all options and choose one. Returns the facts for `txl plan`.

    Raises ConfigError if settings or numbers are impossible.
    """
    check_phases(config)
    _check_question(question)
    check_vocabulary(config.model, vocab_size=question.vocab_size)
    # Lanes that divide in every stage.
    num_lanes = math.gcd(*(staged.train.num_lanes for _, staged in each_phase(config)))
    used, notes = usable_gpus(num_lanes, gpus=question.gpus)
    if config.engine.offload_optimizer or config.engine.offload_parameters:
        notes.append(
            "offloading to host memory is included in the memory but not in the time, so steps will take longer."
        )
    if config.engine.precision == "auto":
        precision = "bf16" if question.cluster.gpu.has_bf16 else "fp32"
        config = changed(config, {"engine.precision": precision})
    planner = _Planner(config, question, used)
    options = list(planner.options())
    return Plan(
        question=question,
        gpus_used=used,
        notes=notes,
        parameters=planner.parameters,
        tokens_per_step=config.train.num_lanes * config.train.step_len,
        flops_per_token=planner.flops,
        usable_gib=planner.gpu.usable_bytes / 2**30,
        options=options,
        as_configured=planner.as_configured(),
        chosen=planner.choose(options),
    )


def _check_question(question: PlanOptions) -> None:
    """Raise ConfigError if a number in the request is out of range.

    The allowed ranges are wide. A number outside its range is a typing error, and computations with it could overflow.
    """
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
            raise ConfigError(f"{flag} {value} is out of range. Give a value from {least:,} to {most:,}.")


def usable_gpus(num_lanes: int, *, gpus: int) -> tuple[int, list[str]]:
    """Return the number of GPUs to plan for, and sentences about GPUs that are not used.

    The number is the largest one, at most `gpus`, that divides the number of lanes (batch rows).
    """
    used = scaling.largest_divisor(num_lanes, at_most=gpus)
    if used == gpus:
        return used, []
    above = next((count for count in range(gpus + 1, num_lanes + 1) if num_lanes % count == 0), None)
    if above:
        more = f" The next larger possible number is {above}."
    else:
        more = ""
    lanes = gpus * max(1, round(num_lanes / gpus))
    return used, [
        f"train.num_lanes={num_lanes} does not divide among {counted(gpus, 'GPU')}, so the plan uses {used}.{more} "
        f"To use all {gpus}, give --train.num_lanes {lanes}."
    ]


def attention_kind(config: Config, *, gpu: Gpu) -> AttentionKind:
    """Return the way in which attention is computed on this kind of GPU: "plain", "kernels" or "fused".

    The setting engine.attention and the GPU decide.
    """
    model = config.model
    dtype = DTYPES[config.engine.dtype]
    shape_reason = unsupported_shape_reason(
        dtype,
        head_width=model.head_width,
        has_position_bias=model.scheme.has_position_bias,
        in_any_order=model.any_order,
    )
    if config.engine.attention == "plain":
        return "plain"
    has_kernels = config.engine.attention in ("auto", "triton") and shape_reason is None and gpu.has_bf16
    if has_kernels:
        return "kernels"
    return "fused"


class _Needed(NamedTuple):
    """Memory that a rank needs."""

    bytes_by_part: dict[str, float]
    """Bytes by their purpose."""
    keeps_scores: bool
    """True if kept distance scores are among them."""

    @property
    def num_bytes(self) -> float:
        """Bytes of all purposes together."""
        return sum(self.bytes_by_part.values())


class _Planner:
    """Planner for one request and one configuration. It predicts memory and speed of the options, and chooses one."""

    def __init__(self, config: Config, question: PlanOptions, gpus: int) -> None:
        self.given = config
        self.question = question
        self.gpus = gpus
        self.gpu = question.cluster.gpu
        self.shares = typical_shares(cluster_edges(config.model.cutoffs, vocab_size=question.vocab_size))
        self.parameters = count_parameters(config.model, vocab_size=question.vocab_size)
        self.flops = flops_by_part(
            config.model,
            vocab_size=question.vocab_size,
            segment_len=config.train.segment_len,
            memory_lens=config.train.memory_per_layer(config.model.num_layers),
            microbatch_lanes=config.train.microbatch_lanes,
            step_len=config.train.step_len,
            num_targets=config.train.num_targets,
        )
        precision = config.engine.precision
        if config.engine.dtype == "fp32" or (precision == "bf16" and not self.gpu.has_bf16):
            if self.gpu.has_bf16:
                precision = "bf16"
            else:
                precision = "fp16"
        if config.engine.cuda_graph == "auto":
            graphs = "auto"
        else:
            graphs = "off"
        self.base = changed(config, {"engine.precision": precision, "engine.cuda_graph": graphs})

    def work(self, config: Config, *, keeps_scores: bool) -> Work:
        """Return the work of one rank with these settings. `keeps_scores` says whether distance scores are kept.

        Raises ConfigError if the lanes cannot be divided among the ranks.
        """
        train = config.train
        engine = config.engine
        plan = plan_batch(train, world_size=self.gpus)
        return Work(
            model=config.model,
            vocab_size=self.question.vocab_size,
            shares=self.shares,
            parameters=self.parameters,
            segment_len=train.segment_len,
            memory_lens=train.memory_per_layer(config.model.num_layers),
            step_len=train.step_len,
            num_targets=train.num_targets,
            microbatch_lanes=plan.microbatch_lanes,
            num_microbatches=plan.num_microbatches,
            world_size=self.gpus,
            zero_stage=engine.zero_stage,
            precision=engine.chosen_precision,
            attention=attention_kind(config, gpu=self.gpu),
            keeps_scores=keeps_scores,
            recomputed=1 / engine.recompute_every if engine.activation_checkpointing else 0.0,
            graphed=engine.replays(on_gpu=True),
            needs_whole_tensors=config.optim.kind.needs_whole_tensors,
            orthogonalizes=config.optim.kind.orthogonalizes,
            updates_by_kernel=updates_by_kernel(config, on_gpu=True) and self.gpu.has_bf16,
        )

    def option(self, config: Config, needed_bytes: float, *, keeps_scores: bool) -> Option:
        """Predict the speed with these settings. `needed_bytes` is their memory, and `keeps_scores` says whether
        distance scores are kept in it."""
        work = self.work(config, keeps_scores=keeps_scores)
        step = step_time(work, self.question.cluster)
        return Option(
            config=config,
            attention=work.attention,
            keeps_scores=keeps_scores,
            needed_gib=needed_bytes / 2**30,
            fits=needed_bytes <= self.gpu.usable_bytes,
            step=step,
            tokens_per_s=work.tokens_per_step / step.total_s,
        )

    def options(self) -> Iterator[Option]:
        """Yield an option for every ZeRO stage and micro-batch that the settings allow.

        If one of a stage's micro-batches does not fit, all of them are also tried with recomputed blocks.
        """
        lanes = self.given.train.num_lanes // self.gpus
        divisors = [size for size in range(1, lanes + 1) if lanes % size == 0]
        configured = self.given.train.microbatch_lanes
        sizes = sorted({*divisors[-MOST_SIZES:], *(size for size in divisors if size == configured)})
        if self.given.train.phases:  # whose micro-batches have as many tokens
            staged = [changed(self.base, {"train.microbatch_lanes": size}) for size in sizes]
            sizes = [size for size, config in zip(sizes, staged, strict=True) if _is_valid(config)]
        if not sizes:
            raise ConfigError(
                f"train.phases: on {counted(self.gpus, 'GPU')} no micro-batch size divides the number of lanes "
                "of every phase. Give a smaller --gpus."
            )
        for stage in range(4):
            for recompute in (False, True):
                settings = {"engine.zero_stage": stage, "engine.activation_checkpointing": recompute}
                config = changed(self.base, settings)
                if not _is_valid(config):
                    continue
                row = self._row([changed(config, {"train.microbatch_lanes": size}) for size in sizes])
                yield from row
                if all(option.fits for option in row):
                    break

    def _row(self, configs: list[Config]) -> list[Option]:
        """Return options with increasing micro-batches. Distance scores are kept where they fit."""
        without = self._row_bytes(configs, choice="off")
        if not self._may_keep_scores(configs[0]):
            keeps = self._must_keep_scores(configs[0])
            pairs = zip(configs, without, strict=True)
            return [self.option(config, needed_bytes, keeps_scores=keeps) for config, needed_bytes in pairs]
        options = []
        with_scores = self._row_bytes(configs, choice="on")
        for config, kept_bytes, least_bytes in zip(configs, with_scores, without, strict=True):
            keeps = kept_bytes <= self.gpu.usable_bytes
            options.append(self.option(config, kept_bytes if keeps else least_bytes, keeps_scores=keeps))
        return options

    def _row_bytes(self, configs: list[Config], *, choice: str) -> list[float]:
        """Return the needed bytes of options with increasing micro-batches. `choice` replaces "auto" as the value of
        engine.keep_scores.

        Bytes are counted for the smallest and the largest micro-batch. For the sizes between these two the bytes are
        interpolated. The bytes are a convex function of the micro-batch size, so the interpolated values are not too
        small.
        """
        sizes = [config.train.microbatch_lanes for config in configs]
        engine = configs[-1].engine
        ends = [configs[0], configs[-1]]
        if engine.keep_scores == "auto":
            ends = [changed(config, {"engine.keep_scores": choice}) for config in ends]
        counted_ends = [self._counted(config) for config in ends]
        first, last = (sum(parts.values()) for parts in counted_ends)
        # All but the last accumulate gradients, which up to stage 1 are held twice then. They are as large as weights.
        twice_bytes = counted_ends[-1]["weights"] if engine.zero_stage < 2 else 0.0
        rise = max(0.0, last + twice_bytes - first)
        between = [first + rise * (size - sizes[0]) / (sizes[-1] - sizes[0]) for size in sizes[1:-1]]
        return [first, *between, last][: len(configs)]

    def _may_keep_scores(self, config: Config) -> bool:
        """Return whether the Triton kernels keep distance scores if they fit into memory."""
        return config.engine.keep_scores == "auto" and attention_kind(config, gpu=self.gpu) == "kernels"

    def _must_keep_scores(self, config: Config) -> bool:
        """Return whether the Triton kernels keep distance scores because the settings say so."""
        return config.engine.keep_scores == "on" and attention_kind(config, gpu=self.gpu) == "kernels"

    def needed(self, config: Config) -> _Needed:
        """Return the memory that a rank needs. Distance scores are kept if they fit."""
        if self._may_keep_scores(config):
            kept = _Needed(self._counted(changed(config, {"engine.keep_scores": "on"})), True)
            if kept.num_bytes <= self.gpu.usable_bytes:
                return kept
        return _Needed(self._counted(config), self._must_keep_scores(config))

    def counted_option(self, config: Config) -> Option:
        """Predict memory and speed with these settings."""
        needed = self.needed(config)
        return self.option(config, needed.num_bytes, keeps_scores=needed.keeps_scores)

    def _counted(self, config: Config) -> dict[str, float]:
        """Return the bytes that a rank needs with these settings, by their purpose. If engine.keep_scores is "auto",
        they do not include kept distance scores."""
        kind = attention_kind(config, gpu=self.gpu)
        in_fp32 = DTYPES[config.engine.dtype].itemsize == 4
        # The footprint of the fused function is that of a CPU, whose blocks are small and many: it takes a minute. So
        # where it replaces the kernels its probabilities are counted here, and in fp32 plain attention is the bound.
        followed = changed(config, {"engine.attention": "plain" if kind == "plain" or in_fp32 else "triton"})
        plan = plan_batch(config.train, world_size=self.gpus)
        needed = bytes_per_rank(
            followed, plan=plan, vocab_size=self.question.vocab_size, on_gpu=True, runs_triton=self.gpu.has_bf16
        )
        if kind == "fused" and not in_fp32:
            needed["scores"] += _kept_scores_bytes(config)
        return needed

    def choose(self, options: list[Option]) -> PlannedOption | None:
        """Return the best option that fits, with a CUDA graph if that is faster. Returns None if no option fits."""
        fitting = [option for option in options if option.fits]
        for option in list(fitting) if self.base.engine.cuda_graph == "off" else []:
            graphed = changed(option.config, {"engine.cuda_graph": "on"})
            if _is_valid(graphed):
                fitting.append(self.option(graphed, option.needed_gib * 2**30, keeps_scores=option.keeps_scores))
        while fitting:
            enough = ENOUGH * max(option.tokens_per_s for option in fitting)
            good = [option for option in fitting if option.tokens_per_s >= enough]
            best = min(good, key=lambda one: (one.needed_gib, one.engine.cuda_graph == "on"))
            chosen = self._details(best.config)
            # Its bytes are counted here, those of a graph and of other stages too.
            if chosen.fits and all(stage.fits for stage in chosen.stages):
                return chosen
            fitting.remove(best)
        return None

    def stages(self, config: Config) -> Iterator[PhasePlan]:
        """Yield the prediction for each phase with these settings.

        Raises ConfigError if the lanes of a phase cannot be divided among the ranks.
        """
        for steps, staged in each_phase(config):
            option = self.counted_option(staged)
            train = staged.train
            yield PhasePlan(
                first_step=steps.start + 1,
                last_step=steps.stop,
                num_lanes=train.num_lanes,
                segment_len=train.segment_len,
                memory_len=train.memory_len,
                microbatch_lanes=train.microbatch_lanes,
                needed_gib=option.needed_gib,
                fits=option.fits,
                step_s=option.step.total_s,
                tokens_per_s=option.tokens_per_s,
            )

    def _details(self, config: Config) -> PlannedOption:
        needed = self.needed(config)
        parts = needed.bytes_by_part
        work = self.work(config, keeps_scores=needed.keeps_scores)
        question = self.question
        option = self.option(config, needed.num_bytes, keeps_scores=needed.keeps_scores)
        tokens = question.budget_tokens or self.given.train.max_steps * work.tokens_per_step
        if config.train.phases:
            stages = list(self.stages(config))
        else:
            stages = []
        shares = [(one.last_step - one.first_step + 1) / config.train.max_steps / one.tokens_per_s for one in stages]
        length_s = tokens * (sum(shares) or 1 / option.tokens_per_s)
        peak = self.gpu.flops(work.precision) * self.gpus
        # On fewer GPUs micro-batches may be larger, but no rank shares its states: 16 bytes per parameter.
        per_lane = (parts["activations"] + parts["memories"] + parts["scores"]) / work.microbatch_lanes
        fitting = int((self.gpu.usable_bytes - 16 * self.parameters) / max(1.0, per_lane))
        largest = replace(work, microbatch_lanes=max(work.microbatch_lanes, fitting))
        return PlannedOption(
            **vars(option),
            flags=[f"--{change.key} {change.new}" for change in config_changes(self.given, config)],
            needed_by_part_gib={name: size / 2**30 for name, size in parts.items()},
            mfu_pct=100 * option.tokens_per_s * sum(self.flops.values()) / peak,
            budget_tokens=tokens,
            epochs=tokens / question.corpus_tokens if question.corpus_tokens else None,
            length_s=length_s,
            gpu_hours=length_s / 3600 * self.gpus,
            stages=stages,
            saving=self._saving(option, length_s=length_s),
            recovery=self._recovery(option),
            strong=scaling.strong(largest, question.cluster, num_lanes=self.given.train.num_lanes),
            weak=scaling.weak(work, question.cluster),
        )

    def as_configured(self) -> Option | str:
        """Predict the settings without changes, or return the reason why they are impossible."""
        precision = self.given.engine.precision
        if precision in ("bf16", "tf32") and not self.gpu.has_bf16:
            return f"{self.gpu.device} has no {precision}."
        try:
            return self.counted_option(self.given)
        except ConfigError as error:
            return str(error)

    def _saving_wait_s(self, size: float) -> float:
        """Return the seconds that training waits for a checkpoint of so many bytes."""
        if self.given.checkpoint.asynchronous:
            return max(1.0, size / self.gpus / (COPY_GB_S * 1e9))
        return max(1.0, size / (WRITE_GB_S * 1e9))

    def _recovery(self, option: Option) -> RecoveryCost:
        saved = checkpoint_size(option.config, vocab_size=self.question.vocab_size)
        cluster = self.question.cluster
        return recovery_cost(
            state_bytes=saved.weights + saved.optimizer,
            memory_bytes=saved.memories,
            gpus=self.gpus,
            gpus_per_node=cluster.gpus_per_node,
            is_sharded=option.engine.zero_stage > 0,
            step_s=option.step.total_s,
            overlap_s=option.step.total_s - option.step.optimizer,
            copy_gb_s=COPY_GB_S,
            network_gb_s=cluster.network_gb_s * NETWORK_SHARE,
            copy_every=self.given.recover.copy_every,
            partner_every=self.given.recover.partner_every,
            wait_s=self._saving_wait_s(saved.total),
            restart_s=RESTART_S,
        )

    def _saving(self, option: Option, *, length_s: float) -> SavingPlan:
        saved = checkpoint_size(option.config, vocab_size=self.question.vocab_size)
        size = saved.total
        wait_s = self._saving_wait_s(size)
        failure_s = 3600 / (FAILURES_PER_GPU_HOUR * self.gpus)
        interval_s = min(math.sqrt(2 * wait_s * failure_s), max(length_s / 10, 100 * wait_s), length_s)
        return SavingPlan(
            size_gib=size / 2**30,
            size_by_part_gib={name: part / 2**30 for name, part in saved._asdict().items()},
            wait_s=wait_s,
            between_failures_s=failure_s,
            failures_expected=length_s / failure_s,
            interval_s=interval_s,
            every_steps=max(1, round(interval_s / option.step.total_s)),
            lost_pct=100 * (wait_s / interval_s + (interval_s / 2 + RESTART_S) / failure_s),
        )


def _kept_scores_bytes(config: Config) -> float:
    """Return the bytes that fused attention keeps for the backward pass and the Triton kernels do not, plus three times
    the bytes of its buffer of scores.

    In any order (XLNet) every row has a probability for each key. Query rows are computed in plain torch. They also
    keep their probabilities in fp32, the columns of their distances, their mask, and copies of keys and values.
    """
    model = config.model
    train = config.train
    size = DTYPES[config.engine.dtype].itemsize
    each = size + (1 if model.attention_dropout else 0)
    rows = train.microbatch_lanes * model.num_heads * train.segment_len
    lens = train.memory_per_layer(model.num_layers)
    seen_in_segment = (train.segment_len + 1) / 2
    of_key = 0.0
    if train.num_targets:
        seen_in_segment = float(train.segment_len)
        of_pair = model.num_heads * (each + 4) + 9
        copies = 2 * model.num_heads * model.head_width * size
        of_key = train.microbatch_lanes * (train.num_targets * of_pair + copies)
    seen = [length + seen_in_segment for length in lens]
    kept = [(rows * each + of_key) * keys for keys in seen]
    if config.engine.activation_checkpointing:
        kept = [max(kept)]
    return sum(kept) + 3 * size * min(FUSED_BUFFER_LEN, rows * max(seen))


def _is_valid(config: Config) -> bool:
    try:
        check_phases(config)
    except ConfigError:
        return False
    return True
