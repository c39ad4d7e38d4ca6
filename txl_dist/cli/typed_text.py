"""Decoding of texts on the command line, which are UTF-8 in every locale.

In an ASCII locale (`LC_ALL=C` with `PYTHONUTF8=0`) Python reads the bytes of characters outside ASCII as lone
surrogates. For a path this is right, because Python encodes the path to the same bytes again. So only the values of
flags that take texts are decoded again as UTF-8. Bytes that are not UTF-8 stay unchanged, and are refused later.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

TEXT_FLAGS = frozenset(
    {"--prompt", "--stop", "--name", "--author", "--license", "--data-license", "--metrics.sample-prompt"}
    | {f"--metrics.wandb-{key}" for key in ("entity", "name", "group", "tags")}
)
"""Flags whose values are texts and not paths."""


def decode_texts(words: Sequence[str]) -> list[str]:
    """Return the words of a command, with the values of TEXT_FLAGS decoded as UTF-8."""
    decoded: list[str] = []
    is_text = False
    for word in words:
        flag, is_joined, value = word.partition("=")
        is_flag = word.startswith("--")
        if is_flag:
            is_text = flag.replace("_", "-") in TEXT_FLAGS
        if is_text and is_flag and is_joined:
            decoded.append(f"{flag}={_decoded(value)}")
        else:
            decoded.append(_decoded(word) if is_text else word)
    return decoded


def _decoded(text: str) -> str:
    """Decode the bytes of a word as UTF-8. If they are not UTF-8, return the word unchanged."""
    if text.isascii():
        return text
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        return text
