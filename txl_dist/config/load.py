"""The settings of a run: read from TOML, overridden by the command line, checked, and then frozen.

Sizes are global and do not depend on the number of ranks. A step has `train.num_lanes` rows (lanes) of
`train.segment_len` tokens, on 1 GPU or on 64. The exception is `train.microbatch_lanes`, the number of lanes that one
rank computes at a time, which is chosen to fit into memory. The number of accumulated micro-batches is computed from
this setting (`BatchPlan`). A config never changes after `load_config`. The state of a run is in `TrainState`. The
sections, and the meaning of each setting, are in `schema`. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import tomli_w
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from txl_dist.config.foreign_names import SECTIONS, find_counterpart
from txl_dist.config.job_settings import named_values
from txl_dist.config.registry import OneOf, load_plugins, not_loaded, remedy
from txl_dist.config.renamed import flat_in_old_names, in_new_names, name_since, warn_of_old_names
from txl_dist.config.schema import (
    SCHEMES,
    CheckpointSection,
    DataSection,
    EngineSection,
    EvalSection,
    GuardSection,
    MetricsSection,
    ModelSection,
    OptimSection,
    RecoverSection,
    Resume,
    RunSection,
    Section,
    TrainSection,
    paths_of_sets,
)
from txl_dist.console.formatting import counted, flag_of
from txl_dist.console.suggest import did_you_mean, nearest
from txl_dist.errors import ConfigError, translate_errors
from txl_dist.io.files import decode_text, parse_toml, path_of, read_bytes


class Config(Section):
    """Settings of a run, with one field per section. A config cannot be changed."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    engine: EngineSection = EngineSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
    recover: RecoverSection = RecoverSection()
    metrics: MetricsSection = MetricsSection()


class BatchPlan(NamedTuple):
    """Division of the global batch among ranks and micro-batches. Lanes are batch rows."""

    world_size: int
    lanes_per_rank: int
    microbatch_lanes: int
    num_microbatches: int
    """Number of micro-batches per rank and step (gradient accumulation). A micro-batch is a fixed slice of lanes with
    its own memory."""
    tokens_per_step: int


def plan_batch(train: TrainSection, *, world_size: int) -> BatchPlan:
    """Compute how the global batch is divided among ranks and micro-batches.

    Raises ConfigError if num_lanes is not divisible by world_size * microbatch_lanes. For train.batch_tokens the
    message names the nearest number of tokens that fits.
    """
    if world_size < 1:
        raise ConfigError(f"a job cannot have {world_size} ranks. Give 1 rank or more.")
    unit = train.segment_len * world_size * train.microbatch_lanes
    if train.batch_tokens % unit:
        nearest = max(1, round(train.batch_tokens / unit)) * unit
        raise ConfigError(
            f"train.batch_tokens={train.batch_tokens} must be a multiple of train.segment_len * ranks * "
            f"train.microbatch_lanes = {train.segment_len} * {world_size} * {train.microbatch_lanes} = {unit} tokens. "
            f"The nearest value that fits is {nearest}."
        )
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
        tokens_per_step=train.num_lanes * train.step_len,
    )


