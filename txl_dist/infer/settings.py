"""What may be asked of texts that are to be generated. Imports no torch: the command line makes its flags of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from txl_dist.errors import ConfigError
from txl_dist.suggest import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.8
    """0 takes the likeliest token; 1 samples from the model as it is."""
    top_k: int = 40
    """Keep only so many of the likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep only the fewest likeliest tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Keep only tokens at least so many times as likely as the likeliest; 0 keeps all."""
    repetition_penalty: float = 1.0
    """The log-probability of a token that was in the prompt or in the text is multiplied by this; 1 does nothing."""
    allowed: tuple[int, ...] = ()
    """Ids that may be drawn; empty allows all."""

    def check(self, *, vocab_size: int | None = None) -> None:
        """Raises ConfigError for a setting out of range; with `vocab_size` for an allowed id that there is not."""
        rules = [
            ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more tokens; 0 keeps all"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1; 1 keeps all"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1; 0 keeps all"),
            ("repetition_penalty", 1 <= self.repetition_penalty < math.inf, "1 or more; 1 does nothing"),
        ]
        _hold(self, rules)
        if vocab_size is not None:
            check_ids(self.allowed, vocab_size=vocab_size, what="--allowed")


@dataclass(frozen=True, kw_only=True)
class Writing(Sampling):
    """How texts are generated."""

    max_tokens: int = 200
    """Most tokens to make of each text."""
    stop: tuple[str, ...] = ()
    """A text ends before the first of these strings."""
    seed: int = 0
    """The same seed gives the same texts."""
    num_samples: int = 1
    """Texts of each prompt."""
    log_probs: int = -1
    """Tell the log-probability of each token, and of this many of the likeliest in its place; -1 tells none."""
    memory_len: int = -1
    """Tokens of the past that are seen; more than in training is allowed. -1 means as trained."""
    batch_size: int = 16
    """Texts that are generated at a time."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From settings by name. Raises ConfigError for a name that is none, with the one that was meant."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise ConfigError(
                    f"unknown setting {name!r}.{did_you_mean(name, names)} There are {', '.join(sorted(names))}."
                )
        lists = {name: tuple(values[name]) for name in ("allowed", "stop") if not isinstance(values.get(name, ""), str)}
        if isinstance(values.get("stop"), str):
            lists["stop"] = (values["stop"],)
        return cls(**{**values, **lists})

    def check(self, *, vocab_size: int | None = None) -> None:
        """Raises ConfigError for a setting out of range; with `vocab_size` for an allowed id that there is not."""
        super().check(vocab_size=vocab_size)
        rules = [
            ("max_tokens", self.max_tokens >= 0, "0 or more tokens"),
            ("seed", 0 <= self.seed < 2**63, "0 or more and below 2**63"),
            ("num_samples", self.num_samples >= 1, "1 or more"),
            ("log_probs", self.log_probs >= -1, "0 or more tokens, or -1 for none"),
            ("memory_len", self.memory_len >= -1, "0 or more tokens, or -1 for as trained"),
            ("batch_size", self.batch_size >= 1, "1 or more"),
            ("stop", all(self.stop), "strings that are not empty"),
        ]
        _hold(self, rules)

    def sampling(self) -> Sampling:
        """How tokens are chosen, alone: what texts may share."""
        return Sampling(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Sampling)})


def check_ids(ids: Sequence[int], *, vocab_size: int, what: str) -> None:
    """Raises ConfigError for an id outside the vocabulary."""
    for i in ids:
        if not 0 <= i < vocab_size:
            raise ConfigError(f"{what}: {i} is no id of this model's vocabulary, 0 ... {vocab_size - 1}. Correct it.")


def check_text(text: str) -> None:
    """Raises ConfigError for halves of characters, which stand for bytes that are not UTF-8, or came so in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not valid UTF-8 (character {error.start}). Give it as UTF-8.") from error


def _hold(settings: Sampling, rules: Sequence[tuple[str, bool, str]]) -> None:
    """Raises ConfigError for the first rule of (setting, whether it holds, what it is) that does not hold."""
    for name, holds, rule in rules:
        if not holds:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(settings, name)}: it must be {rule}.")
