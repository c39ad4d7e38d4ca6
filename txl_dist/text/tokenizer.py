"""Text to ids and back: byte, char, word and byte-level BPE tokenizers behind one class and one file.

Key properties:
- Ids are in order of frequency in the training split, end-of-text included (see vocab.py).
- End-of-text is added by whoever joins documents. `encode` never makes it, not even from its literal spelling.
  A vocabulary that comes from elsewhere may have none: `end_of_text` is None, and documents join without a mark.
- Every id stands for a fixed run of bytes, so decoding is one join, for all kinds, and can be streamed.
- byte and bpe encode any text and give it back exactly; char and word know `<unk>`, or refuse what they do not know.
- The file is canonical JSON: its sha256 is the fingerprint, and the order of symbols is the order of ids. Settings
  are in it where they differ from their defaults.

What it gives up: normalisation, added tokens, and the speed of one encode over a huge text. BPE texts are cut into
pieces of about 64 KiB first, by a rule that is part of the tokenizer (`cut_pieces`), so memory stays bounded.
Training is in training.py.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from txl_dist.errors import DataError

TokenizerKind = Literal["byte", "char", "word", "bpe"]
Ids = npt.NDArray[np.int32]

FORMAT_VERSION = 1
END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"
PIECE_LEN = 1 << 16
"""Characters of text that BPE sees at once."""
PIECES_PER_BATCH = 32
_REFUSED = -1
"""In place of an id: unknown, and without a symbol."""


class Tokenizer(ABC):
    """Maps text to ids. `symbols` names every id in order, end-of-text included."""

    kind: ClassVar[TokenizerKind]
    defaults: ClassVar[dict[str, Any]] = {}
    """Settings of this kind that may be left out of its file."""

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None) -> None:
        self.symbols = tuple(symbols)
        self.end_of_text = end_of_text
        self._ids = {symbol: i for i, symbol in enumerate(symbols) if i != end_of_text}
        self._spellings = [
            END_OF_TEXT.encode() if i == end_of_text else self._spell(symbol) for i, symbol in enumerate(symbols)
        ]

    @property
    def vocab_size(self) -> int:
        """Number of ids, end-of-text included where there is one."""
        return len(self.symbols)

    @property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON, which is also the sha256 of the saved file."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

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

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids. Bytes that are not UTF-8 (a character cut in half) become U+FFFD."""
        return b"".join([self._spellings[i] for i in ids]).decode("utf-8", errors="replace")

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Pieces of text, each as soon as its last byte is there; joined they equal `decode` of all ids."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for i in ids:
            if piece := decoder.decode(self._spellings[i]):
                yield piece
        if piece := decoder.decode(b"", final=True):
            yield piece

    def to_json(self) -> str:
        """Canonical text of the tokenizer: equal for equal tokenizers."""
        values = {"format_version": FORMAT_VERSION, "kind": self.kind, "end_of_text": self.end_of_text}
        return json.dumps(values | {"symbols": self.symbols} | self._extras(), sort_keys=True, separators=(",", ":"))

    def save(self, path: str | Path) -> None:
        """Write the canonical JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def _spell(self, symbol: str) -> bytes:
        return symbol.encode("utf-8")

    def _extras(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.defaults}
        return {name: value for name, value in values.items() if value != self.defaults[name]}


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8; always 257 ids, end-of-text included."""

    kind = "byte"

    def __init__(self, symbols: Sequence[str], *, end_of_text: int | None) -> None:
        super().__init__(symbols, end_of_text=end_of_text)
        self._table = np.array([self._ids[symbol] for symbol in byte_symbols()], dtype=np.int32)

    def encode(self, text: str) -> Ids:
        """One lookup per byte."""
        return self._table[np.frombuffer(text.encode("utf-8"), dtype=np.uint8)]

    def _spell(self, symbol: str) -> bytes:
        return _bytes_of_symbol(symbol)


class CharTokenizer(Tokenizer):
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
        points = {ord(symbol): i for symbol, i in self._ids.items() if symbol != unknown}
        # One entry past the highest known code point stands for all above it.
        missing = _REFUSED if unknown is None else self._ids[unknown]
        self._table = np.full(max(points, default=0) + 2, missing, dtype=np.int32)
        self._table[list(points)] = list(points.values())

    def encode(self, text: str) -> Ids:
        """One lookup per code point. Raises DataError for one that is unknown and has no symbol."""
        text = text.lower() if self.lower_case else text
        points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        ids: Ids = self._table[np.minimum(points, len(self._table) - 1)]
        if self.unknown is None and (ids == _REFUSED).any():
            raise _unknown_error("character", text[int((ids == _REFUSED).argmax())])
        return ids

    def _spell(self, symbol: str) -> bytes:
        return ("\ufffd" if symbol == self.unknown else symbol).encode("utf-8")


class WordTokenizer(Tokenizer):
    """One id per word between blanks; each line ends in `<eos>`, the way WikiText and PTB are counted.

    Decoding puts a blank behind every word and a newline for `<eos>`, so runs of blanks are lost.
    Vocabularies from elsewhere may differ: another symbol or none before and behind each line, and for unknown
    words (None: they are refused); text that is made lower case. The mark behind a line is its newline.
    """

    kind = "word"
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
        self._unknown_id = _REFUSED if unknown is None else self._ids[unknown]
        if missing := {line_start, line_end} - {None} - self._ids.keys():
            raise ValueError(f"the marks of lines {sorted(map(str, missing))} are not among the symbols")

    def encode(self, text: str) -> Ids:
        """One lookup per word and mark of a line. Raises DataError for a word that is unknown and has no symbol."""
        text = text.lower() if self.lower_case else text
        words = list(split_words(text, line_start=self.line_start, line_end=self.line_end))
        ids = np.array([self._ids.get(word, self._unknown_id) for word in words], dtype=np.int32)
        if self.unknown is None and (ids == _REFUSED).any():
            raise _unknown_error("word", words[int((ids == _REFUSED).argmax())])
        return ids

    def encode_prompt(self, text: str) -> Ids:
        """Without the mark that `encode` puts behind a last line that has no newline."""
        ids = self.encode(text)
        return ids[:-1] if self.line_end is not None and text and not text.endswith("\n") else ids

    def joint(self, text: str) -> str:
        """A blank, unless the prompt ends in one."""
        return " " if text and not text[-1].isspace() else ""

    def _spell(self, symbol: str) -> bytes:
        if symbol in (self.line_start, self.line_end):
            return b"\n" if symbol == self.line_end else b""
        return f"{symbol} ".encode()