def check_config(config: Config) -> None:
    """Refuse settings that contradict each other. Raises ConfigError, which names section.key, value and rule."""
    order_rules = _order_rules(config)
    position_rules = _position_rules(config)
    model = config.model
    engine = config.engine
    optim = config.optim
    cutoffs = model.cutoffs
    rules: list[tuple[bool, str]] = [
        (
            all(a < b for a, b in itertools.pairwise(cutoffs)),
            f"model.cutoffs={list(cutoffs)} must increase strictly",
        ),
        (
            len(model.tie_projections) in (0, len(cutoffs) + 1),
            f"model.tie_projections has {counted(len(model.tie_projections), 'entry', 'entries')}, but needs one "
            f"entry per cluster ({len(cutoffs) + 1} for model.cutoffs={list(cutoffs)}) or no entry",
        ),
        (
            model.embed_width_or_default() // model.div_value ** len(cutoffs) > 0,
            f"model.div_value={model.div_value} leaves the last of {len(cutoffs) + 1} clusters no width: "
            f"{model.embed_width_or_default()} // {model.div_value}**{len(cutoffs)} = 0, so lower model.div_value",
        ),
        (
            config.recover.copies == "node" or config.recover.spares > 0,
            "recover.copies=partner needs recover.spares=1",
        ),
        (
            config.recover.spare_nodes == 0 or config.recover.spares > 0,
            f"recover.spare_nodes={config.recover.spare_nodes} needs recover.spares=1",
        ),
        (
            config.recover.on_loss == "stop" or config.recover.spares > 0,
            f"recover.on_loss={config.recover.on_loss} needs recover.spares=1",
        ),
        (
            config.recover.copy_every == 1 or config.recover.spares > 0,
            f"recover.copy_every={config.recover.copy_every} needs recover.spares=1",
        ),
        (
            config.checkpoint.every_steps == 0 or config.recover.copy_every <= config.checkpoint.every_steps,
            f"recover.copy_every={config.recover.copy_every} must not be above checkpoint.every_steps="
            f"{config.checkpoint.every_steps}, because a lost rank would repeat more steps than from a checkpoint",
        ),
        (
            config.recover.partner_every == 1 or config.recover.copies == "partner",
            f"recover.partner_every={config.recover.partner_every} needs recover.copies=partner",
        ),
        (not model.final_norm or model.pre_norm, "model.final_norm=True needs model.pre_norm=True"),
        (
            not model.value_residual or model.num_layers > 1,
            "model.value_residual=True mixes the values of two layers, and needs model.num_layers of 2 or more",
        ),
        (
            config.train.step_len <= config.train.segment_len,
            f"train.reuse_len={config.train.reuse_len} must not exceed train.segment_len={config.train.segment_len}: "
            "lower train.reuse_len, or set it to 0 for the whole segment",
        ),
        (
            config.train.batch_tokens // config.train.segment_len in (0, config.train.num_lanes)
            or bool(config.train.phases),
            f"train.batch_tokens={config.train.batch_tokens} is not train.num_lanes * train.segment_len = "
            f"{config.train.num_lanes} * {config.train.segment_len}: give train.num_lanes or train.batch_tokens to "
            "txl_dist.configure, not both",
        ),
        *position_rules,
        *order_rules,
        *_set_rules(config.eval.sets),
        (
            len(config.data.weights) in (0, 1 + len(config.data.more_paths)),
            f"data.weights has {counted(len(config.data.weights), 'entry', 'entries')}, but needs one entry for "
            f"data.path and one for each of the {len(config.data.more_paths)} paths in data.more_paths, or no entry",
        ),
        (
            not engine.offload_optimizer or engine.zero_stage >= 1,
            "engine.offload_optimizer=True needs engine.zero_stage 1, 2 or 3",
        ),
        (
            not engine.offload_parameters or engine.zero_stage == 3,
            "engine.offload_parameters=True needs engine.zero_stage=3",
        ),
        (
            not config.eval.use_ema or optim.ema_decay > 0,
            "eval.use_ema=True needs an optim.ema_decay above 0, for instance 0.99",
        ),
        (
            engine.cuda_graph != "on" or engine.is_replayable,
            "engine.cuda_graph=on needs engine.zero_stage 0, 1 or 2, and no engine.activation_checkpointing",
        ),
        (
            not optim.kind.needs_whole_tensors or engine.zero_stage == 0,
            f"optim.name={optim.name!r} needs engine.zero_stage=0 (is {engine.zero_stage}), because this optimizer "
            "computes norms of whole tensors, which ZeRO splits",
        ),
        (optim.min_lr <= optim.lr, f"optim.min_lr={optim.min_lr} must not exceed optim.lr={optim.lr}"),
    ]
    broken = dict.fromkeys(message for holds, message in rules if not holds)
    if broken:
        raise ConfigError(". ".join(broken) + ".")


