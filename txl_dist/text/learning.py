"""What a tokenizer is learnt with. Light to import, since the command line makes its flags of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from txl_dist.errors import ConfigError

TokenizerKind = Literal["byte", "char", "word", "bpe", "unigram"]
"""The kinds that can be trained here."""
MOST_IDS = 1 << 24
"""That may be asked for; a library that learns pieces makes room for as many."""
_KINDS_WITH = {
    "vocab_size": ("word", "bpe", "unigram"),
    "min_frequency": ("word", "bpe"),
    "lower_case": ("char", "word"),
    "only_seen": ("byte", "char"),
    "sentence_marks": ("word",),
}
"""The kinds for which a setting means something."""


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
        if kind not in get_args(TokenizerKind):
            raise ConfigError(f"unknown tokenizer {kind!r}; choose one of {', '.join(get_args(TokenizerKind))}.")
        for name, least in (("vocab_size", 0), ("min_frequency", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be {least} or more.")
        for name, kinds in _KINDS_WITH.items():
            if getattr(self, name) != getattr(Learning, name) and kind not in kinds:
                known = " and ".join(kinds)
                raise ConfigError(f"{name} has no meaning for a {kind} tokenizer, only for {known}; leave it out.")
        smallest = self.num_marks(kind) + (1 if kind == "word" else 256)
        if 0 < self.vocab_size < smallest:
            raise ConfigError(
                f"vocab_size={self.vocab_size} is too small: a {kind} tokenizer needs {smallest} or more."
            )
        if self.vocab_size > MOST_IDS:
            raise ConfigError(
                f"vocab_size={self.vocab_size} is too large: a tokenizer has at most {MOST_IDS:,} ids. Give a smaller "
                "number, or leave it out."
            )
