"""The settings of a run: frozen sections, read from TOML, overridden by the command line, checked at the door.

Sizes are global and know nothing of the number of ranks: `train.num_lanes` rows of `train.segment_len` tokens
make one step, on 1 GPU or on 64. `train.microbatch_lanes` is the only knob that fits a run into memory; the
accumulation is derived (`BatchPlan`). A config never changes after `load_config`; state lives in `TrainState`.

Each field may carry a `Resume` class beside its type: what happens when it differs from the settings that made
the run directory. Unmarked fields are frozen: a change is refused with a diff. This module imports no torch.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from txl_dist.errors import ConfigError


class Resume(NamedTuple):
    """How a setting may change when a run directory is continued: "free" silently, "warned" with a line in the log."""

    policy: Literal["warned", "free"]


FREE = Resume("free")
WARNED = Resume("warned")

PositiveInt = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no NaN; the docstring under a field is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class RunSection(Section):
    """Where the run lives and its one seed."""

    dir: Annotated[str, FREE] = "runs/default"
    """Folder of the run: checkpoints, logs, resolved config."""
    seed: int = 1
    """Seed of everything random: initial weights, document order, dropout."""


class DataSection(Section):
    """The corpus, as `txl prepare` wrote it."""

    path: Annotated[str, FREE] = "data/stdlib"
    """Folder with index.json. Its content, not its name, is checked on resume (data fingerprint)."""
    train_split: str = "train"
    """Split to train on."""
    eval_split: Annotated[str, FREE] = "valid"
    """Split to evaluate on; empty switches evaluation off."""
    document_border: Literal["carry", "mask"] = "carry"
    """carry: memory runs over document borders (the paper). mask: a query sees its own document only."""
    prefetch_depth: Annotated[PositiveInt, FREE] = 4
    """Steps that the reader thread may run ahead."""


class ModelSection(Section):
    """The network (Dai et al. 2019). The vocabulary size comes from the corpus."""

    num_layers: PositiveInt = 4
    """Transformer blocks."""
    width: PositiveInt = 128
    """Width D of the residual stream."""
    num_heads: PositiveInt = 4
    """Attention heads."""
    head_width: PositiveInt = 32
    """Width H of one head; num_heads * head_width need not equal width."""
    ff_width: PositiveInt = 512
    """Inner width of the feed-forward layer."""
    embed_width: Count = 0
    """Width E of the embeddings of the most frequent words; 0 means width."""
    cutoffs: tuple[PositiveInt, ...] = ()
    """Ids (in frequency order) at which the clusters of adaptive softmax begin; none means a plain softmax."""
    div_value: PositiveInt = 1
    """Cluster i has embeddings of width embed_width // div_value**i; 1 means one table for all."""
    tie_weights: bool = True
    """Output rows are the input embeddings."""
    tie_projections: tuple[bool, ...] = ()
    """Per cluster: its output projection is its input projection. Empty means none is tied."""
    pre_norm: bool = False
    """Layer norm before each sublayer instead of after its residual sum."""
    final_norm: bool = False
    """Layer norm on the last hidden state; only with pre_norm."""
    share_biases: bool = True
    """One pair of attention biases u, v for all layers (original PyTorch code); False: a pair per layer."""
    same_length: bool = False
    """Every query sees the same number of keys: memory_len of them, itself included."""
    clamp_len: Count = 0
    """Distances above this many tokens share one encoding; 0 means no clamping."""
    dropout: Annotated[Probability, WARNED] = 0.1
    """Dropout on embeddings, position encodings, sublayer outputs, inner feed-forward and last hidden state."""
    attention_dropout: Annotated[Probability, WARNED] = 0.0
    """Dropout on attention probabilities."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of initial weights; 0.005 in the large recipes."""
    projection_init_std: Annotated[float, Field(gt=0)] = 0.01
    """Standard deviation of initial embedding and output projections."""

    def embed_width_or_default(self) -> int:
        """Width of the widest embeddings."""
        return self.embed_width or self.width


class OptimSection(Section):
    """Optimizer and learning-rate schedule."""

    name: Literal["adam", "adamw"] = "adamw"
    """torch's fused form in both cases."""
    lr: Annotated[float, Field(gt=0), WARNED] = 2.5e-4
    """Peak learning rate."""
    betas: Annotated[tuple[Probability, Probability], WARNED] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: Annotated[float, Field(gt=0), WARNED] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0), WARNED] = 0.0
    """Decay of matrices; biases, norms and the attention biases u, v are never decayed."""
    clip_norm: Annotated[float, Field(ge=0), WARNED] = 0.25
    """Largest global gradient norm; 0 switches clipping off."""
    schedule: Annotated[Literal["cosine", "inverse_sqrt", "linear", "constant"], WARNED] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: Annotated[Count, WARNED] = 0
    """Steps of linear warm-up from 0."""
    min_lr: Annotated[float, Field(ge=0), WARNED] = 0.0
    """Learning rate at train.max_steps for cosine and linear, and a floor for inverse_sqrt."""


