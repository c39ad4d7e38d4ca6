"""Base classes of tokenizers, which convert text to ids and back. Each tokenizer has one file and one fingerprint.

Key properties:
- Ids are in order of frequency in the training split, end-of-text included (see training.py).
- The code that joins documents adds end-of-text. `encode` never returns end-of-text, not even for its literal
  spelling. If a vocabulary has no end-of-text, `end_of_text` is None, and documents are joined without a mark.
- The file is canonical JSON, and its sha256 is the fingerprint of the tokenizer. The file lists the symbols in the
  order of ids. Settings at their defaults are left out.

Our own kinds are `SpelledTokenizer`s: every id stands for fixed bytes. So decoding joins bytes, and can be streamed.
In the tokenizers of other programs (foreign.py) the text of an id can depend on its neighbours.
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
"""Value in place of the id of an unknown symbol, in a vocabulary that has no id for unknown symbols."""


class Tokenizer(ABC):
    """Base class of all tokenizers, which convert text to token ids and back."""

    kind: ClassVar[str]
    """Name of the kind in the tokenizer's file."""
    spellings: Sequence[bytes] | None = None
    """Bytes that each id stands for. None if the bytes depend on neighbouring ids."""
    spells_text: ClassVar[bool] = True
    """True if ids stand for text, which makes bits per byte meaningful. False if ids stand for other things, such as
    events."""
    unit: ClassVar[str] = "token"
    """Noun that messages use for the text of one id, such as "token" or "word"."""
    unknown_id: int | None = None
    """Id that stands for every unknown symbol. None if there is no such id."""

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None) -> None:
        self.symbols = tuple(symbols)
        """Name of every id in order, end-of-text included."""
        self.end_of_text = end_of_text
        """Id of end-of-text. None if the vocabulary has no end-of-text."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, end-of-text included if there is one."""
        return len(self.symbols)

    @property
    def fingerprint(self) -> str:
        """Hexadecimal sha256 of the canonical JSON, which is also the sha256 of the saved file."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def is_lossless(self) -> bool:
        """Whether decoding restores the bytes of every text that can be encoded."""
        return False

    def keeps_text(self, *, num_unknown: int) -> bool:
        """Return whether decoding certainly restores the bytes of a text, if `num_unknown` of the text's ids are
        `unknown_id`."""
        return self.is_lossless

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Return the ids of a text, without end-of-text."""

    def encode_prompt(self, text: str) -> Ids:
        """Return the ids of a prompt. No end-of-line symbol is added at the end of the prompt, because the model
        continues the prompt's last line."""
        return self.encode(text)

    def joint(self, text: str) -> str:
        """Return the text to show between the prompt `text` and the model's continuation, such as a blank."""
        return ""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, as `encode` does for one text. Some tokenizers encode many texts faster."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids. Bytes that are not UTF-8 (half a character) become U+FFFD."""

    @abstractmethod
    def decoder(self, *, after: Sequence[int] = ()) -> StreamDecoder:
        """Return a decoder that takes one id at a time.

        Args:
            after: The preceding ids, whose text has been shown. The text of the next id may depend on these ids.
        """

    def decode_stream(self, ids: Iterable[int], *, after: Sequence[int] = ()) -> Iterator[str]:
        """Yield pieces of text, each as soon as its last byte is known. Joined, the pieces equal `decode` of all
        ids."""
        decoder = self.decoder(after=after)
        for i in ids:
            piece = decoder.push(i)
            if piece:
                yield piece
        last_piece = decoder.close()
        if last_piece:
            yield last_piece

    def to_json(self) -> str:
        """Return the canonical JSON text of the tokenizer's file. Equal tokenizers have equal texts."""
        values = {"format_version": FORMAT_VERSION, "kind": self.kind, "end_of_text": self.end_of_text}
        return json.dumps(values | self._values(), sort_keys=True, separators=(",", ":"))

    def save(self, path: str | Path) -> None:
        """Write the canonical JSON to a file."""
        write_bytes(Path(path), self.to_json().encode())

    @classmethod
    @abstractmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Build a tokenizer from the values in its file. Raises ValueError or KeyError if they are inconsistent."""

    @abstractmethod
    def _values(self) -> dict[str, Any]:
        """Return the values of the tokenizer's file, except the version, the kind and end-of-text."""


