"""Byte-level BPE and unigram, both run by the library `tokenizers` and both lossless: any text comes back.

Text is first split into words as GPT-2 does, and its bytes are spelled in GPT-2's alphabet of 256 printable
characters, all of which are symbols, so nothing is unknown and every id is a fixed run of bytes.

What they give up: normalisation, added tokens, and the speed of one encode over a huge text. Texts are cut into
pieces of about 64 KiB first, by a rule that is part of the tokenizer (`cut_pieces`), so memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from txl_dist.tokenizers.base import Ids, SpelledTokenizer, Tokenizer, batches, byte_symbols, bytes_of_symbol

PIECE_LEN = 1 << 16
"""Characters of text that the library sees at once."""
BATCH_LEN = 32 * PIECE_LEN
"""Characters of text in one call of the library, which takes some hundred bytes for each token it returns."""


class LibraryTokenizer(Tokenizer):
    """One that the library `tokenizers` runs, piece by piece."""

    _library: Any

    def encode(self, text: str) -> Ids:
        """Ids of the pieces of the text, joined."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """All pieces of all texts in few calls of the library."""
        pieces = [self._cut(text) for text in texts]
        encoded = self._encode_pieces(list(chain.from_iterable(pieces)))
        return [np.concatenate([next(encoded) for _ in own] or [np.empty(0, np.int32)]) for own in pieces]

    def _cut(self, text: str) -> list[str]:
        return cut_pieces(text)

    def _encode_pieces(self, pieces: Sequence[str]) -> Iterator[Ids]:
        for batch in batches(pieces, most_characters=BATCH_LEN):
            encoded = self._library.encode_batch_fast(batch, add_special_tokens=False)
            yield from (np.array(encoding.ids, dtype=np.int32) for encoding in encoded)


class ByteLevelTokenizer(LibraryTokenizer, SpelledTokenizer):
    """One whose symbols are pieces of text, spelled in GPT-2's alphabet, all of which it has."""

    @property
    def is_lossless(self) -> bool:
        """Always."""
        return True

    def _spell(self, symbol: str) -> bytes:
        return bytes_of_symbol(symbol)


class BpeTokenizer(ByteLevelTokenizer):
    """Byte-level BPE as in GPT-2; `merges` in the order they are applied."""

    kind = "bpe"
    _required: ClassVar[tuple[str, ...]] = ("merges",)

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None, merges: Sequence[str]) -> None:
        from tokenizers.models import BPE

        super().__init__(symbols, end_of_text=end_of_text)
        self.merges = tuple(merges)
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in self.merges)]
        self._library = byte_level(BPE(vocab=self._ids, merges=pairs))


class UnigramTokenizer(ByteLevelTokenizer):
    """The most probable pieces of each word (Kudo 2018); `scores` are log-probabilities in the order of ids.

    End-of-text has the score None: it is never found in a text.
    """

    kind = "unigram"
    _required: ClassVar[tuple[str, ...]] = ("scores",)

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None, scores: Sequence[float | None]) -> None:
        from tokenizers.models import Unigram

        super().__init__(symbols, end_of_text=end_of_text)
        self.scores = tuple(scores)
        if missing := set(byte_symbols()) - self._ids.keys():
            raise ValueError(f"{len(missing)} bytes have no symbol")
        if [i for i, score in enumerate(self.scores) if score is None] != (
            [] if end_of_text is None else [end_of_text]
        ):
            raise ValueError("a symbol has no score, or end-of-text has one")
        lowest = min(score for score in self.scores if score is not None)
        # GPT-2's words never hold letters and signs together, so no text is ever the end-of-text in its place.
        pieces = [
            (symbol, lowest if score is None else score)
            for symbol, score in zip(self.symbols, self.scores, strict=True)
        ]
        self._library = byte_level(Unigram(pieces, unk_id=None, byte_fallback=False))


def byte_level(model: Any) -> Any:
    """A tokenizer of the library for this model over GPT-2's words and alphabet."""
    from tokenizers import Tokenizer as Library
    from tokenizers.pre_tokenizers import ByteLevel

    library = Library(model)
    library.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return library


def cut_pieces(text: str, *, piece_len: int = PIECE_LEN) -> list[str]:
    """Cut a text into pieces of at most `piece_len` characters that join to the text again.

    Each piece ends behind the last newline that fits; where none fits, before the last blank; else anywhere.
    Ids depend on this rule: changing it needs a new format version.
    """
    pieces: list[str] = []
    start = 0
    while len(text) - start > piece_len:
        end = text.rfind("\n", start, start + piece_len) + 1
        if end <= start:
            end = text.rfind(" ", start + 1, start + piece_len)
        if end <= start:
            end = start + piece_len
        pieces.append(text[start:end])
        start = end
    if start < len(text):
        pieces.append(text[start:])
    return pieces
