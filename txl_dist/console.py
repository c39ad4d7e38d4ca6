"""What is written to people passes here: text of others must not steer their terminal.

File names, splits, fields of a bundle, records and generated text may hold escape sequences, which move the cursor,
rename the window or rewrite what was printed before. So every control character but newline and tab, C1 and DEL, the
marks that turn the direction of writing, and halves of characters are written out (\\x1b), in what verbs print, in log
lines and in errors, wherever they go. Only text that a model generates is given as it is to a file or a pipe, byte by
byte; on a terminal it is escaped too.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    """The text with what would steer a terminal written out, as Python spells it."""
    return _STEERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, *, to: TextIO | None = None, flush: bool = False) -> None:
    """Print lines for people, on standard output unless told otherwise."""
    stream = sys.stdout if to is None else to
    print(_encodable(escaped(text), stream), file=stream, flush=flush)


def write_text(text: str) -> None:
    """Write a piece of generated text to standard output at once: as it is, unless that is a terminal."""
    stream = sys.stdout
    stream.write(_encodable(escaped(text) if stream.isatty() else text, stream))
    stream.flush()


def _encodable(text: str, stream: TextIO) -> str:
    """With characters that the stream's encoding lacks written out: a locale of ASCII is no reason to fail."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)
