"""Functions that a plugin calls to extend txl_dist, one for each kind of extension (docs/extending.md).

A plugin is a module that calls these functions when it is imported. `run.plugins`, `--plugins` and `load` import the
module, once per process. After that, settings, checkpoints, exports and commands accept the names that the plugin adds.
This file imports no torch, so `txl prepare` starts quickly with a plugin for a text source.

Every function whose name begins with `register` raises ConfigError if the new name exists already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from txl_dist.config.registry import Plugin, add_row, load_plugins, loaded_plugins
from txl_dist.config.renamed import new_keyword
from txl_dist.config.schema import OPTIMIZERS, SCHEMES, ModelSection, OptimizerKind, OptimSection, PositionScheme
from txl_dist.data.prepare.sources import TEXT_SOURCES, TextSource
from txl_dist.errors import ConfigError
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.learning import LEARNT_KINDS, Learning, LearntKind
from txl_dist.tokenizers.tokenizer import KINDS
from txl_dist.train.report.metric_table import METRICS, Curve, Metric

__all__ = [
    "Curve",
    "Learning",
    "Plugin",
    "Tokenizer",
    "load",
    "loaded_plugins",
    "register_metric",
    "register_optimizer",
    "register_positions",
    "register_source",
    "register_tokenizer",
]


def load(*names: str) -> None:
    """Import plugins in your own program, before `txl_dist.load` or `configure` needs the names that they add.

    `names` are names of modules. Raises ConfigError, in one line, for a module that is missing or raises an error.
    """
    load_plugins(names)


def register_positions(
    name: str,
    build: Callable[[ModelSection], Any] | None = None,
    *,
    uses_memory: bool = True,
    sinusoids: Literal["distances", "embedding", "none"] = "none",
    has_position_bias: bool = False,
    has_table: bool = False,
) -> None:
    """Add a positional scheme, as a value of `model.positions`.

    `build(model)` makes the `nn.Module` of one layer. Its `forward(num_distances, encoding_KD)` returns
    `txl_dist.model.attention.RelativeEncodings` of the distances K-1 ... 0. These are vectors key_KNH, by which queries
    are multiplied, and numbers bias_KN or None, for N heads of width H. The numbers are added to the scores before the
    scores are divided by sqrt(H). Parameters are initialized like the model's other weights, unless the module has a
    method `reset_parameters`. A checkpoint holds only parameters, so buffers must be computed from the settings
    (`persistent=False` is clearest). Without `build`, scores depend only on contents.

    Args:
        uses_memory: True if a segment may attend to past segments.
        sinusoids: "distances": `encoding_KD` holds sinusoids of distances. "embedding": sinusoids of positions in the
            segment are added to the embedding. "none": there are none.
        has_position_bias: True if a learned bias v replaces bias_KN (the paper's term d).
        has_table: True if the module needs `model.num_distances`.
    """
    if build is None and (has_position_bias or has_table or sinusoids == "distances"):
        raise ConfigError(
            f"positions {name!r}: has_position_bias, has_table and sinusoids='distances' need a function `build`, "
            "which returns the module that computes the position terms. Pass `build`, or remove these arguments."
        )
    scheme = PositionScheme(
        uses_memory,
        sinusoids,
        has_distance_terms=build is not None,
        has_position_bias=has_position_bias,
        has_table=has_table,
        build=build,
    )
    add_row(SCHEMES, name, scheme, what="positions")


def register_optimizer(
    name: str,
    build: Callable[..., Any],
    *,
    settings: tuple[str, ...] = ("betas", "eps"),
    state_bytes: Callable[[OptimSection], int] = lambda _: 8,
    needs_whole_tensors: bool = False,
) -> None:
    """Add an optimizer, as a value of `optim.name`.

    `build(groups, lr=0.0)` makes a torch optimizer of parameter groups. The keys of each group are `lr`,
    `weight_decay`, and the settings of [optim] that `settings` names. The value of `lr` changes with every step. The
    optimizer's state must be fp32 tensors of the parameter's shape, made in `step`, and `state["step"]`, an fp32 tensor
    with one number. A checkpoint would lose other state.

    Args:
        settings: Fields of [optim] that the groups get: betas, eps, momentum, muon_momentum.
        state_bytes: Function that returns the bytes of fp32 state per parameter, for the estimate of memory.
        needs_whole_tensors: True if a step needs whole tensors, for instance for norms. The optimizer then runs only
            without ZeRO.
    """
    unknown = [setting for setting in settings if setting not in OptimSection.model_fields]
    if unknown:
        raise ConfigError(
            f"optimizer {name!r}: [optim] has no setting {unknown[0]!r}. Let `settings` name only fields of [optim]."
        )
    kind = OptimizerKind(settings, state_bytes, needs_whole_tensors, build=build)
    add_row(OPTIMIZERS, name, kind, what="optimizer")


def register_metric(
    name: str,
    measure: Callable[[Mapping[str, Any]], float | None],
    *,
    form: str = "",
    label: str = "",
    unit: str = "",
    curve: Curve | None = None,
) -> None:
    """Add a number to training and evaluation records.

    Files, TensorBoard, console and report then show it. `measure(record)` runs on rank 0. It gets the other numbers of
    a record, read-only (docs/monitoring.md lists them). It returns the new number, or None if the record lacks what
    `measure` needs. If `measure` raises an error, the number is left out and the run continues.

    Args:
        form: Format specification on the console, for instance ".3f". With an empty format the console does not show
            the number.
        label: Text before the number on the console. By default it is the name.
        unit: Text after the number on the console.
        curve: Curve of the number in reports. With None there is no curve.
    """
    row = Metric(name, form, label or name, unit, drop=12, curve=curve, measure=measure)
    add_row(METRICS, name, row, what="metric")


def register_source(name: str, read: Callable[[str], Iterable[str]]) -> None:
    """Add a text source for `txl prepare`.

    With this source, `NAME:REST` is an input that consists of the documents that `read(REST)` yields, in order. The
    source is read once per preparation, like standard input. If `read` raises an error, the preparation ends with a
    message of one line.
    """
    add_row(TEXT_SOURCES, name, TextSource(read), what="text source")


def register_tokenizer(
    tokenizer: type[Tokenizer],
    learn: Callable[[Iterable[str], Learning], Tokenizer],
    *,
    settings: tuple[str, ...] = (),
) -> None:
    """Add a tokenizer for `txl prepare --tokenizer`. The class's attribute `kind` is the value of this flag that
    selects the tokenizer.

    `learn(texts, learning)` trains the tokenizer on the train split. `texts` can be read more than once. Ids must be in
    order of frequency, the most frequent first, because adaptive softmax cuts the vocabulary at ids.

    Args:
        settings: Fields of `Learning` that `learn` uses in addition to end_of_text: vocab_size, min_frequency,
            lower_case, observed_symbols, double_eos.
    """
    kind = tokenizer.kind
    add_row(KINDS, kind, tokenizer, what="tokenizer")
    options = tuple(new_keyword(name, command="prepare") for name in settings)
    add_row(LEARNT_KINDS, kind, LearntKind(options, 1, learn), what="tokenizer")
