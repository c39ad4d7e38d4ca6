"""Pairs of hexadecimal digits: a tokenizer for text such as `0aff 12`, whose ids stand for a pair or one character."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from txl_dist import plugins
from txl_dist.errors import DataError
from txl_dist.tokenizers.base import END_OF_TEXT, Ids, SpelledTokenizer

PIECE = re.compile(r"[0-9a-f]{2}|.", re.DOTALL)


class HexTokenizer(SpelledTokenizer):
    """`SpelledTokenizer` decodes, and writes and reads the file: each id stands for a fixed text, its symbol."""

    kind: ClassVar[str] = "hex"

    @property
    def is_lossless(self) -> bool:
        """Every text that it takes comes back as it was."""
        return True

    def encode(self, text: str) -> Ids:
        """Raises DataError for a piece that has no id."""
        try:
            return np.array([self._ids[piece] for piece in PIECE.findall(text)], dtype=np.int32)
        except KeyError as error:
            raise DataError(f"the piece {error.args[0]!r} is not in the vocabulary of the hex tokenizer.") from error


def learn(texts: Iterable[str], learning: plugins.Learning) -> HexTokenizer:
    """The pieces of the texts, the most frequent first."""
    counts: Counter[str] = Counter()
    num_texts = 0
    for text in texts:
        counts.update(PIECE.findall(text))
        num_texts += 1
    if learning.end_of_text:
        counts[END_OF_TEXT] = num_texts
    symbols = sorted(counts, key=lambda symbol: (-counts[symbol], symbol))
    return HexTokenizer(symbols, end_of_text=symbols.index(END_OF_TEXT) if learning.end_of_text else None)


plugins.register_tokenizer(HexTokenizer, learn)
