"""Texts on the command line are UTF-8 in every locale.

In a locale of ASCII (`LC_ALL=C` with `PYTHONUTF8=0`) Python reads the bytes of other characters as halves of
characters. For a path that is right: it is turned back into the same bytes. For a text it is not, so the values of the
flags that take texts are read again as the UTF-8 that they are. Bytes that are not UTF-8 stay, and are refused later.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

TEXT_FLAGS = frozenset(
    {"--prompt", "--stop", "--name", "--author", "--license", "--data-license", "--metrics.sample-prompt"}
    | {f"--metrics.wandb-{key}" for key in ("entity", "name", "group", "tags")}
)
"""Flags whose values are texts, and no paths."""


def decode_texts(words: Sequence[str]) -> list[str]:
    """Return the words of a command with the values of TEXT_FLAGS decoded."""
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
    """The text that the bytes of a word are in UTF-8; the word as it is where they are none."""
    if text.isascii():
        return text
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        return text
