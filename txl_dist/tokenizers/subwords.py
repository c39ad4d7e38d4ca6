"""Byte-level BPE and unigram tokenizers, run by the library `tokenizers`. Both are lossless for any text.

A text is first split into words as GPT-2 does. The bytes of the words are spelled in GPT-2's alphabet of 256 printable
characters, all of which are symbols. So no text is unknown, and every id stands for fixed bytes.

Not supported: normalisation and added tokens. To bound memory, a text is first cut into pieces of about 64 KiB, by a
rule that is part of the tokenizer (`cut_pieces`). Encoding a huge text in pieces is slower than encoding it in one
call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from txl_dist.tokenizers.base import Ids, SpelledTokenizer, Tokenizer, batches, byte_symbols, bytes_of_symbol

PIECE_LEN = 1 << 16
"""Maximum number of characters that the library encodes as one piece."""
BATCH_LEN = 32 * PIECE_LEN
"""Number of characters per call of the library. A call takes some hundred bytes of memory for each token."""


class LibraryTokenizer(Tokenizer):
    """Base class of tokenizers that the library `tokenizers` runs. A text is encoded in pieces, to bound memory."""

    _library: Any

    def encode(self, text: str) -> Ids:
        """Return the ids of the text's pieces, joined."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text. The library encodes the pieces of all texts in few calls."""
        pieces_of_texts = [self._cut(text) for text in texts]
        encoded = self._encode_pieces(list(chain.from_iterable(pieces_of_texts)))
        ids_of_texts = []
        for pieces in pieces_of_texts:
            ids_of_pieces = [next(encoded) for _ in pieces] or [np.empty(0, np.int32)]
            ids_of_texts.append(np.concatenate(ids_of_pieces))
        return ids_of_texts

    def _cut(self, text: str) -> list[str]:
        return cut_pieces(text)

    def _encode_pieces(self, pieces: Sequence[str]) -> Iterator[Ids]:
        for batch in batches(pieces, most_characters=BATCH_LEN):
            encoded = self._library.encode_batch_fast(batch, add_special_tokens=False)
            for encoding in encoded:
                yield np.array(encoding.ids, dtype=np.int32)


class ByteLevelTokenizer(LibraryTokenizer, SpelledTokenizer):
    """Base class of tokenizers whose symbols are byte strings, spelled in GPT-2's alphabet. Every byte is a symbol."""

    @property
    def is_lossless(self) -> bool:
        """Whether decoding restores the bytes of every text. Always True, because every byte is a symbol."""
        return True

    def _spell(self, symbol: str) -> bytes:
        return bytes_of_symbol(symbol)


class BpeTokenizer(ByteLevelTokenizer):
    """Byte-level BPE tokenizer as in GPT-2. `merges` are in the order in which they are applied."""

    kind = "bpe"
    _required: ClassVar[tuple[str, ...]] = ("merges",)

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None, merges: Sequence[str]) -> None:
        from tokenizers.models import BPE

        super().__init__(symbols, end_of_text=end_of_text)
        self.merges = tuple(merges)
        pairs = []
        for merge in self.merges:
            left, right = merge.split(" ")
            pairs.append((left, right))
        self._library = byte_level(BPE(vocab=self._ids, merges=pairs))


class UnigramTokenizer(ByteLevelTokenizer):
    """Unigram tokenizer, which splits each word into its most probable pieces (Kudo 2018).

    `scores` are log-probabilities in the order of ids. The score of end-of-text is None, because no text contains it.
    """

    kind = "unigram"
    _required: ClassVar[tuple[str, ...]] = ("scores",)

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None, scores: Sequence[float | None]) -> None:
        from tokenizers.models import Unigram

        super().__init__(symbols, end_of_text=end_of_text)
        self.scores = tuple(scores)
        missing = set(byte_symbols()) - self._ids.keys()
        if missing:
            raise ValueError(f"{len(missing)} bytes have no symbol")
        without_score = [i for i, score in enumerate(self.scores) if score is None]
        if end_of_text is None:
            may_lack_score = []
        else:
            may_lack_score = [end_of_text]
        if without_score != may_lack_score:
            raise ValueError("a symbol has no score, or the end-of-text token has a score")
        lowest = min(score for score in self.scores if score is not None)
        # GPT-2's words never mix letters and punctuation, so no text is encoded as end-of-text by its score here.
        pieces = []
        for symbol, score in zip(self.symbols, self.scores, strict=True):
            pieces.append((symbol, lowest if score is None else score))
        self._library = byte_level(Unigram(pieces, unk_id=None, byte_fallback=False))


def byte_level(model: Any) -> Any:
    """Return a tokenizer of the library `tokenizers` with the given model. It splits and spells text as GPT-2 does."""
    from tokenizers import Tokenizer as Library
    from tokenizers.pre_tokenizers import ByteLevel

    library = Library(model)
    library.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return library


def cut_pieces(text: str, *, piece_len: int = PIECE_LEN) -> list[str]:
    """Cut a text into pieces of at most `piece_len` characters that join to the text again.

    Each piece ends after the last newline that fits. If no newline fits, the piece ends before the last blank. Without
    a blank, the piece has exactly `piece_len` characters. The ids of a text depend on this rule, so changing the rule
    needs a new format version.
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