class TrainSection(Section):
    """Batch arithmetic and length of the run. All sizes are global."""

    num_lanes: PositiveInt = 32
    """Rows of the global batch; each is one contiguous token stream."""
    segment_len: PositiveInt = 64
    """Tokens per lane and step (T)."""
    memory_len: Count = 128
    """Tokens of memory per lane and layer (M); 0 switches recurrence off."""
    microbatch_lanes: Annotated[PositiveInt, WARNED] = 16
    """Lanes that a rank runs at once; divides num_lanes / ranks."""
    max_steps: Annotated[PositiveInt, WARNED] = 1000
    """Optimizer steps in the whole run; the schedule ends here."""


class EngineSection(Section):
    """DeepSpeed and the hardware."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """0 replicates everything, 1 shards optimizer state, 2 also gradients, 3 also parameters."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of weights and activations in the step; fp16 needs a GPU."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory (stages 1 to 3)."""
    offload_parameters: bool = False
    """Keep parameters in host memory (stage 3)."""
    activation_checkpointing: Annotated[bool, FREE] = False
    """Recompute each block in the backward pass; bit-identical, slower, smaller."""
    num_threads: Annotated[Count, FREE] = 0
    """CPU threads per rank; 0 means cores // local ranks. OMP_NUM_THREADS, where set, wins over 0."""
    timeout_s: Annotated[PositiveInt, FREE] = 1800
    """Seconds until a collective that does not finish is an error."""


class EvalSection(Section):
    """Evaluation of the held-out split during and after training."""

    every_steps: Annotated[Count, FREE] = 0
    """Steps between evaluations; 0 means at the end only."""
    num_lanes: Annotated[PositiveInt, FREE] = 8
    """Stripes that the split is cut into; each starts with an empty memory, so fewer is more exact, more is faster."""
    segment_len: Annotated[Count, FREE] = 0
    """Tokens per lane and forward pass; 0 means train.segment_len."""
    memory_len: Annotated[int, Field(ge=-1), FREE] = -1
    """Tokens of memory; -1 means train.memory_len, 0 evaluates without memory."""
    max_tokens: Annotated[Count, FREE] = 0
    """Score only the first so many tokens of the split; 0 means all."""


class CheckpointSection(Section):
    """Saving."""

    every_steps: Annotated[Count, FREE] = 500
    """Steps between checkpoints; 0 means at the end only. The end is always saved."""
    keep_last: Annotated[PositiveInt, FREE] = 3
    """Committed checkpoints to keep; older ones are removed after a new one is committed."""


class MetricsSection(Section):
    """What is reported, and how often."""

    log_every_steps: Annotated[PositiveInt, FREE] = 10
    """Steps between log lines; a metric is the mean over these steps. The device is synchronised only then."""
    tensorboard: Annotated[bool, FREE] = True
    """Write TensorBoard event files beside metrics.jsonl."""