class StreamDecoder(Protocol):
    """Interface of a decoder that takes one id at a time. The results of all calls, joined, are the whole text."""

    def push(self, i: int) -> str:
        """Return the text that is complete after one more id. The text can be empty."""

    def close(self) -> str:
        """Return the remaining text, because no more ids follow."""


class _SpellingDecoder:
    """Stream decoder of a tokenizer whose ids stand for fixed bytes."""

    def __init__(self, spellings: Sequence[bytes]) -> None:
        self._spellings = spellings
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, i: int) -> str:
        return self._decoder.decode(self._spellings[i])

    def close(self) -> str:
        return self._decoder.decode(b"", final=True)


class SpelledTokenizer(Tokenizer):
    """Base class of tokenizers whose ids stand for fixed bytes, so that decoding joins bytes."""

    spellings: Sequence[bytes]
    defaults: ClassVar[dict[str, Any]] = {}
    """Settings of this kind by name, with their default values. A setting at its default is left out of the file."""

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None) -> None:
        super().__init__(symbols, end_of_text=end_of_text)
        self._ids = {symbol: i for i, symbol in enumerate(symbols) if i != end_of_text}
        self.spellings = [
            END_OF_TEXT.encode() if i == end_of_text else self._spell(symbol) for i, symbol in enumerate(symbols)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids. Bytes that are not UTF-8 (half a character) become U+FFFD."""
        return b"".join([self.spellings[i] for i in ids]).decode("utf-8", errors="replace")

    @override
    def decoder(self, *, after: Sequence[int] = ()) -> StreamDecoder:
        return _SpellingDecoder(self.spellings)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Build a tokenizer from the values in its file. Raises ValueError or KeyError if they are inconsistent."""
        symbols = values["symbols"]
        end_of_text = values["end_of_text"]
        if end_of_text is not None and (symbols[end_of_text] != END_OF_TEXT or end_of_text < 0):
            raise ValueError(f"id {end_of_text} is not {END_OF_TEXT}")
        if len(set(symbols)) != len(symbols):
            raise ValueError("a symbol occurs twice")
        optional = {name: values[name] for name in cls.defaults if name in values}
        required = {name: values[name] for name in cls._required}
        return cls(symbols, end_of_text=end_of_text, **optional, **required)

    _required: ClassVar[tuple[str, ...]] = ()
    """Names of the values that the file of this kind must contain, in addition to its symbols."""

    def _spell(self, symbol: str) -> bytes:
        return symbol.encode("utf-8")

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = {"symbols": self.symbols}
        for name, default in self.defaults.items():
            if getattr(self, name) != default:
                values[name] = getattr(self, name)
        for name in self._required:
            values[name] = getattr(self, name)
        return values


def batches(
    items: Iterable[T],
    *,
    most_characters: int,
    most_items: int = sys.maxsize,
    text_of: Callable[[T], str] = str,
) -> Iterator[list[T]]:
    """Yield lists of consecutive items. A list ends when it has at least `most_characters` characters of text, or
    `most_items` items."""
    batch: list[T] = []
    num_characters = 0
    for item in items:
        batch.append(item)
        num_characters += len(text_of(item))
        if num_characters >= most_characters or len(batch) >= most_items:
            yield batch
            batch = []
            num_characters = 0
    if batch:
        yield batch


def unknown_error(what: str, symbol: str) -> DataError:
    """Return the error for a symbol without an id, in a vocabulary that has no id for unknown symbols."""
    return DataError(
        f"the {what} {symbol!r} is not in the vocabulary, which has no symbol for unknown text. Remove this {what} "
        f"from the text, or use another tokenizer."
    )


@cache
def byte_symbols() -> tuple[str, ...]:
    """Return the printable character that stands for each byte in GPT-2's byte-level alphabet."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    next_code_point = 256  # of the other bytes, in ascending order
    symbols = []
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(next_code_point))
            next_code_point += 1
    return tuple(symbols)


def bytes_of_symbol(symbol: str) -> bytes:
    """Return the bytes of a symbol of GPT-2's byte-level alphabet. Raises KeyError for another symbol."""
    return bytes(_byte_values()[character] for character in symbol)


@cache
def _byte_values() -> dict[str, int]:
    return {symbol: byte for byte, symbol in enumerate(byte_symbols())}
