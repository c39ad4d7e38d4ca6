"""The smallest alphabets: one id per byte, or one per code point.

Both come with everything (all 256 bytes; `<unk>` for unseen characters) or, `only_seen`, with exactly what the
training split holds, as the character-level benchmarks count: enwik8 has 204 ids, text8 27. What was not seen is
then refused by name, because there is no id for it.
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
    """One id per byte of UTF-8: all 256 of them, unless `only_seen`.

    Text that was read with `surrogateescape` is encoded to the very bytes it was read from, be they UTF-8 or not.
    """

    kind = "byte"
    defaults: ClassVar[dict[str, Any]] = {"only_seen": False}

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None, only_seen: bool = False) -> None:
        self.only_seen = only_seen
        super().__init__(symbols, end_of_text=end_of_text)
        self._table = np.array([self._ids.get(symbol, REFUSED) for symbol in byte_symbols()], dtype=np.int32)
        if not only_seen and (self._table == REFUSED).any():
            raise ValueError(f"byte {int((self._table == REFUSED).argmax())} has no symbol")

    @property
    def is_lossless(self) -> bool:
        """Always: what has no id is refused."""
        return True

    def encode(self, text: str) -> Ids:
        """One lookup per byte. Raises DataError for a byte that has no id (`only_seen`)."""
        content = np.frombuffer(text.encode("utf-8", errors="surrogateescape"), dtype=np.uint8)
        ids: Ids = self._table[content]
        if self.only_seen and (missing := ids == REFUSED).any():
            raise unknown_error("byte", f"0x{content[missing.argmax()]:02x}")
        return ids

    def _spell(self, symbol: str) -> bytes:
        return bytes_of_symbol(symbol)


class CharTokenizer(SpelledTokenizer):
    """One id per code point; others become the symbol `unknown`, shown as U+FFFD. None: they are refused."""

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
        self.unknown_id = None if unknown is None else self._ids[unknown]
        points = {ord(symbol): i for symbol, i in self._ids.items() if symbol != unknown}
        # One entry past the highest known code point stands for all above it.
        missing = REFUSED if self.unknown_id is None else self.unknown_id
        self._table = np.full(max(points, default=0) + 2, missing, dtype=np.int32)
        self._table[list(points)] = list(points.values())

    @property
    def is_lossless(self) -> bool:
        """If what is unknown is refused, and no case is lost."""
        return self.unknown is None and not self.lower_case

    def keeps_text(self, *, num_unknown: int) -> bool:
        """If nothing of it was unknown, and no case is lost."""
        return not self.lower_case and not num_unknown

    def encode(self, text: str) -> Ids:
        """One lookup per code point. Raises DataError for one that is unknown and has no symbol."""
        text = text.lower() if self.lower_case else text
        points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        ids: Ids = self._table[np.minimum(points, len(self._table) - 1)]
        if self.unknown is None and (missing := ids == REFUSED).any():
            raise unknown_error("character", text[int(missing.argmax())])
        return ids

    def _spell(self, symbol: str) -> bytes:
        return ("\ufffd" if symbol == self.unknown else symbol).encode("utf-8")
