"""Encoding of a command's words for other machines, so that the words arrive there as they were typed.

A launch on several machines sends the words through a shell. DeepSpeed's runner for pdsh puts a word with blanks into
double quotes, where `$`, backticks and backslashes keep their meaning. It does not quote other words. pdsh replaces %h,
%n and %u, and an empty word is lost. So if a word has a character that is not plain, all words are encoded as one plain
word. This is done for every launcher, not only for pdsh. `txl` decodes this word on the other machine.

The words that DeepSpeed itself writes into that shell cannot be encoded. So the folder, the path of Python and the
variables that DeepSpeed writes are checked.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence

from txl_dist.errors import ConfigError

ENCODED = "--encoded-words="
"""Beginning of the single word that encodes all words."""
_PLAIN = re.compile(r"[\w@+=:,./-]+", re.ASCII)
_SENT_VARIABLES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""Beginnings of the names of the environment variables that DeepSpeed sends to other machines (EXPORT_ENVS of its
runner, and the variables of its accelerators)."""
_CHANGED_IN_QUOTES = re.compile(r'["$`\\%]')
"""Characters that a shell changes even if DeepSpeed puts the value in double quotes."""


def encode_words(words: Sequence[str]) -> list[str]:
    """Encode a command's words so that any shell passes them on unchanged. `decode_words` reads the result."""
    if all(_PLAIN.fullmatch(word) for word in words):
        return list(words)
    return [ENCODED + base64.urlsafe_b64encode(json.dumps(list(words)).encode()).decode()]


def decode_words(words: Sequence[str]) -> list[str]:
    """Decode the words that `encode_words` encoded. Raises ConfigError if a shell damaged them."""
    if len(words) != 1 or not words[0].startswith(ENCODED):
        return list(words)
    try:
        decoded = json.loads(base64.b64decode(words[0].removeprefix(ENCODED), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError) as error:
        raise ConfigError(
            f"the value of {ENCODED} is damaged ({error}). Only `txl launch` may write this flag. Start `txl launch` "
            "again."
        ) from error
    if not isinstance(decoded, list) or not all(isinstance(word, str) for word in decoded):
        raise ConfigError(
            f"the value of {ENCODED} is damaged. Only `txl launch` may write this flag. Start `txl launch` again."
        )
    return decoded


def check_remote(places: Mapping[str, str], *, environment: Mapping[str, str]) -> None:
    """Refuse paths and names that would change their meaning in the shell of another machine.

    `places` holds the paths and names that DeepSpeed writes to this shell without quotes, each under a description for
    messages. Raises ConfigError.
    """
    for what, path in places.items():
        if not _PLAIN.fullmatch(path):
            raise ConfigError(
                f"{what} {path!r} has a character that pdsh or the shell of the other machines would change. Use only "
                "letters, digits and @ + = : , . / - _, or start each node with --no_ssh --node_rank N."
            )
    for name, value in environment.items():
        if name.startswith(_SENT_VARIABLES) and (found := _CHANGED_IN_QUOTES.search(value)):
            raise ConfigError(
                f"the variable {name} contains {found[0]!r}, which pdsh or the shell of the other machines would "
                f"change. Change or unset {name}, or start each node with --no_ssh --node_rank N."
            )