def _set_rules(words: Sequence[str]) -> list[tuple[bool, str]]:
    """Return the rules for the names and paths of eval.sets. `words` is the value of the setting."""
    named = paths_of_sets(words)
    names = [name for name, _ in named]
    rules = [
        (
            len(set(names)) == len(names),
            f"eval.sets={list(words)} has a name twice. Give each held-out set its own name",
        )
    ]
    for word, (name, path) in zip(words, named, strict=True):
        rules.append(
            (
                _SET_NAME.fullmatch(name) is not None and bool(path),
                f"eval.sets: {word!r} is not a name and a path. Write NAME=PATH, with at most 40 letters, digits, "
                "hyphens and underscores in NAME",
            )
        )
    return rules


_SET_NAME = re.compile("[A-Za-z0-9_-]{1,40}")
"""Form of the name of a held-out set, which is a part of names in metrics.jsonl, in TensorBoard and on pages."""


def _position_rules(config: Config) -> list[tuple[bool, str]]:
    model = config.model
    train = config.train
    evaluation = config.eval
    tabled = " and ".join(repr(name) for name, scheme in SCHEMES.items() if scheme.has_table)
    longest = train.segment_len + train.memory_len
    lens = train.memory_lens
    if evaluation.memory_len < 0:
        eval_memory_len = train.memory_len
    else:
        eval_memory_len = evaluation.memory_len
    return [
        (
            len(lens) in (0, model.num_layers),
            f"train.memory_lens={list(lens)} has {counted(len(lens), 'entry', 'entries')}, but needs one entry for "
            f"each of the {counted(model.num_layers, 'layer')}, or no entry",
        ),
        (
            not lens or max(lens) == train.memory_len or bool(train.phases),  # which have memories of their own
            f"train.memory_lens={list(lens)}: the largest entry must equal train.memory_len (is {train.memory_len})",
        ),
        (
            not lens or not model.value_residual or lens[0] == max(lens),
            f"train.memory_lens={list(lens)}: with model.value_residual=True no layer may have a longer memory than "
            "the first layer, whose values are mixed into the values of all layers",
        ),
        (
            not lens or model.same_length == "off" or min(lens) > 0,
            f"train.memory_lens={list(lens)}: model.same_length={model.same_length!r} needs a memory in every layer, "
            "so give entries above 0",
        ),
        (
            model.same_length == "off" or min(train.memory_len, eval_memory_len) > 0,
            f"model.same_length={model.same_length!r} needs a memory: train.memory_len (is {train.memory_len}) and the "
            f"memory_len of evaluation (is {eval_memory_len}) must be above 0",
        ),
        (
            model.scheme.has_table == (model.num_distances > 0),
            f"model.num_distances={model.num_distances} does not fit model.positions={model.positions!r}: positions "
            f"{tabled} need a number above 0 (train.segment_len + train.memory_len = {longest} gives every distance "
            "its own row), and all other positions need 0",
        ),
        (
            model.takes_memory or (train.memory_len == 0 and eval_memory_len == 0),
            f"model.positions={model.positions!r} supports no memory, and needs train.memory_len=0 (is "
            f"{train.memory_len}) and eval.memory_len=0 or -1 (is {evaluation.memory_len}), or "
            "model.absolute_with_memory=True to reproduce how a memory fails",
        ),
        (
            not model.absolute_with_memory or not model.scheme.uses_memory,
            f"model.absolute_with_memory=True works only with model.positions='absolute' (is {model.positions!r}, "
            "which "
            "supports memory without this setting)",
        ),
        (
            train.initial_memory == "empty" or not config.data.document_mask,
            f"train.initial_memory={train.initial_memory!r} needs data.document_mask=False, because a document mask "
            "hides keys outside the query's document, and an initial memory belongs to no document",
        ),
        (
            evaluation.overlap_len == 0 or eval_memory_len == 0,
            f"eval.overlap_len={evaluation.overlap_len} needs eval.memory_len=0 (is {eval_memory_len}), because the "
            "overlap replaces the context that a memory gives",
        ),
    ]


