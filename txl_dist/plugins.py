"""Functions that a plugin calls to extend the program: one for each kind of extension (docs/extending.md).

A plugin is a module that calls these functions when it is imported. `run.plugins`, `--plugins` and `load` import it,
once per process. After that its names are known to settings, checkpoints, exports and commands, like our own. This
module imports no torch, so that a plugin with a text source costs `txl prepare` nothing.

Every function raises ConfigError for a name that exists already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from txl_dist.config.registry import Plugin, add_row, load_plugins, loaded_plugins
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
    """Import plugins, for one's own program: before `txl_dist.load` or `configure` meets their names.

    Raises ConfigError, in one line, for a module that is missing or raises.
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
    """A value of `model.positions`.

    `build(model)` makes the `nn.Module` of one layer. Its `forward(num_distances, encoding_KD)` returns
    `txl_dist.model.attention.RelativeEncodings` of the distances K-1 ... 0: vectors key_KNH, which queries are
    multiplied with, and numbers bias_KN, or None. The numbers are added to the scores before these are divided by
    sqrt(H). Parameters begin as the model's other weights, unless the module has a method `reset_parameters`. Buffers
    must follow from the settings (`persistent=False` is clearest): a checkpoint holds parameters only. Without `build`
    scores are of contents alone.

    Args:
        uses_memory: Whether a segment may attend to past ones.
        sinusoids: What `encoding_KD` holds: sinusoids of distances, or none; embedding: they are added to the
            embedding, by position in the segment.
        has_position_bias: Whether a learned bias v replaces bias_KN (the paper's term d).
        has_table: Whether the module needs `model.num_distances`.
    """
    if build is None and (has_position_bias or has_table or sinusoids == "distances"):
        raise ConfigError(f"positions {name!r}: distances need a build function that makes their module.")
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
    """A value of `optim.name`.

    `build(groups, lr=0.0)` makes a torch optimizer of parameter groups. Each group has `lr`, `weight_decay`, and the
    named `settings` of [optim] as keys; `lr` changes with every step. Its state must be fp32 tensors of the parameter's
    shape, made in `step`, and `state["step"]`, an fp32 tensor with one number: a checkpoint would lose other state.

    Args:
        settings: Fields of [optim] that the groups get: betas, eps, momentum, muon_momentum.
        state_bytes: Bytes per parameter that it keeps in fp32, for the prediction of memory.
        needs_whole_tensors: Whether a step needs whole tensors, for instance for their norms: only without ZeRO.
    """
    unknown = [one for one in settings if one not in OptimSection.model_fields]
    if unknown:
        raise ConfigError(f"optimizer {name!r}: [optim] has no setting {unknown[0]!r}.")
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
    """A number of training and evaluation records: in metrics.jsonl, TensorBoard, on the console and in the report.

    `measure(record)` gets the other numbers of a record (docs/seeing.md lists them), read-only, on rank 0; it returns
    the number, or None where the record has not what it needs. If it raises, the number is left out and the run
    continues.

    Args:
        form: Format specification on the console, for instance ".3f"; empty: not shown there.
        label: In front of the number on the console.
        unit: After the number on the console.
        curve: How reports draw it over the steps; None: not drawn.
    """
    row = Metric(name, form, label or name, unit, drop=12, curve=curve, measure=measure)
    add_row(METRICS, name, row, what="metric")


def register_source(name: str, read: Callable[[str], Iterable[str]]) -> None:
    """An input of `txl prepare`: `NAME:REST` gives the documents that `read(REST)` yields, in order.

    It is read once per preparation, as standard input is. An error that it raises ends the preparation in one line.
    """
    add_row(TEXT_SOURCES, name, TextSource(read), what="text source")


def register_tokenizer(
    tokenizer: type[Tokenizer],
    learn: Callable[[Iterable[str], Learning], Tokenizer],
    *,
    settings: tuple[str, ...] = (),
) -> None:
    """A value of `txl prepare --tokenizer`: the class' `kind`.

    `learn(texts, learning)` makes the tokenizer of the train split. `texts` can be read more than once. Ids must be in
    order of frequency, the most frequent first, because adaptive softmax cuts the vocabulary at ids.

    Args:
        settings: Fields of `Learning` that it takes in addition to end_of_text: vocab_size, min_frequency, lower_case,
            only_seen, sentence_marks.
    """
    kind = tokenizer.kind
    add_row(KINDS, kind, tokenizer, what="tokenizer")
    add_row(LEARNT_KINDS, kind, LearntKind(settings, 1, learn), what="tokenizer")
