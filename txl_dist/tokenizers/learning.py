"""What a tokenizer is learnt with. Light to import, since the command line makes its flags of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from txl_dist.console.suggest import did_you_mean
from txl_dist.errors import ConfigError

MOST_IDS = 1 << 24
"""That may be asked for; a library that learns pieces makes room for as many."""


class LearntKind(NamedTuple):
    """Properties of a kind of tokenizer that `txl prepare` can learn; `text.training` learns ours."""

    settings: tuple[str, ...]
    """Fields of `Learning` that it uses, in addition to `end_of_text`."""
    smallest: int
    """Smallest number of ids, special symbols not counted."""
    learn: Callable[[Iterable[str], Learning], Any] | None = None
    """For a plugin's kind: learns the `Tokenizer` from the texts, which it may read more than once."""


LEARNT_KINDS: dict[str, LearntKind] = {
    "byte": LearntKind(("only_seen",), 256),
    "char": LearntKind(("lower_case", "only_seen"), 256),
    "word": LearntKind(("vocab_size", "min_frequency", "lower_case", "sentence_marks"), 1),
    "bpe": LearntKind(("vocab_size", "min_frequency"), 256),
    "unigram": LearntKind(("vocab_size",), 256),
}
"""By name; a plugin may add rows (`plugins.register_tokenizer`)."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How symbols are chosen, whatever the kind; what a kind does not have stays at its default."""

    vocab_size: int = 0
    """Largest vocabulary of word, bpe and unigram; 0 means 4096, and no limit for word."""
    min_frequency: int = 1
    """Fewest occurrences of a word, or of a bpe merge."""
    lower_case: bool = False
    """Make text lower case (char, word)."""
    end_of_text: bool = True
    """Put an end-of-text behind each document. Named corpora with the tokenizer of the papers never have one."""
    only_seen: bool = False
    """No ids for bytes or characters that do not occur (byte, char)."""
    sentence_marks: bool = False
    """lm1b's marks of lines (word)."""

    def num_marks(self, kind: str) -> int:
        """Ids that are no pieces of text: end-of-text, and of words the mark of lines and the unknown."""
        return self.end_of_text + (2 if kind == "word" else 0)

    def learning(self) -> dict[str, Any]:
        """These settings alone, by name."""
        return {field.name: getattr(self, field.name) for field in fields(Learning)}

    def check_kind(self, kind: str) -> None:
        """Raises ConfigError for an unknown kind, a setting that it does not have, and an impossible size."""
        if kind not in LEARNT_KINDS:
            hint = did_you_mean(kind, LEARNT_KINDS)
            raise ConfigError(f"unknown tokenizer {kind!r}; choose one of {', '.join(LEARNT_KINDS)}.{hint}")
        for name, least in (("vocab_size", 0), ("min_frequency", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be {least} or more.")
        conditional = dict.fromkeys(name for row in LEARNT_KINDS.values() for name in row.settings)
        for name in conditional:
            known = [other for other, row in LEARNT_KINDS.items() if name in row.settings]
            if getattr(self, name) != getattr(Learning, name) and kind not in known:
                raise ConfigError(
                    f"{name} has no meaning for a {kind} tokenizer, only for {' and '.join(known)}; leave it out."
                )
        smallest = self.num_marks(kind) + LEARNT_KINDS[kind].smallest
        if 0 < self.vocab_size < smallest:
            raise ConfigError(
                f"vocab_size={self.vocab_size} is too small: a {kind} tokenizer needs {smallest} or more."
            )
        if self.vocab_size > MOST_IDS:
            raise ConfigError(
                f"vocab_size={self.vocab_size} is too large: a tokenizer has at most {MOST_IDS:,} ids. Give a smaller "
                "number, or leave it out."
            )
