"""Stages of one run: parts of it with other lengths (Press et al. 2021, Shortformer: short segments first).

    [train]
    num_lanes = 32
    segment_len = 64
    memory_len = 128
    stages = ["until=0.5 num_lanes=128 segment_len=16 memory_len=32"]

Until half of the steps, and as every step has equally many tokens, of the tokens, lanes are many and short; behind the
last stage the section's own values hold. Between two stages the run goes on as one does that is resumed with other
lengths: each token is read once, and lanes that are cut anew begin with an empty memory.

A `Config` in which a stage holds has that stage's values in its section, and all stages, the last one too, in its list:
so that each can be made of any other (`at_step`, `whole`). What is written and compared is the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from txl_dist.config.load import Config, changed, check_config
from txl_dist.config.schema import LONGEST, TrainSection, memory_of_layers
from txl_dist.console.formatting import counted
from txl_dist.console.suggest import did_you_mean
from txl_dist.errors import ConfigError

_LENGTHS = ("num_lanes", "segment_len", "memory_len", "microbatch_lanes")
_FORM = 'until=SHARE num_lanes=N segment_len=T memory_len=M", for instance "until=0.5 num_lanes=128 segment_len=16'


class Stage(NamedTuple):
    """A part of a run."""

    until: float
    """Share of the run's steps behind which it ends."""
    num_lanes: int
    segment_len: int
    memory_len: int
    microbatch_lanes: int

    def __str__(self) -> str:
        return " ".join(f"{name}={value:g}" for name, value in self._asdict().items())


def whole(config: Config) -> Config:
    """As it was given, whichever stage holds. Raises ConfigError for stages that cannot be read."""
    *stages, last = _stages(config.train)
    if len(stages) == len(config.train.stages):
        return config
    return changed(config, _values(last) | {"train.stages": config.train.stages[:-1]})


def at_step(config: Config, step: int) -> Config:
    """With the lengths that hold in the step behind `step` finished ones. Raises ConfigError as `whole` does."""
    if not config.train.stages:
        return config
    stages = _stages(config.train)
    held = next((one for one in stages if step < _end(one, config)), stages[-1])
    given = config.train.stages[: len(stages) - 1]
    return changed(config, _values(held) | {"train.stages": (*given, str(stages[-1]))})


def end_of_stage(config: Config, step: int) -> int:
    """The last step of the stage that the step behind `step` finished ones belongs to."""
    return next((end for one in _stages(config.train) if step < (end := _end(one, config))), config.train.max_steps)


def each_stage(config: Config) -> Iterator[tuple[range, Config]]:
    """(finished steps at its beginning ... at its end, the settings that hold) of every stage that has a step."""
    step = 0
    while step < config.train.max_steps:
        end = end_of_stage(config, step)
        yield range(step, end), at_step(config, step)
        step = end


def check_stages(config: Config) -> None:
    """Refuse stages that cannot be read, do not follow one another, or contradict other settings. Raises ConfigError
    naming the stage."""
    given = whole(config)
    check_config(changed(given, {"train.stages": ()}))
    *stages, last = _stages(given.train)
    earlier: Stage | None = None
    for before, after in itertools.pairwise([*stages, last]):
        if not 0 < before.until < after.until:
            raise ConfigError(
                f"train.stages: a stage until {before.until:g} cannot stand before one until {after.until:g}. Shares "
                "of the run lie between 0 and 1 and grow from stage to stage; behind the last [train] holds."
            )
        if _end(before, given) == (_end(earlier, given) if earlier else 0):
            raise ConfigError(
                f"train.stages: a stage until {before.until:g} of {counted(given.train.max_steps, 'step')} "
                "has none of its own. "
                "Leave it out, or make it longer."
            )
        earlier = before
    for text, stage in zip(given.train.stages, stages, strict=True):
        tokens, wanted = stage.num_lanes * stage.segment_len, last.num_lanes * last.segment_len
        if tokens != wanted:
            raise ConfigError(
                f'train.stages: "{text}" has steps of {stage.num_lanes} x {stage.segment_len} = {tokens:,} tokens, '
                f"and [train] of {last.num_lanes} x {last.segment_len} = {wanted:,}. Steps of all stages have equally "
                "many, so that one learning rate fits them: with segments a quarter as long give four times the lanes."
            )
        lens = given.train.memory_lens and memory_of_layers(
            stage.memory_len, given.train.memory_lens, num_layers=given.model.num_layers
        )
        alone = changed(given, _values(stage) | {"train.stages": (), "train.memory_lens": lens})
        try:
            check_config(alone)
        except ConfigError as error:
            raise ConfigError(f'train.stages: in "{text}": {error}') from error


def _stages(train: TrainSection) -> list[Stage]:
    """All, also the last one, until 1, which is the section's own where no stage holds."""
    own = Stage(1.0, train.num_lanes, train.segment_len, train.memory_len, train.microbatch_lanes)
    given = list(train.stages)
    if given and _parsed(given[-1], own).until == 1:
        own = _parsed(given.pop(), own)
    return [*(_parsed(text, own) for text in given), own]


def _parsed(text: str, own: Stage) -> Stage:
    """What is not named is as in the section; micro-batches keep their number of tokens."""
    values: dict[str, Any] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in Stage._fields or name in values:
            problem = "given twice" if name in values else "nothing that a stage has"
            hint = "" if name in values else did_you_mean(name, Stage._fields)
            raise ConfigError(f'train.stages: "{text}": {name} is {problem}.{hint} Write "{_FORM} memory_len=32".')
        try:
            values[name] = float(value) if name == "until" else int(value)
        except ValueError as error:
            kind = "a share of the run" if name == "until" else "a whole number"
            raise ConfigError(f'train.stages: "{text}": {name}={value} is not {kind}. Write "{_FORM}".') from error
    if "until" not in values:
        raise ConfigError(f'train.stages: "{text}" does not say until when. Write "{_FORM} memory_len=32".')
    if "microbatch_lanes" not in values and "num_lanes" in values:
        lanes = own.microbatch_lanes * int(values["num_lanes"])
        if lanes % own.num_lanes:
            raise ConfigError(
                f'train.stages: "{text}": {values["num_lanes"]:g} lanes do not divide into micro-batches as the '
                f"{own.num_lanes} of [train] do into {own.microbatch_lanes}. Give microbatch_lanes too."
            )
        values["microbatch_lanes"] = lanes // own.num_lanes
    stage = own._replace(**values)
    if min(stage.num_lanes, stage.segment_len, stage.microbatch_lanes) < 1 or not 0 <= stage.memory_len <= LONGEST:
        raise ConfigError(f'train.stages: "{text}": lengths and lanes are 1 or more, a memory 0 to {LONGEST:,}.')
    return stage


def _values(stage: Stage) -> dict[str, Any]:
    return {f"train.{name}": getattr(stage, name) for name in _LENGTHS}


def _end(stage: Stage, config: Config) -> int:
    return round(stage.until * config.train.max_steps)