class BpeTokenizer(Tokenizer):
    """Byte-level BPE as in GPT-2, run by the library `tokenizers`; `merges` in the order they are applied."""

    kind = "bpe"

    def __init__(self, symbols: Sequence[str], *, end_of_text: int, merges: Sequence[str]) -> None:
        super().__init__(symbols, end_of_text=end_of_text)
        self.merges = tuple(merges)
        self._library = _build_library_bpe(self._ids, self.merges)

    def encode(self, text: str) -> Ids:
        """Ids of the pieces that `cut_pieces` makes, joined."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """All pieces of all texts in few calls of the library."""
        pieces = [cut_pieces(text) for text in texts]
        encoded = self._encode_pieces(list(chain.from_iterable(pieces)))
        return [np.concatenate([next(encoded) for _ in own] or [np.empty(0, np.int32)]) for own in pieces]

    def _encode_pieces(self, pieces: Sequence[str]) -> Iterator[Ids]:
        # An Encoding of the library takes some hundred bytes per token: hold few of them at once.
        for first in range(0, len(pieces), PIECES_PER_BATCH):
            batch = self._library.encode_batch_fast(pieces[first : first + PIECES_PER_BATCH], add_special_tokens=False)
            yield from (np.array(encoding.ids, dtype=np.int32) for encoding in batch)

    def _spell(self, symbol: str) -> bytes:
        return _bytes_of_symbol(symbol)

    def _extras(self) -> dict[str, Any]:
        return {"merges": self.merges}


_KINDS: dict[str, type[Tokenizer]] = {
    "byte": ByteTokenizer,
    "char": CharTokenizer,
    "word": WordTokenizer,
    "bpe": BpeTokenizer,
}


_REMEDY = "Give a tokenizer.json that `txl prepare` wrote, or prepare the corpus again."


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json. Raises DataError naming the file if it is missing, damaged or of another format."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {path}: {error.strerror or error}. {_REMEDY}") from error
    return read_tokenizer(content, name=str(path))


def read_tokenizer(content: bytes, *, name: str) -> Tokenizer:
    """The tokenizer in the bytes of a tokenizer.json. Raises DataError as `load_tokenizer` does."""
    try:
        values = json.loads(content)
    except ValueError as error:
        raise DataError(f"the tokenizer {name} is not valid JSON: {error}. {_REMEDY}") from error
    try:
        if values["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"the tokenizer {name} has format version {values['format_version']}, this program reads "
                f"{FORMAT_VERSION}. Prepare the corpus again, or use the program that wrote it."
            )
        return build_tokenizer(values)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the tokenizer {name} is damaged ({type(error).__name__}: {error}). {_REMEDY}") from error


def build_tokenizer(values: dict[str, Any]) -> Tokenizer:
    """A tokenizer from the values of its file. Raises ValueError or KeyError if they contradict themselves."""
    kind, symbols, end_of_text = values["kind"], values["symbols"], values["end_of_text"]
    if kind not in _KINDS:
        raise ValueError(f"unknown kind {kind!r}, known are {', '.join(get_args(TokenizerKind))}")
    if end_of_text is not None and (symbols[end_of_text] != END_OF_TEXT or end_of_text < 0):
        raise ValueError(f"id {end_of_text} is not {END_OF_TEXT}")
    if len(set(symbols)) != len(symbols):
        raise ValueError("a symbol occurs twice")
    if kind == "bpe":
        return BpeTokenizer(symbols, end_of_text=end_of_text, merges=values["merges"])
    settings = {name: values[name] for name in _KINDS[kind].defaults if name in values}
    return _KINDS[kind](symbols, end_of_text=end_of_text, **settings)


def split_words(text: str, *, line_start: str | None = None, line_end: str | None = END_OF_LINE) -> Iterator[str]:
    """Words of a text with the marks before and behind each line; the last line needs no newline."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    start = [] if line_start is None else [line_start]
    end = [] if line_end is None else [line_end]
    for line in lines:
        yield from (*start, *line.split(), *end)


def _unknown_error(what: str, found: str) -> DataError:
    return DataError(
        f"the {what} {found!r} is not in the vocabulary, which has no symbol for what is unknown. Take it out of the "
        "text, or use another tokenizer."
    )


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


@cache
def byte_symbols() -> tuple[str, ...]:
    """The printable character that stands for each byte in GPT-2's byte-level alphabet."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    # The other bytes take the code points from 256 on, in ascending order.
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


def _bytes_of_symbol(symbol: str) -> bytes:
    return bytes(_byte_values()[character] for character in symbol)


@cache
def _byte_values() -> dict[str, int]:
    return {symbol: byte for byte, symbol in enumerate(byte_symbols())}


def _build_library_bpe(ids: dict[str, int], merges: Sequence[str]) -> Any:
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    library = LibraryTokenizer(BPE(vocab=ids, merges=pairs))
    library.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return library
