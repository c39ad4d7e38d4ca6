"""Options for training a tokenizer. This module imports little, because the command line needs it at each start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from txl_dist.config.renamed import new_keyword
from txl_dist.console.suggest import did_you_mean
from txl_dist.errors import ConfigError

MOST_IDS = 1 << 24
"""Maximum size of a vocabulary that may be requested. The library `tokenizers` allocates memory for the whole requested
size."""


class LearntKind(NamedTuple):
    """Properties of a kind of tokenizer that `txl prepare` can train."""

    settings: tuple[str, ...]
    """Names of the fields of `Learning` that the kind uses, in addition to `end_of_text`."""
    smallest: int
    """Minimum number of ids, special symbols not counted."""
    learn: Callable[[Iterable[str], Learning], Any] | None = None
    """Function that trains a plugin's kind on texts and returns a `Tokenizer`. It may read the texts more than once.
    None for our own kinds, which training.py trains."""


LEARNT_KINDS: dict[str, LearntKind] = {
    "byte": LearntKind(("observed_symbols",), 256),
    "char": LearntKind(("lower_case", "observed_symbols"), 256),
    "word": LearntKind(("vocab_size", "min_frequency", "lower_case", "double_eos"), 1),
    "bpe": LearntKind(("vocab_size", "min_frequency"), 256),
    "unigram": LearntKind(("vocab_size",), 256),
}
"""Trainable kinds by name. A plugin can add kinds (`plugins.register_tokenizer`)."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Options for training a tokenizer of any kind. Options that a kind does not use must be at their defaults."""

    vocab_size: int = 0
    """Maximum number of ids of a word, bpe or unigram tokenizer. 0 means 4,096 for bpe and unigram, and no limit for
    word."""
    min_frequency: int = 1
    """Minimum number of occurrences of a word, or of a bpe merge."""
    lower_case: bool = False
    """Convert text to lower case (kinds char and word)."""
    end_of_text: bool = True
    """Add an end-of-text token after each document. By default the token is added, except for a named corpus (such as
    enwik8) with the kind of tokenizer that papers use for it."""
    observed_symbols: bool = False
    """Give ids only to bytes or characters that occur in the text (kinds byte and char)."""
    double_eos: bool = False
    """Mark the start and the end of each line, as lm1b does (kind word)."""

    def __getattr__(self, name: str) -> Any:
        """Return an option by the name that an earlier version gave it, which a plugin may use."""
        new_name = new_keyword(name, command="prepare")
        if new_name == name:
            raise AttributeError(f"{type(self).__name__} has no option {name!r}")
        return getattr(self, new_name)

    def num_marks(self, kind: str) -> int:
        """Return the number of ids that are not text: the end-of-text token, and for the kind word the end-of-line
        symbol and `<unk>`."""
        return self.end_of_text + (2 if kind == "word" else 0)

    def learning(self) -> dict[str, Any]:
        """Return the values of the options of `Learning` by name. Options that a subclass adds are left out, because
        they do not concern the tokenizer."""
        return {field.name: getattr(self, field.name) for field in fields(Learning)}

    def check_kind(self, kind: str) -> None:
        """Raise ConfigError for an unknown kind, an option that the kind does not use, or an impossible size."""
        if kind not in LEARNT_KINDS:
            hint = did_you_mean(kind, LEARNT_KINDS)
            raise ConfigError(f"unknown tokenizer {kind!r}. Choose one of {', '.join(LEARNT_KINDS)}.{hint}")
        for name, least in (("vocab_size", 0), ("min_frequency", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be {least} or more.")
        kinds_with: dict[str, list[str]] = {}
        for other_kind, row in LEARNT_KINDS.items():
            for name in row.settings:
                kinds_with.setdefault(name, []).append(other_kind)
        for name, kinds in kinds_with.items():
            is_set = getattr(self, name) != getattr(Learning, name)
            if is_set and kind not in kinds:
                raise ConfigError(
                    f"{name} has no meaning for a {kind} tokenizer, only for {' and '.join(kinds)}. Remove this option."
                )
        smallest = self.num_marks(kind) + LEARNT_KINDS[kind].smallest
        if 0 < self.vocab_size < smallest:
            raise ConfigError(
                f"vocab_size={self.vocab_size} is too small: a {kind} tokenizer needs {smallest} or more."
            )
        if self.vocab_size > MOST_IDS:
            raise ConfigError(
                f"vocab_size={self.vocab_size} is too large: a tokenizer has at most {MOST_IDS:,} ids. Give a smaller "
                f"vocab_size, or do not set vocab_size."
            )
