"""Phases of one run, which differ in the lengths of segment and memory, the number of lanes (rows), or the corpora.

    [train]
    num_lanes = 32
    segment_len = 64
    memory_len = 128
    phases = ["until=0.5 num_lanes=128 segment_len=16 memory_len=32"]

A run may begin with short segments (Press et al. 2021, Shortformer). In this example the first half of the steps has
many lanes and short segments. After the listed phases the values of the section itself apply (num_lanes = 32,
segment_len = 64). Steps of all phases have equally many tokens, so half of the steps are half of the tokens. Between
two phases the run continues like a run that is resumed with other lengths. If the number of lanes changes, the unread
tokens are divided among the new lanes, whose memories begin empty. Each token is still read once. The same holds for a
phase with its own `weights` of the corpora, such as "until=0.9 weights=3,1": each corpus continues where it stopped.

A `Config` of one phase has the values of that phase in its sections [train] and [data]. Its list `phases` has all
phases, including the last phase. So the config of a phase can be computed from the config of any other phase
(`at_step`, `whole`). The config of the whole run is saved and compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from txl_dist.config.load import Config, changed, check_config, config_fingerprint, config_to_toml
from txl_dist.config.schema import HEAVIEST, LONGEST, memory_of_layers
from txl_dist.console.formatting import counted
from txl_dist.console.suggest import did_you_mean
from txl_dist.errors import ConfigError

_LENGTHS = ("num_lanes", "segment_len", "memory_len", "microbatch_lanes")
_AUTOMATIC = {"reuse_len": "the whole segment", "predicted_len": "a sixth of it", "order_len": "half of it"}
_SHARES = tuple(_AUTOMATIC)
"""Lengths of XLNet's objective, which are the same shares of a segment in all phases."""
_FORM = 'until=SHARE num_lanes=N segment_len=T memory_len=M", for instance "until=0.5 num_lanes=128 segment_len=16'


class Phase(NamedTuple):
    """One phase of a run, with its number of lanes (batch rows), its lengths in tokens, and its weights of the
    corpora."""

    until: float
    """Share of the run's steps after which the phase ends."""
    num_lanes: int
    segment_len: int
    memory_len: int
    microbatch_lanes: int
    reuse_len: int = 0
    predicted_len: int = 0
    order_len: int = 0
    weights: tuple[float, ...] = ()
    """Share of the lanes for each corpus, as in `data.weights`."""

    def __str__(self) -> str:
        """Return the phase as text, as `train.phases` takes it, without lengths of XLNet's objective that are 0."""
        numbers = self._asdict()
        weights = numbers.pop("weights")
        words = [f"{name}={value:g}" for name, value in numbers.items() if value or name not in _SHARES]
        words.append(f"weights={','.join(map(str, weights))}")
        return " ".join(words)


def _read_weights(text: str) -> tuple[float, ...]:
    """Parse weights that commas separate. An empty text means shares in proportion to the corpora's tokens.

    Raises ValueError for a weight that is not a number from 0 to `HEAVIEST`.
    """
    weights = tuple(float(word) for word in text.split(",") if text)
    if not all(0 <= weight <= HEAVIEST for weight in weights):  # which NaN is not
        raise ValueError(text)
    return weights


_KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "until": ("a share of the run", float),
    "weights": ("a list of weights, which are 0 or more and separated by commas", _read_weights),
}
"""For each value of a phase that is not a whole number: its description, and the function that parses it."""
_WHOLE: tuple[str, Callable[[str], Any]] = ("a whole number", int)


class SavedSettings(NamedTuple):
    """Settings of the whole run with all phases. The run directory and every checkpoint contain them."""

    config: Config
    """Settings of the whole run as the user gave them."""
    toml: str
    """Text of the settings, as the file config.toml contains it."""
    fingerprint: str
    """Hash of the frozen settings, computed by `config_fingerprint`."""


def whole(config: Config) -> Config:
    """Return the config of the whole run, as the user gave it, from the config of any of its phases.

    Raises ConfigError for phases that cannot be read.
    """
    *phases, last = _phases(config)
    if len(phases) == len(config.train.phases):
        return config
    return changed(config, _values(last) | {"train.phases": config.train.phases[:-1]})