def _order_rules(config: Config) -> list[tuple[bool, str]]:
    """Return the rules for models that predict in any order (XLNet). A rule is a pair (whether the settings obey the
    rule, message for settings that do not obey it)."""
    model = config.model
    train = config.train
    is_permutation = train.objective == "permutation"
    rules = [
        (
            is_permutation == model.any_order,
            f"train.objective={train.objective!r} does not go with model.any_order={model.any_order}: "
            "set objective to 'permutation' and any_order to true (XLNet), or objective to 'next' and any_order "
            "to false",
        ),
        (
            not model.segment_terms or model.any_order,
            "model.segment_terms=True needs model.any_order=True: set model.segment_terms to false",
        ),
        (
            is_permutation or not (train.reuse_len or train.predicted_len or train.order_len),
            f"train.reuse_len={train.reuse_len}, predicted_len={train.predicted_len} and "
            f"order_len={train.order_len} need train.objective='permutation': set these lengths to 0",
        ),
    ]
    if not model.any_order:
        return rules
    rules += [
        (
            model.positions == "relative",
            f"model.any_order=True needs the encodings of negative distances: set model.positions to 'relative' "
            f"(is {model.positions!r})",
        ),
        (
            model.same_length == "off",
            f"model.any_order=True has no window of equally many keys: set model.same_length to 'off' "
            f"(is {model.same_length!r})",
        ),
        (
            not model.value_residual,
            "model.any_order=True does not support model.value_residual: set model.value_residual to false",
        ),
        (
            config.engine.attention != "triton",
            "engine.attention='triton' computes causal attention only, and model.any_order=True predicts in any "
            "order: set engine.attention to 'auto' or 'fused'",
        ),
    ]
    if is_permutation:
        rules += _permutation_rules(config)
    return rules


def _permutation_rules(config: Config) -> list[tuple[bool, str]]:
    """Return the rules for the lengths of train.objective='permutation'."""
    train = config.train
    segment_len = train.segment_len
    rules = [
        (not train.half_loss, "train.half_loss=True needs train.objective='next': set half_loss to false"),
        (
            config.metrics.sample_every_steps == 0,
            f"metrics.sample_every_steps={config.metrics.sample_every_steps} needs a model that predicts the next "
            "token: set metrics.sample_every_steps to 0 with train.objective='permutation'",
        ),
        (
            config.eval.overlap_len == 0,
            f"eval.overlap_len={config.eval.overlap_len} needs train.objective='next': set eval.overlap_len to 0",
        ),
        (
            config.eval.segment_len in (0, segment_len),
            f"eval.segment_len={config.eval.segment_len} must be train.segment_len={segment_len} with "
            "train.objective='permutation': set eval.segment_len to 0",
        ),
        (
            config.engine.cuda_graph == "off",
            f"engine.cuda_graph={config.engine.cuda_graph!r} needs train.objective='next': set engine.cuda_graph to "
            "'off'",
        ),
        (
            config.eval.max_tokens == 0 or config.eval.max_tokens > segment_len,
            f"eval.max_tokens={config.eval.max_tokens} is less than a segment (train.segment_len={segment_len}) and "
            f"one token before it: set eval.max_tokens to 0, or to {segment_len + 1} or more",
        ),
    ]
    if train.reuse_len > segment_len:
        return rules
    for half in train.halves():
        length = half.stop - half.start
        rules += [
            (
                half.num_targets < length,
                f"train.predicted_len={train.num_predicted} predicts {half.num_targets} of the {length} tokens of a "
                f"half of the segment (train.segment_len={segment_len}, train.reuse_len={train.step_len}), and at "
                "least one token must be known: lower train.predicted_len, or raise train.segment_len",
            ),
            (
                train.order_len == 0 or length % train.order_len == 0,
                f"train.order_len={train.order_len} must divide the {length} tokens of each half of the segment "
                f"(train.segment_len={segment_len}, train.reuse_len={train.step_len}): set train.order_len to 0 for "
                "one order in each half, or to a divisor of its length",
            ),
        ]
    return rules


def check_vocabulary(model: ModelSection, *, vocab_size: int) -> None:
    """Refuse cutoffs that do not fit the size of the vocabulary. Raises ConfigError."""
    if model.cutoffs and model.cutoffs[-1] >= vocab_size:
        raise ConfigError(
            f"model.cutoffs={list(model.cutoffs)} must be below the vocabulary size {vocab_size} of the corpus. "
            "Lower the cutoffs, prepare the corpus with a larger vocabulary, or write --model.cutoffs without values "
            "for a plain softmax."
        )


