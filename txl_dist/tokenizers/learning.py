"""Options for training a tokenizer. Light to import, because the command line makes flags of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from txl_dist.config.renamed import new_keyword
from txl_dist.console.suggest import did_you_mean
from txl_dist.errors import ConfigError

MOST_IDS = 1 << 24
"""Largest vocabulary that may be requested; the library `tokenizers` allocates memory for all of it."""


class LearntKind(NamedTuple):
    """Properties of a kind of tokenizer that `txl prepare` can train. training.py trains our own kinds."""

    settings: tuple[str, ...]
    """Fields of `Learning` that it uses, in addition to `end_of_text`."""
    smallest: int
    """Smallest number of ids, special symbols not counted."""
    learn: Callable[[Iterable[str], Learning], Any] | None = None
    """Function of a plugin's kind: trains the `Tokenizer` on texts, which it may read more than once."""


LEARNT_KINDS: dict[str, LearntKind] = {
    "byte": LearntKind(("observed_symbols",), 256),
    "char": LearntKind(("lower_case", "observed_symbols"), 256),
    "word": LearntKind(("vocab_size", "min_frequency", "lower_case", "double_eos"), 1),
    "bpe": LearntKind(("vocab_size", "min_frequency"), 256),
    "unigram": LearntKind(("vocab_size",), 256),
}
"""Trainable kinds by name; a plugin may add rows (`plugins.register_tokenizer`)."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Options for training a tokenizer of any kind. Options that a kind does not use must be at their defaults."""

    vocab_size: int = 0
    """Largest vocabulary of word, bpe and unigram. 0 means 4096, but no limit for word."""
    min_frequency: int = 1
    """Minimum occurrences of a word, or of a bpe merge."""
    lower_case: bool = False
    """Make text lower case (char, word)."""
    end_of_text: bool = True
    """Add an end-of-text token after each document, except in named corpora with the papers' tokenizer."""
    observed_symbols: bool = False
    """Give ids only to bytes or characters that occur (byte, char)."""
    double_eos: bool = False
    """Mark the start and end of each line, as lm1b does (word)."""

    def __getattr__(self, name: str) -> Any:
        """Return an option by the name that an earlier version gave it, which a plugin may use."""
        new_name = new_keyword(name, command="prepare")
        if new_name == name:
            raise AttributeError(f"{type(self).__name__} has no option {name!r}")
        return getattr(self, new_name)

    def num_marks(self, kind: str) -> int:
        """Return the number of ids that are not text: end-of-text, and for words the line mark and the unknown."""
        return self.end_of_text + (2 if kind == "word" else 0)

    def learning(self) -> dict[str, Any]:
        """Return these options by name, without those of a subclass."""
        return {field.name: getattr(self, field.name) for field in fields(Learning)}

    def check_kind(self, kind: str) -> None:
        """Raise ConfigError for an unknown kind, an option that it does not have, or an impossible size."""
        if kind not in LEARNT_KINDS:
            hint = did_you_mean(kind, LEARNT_KINDS)
            raise ConfigError(f"unknown tokenizer {kind!r}; choose one of {', '.join(LEARNT_KINDS)}.{hint}")
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
                    f"{name} has no meaning for a {kind} tokenizer, only for {' and '.join(kinds)}; leave it out."
                )
        smallest = self.num_marks(kind) + LEARNT_KINDS[kind].smallest
        if 0 < self.vocab_size < smallest:
            raise ConfigError(
                f"vocab_size={self.vocab_size} is too small: a {kind} tokenizer needs {smallest} or more."
            )
        if self.vocab_size > MOST_IDS:
            raise ConfigError(
                f"vocab_size={self.vocab_size} is too large: a tokenizer has at most {MOST_IDS:,} ids. Give a smaller "
                f"vocab_size, or none."
            )
