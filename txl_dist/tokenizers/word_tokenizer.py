"""One id per word between blanks, the way PTB and WikiText are counted: `<eos>` behind each line, `<unk>`.

Lines and words are taken one by one: a text of half a gigabyte is never a list of its words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from txl_dist.tokenizers.base import REFUSED, UNKNOWN, Ids, SpelledTokenizer, unknown_error

END_OF_LINE = "<eos>"


class WordTokenizer(SpelledTokenizer):
    """One id per word between blanks; each line ends in `<eos>`, the way WikiText and PTB are counted.

    Decoding puts a blank behind every word and a newline for `<eos>`: any other white space is lost.
    Vocabularies from elsewhere may differ: another symbol or none before and behind each line, and for unknown
    words (None: they are refused); text that is made lower case. The mark behind a line is its newline.
    """

    kind = "word"
    unit = "word"
    defaults: ClassVar[dict[str, Any]] = {
        "line_start": None,
        "line_end": END_OF_LINE,
        "unknown": UNKNOWN,
        "lower_case": False,
    }

    def __init__(
        self,
        symbols: Sequence[str],
        *,
        end_of_text: int | None,
        line_start: str | None = None,
        line_end: str | None = END_OF_LINE,
        unknown: str | None = UNKNOWN,
        lower_case: bool = False,
    ) -> None:
        self.line_start = line_start
        self.line_end = line_end
        self.unknown = unknown
        self.lower_case = lower_case
        super().__init__(symbols, end_of_text=end_of_text)
        self.unknown_id = None if unknown is None else self._ids[unknown]
        if missing := {line_start, line_end} - {None} - self._ids.keys():
            raise ValueError(f"the marks of lines {sorted(map(str, missing))} are not among the symbols")

    def encode(self, text: str) -> Ids:
        """One lookup per word and mark of a line. Raises DataError for a word that is unknown and has no symbol."""
        id_of, unknown_id = self._ids.get, REFUSED if self.unknown_id is None else self.unknown_id
        ids = np.fromiter((id_of(word, unknown_id) for word in self._split(text)), dtype=np.int32)
        if self.unknown is None and (ids == REFUSED).any():
            raise unknown_error("word", next(word for word in self._split(text) if word not in self._ids))
        return ids

    def encode_prompt(self, text: str) -> Ids:
        """Without the mark that `encode` puts behind a last line that has no newline."""
        ids = self.encode(text)
        return ids[:-1] if self.line_end is not None and text and not text.endswith("\n") else ids

    def joint(self, text: str) -> str:
        """A blank, unless the prompt ends in one."""
        return " " if text and not text[-1].isspace() else ""

    def _split(self, text: str) -> Iterator[str]:
        text = text.lower() if self.lower_case else text
        return split_words(text, line_start=self.line_start, line_end=self.line_end)

    def _spell(self, symbol: str) -> bytes:
        if symbol in (self.line_start, self.line_end):
            return b"\n" if symbol == self.line_end else b""
        return f"{symbol} ".encode()


def split_words(text: str, *, line_start: str | None = None, line_end: str | None = END_OF_LINE) -> Iterator[str]:
    """Words of a text with the marks before and behind each line; the last line needs no newline."""
    start = [] if line_start is None else [line_start]
    end = [] if line_end is None else [line_end]
    for line in _lines(text):
        yield from (*start, *line.split(), *end)


def _lines(text: str) -> Iterator[str]:
    """Lines between newlines only; `splitlines` would end them at other characters too."""
    first = 0
    while first < len(text):
        last = text.find("\n", first)
        last = len(text) if last < 0 else last
        yield text[first:last]
        first = last + 1
