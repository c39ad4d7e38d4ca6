"""Encoding of a command's words for other machines, so that they arrive there as they were typed.

A launch on several machines sends the words through a shell. DeepSpeed's runner for pdsh puts a word with blanks into
double quotes, where `$`, backticks and backslashes keep their meaning, and does not quote the others. pdsh replaces %h,
%n and %u, and an empty word is lost. So if a word has other than plain characters, all words are sent as one plain
word, which `txl` decodes on the other machine, with any launcher.

What DeepSpeed itself writes into that shell cannot be encoded: its folder, Python and variables are checked.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence

from txl_dist.errors import ConfigError

ENCODED = "--encoded-words="
"""Beginning of the one word that holds all words."""
_PLAIN = re.compile(r"[\w@+=:,./-]+", re.ASCII)
_SENT_VARIABLES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""Beginnings of the variables that DeepSpeed sends along (EXPORT_ENVS of its runner, and those of its accelerators)."""
_CHANGED_IN_QUOTES = re.compile(r'["$`\\%]')
"""Characters that change on the way, though DeepSpeed puts the value in double quotes."""


def encode_words(words: Sequence[str]) -> list[str]:
    """Return words that any shell passes on unchanged, for `decode_words`."""
    if all(_PLAIN.fullmatch(word) for word in words):
        return list(words)
    return [ENCODED + base64.urlsafe_b64encode(json.dumps(list(words)).encode()).decode()]


def decode_words(words: Sequence[str]) -> list[str]:
    """Return the words that `encode_words` was given. Raises ConfigError if they were damaged on their way."""
    if len(words) != 1 or not words[0].startswith(ENCODED):
        return list(words)
    try:
        decoded = json.loads(base64.b64decode(words[0].removeprefix(ENCODED), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError) as error:
        raise ConfigError(
            f"{ENCODED} is written by `txl launch` alone, and these are not its words: {error}."
        ) from error
    if not isinstance(decoded, list) or not all(isinstance(word, str) for word in decoded):
        raise ConfigError(f"{ENCODED} is written by `txl launch` alone, and these are not its words.")
    return decoded


def check_remote(places: Mapping[str, str], *, environment: Mapping[str, str]) -> None:
    """Refuse what DeepSpeed would write into the shell of another machine with another meaning.

    `places`: paths and names that it writes there bare, by what they are. Raises ConfigError.
    """
    for what, path in places.items():
        if not _PLAIN.fullmatch(path):
            raise ConfigError(
                f"{what} {path!r} has a character that does not reach other machines unchanged. Use letters, digits "
                "and @ + = : , . / - _ alone, or start each node with --no_ssh --node_rank N."
            )
    for name, value in environment.items():
        if name.startswith(_SENT_VARIABLES) and (found := _CHANGED_IN_QUOTES.search(value)):
            raise ConfigError(
                f"the variable {name} holds {found[0]!r}, which does not reach other machines unchanged. Change or "
                "unset it, or start each node with --no_ssh --node_rank N."
            )
