"""Options of text generation. This module imports no torch, because the command line makes flags from these options."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal, Self

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from txl_dist.config.foreign_names import find_counterpart
from txl_dist.console.formatting import flag_of
from txl_dist.console.suggest import did_you_mean
from txl_dist.errors import ConfigError

InferencePrecision = Literal["stored", "fp32", "bf16"]
"""Number type in which a network runs. stored: the type of the bundle's weights. Runs, checkpoints and int8 bundles
then run in fp32."""
MOST_TOKENS = 10**9
"""Largest value of `max_tokens`. A larger number raises an error, because it is probably a typing mistake."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True))
class Sampling:
    """Options that choose the next token of a text."""

    temperature: float = 0.8
    """Sampling temperature. 0 takes the likeliest token. 1 keeps the model's probabilities."""
    top_k: int = 40
    """Keep only this many of the likeliest tokens. 0 keeps all."""
    top_p: float = 1.0
    """Keep only the smallest set of likeliest tokens whose probabilities sum to at least this value."""
    min_p: float = 0.0
    """Keep only tokens with at least this share of the likeliest token's probability. 0 keeps all."""
    repetition_penalty: float = 1.0
    """Factor that multiplies the log-probability of tokens that occurred in the prompt or the text. A value above 1
    makes these tokens less likely. 1 changes nothing."""
    allowed: tuple[int, ...] = ()
    """Token ids that can be generated. Without this option all ids can be generated."""

    def check(self, *, vocab_size: int | None = None) -> None:
        """Raise ConfigError if a setting is out of range. With `vocab_size` also check the ids in `allowed`."""
        rules = [
            ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more tokens (0 keeps all)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 keeps all)"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1 (0 keeps all)"),
            ("repetition_penalty", 1 <= self.repetition_penalty < math.inf, "1 or more (1 changes nothing)"),
        ]
        _hold(self, rules)
        if vocab_size is not None:
            check_ids(self.allowed, vocab_size=vocab_size, what="--allowed")


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True))
class SamplingParams(Sampling):
    """Options of generated texts: how tokens are chosen, when a text ends, and how many texts are generated."""

    max_tokens: int = 200
    """Maximum tokens to generate per text."""
    stop: tuple[str, ...] = ()
    """Strings that end a text. The text does not contain the string."""
    seed: int = 0
    """Seed of the random choice of tokens. The same seed gives the same texts."""
    num_samples: int = 1
    """Number of texts per prompt."""
    log_probs: int = -1
    """Write the log-probability of each token and of this many likeliest alternatives. -1 writes no
    log-probabilities."""
    memory_len: int = -1
    """Past tokens that the model sees, possibly more than in training. -1 means as many as in training."""
    batch_size: int = 16
    """Number of texts generated at once."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Make parameters from a mapping of settings. Arrays are accepted in place of lists and numbers.

        Raises ConfigError for a value of the wrong type, and for an unknown name. The message suggests the nearest
        known name.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                counterpart = find_counterpart(name, names)
                if counterpart:
                    hint = counterpart.hint(spell=_spelt)
                else:
                    hint = did_you_mean(name, names)
                raise ConfigError(f"unknown setting {name!r}.{hint} Known settings: {', '.join(sorted(names))}.")
        plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}
        if isinstance(plain.get("stop"), str):
            plain["stop"] = [plain["stop"]]
        lists = {name: tuple(plain[name]) for name in _LISTS if isinstance(plain.get(name), list | range | Set)}
        try:
            return cls(**{**plain, **lists})
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            kind = _LISTS.get(name) or ("a number" if isinstance(getattr(cls, name), float) else "a whole number")
            raise ConfigError(f"{name}={values[name]!r:.200}: it must be {kind}.") from error

    def check(self, *, vocab_size: int | None = None) -> None:
        """Raise ConfigError if a setting is out of range. With `vocab_size` also check the ids in `allowed`."""
        super().check(vocab_size=vocab_size)
        rules = [
            ("max_tokens", 0 <= self.max_tokens <= MOST_TOKENS, f"0 or more tokens, and at most {MOST_TOKENS:,}"),
            ("seed", 0 <= self.seed < 2**63, "0 or more and below 2**63"),
            ("num_samples", self.num_samples >= 1, "1 or more"),
            ("log_probs", self.log_probs >= -1, "0 or more tokens, or -1 for none"),
            ("memory_len", self.memory_len >= -1, "0 or more tokens, or -1 for the value of training"),
            ("batch_size", self.batch_size >= 1, "1 or more"),
            ("stop", all(self.stop), "strings that are not empty"),
        ]
        _hold(self, rules)

    @property
    def num_spare(self) -> int:
        """Largest number of tokens that a stop string can remove from a text.

        A character has up to four bytes, and a token has at least one byte.
        """
        return 4 * max(map(len, self.stop), default=0)

    def sampling(self) -> Sampling:
        """Return only the settings that choose a token. Texts with equal settings are sampled together."""
        return Sampling(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Sampling)})


_LISTS = {"allowed": "a list of ids", "stop": "a string, or a list of strings"}
"""Settings that have several values, each with a description of the values for messages."""


def check_ids(ids: Any, *, vocab_size: int, what: str) -> list[int]:
    """Return the ids of a list, an array or a tensor.

    Raises ConfigError for other values, and for ids outside the vocabulary.
    """
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, str | bytes | bytearray | Mapping | Set) or not isinstance(ids, Iterable):
        raise ConfigError(f"{what}: {ids!r:.200} is not a list of token ids (whole numbers). Correct the list.")
    found = []
    for i in ids:
        given: Any = None if isinstance(i, bool) else i
        try:
            found.append(operator.index(given))
        except TypeError as error:
            raise ConfigError(f"{what}: {i!r:.200} is not a token id (a whole number). Correct the id.") from error
        if not 0 <= found[-1] < vocab_size:
            raise ConfigError(
                f"{what}: {found[-1]} is not an id of this model's vocabulary, 0 ... {vocab_size - 1}. Correct the id."
            )
    return found


def check_count(value: Any, *, least: int, what: str) -> None:
    """Raise ConfigError for a value that is not a whole number, or is below `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        if least < 0:
            hint = ", or -1 for the value of training"
        else:
            hint = ""
        raise ConfigError(f"{what}={value!r:.200}: it must be a whole number, {max(0, least)} or more{hint}.")


def check_text(text: str) -> None:
    """Raise ConfigError for a value that is not text, and for text with surrogates, which is not valid UTF-8."""
    if not isinstance(text, str):
        raise ConfigError(f"{text!r:.200} is not a text. Give a string.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the prompt is not valid UTF-8 (character {error.start}). Pass the prompt as UTF-8."
        ) from error


def _spelt(name: str, value: str) -> str:
    if value:
        return f"{name}={value}"
    return name


def _hold(settings: Sampling, rules: Sequence[tuple[str, bool, str]]) -> None:
    """Raise ConfigError for the first rule that does not hold. A rule is (setting, whether the rule holds, text of the
    rule)."""
    for name, holds, rule in rules:
        if not holds:
            raise ConfigError(f"{flag_of(name)} {getattr(settings, name)}: it must be {rule}.")