def at_step(config: Config, step: int) -> Config:
    """Return the config of the phase that the run is in after `step` finished steps.

    Raises ConfigError as `whole` does.
    """
    if not config.train.phases:
        return config
    phases = _phases(config)
    current = phases[-1]
    for phase in phases:
        if step < _end(phase, config):
            current = phase
            break
    texts = (*config.train.phases[: len(phases) - 1], str(phases[-1]))
    return changed(config, _values(current) | {"train.phases": texts})


def end_of_phase(config: Config, step: int) -> int:
    """Return the last step of the phase that the run is in after `step` finished steps."""
    for phase in _phases(config):
        end = _end(phase, config)
        if step < end:
            return end
    return config.train.max_steps


def each_phase(config: Config) -> Iterator[tuple[range, Config]]:
    """Yield (range of steps, config) for every phase that has a step.

    The range starts at the number of steps that are finished when the phase begins. The range stops at the number of
    steps that are finished when the phase ends.
    """
    step = 0
    while step < config.train.max_steps:
        end = end_of_phase(config, step)
        yield range(step, end), at_step(config, step)
        step = end


def max_ranks(config: Config) -> int:
    """Return the largest number of ranks that all phases allow. Numbers of ranks that divide it are possible too."""
    trains = [phase.train for _, phase in each_phase(config)] or [config.train]
    return math.gcd(*(train.num_lanes // train.microbatch_lanes for train in trains))


def saved_settings(config: Config) -> SavedSettings:
    """Return the settings of the whole run, as the run directory and its checkpoints keep them.

    `config` may be the config of any phase. Raises ConfigError as `whole` does.
    """
    whole_config = whole(config)
    return SavedSettings(whole_config, config_to_toml(whole_config), config_fingerprint(whole_config))


def check_phases(config: Config) -> None:
    """Refuse phases that cannot be read, are out of order, or contradict other settings.

    Raises ConfigError, which names the phase.
    """
    given = whole(config)
    check_config(changed(given, {"train.phases": ()}))
    *phases, last = _phases(given)
    _check_order([*phases, last], given)
    for text, phase in zip(given.train.phases, phases, strict=True):
        _check_alone(text, phase, last, given)


def _check_order(phases: list[Phase], given: Config) -> None:
    """Refuse phases whose ends do not increase, and phases without a step."""
    end_before = 0
    for phase, following in itertools.pairwise(phases):
        if not 0 < phase.until < following.until:
            raise ConfigError(
                f"train.phases: a phase with until={phase.until:g} cannot precede a phase with "
                f"until={following.until:g}. The values of `until` must be between 0 and 1, and each phase must have a "
                "larger value than the phase before it. After the last phase the settings of [train] apply."
            )
        end = _end(phase, given)
        if end == end_before:
            steps = counted(given.train.max_steps, "step")
            raise ConfigError(
                f"train.phases: the phase with until={phase.until:g} has no step in a run of {steps}. Remove this "
                "phase, or raise its value of `until`."
            )
        end_before = end


def _check_alone(text: str, phase: Phase, last: Phase, given: Config) -> None:
    """Refuse a phase that contradicts other settings, or whose steps have more or fewer tokens than the steps of
    [train]."""
    _check_shares(text, phase, last)
    tokens = phase.num_lanes * phase.segment_len
    tokens_of_last = last.num_lanes * last.segment_len
    if tokens != tokens_of_last:
        raise ConfigError(
            f'train.phases: "{text}" has steps of num_lanes x segment_len = {phase.num_lanes} x {phase.segment_len} = '
            f"{tokens:,} tokens, but [train] has steps of {last.num_lanes} x {last.segment_len} = {tokens_of_last:,} "
            "tokens. Steps of all phases must have equally many tokens, so that one learning rate fits all phases. For "
            "example, segments a quarter as long need four times as many lanes."
        )
    memory_lens = given.train.memory_lens and memory_of_layers(
        phase.memory_len, given.train.memory_lens, num_layers=given.model.num_layers
    )
    alone = changed(given, _values(phase) | {"train.phases": (), "train.memory_lens": memory_lens})
    try:
        check_config(alone)
    except ConfigError as error:
        raise ConfigError(f'train.phases: in "{text}": {error}') from error


def _check_shares(text: str, phase: Phase, last: Phase) -> None:
    """Refuse a phase in which XLNet's objective reuses or predicts another share of a segment than in [train]."""
    for name in _SHARES:
        length = getattr(last, name)
        if getattr(phase, name) * last.segment_len != length * phase.segment_len:
            raise ConfigError(
                f'train.phases: "{text}" has segments of {phase.segment_len} tokens, and train.{name}={length} of '
                f"train.segment_len={last.segment_len} would be {length * phase.segment_len / last.segment_len:g} "
                f"tokens of them. Choose segments of which train.{name} is the same share, in whole tokens, or set "
                f"train.{name} to 0 for {_AUTOMATIC[name]}."
            )


def _phases(config: Config) -> list[Phase]:
    """Parse all phases. The last phase ends at the end of the run, and has the values of [train] and [data]."""
    train = config.train
    lengths = {name: getattr(train, name) for name in (*_LENGTHS, *_SHARES)}
    last = Phase(until=1.0, **lengths, weights=config.data.weights)
    texts = list(train.phases)
    if texts and _parsed(texts[-1], last).until == 1:  # the config of an earlier phase keeps the last one there
        last = _parsed(texts.pop(), last)
    return [*(_parsed(text, last) for text in texts), last]


def _parsed(text: str, last: Phase) -> Phase:
    """Parse one phase. Values that the text does not give are the values of the last phase.

    Micro-batches have the same number of tokens in all phases, unless the text gives microbatch_lanes. Lengths of
    XLNet's objective are the same share of a segment in all phases, rounded to whole tokens.
    """
    values: dict[str, Any] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name in values:
            raise ConfigError(f'train.phases: "{text}": {name} occurs twice. Write "{_FORM} memory_len=32".')
        if name not in Phase._fields:
            hint = did_you_mean(name, Phase._fields)
            raise ConfigError(
                f'train.phases: "{text}": a phase has no setting {name}.{hint} Its settings are '
                f'{", ".join(Phase._fields)}. Write "{_FORM} memory_len=32".'
            )
        kind, read = _KINDS.get(name, _WHOLE)
        try:
            values[name] = read(value)
        except ValueError as error:
            raise ConfigError(f'train.phases: "{text}": {name}={value} is not {kind}. Write "{_FORM}".') from error
    if "until" not in values:
        raise ConfigError(
            f'train.phases: "{text}" has no `until` (the share of the run after which the phase ends). '
            f'Write "{_FORM} memory_len=32".'
        )
    if "microbatch_lanes" not in values and "num_lanes" in values:
        lanes = last.microbatch_lanes * int(values["num_lanes"])
        if lanes % last.num_lanes:
            raise ConfigError(
                f'train.phases: "{text}": num_lanes={values["num_lanes"]:g} needs its own microbatch_lanes. '
                f"In [train] a micro-batch has {last.microbatch_lanes} of {counted(last.num_lanes, 'lane')}, and the "
                "same share of this phase's lanes is not a whole number. Add microbatch_lanes=N to this phase."
            )
        values["microbatch_lanes"] = lanes // last.num_lanes
    segment_len = int(values.get("segment_len", last.segment_len))
    shares = {name: round(getattr(last, name) * segment_len / last.segment_len) for name in _SHARES}
    phase = last._replace(**(shares | values))
    if min(phase.num_lanes, phase.segment_len, phase.microbatch_lanes) < 1 or not 0 <= phase.memory_len <= LONGEST:
        raise ConfigError(
            f'train.phases: "{text}": num_lanes, segment_len and microbatch_lanes must be 1 or more, and memory_len '
            f"must be from 0 to {LONGEST:,} tokens."
        )
    return phase


def _values(phase: Phase) -> dict[str, Any]:
    lengths = {f"train.{name}": getattr(phase, name) for name in (*_LENGTHS, *_SHARES)}
    return lengths | {"data.weights": phase.weights}


def _end(phase: Phase, config: Config) -> int:
    return round(phase.until * config.train.max_steps)
