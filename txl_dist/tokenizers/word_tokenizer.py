"""Tokenizer with one id per word between blanks, an `<eos>` after each line, and `<unk>`, as in PTB and WikiText.

Lines and words are read one by one, so that a text of half a gigabyte never becomes a list of its words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from txl_dist.tokenizers.base import REFUSED, UNKNOWN, Ids, SpelledTokenizer, unknown_error

END_OF_LINE = "<eos>"


class WordTokenizer(SpelledTokenizer):
    """Tokenizer with one id per word between blanks, and `<eos>` after each line, as WikiText and PTB count.

    Decoding writes a blank after every word and a newline for `<eos>`. Any other white space of the text is lost. An
    imported vocabulary may have other symbols, or none, for the start and the end of lines (`line_start`, `line_end`)
    and for unknown words. If `unknown` is None, an unknown word raises DataError. The symbol at the end of a line
    decodes to a newline.
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
        if unknown is None:
            self.unknown_id = None
        else:
            self.unknown_id = self._ids[unknown]
        missing = {line_start, line_end} - {None} - self._ids.keys()
        if missing:
            raise ValueError(
                f"the vocabulary lacks the symbols for the start or the end of a line: {sorted(map(str, missing))}"
            )

    def encode(self, text: str) -> Ids:
        """Return one id per word, and one id per symbol at the start or the end of a line.

        Raises DataError for an unknown word, if the vocabulary has no symbol for unknown words.
        """
        id_of = self._ids.get
        if self.unknown_id is None:
            unknown_id = REFUSED
        else:
            unknown_id = self.unknown_id
        ids = np.fromiter((id_of(word, unknown_id) for word in self._split(text)), dtype=np.int32)
        if self.unknown is None and (ids == REFUSED).any():
            first_unknown = next(word for word in self._split(text) if word not in self._ids)
            raise unknown_error("word", first_unknown)
        return ids

    def encode_prompt(self, text: str) -> Ids:
        """Return the ids of a prompt, without the end-of-line symbol that `encode` adds if the last line has no
        newline."""
        ids = self.encode(text)
        has_added_mark = self.line_end is not None and text != "" and not text.endswith("\n")
        if has_added_mark:
            return ids[:-1]
        return ids

    def joint(self, text: str) -> str:
        """Return the text to show between a prompt and its continuation: a blank, or an empty text if the prompt is
        empty or ends in white space."""
        if text and not text[-1].isspace():
            return " "
        return ""

    def _split(self, text: str) -> Iterator[str]:
        if self.lower_case:
            text = text.lower()
        return split_words(text, line_start=self.line_start, line_end=self.line_end)

    def _spell(self, symbol: str) -> bytes:
        if symbol == self.line_end:
            return b"\n"
        if symbol == self.line_start:
            return b""
        return f"{symbol} ".encode()


def split_words(text: str, *, line_start: str | None = None, line_end: str | None = END_OF_LINE) -> Iterator[str]:
    """Yield a text's words, with the marks at the start and the end of each line. The last line needs no newline."""
    for line in _lines(text):
        if line_start is not None:
            yield line_start
        yield from line.split()
        if line_end is not None:
            yield line_end


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, which end only at newlines. `splitlines` would split at other characters too."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        if end < 0:
            end = len(text)
        yield text[start:end]
        start = end + 1