def load_config(path: str | Path, *, imports_plugins: bool = False, copy: str = "") -> Config:
    """Read the settings of a run from a TOML file. Settings that the file does not contain have their default values.

    `imports_plugins` says whether to import the plugins that the file names. It is True for a file that the user has
    chosen as settings. For settings in a checkpoint it is False, and the plugins must already be loaded. `copy` is the
    path of a copy of the file that is read in its place. Messages name `path`.

    Raises ConfigError for a missing file, broken TOML, a bad value, or an unknown key, for which the message suggests
    the nearest known key.
    """
    with translate_errors(
        ConfigError, f"cannot read the config file {path}", "Name a TOML file, such as those in configs/."
    ):
        content = read_bytes(Path(copy or path))
    try:
        text = decode_text(content)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}). Save the file as UTF-8.") from error
    try:
        values = parse_toml(text)
    except ValueError as error:
        if re.search(r"=\s*(True|False)\b", text):
            hint = " In TOML, write true and false in lower case."
        else:
            hint = ""
        if Path(path).suffix != ".toml":
            hint = f" If this file is a text to train on, run `txl prepare {path} --out DIR` and give --data.path DIR."
        raise ConfigError(f"{path} is not valid TOML: {error}. Correct the line.{hint}") from error
    if imports_plugins:
        load_plugins(_plugins_in(values))
        warn_of_old_names(values, source=str(path))
    return config_from_dict(values, source=str(path))


def _plugins_in(values: Mapping[str, Any]) -> list[str]:
    """Return `run.plugins` of values that are not validated yet.

    The result is empty if `run.plugins` is not a list of texts.
    """
    run = values.get("run")
    if isinstance(run, Mapping):
        names = run.get("plugins")
    else:
        names = None
    if isinstance(names, list | tuple):
        return [name for name in names if isinstance(name, str)]
    return []


def config_from_dict(values: dict[str, Any], *, source: str) -> Config:
    """Validate nested values and return the settings. `source` names the values in errors.

    Renamed settings may have their old names. Raises ConfigError.
    """
    values = _with_lanes(in_new_names(values, source=source), source=source)
    _check_texts(values, source=source)
    try:
        # Strict, so that num_lanes = true is no 1; by way of JSON, so that a list is a tuple all the same.
        return Config.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        lines = list(_explain(error, source))
        missing = not_loaded(_plugins_in(values))
        if missing and any(problem["type"] == "unknown_name" for problem in error.errors()):
            lines = [f"{source} names the plugin {missing[0]}, which is not loaded. {remedy(missing[0])}"]
        raise ConfigError(*lines) from error