class Config(Section):
    """All sections of a run."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    engine: EngineSection = EngineSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()


class BatchPlan(NamedTuple):
    """How the global batch falls onto ranks and micro-batches."""

    world_size: int
    lanes_per_rank: int
    microbatch_lanes: int
    num_microbatches: int
    """Micro-batches per rank and step (gradient accumulation), each a fixed slice of lanes with its own memory."""
    tokens_per_step: int


def plan_batch(train: TrainSection, *, world_size: int) -> BatchPlan:
    """Derive accumulation from the global batch.

    Raises ConfigError if num_lanes is not divisible by world_size * microbatch_lanes.
    """
    if world_size < 1:
        raise ConfigError(f"a job of {world_size} ranks cannot be. Give 1 or more.")
    if train.num_lanes % (world_size * train.microbatch_lanes):
        raise ConfigError(
            f"train.num_lanes={train.num_lanes} must be divisible by ranks * train.microbatch_lanes = "
            f"{world_size} * {train.microbatch_lanes} = {world_size * train.microbatch_lanes}. "
            f"Choose another --train.num_lanes or --train.microbatch_lanes, or start another number of ranks."
        )
    lanes_per_rank = train.num_lanes // world_size
    return BatchPlan(
        world_size=world_size,
        lanes_per_rank=lanes_per_rank,
        microbatch_lanes=train.microbatch_lanes,
        num_microbatches=lanes_per_rank // train.microbatch_lanes,
        tokens_per_step=train.num_lanes * train.segment_len,
    )


def check_config(config: Config) -> None:
    """Refuse settings that contradict each other. Raises ConfigError naming section.key, value and rule."""
    model, engine, optim, train = config.model, config.engine, config.optim, config.train
    cutoffs = model.cutoffs
    rules: list[tuple[bool, str]] = [
        (
            all(a < b for a, b in itertools.pairwise(cutoffs)),
            f"model.cutoffs={list(cutoffs)} must increase strictly",
        ),
        (
            len(model.tie_projections) in (0, len(cutoffs) + 1),
            f"model.tie_projections has {len(model.tie_projections)} entries; give one per cluster, "
            f"{len(cutoffs) + 1} for model.cutoffs={list(cutoffs)}, or none",
        ),
        (
            model.embed_width_or_default() // model.div_value ** len(cutoffs) > 0,
            f"model.div_value={model.div_value} leaves the last of {len(cutoffs) + 1} clusters no width: "
            f"{model.embed_width_or_default()} // {model.div_value}**{len(cutoffs)} = 0",
        ),
        (not model.final_norm or model.pre_norm, "model.final_norm=True needs model.pre_norm=True"),
        (
            not model.same_length or train.memory_len > 0,
            "model.same_length=True needs train.memory_len > 0: its window is memory_len keys",
        ),
        (
            not engine.offload_optimizer or engine.zero_stage >= 1,
            "engine.offload_optimizer=True needs engine.zero_stage 1, 2 or 3",
        ),
        (
            not engine.offload_parameters or engine.zero_stage == 3,
            "engine.offload_parameters=True needs engine.zero_stage=3",
        ),
        (optim.min_lr <= optim.lr, f"optim.min_lr={optim.min_lr} must not exceed optim.lr={optim.lr}"),
    ]
    broken = [message for holds, message in rules if not holds]
    if broken:
        raise ConfigError(". ".join(broken) + ".")


def check_vocabulary(model: ModelSection, *, vocab_size: int) -> None:
    """Refuse cutoffs that do not fit the vocabulary. Raises ConfigError."""
    if model.cutoffs and model.cutoffs[-1] >= vocab_size:
        raise ConfigError(
            f"model.cutoffs={list(model.cutoffs)} must lie below the vocabulary size {vocab_size} of the corpus. "
            "Lower them, prepare the corpus with a larger vocabulary, or write --model.cutoffs with nothing behind it "
            "for a plain softmax."
        )


def load_config(path: str | Path) -> Config:
    """Read a TOML file over the defaults.

    Raises ConfigError for a missing file, broken TOML, an unknown key (with the nearest known one) or a bad value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {path}: {error.strerror or error}. Name a TOML file, as those in configs/."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}). Save it as UTF-8.") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}. Mend that line.") from error
    return config_from_dict(values, source=str(path))


def config_from_dict(values: dict[str, Any], *, source: str) -> Config:
    """Validate nested values; `source` names them in errors. Raises ConfigError."""
    try:
        # Strict, so that num_lanes = true is no 1; by way of JSON, so that a list is a tuple all the same.
        return Config.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, source))) from error


def config_to_toml(config: Config) -> str:
    """Every setting, defaults included, as TOML that `load_config` reads back to an equal config."""
    return tomli_w.dumps(config.model_dump(mode="json"))


def config_fingerprint(config: Config) -> str:
    """sha256 over the frozen settings: equal for two configs that may continue one another."""
    frozen = {key: value for key, value in _flatten(config) if _resume_policy(key) == "frozen"}
    return hashlib.sha256(json.dumps(frozen, sort_keys=True).encode()).hexdigest()


class Change(NamedTuple):
    """One setting that differs between two configs."""

    key: str
    old: Any
    new: Any
    policy: Literal["frozen", "warned", "free"]


def config_changes(old: Config, new: Config) -> list[Change]:
    """All settings in which `new` differs from `old`, each with its resume policy."""
    new_values = dict(_flatten(new))
    return [
        Change(key, value, new_values[key], _resume_policy(key))
        for key, value in _flatten(old)
        if new_values[key] != value
    ]


def setting_names() -> list[str]:
    """Every `section.key`."""
    return [f"{section}.{key}" for section, info in _sections().items() for key in info.model_fields]


def _sections() -> dict[str, type[Section]]:
    return {name: type(info.default) for name, info in Config.model_fields.items()}


def _flatten(config: Config) -> Iterator[tuple[str, Any]]:
    for section, values in config.model_dump(mode="json").items():
        for key, value in values.items():
            yield f"{section}.{key}", value


def _resume_policy(name: str) -> Literal["frozen", "warned", "free"]:
    section, key = name.split(".")
    marks = [mark for mark in _sections()[section].model_fields[key].metadata if isinstance(mark, Resume)]
    return marks[0].policy if marks else "frozen"


def _explain(error: ValidationError, source: str) -> Iterator[str]:
    names = setting_names()
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] != "extra_forbidden":
            yield f"{source}: {name} = {problem['input']!r}: {problem['msg']}."
            continue
        known = names if "." in name else list(_sections())
        # The right key in the wrong section is one common slip, a misspelt name the other.
        near = [other for other in names if other.split(".")[-1] == name.split(".")[-1]]
        near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(known)}."
        yield f"{source}: unknown setting {name}.{hint}"
