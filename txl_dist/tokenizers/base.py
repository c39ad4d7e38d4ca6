"""What every tokenizer is: text to ids and back, one file, one fingerprint.

Key properties:
- Ids are in order of frequency in the training split, end-of-text included (see training.py).
- End-of-text is added by whoever joins documents. `encode` never makes it, not even from its literal spelling.
  A vocabulary may have none: `end_of_text` is None, and documents join without a mark.
- The file is canonical JSON: its sha256 is the fingerprint, and the order of symbols is the order of ids. Settings
  are in it where they differ from their defaults.

Our own kinds are `SpelledTokenizer`s: every id stands for a fixed run of bytes, so decoding is one join, for all of
them, and can be streamed. Tokenizers that others made (foreign.py) need not be.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from txl_dist.errors import DataError
from txl_dist.io.files import write_bytes

Ids = npt.NDArray[np.int32]
T = TypeVar("T")

FORMAT_VERSION = 1
END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<unk>"
REFUSED = -1
"""In place of an id: unknown, and without a symbol."""


class Tokenizer(ABC):
    """Maps text to ids and back. `symbols` names every id in order, end-of-text included."""

    kind: ClassVar[str]
    spellings: Sequence[bytes] | None = None
    """The bytes of each id, where they do not depend on its neighbours."""
    spells_text: ClassVar[bool] = True
    """Whether ids stand for text, which has bytes."""
    unit: ClassVar[str] = "token"
    """What an id stands for, for people."""
    unknown_id: int | None = None
    """The id of all that is not known."""

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None) -> None:
        self.symbols = tuple(symbols)
        self.end_of_text = end_of_text

    @property
    def vocab_size(self) -> int:
        """Number of ids, end-of-text included where there is one."""
        return len(self.symbols)

    @property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON, which is also the sha256 of the saved file."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def is_lossless(self) -> bool:
        """Whether every text that is encoded at all comes back byte for byte, by how the tokenizer is made."""
        return False

    def keeps_text(self, *, num_unknown: int) -> bool:
        """Whether a text of which so many ids stand for something unknown is certain to come back byte for byte."""
        return self.is_lossless

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Ids of a text, without end-of-text."""

    def encode_prompt(self, text: str) -> Ids:
        """Ids of a text that is to be continued: its last line has not ended."""
        return self.encode(text)

    def joint(self, text: str) -> str:
        """What stands between a prompt and its continuation, for people."""
        return ""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text; the same as `encode` one by one, where possible faster."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids. Bytes that are not UTF-8 (a character cut in half) become U+FFFD."""

    @abstractmethod
    def decoder(self, *, after: Sequence[int] = ()) -> StreamDecoder:
        """What decodes one id at a time. `after` are ids whose text was shown already, where the text of an id may
        depend on the one before it."""

    def decode_stream(self, ids: Iterable[int], *, after: Sequence[int] = ()) -> Iterator[str]:
        """Pieces of text, each as soon as its last byte is there; joined they equal `decode` of all ids."""
        decoder = self.decoder(after=after)
        for i in ids:
            if piece := decoder.push(i):
                yield piece
        if piece := decoder.close():
            yield piece

    def to_json(self) -> str:
        """Canonical text of the tokenizer: equal for equal tokenizers."""
        values = {"format_version": FORMAT_VERSION, "kind": self.kind, "end_of_text": self.end_of_text}
        return json.dumps(values | self._values(), sort_keys=True, separators=(",", ":"))

    def save(self, path: str | Path) -> None:
        """Write the canonical JSON."""
        write_bytes(Path(path), self.to_json().encode())

    @classmethod
    @abstractmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """The tokenizer of the values in its file. Raises ValueError or KeyError if they contradict themselves."""

    @abstractmethod
    def _values(self) -> dict[str, Any]:
        """What the file holds besides the version, the kind and end-of-text."""


class StreamDecoder(Protocol):
    """Decodes ids as they come: the pieces of all `push`es and of `close`, joined, are the text of all ids."""

    def push(self, i: int) -> str:
        """The text that is whole with one more id."""

    def close(self) -> str:
        """What was held back, as there is no more."""


class _SpellingDecoder:
    """Of ids that stand for fixed runs of bytes."""

    def __init__(self, spellings: Sequence[bytes]) -> None:
        self._spellings = spellings
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, i: int) -> str:
        return self._decoder.decode(self._spellings[i])

    def close(self) -> str:
        return self._decoder.decode(b"", final=True)


class SpelledTokenizer(Tokenizer):
    """One whose ids stand for fixed runs of bytes."""

    spellings: Sequence[bytes]
    defaults: ClassVar[dict[str, Any]] = {}
    """Settings of this kind that may be left out of its file."""

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None) -> None:
        super().__init__(symbols, end_of_text=end_of_text)
        self._ids = {symbol: i for i, symbol in enumerate(symbols) if i != end_of_text}
        self.spellings = [
            END_OF_TEXT.encode() if i == end_of_text else self._spell(symbol) for i, symbol in enumerate(symbols)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids. Bytes that are not UTF-8 (a character cut in half) become U+FFFD."""
        return b"".join([self.spellings[i] for i in ids]).decode("utf-8", errors="replace")

    @override
    def decoder(self, *, after: Sequence[int] = ()) -> StreamDecoder:
        return _SpellingDecoder(self.spellings)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """The tokenizer of the values in its file. Raises ValueError or KeyError if they contradict themselves."""
        symbols, end_of_text = values["symbols"], values["end_of_text"]
        if end_of_text is not None and (symbols[end_of_text] != END_OF_TEXT or end_of_text < 0):
            raise ValueError(f"id {end_of_text} is not {END_OF_TEXT}")
        if len(set(symbols)) != len(symbols):
            raise ValueError("a symbol occurs twice")
        settings = {name: values[name] for name in cls.defaults if name in values}
        return cls(symbols, end_of_text=end_of_text, **settings, **{name: values[name] for name in cls._required})

    _required: ClassVar[tuple[str, ...]] = ()
    """What the file of this kind must hold besides its symbols."""

    def _spell(self, symbol: str) -> bytes:
        return symbol.encode("utf-8")

    def _values(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in self.defaults}
        changed = {name: value for name, value in settings.items() if value != self.defaults[name]}
        return {"symbols": self.symbols} | changed | {name: getattr(self, name) for name in self._required}


def batches(
    items: Iterable[T],
    *,
    most_characters: int,
    most_items: int = sys.maxsize,
    text_of: Callable[[T], str] = str,
) -> Iterator[list[T]]:
    """Lists of consecutive items, each closed once their texts have so many characters, or there are so many."""
    batch: list[T] = []
    held = 0
    for item in items:
        batch.append(item)
        held += len(text_of(item))
        if held >= most_characters or len(batch) >= most_items:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def unknown_error(what: str, found: str) -> DataError:
    """For text without an id, in a vocabulary that has no symbol for what is unknown."""
    return DataError(
        f"the {what} {found!r} is not in the vocabulary, which has no symbol for what is unknown. Take it out of the "
        "text, or use another tokenizer."
    )


@cache
def byte_symbols() -> tuple[str, ...]:
    """The printable character that stands for each byte in GPT-2's byte-level alphabet."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    # The other bytes take the code points from 256 on, in ascending order.
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


def bytes_of_symbol(symbol: str) -> bytes:
    """The bytes of a symbol in that alphabet. Raises KeyError for one that is not in it."""
    return bytes(_byte_values()[character] for character in symbol)


@cache
def _byte_values() -> dict[str, int]:
    return {symbol: byte for byte, symbol in enumerate(byte_symbols())}