def _with_lanes(values: dict[str, Any], *, source: str) -> dict[str, Any]:
    """Return the values with the train.num_lanes that follow from train.batch_tokens, if they have that setting.

    Values that are not numbers are left to the validation. Raises ConfigError if the values have both settings.
    """
    train = values.get("train")
    if not isinstance(train, Mapping) or not train.get("batch_tokens"):
        return values
    if "num_lanes" in train:
        raise ConfigError(
            f"{source}: train.batch_tokens={train['batch_tokens']} and train.num_lanes={train['num_lanes']} both give "
            "the number of lanes (batch rows). Remove one of them."
        )
    numbers = [train["batch_tokens"], train.get("segment_len", TrainSection().segment_len)]
    if not all(type(number) is int and number > 0 for number in numbers):
        return values
    tokens, segment_len = numbers
    return values | {"train": {**train, "num_lanes": max(1, tokens // segment_len)}}


def settle_lanes(config: Config, *, given: Collection[str]) -> Config:
    """Return settings in which train.num_lanes and train.batch_tokens agree, after some settings were replaced.

    `given` are the names of the replaced settings. If train.num_lanes is one of them, it replaces a
    train.batch_tokens of the file. Else train.num_lanes follows from train.batch_tokens, if that is set. Raises
    ConfigError if both were given.
    """
    train = config.train
    if not train.batch_tokens:
        return config
    if "train.num_lanes" not in given:
        return changed(config, {"train.num_lanes": max(1, train.batch_tokens // train.segment_len)})
    if "train.batch_tokens" in given:
        raise ConfigError(
            f"--train.batch-tokens {train.batch_tokens} and --train.num-lanes {train.num_lanes} both give the number "
            "of lanes (batch rows). Remove one of them."
        )
    return changed(config, {"train.batch_tokens": 0})


def _check_texts(value: Any, *, source: str, name: str = "") -> None:
    """Refuse texts with lone surrogates, which a settings file cannot contain.

    Such texts come from paths whose bytes are not UTF-8. In an ASCII locale, all paths with characters outside ASCII
    give such texts. Raises ConfigError, which names the setting.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_texts(inner, source=source, name=f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_texts(inner, source=source, name=name)
    elif isinstance(value, str | Path):
        try:
            str(value).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{source}: {name}={value} is not UTF-8. Give a value in UTF-8. If the locale is ASCII, set the "
                "environment variable PYTHONUTF8=1."
            ) from error


def configure(path: str | Path | None = None, /, **sections: Mapping[str, Any]) -> Config:
    """Return the settings of a TOML file, or the defaults, after replacing the values that the caller gives.

        configure("configs/quickstart.toml", data={"path": "data/first"}, train={"num_lanes": 8})

    A program calls this function before `pretrain`. Plugins that `run.plugins` names are imported. Raises ConfigError
    for a wrong value, or for an unknown name, for which the message suggests the nearest name.
    """
    load_plugins(_plugins_in(sections))
    if path is None:
        values = {}
    else:
        values = values_to_give(load_config(path_of(path), imports_plugins=True))
    for section, settings in sections.items():
        if section not in _sections():
            raise ConfigError(f"configure: {unknown_setting(section)}")
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"configure: {section}={settings!r:.200} is not a section. Give the settings of the section: "
                f"{section}={{...}}."
            )
    warn_of_old_names(sections, source="configure()")
    for section, settings in in_new_names(sections, source="configure()").items():
        if section == "train":  # the caller's number of lanes replaces that of the file, in either form
            for name, other in (("num_lanes", "batch_tokens"), ("batch_tokens", "num_lanes")):
                if settings.get(name):
                    values.get("train", {}).pop(other, None)
        values[section] = {**values.get(section, {}), **{str(name): value for name, value in settings.items()}}
    config = config_from_dict(values, source="configure()")
    check_config(config)
    return config


def config_to_toml(config: Config) -> str:
    """Return all settings, defaults included, as TOML that `load_config` reads back to an equal config."""
    return tomli_w.dumps(values_to_give(config))


def values_to_give(config: Config) -> dict[str, dict[str, Any]]:
    """Return all settings as nested JSON values from which `config_from_dict` makes an equal config.

    train.num_lanes is left out if train.batch_tokens gives the number of lanes.
    """
    values = config.model_dump(mode="json")
    if config.train.batch_tokens:
        del values["train"]["num_lanes"]
    return values


def changes_to_toml(config: Config) -> str:
    """Return the settings that differ from the defaults, as TOML that `load_config` reads back to an equal config."""
    sections: dict[str, dict[str, Any]] = {}
    values = values_to_give(config)
    for change in config_changes(Config(), config):
        section, key = change.key.split(".")
        if key in values[section]:
            sections.setdefault(section, {})[key] = change.new
    return f"# settings that differ from the defaults; --all shows all settings\n{tomli_w.dumps(sections)}"


_ADDED_SINCE_0_2 = frozenset({"model.any_order", "model.segment_terms", "train.objective", "train.reuse_len"})
"""Frozen settings (a resume cannot change them) that version 0.2 did not have."""


def config_fingerprint(config: Config) -> str:
    """Return the sha256 hash of the frozen settings, which a resume cannot change.

    A run can be resumed with another config only if both configs have the same hash. The hash uses the names of version
    0.2, so that renaming a setting does not change the hash. A setting that a later version added is left out while it
    has its default value, so that runs of older versions keep their hash.
    """
    defaults = dict(flat(Config()))
    frozen = {}
    for key, value in flat(config):
        is_new_default = key in _ADDED_SINCE_0_2 and value == defaults[key]
        if resume_policy(key) == "frozen" and not is_new_default:
            frozen[key] = value
    return hashlib.sha256(json.dumps(flat_in_old_names(frozen), sort_keys=True).encode()).hexdigest()


class Change(NamedTuple):
    """Setting that differs between two configs: its name (`section.key`), both values, and its resume policy."""

    key: str
    old: Any
    new: Any
    policy: Literal["frozen", "warned", "free"]


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a config with other values of some settings. The keys of `values` are `section.key`.

    The new values are not checked.
    """
    for name, value in values.items():
        section, key = name.split(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})
    return config


def config_changes(old: Config, new: Config) -> list[Change]:
    """Return all settings in which `new` differs from `old`, each with its resume policy."""
    new_values = dict(flat(new))
    return [
        Change(key, value, new_values[key], resume_policy(key)) for key, value in flat(old) if new_values[key] != value
    ]


def setting_names() -> list[str]:
    """Return the name of every setting, as `section.key`."""
    return [f"{section}.{key}" for section, info in _sections().items() for key in info.model_fields]


def _sections() -> dict[str, type[Section]]:
    return {name: type(info.default) for name, info in Config.model_fields.items()}


def flat(config: Config) -> Iterator[tuple[str, Any]]:
    """Return the name of every setting, as `section.key`, with its value."""
    return named_values(config.model_dump(mode="json"))


def resume_policy(name: str) -> Literal["frozen", "warned", "free"]:
    """Return what happens to a setting (`section.key`) that has another value when a run is resumed. See `Resume`."""
    section, key = name.split(".")
    marks = [mark for mark in _sections()[section].model_fields[key].metadata if isinstance(mark, Resume)]
    if marks:
        return marks[0].policy
    return "frozen"


def _explain(error: ValidationError, source: str) -> Iterator[str]:
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            is_section = isinstance(problem["input"], dict)
            yield f"{source}: {unknown_setting(name[:200], is_section=is_section)}"
        elif (setting := ".".join(map(str, problem["loc"][:2]))) in setting_names():
            yield f"{source}: {setting} = {problem['input']!r:.200}: {_rule(setting, problem)}"
        else:
            yield f"{source}: {name} must be a section. Write [{name}], and the settings of this section below."


def value_of(name: str, words: Sequence[str]) -> Any:
    """Return the value of a setting (`section.key`) that is written as words of a command line.

    Raises ConfigError, in one line, for words that are not a value of the setting.
    """
    flag = flag_of(name)
    info = _field(name)
    is_many = get_origin(info.annotation) is tuple
    kind: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    try:
        return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(
            tuple(words) if is_many else words[0] if words else None
        )
    except ValidationError as error:
        rule = _rule(name, error.errors()[0], on_flag=True)
        raise ConfigError(f"{flag} {' '.join(words)}: {rule}" if words else f"{flag} needs a value: {rule}") from error


def explain_flag(name: str, words: Sequence[str]) -> str:
    """Return the error message for a setting (`section.key`) with these words of a command line as its value.

    The result is empty if the words are a valid value.
    """
    try:
        value_of(name, words)
    except ConfigError as error:
        return str(error)
    return ""


def _rule(name: str, problem: Any, *, on_flag: bool = False) -> str:
    """Return a description of the values that a setting can have, its unit, and the value that was probably meant."""
    info = _field(name)
    hint = ""
    unit = lower(re.split(r"\.(?:\s|$)", info.description or "")[0].replace("\n", " "))
    choices = choices_of(name)
    if choices:
        if not on_flag:
            choices = tuple(word.lower() if word in ("True", "False") else word for word in choices)
        hint = did_you_mean(str(problem["input"]), choices)
        if not hint and info.annotation is bool and not on_flag:
            hint = " Write true or false, without quotes."
        return f"it can be {', '.join(choices)} ({unit}).{hint}"
    return f"it must be {_range(info, is_too_large=problem['type'].startswith('less_than'))} ({unit})."


def lower(text: str) -> str:
    """Return a sentence for use inside another sentence.

    Its first letter becomes small, unless the first word is a name.
    """
    if text[1:2].islower():
        return text[:1].lower() + text[1:]
    return text


_FAR = 1000
"""Absolute value from which a bound is left out of messages. Such a bound only refuses absurd values."""
_KINDS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    bool: ("true or false", "true or false"),
}


def _range(info: FieldInfo, *, is_too_large: bool) -> str:
    """Return the values that a setting can take, such as `a whole number, 1 or more`.

    A bound that only refuses absurd values is included only if the value exceeds it.
    """
    kind = info.annotation
    rules = list(info.metadata)
    parts = get_args(kind)
    if parts:  # a tuple, whose bounds are those of its entries
        if get_origin(parts[0]) is Annotated:
            kind, *marks = get_args(parts[0])
        else:
            kind, *marks = parts[:1]
        rules = [rule for mark in marks for rule in mark.metadata]
    one, many = _KINDS[kind]  # type: ignore[index]  # every setting that has no choices is of these
    if not parts:
        what = one
    elif Ellipsis in parts:
        what = f"a list of {many}"
    else:
        what = f"{len(parts)} {many}"
    least = _bound(rules, "ge")
    above = _bound(rules, "gt")
    below = _bound(rules, "lt")
    most = _bound(rules, "le")
    if kind is int and above is not None:
        least = above + 1
        above = None
    if most is not None and most > _FAR and not is_too_large:
        most = None
    if least is None:
        low = ""
    else:
        low = f"{least:g} or more"
    if above is not None:
        low = f"above {above:g}"
    if below is not None:
        high = f"below {below:g}"
    elif most is not None:
        high = f"at most {most:,}"
    else:
        high = ""
    words = " and ".join(filter(None, (low, high)))
    if words:
        return f"{what}, {words}"
    return what


def unknown_setting(name: str, *, is_section: bool = False) -> str:
    """Return the message for a section or a `section.key` that does not exist."""
    settings = setting_names()
    sections = list(_sections())
    new_name = name_since(name)
    if new_name:
        return f"unknown setting {name}. {new_name}"
    if is_section:
        near = SECTIONS.get(name.lower()) or next(iter(nearest(name, sections)), "")
        if near:
            return f"unknown setting {name}. Did you mean {near}?"
    if name in settings:
        section, _, key = name.partition(".")
        return f'"{name}" in quotes is one key. Write {name} without quotes, or {key} under [{section}].'
    counterpart = find_counterpart(name, settings)
    if counterpart:
        return f"unknown setting {name}.{counterpart.hint(spell=_in_file)}"
    section, _, key = name.partition(".")
    if section in sections and key:
        hint = did_you_mean(name, settings)
        known = [f"{section}.{other}" for other in _sections()[section].model_fields]
    else:
        hint = did_you_mean(name, [*sections, *settings])
        known = sections
    return f"unknown setting {name}." + (hint or f" Known: {', '.join(known)}.")


def _in_file(name: str, value: str) -> str:
    """Return a setting as it is written in a file, followed by the value that it should have, if any."""
    if value in ("True", "False"):
        written = value.lower()
    else:
        written = f'"{value}"'
    if value:
        return f"{name} = {written}"
    return name


def choices_of(name: str) -> tuple[str, ...]:
    """Return the values that a setting (`section.key`) can take on the command line, if the setting has a list of
    choices.

    The result is empty for all other settings.
    """
    field = _field(name)
    kind = field.annotation
    tables = [mark.table for mark in field.metadata if isinstance(mark, OneOf)]
    if tables:
        return tuple(tables[0])
    if kind is bool:
        return ("True", "False")
    return tuple(str(value) for value in get_args(kind) if isinstance(value, str))


def _field(name: str) -> FieldInfo:
    section, _, key = name.partition(".")
    return _sections()[section].model_fields[key]


def _bound(rules: Iterable[Any], name: str) -> Any:
    """Return the bound with this name (`ge`, `gt`, `lt`, `le`) from the first rule that has it, or None."""
    for rule in rules:
        if hasattr(rule, name):
            return getattr(rule, name)
    return None
