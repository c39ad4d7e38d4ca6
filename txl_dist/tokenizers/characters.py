"""Tokenizers with one id per byte, or one id per code point (character).

By default both encode any text: the byte tokenizer has all 256 bytes, and the character tokenizer has `<unk>` for
unseen characters. With `only_seen` a tokenizer has exactly the symbols of the training split, as character-level
benchmarks count: 204 ids for enwik8, 27 ids for text8. Text with other symbols then raises DataError, because no id
stands for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from txl_dist.tokenizers.base import (
    REFUSED,
    UNKNOWN,
    Ids,
    SpelledTokenizer,
    byte_symbols,
    bytes_of_symbol,
    unknown_error,
)


class ByteTokenizer(SpelledTokenizer):
    """Tokenizer with one id per byte of UTF-8. With `only_seen` only bytes of the training split have an id.

    Text that was read with `surrogateescape` is encoded to its original bytes, even if these are not UTF-8.
    """

    kind = "byte"
    defaults: ClassVar[dict[str, Any]] = {"only_seen": False}

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None, only_seen: bool = False) -> None:
        self.only_seen = only_seen
        super().__init__(symbols, end_of_text=end_of_text)
        self._id_of_byte = np.array([self._ids.get(symbol, REFUSED) for symbol in byte_symbols()], dtype=np.int32)
        is_missing = self._id_of_byte == REFUSED
        if not only_seen and is_missing.any():
            raise ValueError(f"byte {int(is_missing.argmax())} has no symbol")

    @property
    def is_lossless(self) -> bool:
        """Whether decoding restores the bytes of every text. Always True, because a byte without an id is refused."""
        return True

    def encode(self, text: str) -> Ids:
        """Return one id per byte of the text. Raises DataError for a byte that has no id (`only_seen`)."""
        content = np.frombuffer(text.encode("utf-8", errors="surrogateescape"), dtype=np.uint8)
        ids: Ids = self._id_of_byte[content]
        if self.only_seen:
            is_missing = ids == REFUSED
            if is_missing.any():
                raise unknown_error("byte", f"0x{content[is_missing.argmax()]:02x}")
        return ids

    def _spell(self, symbol: str) -> bytes:
        return bytes_of_symbol(symbol)


class CharTokenizer(SpelledTokenizer):
    """Tokenizer with one id per code point (character).

    A code point without an id becomes the symbol `unknown`, which decodes to U+FFFD. If `unknown` is None, such a code
    point raises DataError. With `lower_case` text is converted to lower case first.
    """

    kind = "char"
    defaults: ClassVar[dict[str, Any]] = {"unknown": UNKNOWN, "lower_case": False}

    def __init__(
        self,
        symbols: Sequence[str],
        *,
        end_of_text: int | None,
        unknown: str | None = UNKNOWN,
        lower_case: bool = False,
    ) -> None:
        self.unknown = unknown
        self.lower_case = lower_case
        super().__init__(symbols, end_of_text=end_of_text)
        if unknown is None:
            self.unknown_id = None
        else:
            self.unknown_id = self._ids[unknown]
        ids_by_point = {ord(symbol): i for symbol, i in self._ids.items() if symbol != unknown}
        # The last entry, one past the highest known code point, stands for all code points above it.
        table_len = max(ids_by_point, default=0) + 2
        if self.unknown_id is None:
            unknown_value = REFUSED
        else:
            unknown_value = self.unknown_id
        self._id_of_point = np.full(table_len, unknown_value, dtype=np.int32)
        self._id_of_point[list(ids_by_point)] = list(ids_by_point.values())

    @property
    def is_lossless(self) -> bool:
        """Whether decoding restores the bytes of every text. True if unknown characters are refused and case is
        kept."""
        return self.unknown is None and not self.lower_case

    def keeps_text(self, *, num_unknown: int) -> bool:
        """Return whether decoding restores the bytes of a text with `num_unknown` unknown characters.

        The result is True if no character is unknown and case is kept.
        """
        return not self.lower_case and not num_unknown

    def encode(self, text: str) -> Ids:
        """Return one id per code point of the text.

        Raises DataError for a code point without an id, if there is no symbol `unknown`.
        """
        if self.lower_case:
            text = text.lower()
        points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        ids: Ids = self._id_of_point[np.minimum(points, len(self._id_of_point) - 1)]
        if self.unknown is None:
            is_missing = ids == REFUSED
            if is_missing.any():
                raise unknown_error("character", text[int(is_missing.argmax())])
        return ids

    def _spell(self, symbol: str) -> bytes:
        if symbol == self.unknown:
            shown = "\ufffd"
        else:
            shown = symbol
        return shown.encode("utf-8")
