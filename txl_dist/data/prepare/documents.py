"""From raw bytes to documents: cut, decode, parse, and decide the split. This runs in the workers of `txl prepare`.

A `TextBlock` is a run of consecutive raw records of one input; a record is a line, a paragraph, a row or a whole file.
Text is UTF-8, taken as it is, without newline or Unicode normalisation; but a byte order mark is no text, at the
beginning of a file and of a document. What is not UTF-8 is refused, or by the caller's choice replaced (U+FFFD),
skipped, or kept (`keep`: surrogate escapes, for tokenizers of bytes). A document's split is a frozen function of its
content, so equal documents are never on both sides, and adding documents never moves others; but for inputs of so few
documents that their ends are held out (held_out.py).
"""

from __future__ import annotations

import codecs
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from txl_dist.errors import DataError
from txl_dist.io.files import Record, parse_record

EncodingErrors = Literal["refuse", "replace", "skip", "keep"]
Cut = Literal["file", "line", "blank_line", "jsonl"]
"""How text becomes documents: one per file, per line, per run of lines between blank ones, or per line of JSON."""
Form = Literal["file", "line", "blank_line", "jsonl", "parquet", "ids", "npy"]
"""ids: a list of ready ids on each line; npy: of an array, which is a document, or each of its rows."""

TRAIN, VALID, TEST = SPLITS = ("train", "valid", "test")
LONGEST_RECORD = 1 << 31
"""Bytes from which on a document is too long; of ready ids those of their names."""
_MARK = "\ufeff"
"""A byte order mark, decoded."""
_SKIP_INVALID = "Mend or remove it, or leave such records out with --skip-invalid."
_SHOWN_KEYS = 8
_IDS_AT_ONCE = 1 << 12
_LOOKED_AT = 1 << 16
"""Bytes of a damaged document that say whether it is in another encoding."""
_MANY_DAMAGED = 3
"""Damaged characters that are no accident."""
SHORTEST_TAIL = 100
"""Characters that the end of a document must have to be held out: with a share of 0.05 a text of 2,000."""


class Document(NamedTuple):
    """One text. A skipped document comes without its text, so that it can be counted."""

    where: str
    """File and line, for messages."""
    ordinal: int
    """Number of its raw record among all inputs: later documents have larger ones."""
    text: str
    damage: Literal["", "replaced", "skipped", "invalid"] = ""


class TextBlock(NamedTuple):
    """Consecutive raw records of one input, not decoded."""

    where: str
    form: Form
    split: str
    """Split that the input was given for."""
    unit: int
    """Line (or row) number in the file of the first record, from 0."""
    ordinal: int
    """The same, counted over all inputs."""
    data: bytes


class Reading(NamedTuple):
    """How blocks become documents."""

    jsonl_field: str = "text"
    """Field of a JSON line, or column of a parquet file, that holds the text."""
    names: tuple[str, ...] = ()
    """Of ready ids, in order."""
    encoding_errors: EncodingErrors = "refuse"
    valid_fraction: float = 0.0
    """Share of the documents given for train that are held out as valid."""
    test_fraction: float = 0.0
    skip_invalid: bool = False
    """Records without a text are left out; else they are refused."""
    tails: Mapping[bytes, str] | None = None
    """None: whole documents are held out. Else the end of each long one, and whatever equals such an end: the digests
    of the ends, and their splits."""

    @property
    def shares(self) -> dict[str, float]:
        """Of the splits that are held out of train."""
        shares = {VALID: self.valid_fraction, TEST: self.test_fraction}
        return {split: share for split, share in shares.items() if share}


class DocumentPiece(NamedTuple):
    """A document, or a part of one, and where it belongs."""

    document: Document
    split: str
    digest: bytes
    num_bytes: int


class InvalidRecordError(DataError):
    """A record without a text: with `Reading.skip_invalid` it is left out."""


def documents_of(block: TextBlock, reading: Reading) -> Iterator[Document]:
    """The documents of a block, empty ones and skipped ones included. Raises DataError for what cannot be read."""
    for document in _documents_of(block, reading):
        yield document._replace(text=document.text.lstrip(_MARK)) if document.text.startswith(_MARK) else document


def _documents_of(block: TextBlock, reading: Reading) -> Iterator[Document]:
    if block.form == "parquet":
        yield from _documents_of_rows(block, reading)
        return
    if block.form == "npy":
        yield from _documents_of_array(block, reading.names)
        return
    for number, raw in _records_of(block):
        where = block.where if block.form == "file" else f"{block.where}, line {block.unit + number + 1}"
        if block.form not in ("jsonl", "ids"):
            yield _decode(raw, where, block.ordinal + number, reading.encoding_errors, block.form)
        elif document := _document_of_line(raw, where, block.ordinal + number, reading, block.form):
            yield document


def _documents_of_rows(block: TextBlock, reading: Reading) -> Iterator[Document]:
    import pyarrow

    with pyarrow.ipc.open_stream(block.data) as stream:
        values: list[bytes | None] = stream.read_all().column(0).to_pylist()
    for row, value in enumerate(values):
        where = f"{block.where}, column {reading.jsonl_field!r}, row {block.unit + row + 1:,}"
        if value is not None:
            yield _decode(value, where, block.ordinal + row, reading.encoding_errors, block.form)
        elif reading.skip_invalid:
            yield Document(where, block.ordinal + row, "", "invalid")
        else:
            raise InvalidRecordError(f"{where}: it is null. {_SKIP_INVALID}")


def _document_of_line(raw: bytes, where: str, ordinal: int, reading: Reading, form: Form) -> Document | None:
    """The document of a line of JSON; None for a blank line."""
    if not raw.strip():
        return None
    try:
        if form == "ids":
            ids = _parse_ids(raw, field=reading.jsonl_field, where=where)
            return Document(where, ordinal, _named(ids, reading.names, where=where))
        document = _decode(raw, where, ordinal, reading.encoding_errors, form)
        if document.damage == "skipped":
            return document
        if not document.text.lstrip(_MARK).strip():
            return None
        text = _parse_record(document.text.lstrip(_MARK), field=reading.jsonl_field, where=where)
        return _without_surrogates(document._replace(text=text), reading.encoding_errors)
    except InvalidRecordError:
        if not reading.skip_invalid:
            raise
        return Document(where, ordinal, "", "invalid")


def check_length(num_bytes: int, where: str) -> None:
    """Raise DataError with the remedy for a document of 2 GiB or more."""
    if num_bytes >= LONGEST_RECORD:
        raise DataError(
            f"{where} holds a document of 2 GiB or more (of ids: as names). Cut it: text with `--documents line` or "
            "`--documents blank_line`, ids as rows of a two-dimensional array or JSON lines, all else where it is made."
        )


def text_bytes_of(text: str) -> bytes:
    """The bytes that a text was read from, those of `keep` too."""
    return text.encode("utf-8", "surrogateescape")


def count_characters(raw: bytes) -> int:
    """Characters of a text in UTF-8: each has one byte that does not continue another."""
    import numpy as np  # the command line reads this file, and no --help waits for numpy

    return int((np.frombuffer(raw, dtype=np.uint8) & 0xC0 != 0x80).sum())


def content_digest(data: bytes) -> bytes:
    """16 bytes that say whether two documents are equal."""
    return hashlib.sha256(data).digest()[:16]


def split_of(digest: bytes, *, given_for: str, reading: Reading) -> str:
    """Split of a document: what its input was given for, but a hashed share of train is held out."""
    if given_for != TRAIN:
        return given_for
    place = int.from_bytes(digest[:8], "big") / 2.0**64
    if place < reading.test_fraction:
        return TEST
    return VALID if place < reading.test_fraction + reading.valid_fraction else TRAIN


def pieces_of(document: Document, *, given_for: str, reading: Reading) -> list[DocumentPiece]:
    """The document whole in its split, or, where ends are held out, its pieces, each with an ordinal of its own."""
    if given_for != TRAIN or reading.tails is None:
        raw = text_bytes_of(document.text)
        digest = content_digest(raw)
        return [DocumentPiece(document, split_of(digest, given_for=given_for, reading=reading), digest, len(raw))]
    pieces = []
    for number, (split, text) in enumerate(cut_tails(document.text, reading.shares, whole_words=bool(reading.names))):
        raw = text_bytes_of(text)
        digest = content_digest(raw)
        piece = document._replace(text=text, ordinal=len(SPLITS) * document.ordinal + number)
        pieces.append(DocumentPiece(piece, reading.tails.get(digest, split), digest, len(raw)))
    return pieces


def cut_tails(text: str, shares: Mapping[str, float], *, whole_words: bool = False) -> list[tuple[str, str]]:
    """(split, text) of the pieces, which together are the text: its beginning, and the shares at its end.

    A text too short for that stays whole. A cut lies behind the paragraph, else the line, else the word that ends
    nearest to its share, within a quarter of the smallest one; else between two characters, or, if `whole_words`,
    behind the nearest word, however far.
    """
    length, smallest = len(text), min(shares.values(), default=0.0)
    if min(smallest, 1 - sum(shares.values())) * length < SHORTEST_TAIL:
        return [(TRAIN, text)]
    test_share = shares.get(TEST, 0.0)
    begins = {VALID: round(length * (1 - test_share - shares.get(VALID, 0.0))), TEST: round(length * (1 - test_share))}
    slack = length if whole_words else int(smallest * length / 4)
    borders = [0, *(_nearest_border(text, begins[split], slack) for split in shares), length]
    pieces = [text[begin:end] for begin, end in pairwise(borders)]
    return [(TRAIN, text)] if any(map(str.isspace, pieces)) else list(zip((TRAIN, *shares), pieces, strict=True))


def _nearest_border(text: str, wanted: int, slack: int) -> int:
    for separator in ("\n\n", "\r\n\r\n", "\n", " "):
        before = text.rfind(separator, max(wanted - slack, 0), wanted)
        after = text.find(separator, max(wanted - len(separator), 0), wanted + slack)
        found = [at + len(separator) for at in (before, after) if at >= 0]
        if found:
            return min(found, key=lambda at: (abs(at - wanted), at))
    return wanted


def is_learnt_from(digest: bytes, *, fraction: float) -> bool:
    """Whether a document is in the hashed share that the tokenizer is learnt from; independent of its split."""
    return int.from_bytes(digest[8:], "big") < fraction * 2.0**64


def end_of_records(data: bytes, form: Form) -> int:
    """Bytes up to the end of the last record that is surely whole, 0 if there is none."""
    if form != "blank_line":
        return data.rfind(b"\n") + 1
    end = data.rfind(b"\n")
    while end >= 0:
        before = data.rfind(b"\n", 0, end)
        if not data[before + 1 : end].strip():
            return end + 1
        end = before
    return 0


def _records_of(block: TextBlock) -> Iterator[tuple[int, bytes]]:
    """Raw records and the number of their first line in the block. Line ends do not belong to a record."""
    data = block.data
    while block.unit == 0 and data.startswith(codecs.BOM_UTF8):
        data = data.removeprefix(codecs.BOM_UTF8)
    if block.form == "file":
        yield 0, data
        return
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    if block.form != "blank_line":
        yield from enumerate(line.removesuffix(b"\r") for line in lines)
        return
    first = 0
    for number, line in enumerate([*lines, b""]):
        if not line.strip():
            if first < number:
                yield first, b"\n".join(lines[first:number]).removesuffix(b"\r")
            first = number + 1


def _documents_of_array(block: TextBlock, names: Sequence[str]) -> Iterator[Document]:
    import numpy as np

    array = np.load(io.BytesIO(block.data))
    for row, ids in enumerate(np.atleast_2d(array)):
        where = block.where if array.ndim == 1 else f"{block.where}, row {block.unit + row + 1}"
        yield Document(where, block.ordinal + row, _named(ids, names, where=where))


def _parse_ids(line: bytes, *, field: str, where: str) -> list[Any]:
    try:
        ids = parse_record(line.decode("utf-8-sig"))
    except ValueError as error:
        raise InvalidRecordError(
            f"{where}: not valid JSON ({error}), a list of ids on each line. {_SKIP_INVALID}"
        ) from error
    if isinstance(ids, Record):
        ids = _value_of(ids, field, where=where)
    if not isinstance(ids, list):
        raise InvalidRecordError(
            f"{where}: {_type_of(ids)}, and no list of ids. Give one a line, as [5, 17], or name its field with "
            "--jsonl-field."
        )
    if not ids:
        raise InvalidRecordError(f"{where}: no ids. {_SKIP_INVALID}")
    return ids


def _named(ids: Any, names: Sequence[str], *, where: str) -> str:
    """The text of a document, a list or an array: the name of each id with a blank behind it.

    A few at a time, since a long array is many times as large as a list. Raises DataError naming what is no id, or if
    the text is too long.
    """
    texts, num_bytes = [], 0
    for first in range(0, len(ids), _IDS_AT_ONCE):
        some = ids[first : first + _IDS_AT_ONCE]
        some = some if isinstance(some, list) else some.tolist()
        for index, one in enumerate(some, start=first):
            if type(one) is not int or not 0 <= one < len(names):
                raise DataError(
                    f"{where}, index {index}: {one!r:.40} is no id of the vocabulary list, whose {len(names):,} names "
                    f"are those of 0 to {len(names) - 1:,}. Mend the ids, or give the list that they were made with."
                )
        texts.append("".join([f"{names[one]} " for one in some]))
        num_bytes += len(texts[-1].encode())
        check_length(num_bytes, where)
    return "".join(texts)


def _decode(raw: bytes, where: str, ordinal: int, encoding_errors: EncodingErrors, form: Form) -> Document:
    try:
        return Document(where, ordinal, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        if encoding_errors == "keep" and form != "jsonl":
            return Document(where, ordinal, raw.decode("utf-8", "surrogateescape"))
        if encoding_errors in ("refuse", "keep"):
            what = f"byte {error.start} (0x{raw[error.start]:02x})"
            raise _not_utf8(where, what, is_mostly_damaged=_is_mostly_damaged(raw)) from error
    if encoding_errors == "skip":
        return Document(where, ordinal, "", "skipped")
    return Document(where, ordinal, raw.decode("utf-8", errors="replace"), "replaced")


def _without_surrogates(document: Document, encoding_errors: EncodingErrors) -> Document:
    """JSON can spell half a surrogate pair, which no UTF-8 can hold: the same policy applies."""
    try:
        document.text.encode("utf-8")
    except UnicodeEncodeError as error:
        if encoding_errors in ("refuse", "keep"):
            raise _not_utf8(document.where, f"character {error.start} (a lone surrogate)") from error
        if encoding_errors == "skip":
            return document._replace(text="", damage="skipped")
        paired = document.text.encode("utf-16", "surrogatepass").decode("utf-16", errors="replace")
        return document._replace(text=paired, damage="replaced")
    return document


def _is_mostly_damaged(raw: bytes) -> bool:
    """Whether most characters outside ASCII are damaged: then the text is in another encoding."""
    beginning = raw[:_LOOKED_AT]
    damaged = beginning.decode("utf-8", errors="replace").count("\ufffd")
    sound = sum(not each.isascii() for each in beginning.decode("utf-8", errors="ignore"))
    return damaged >= _MANY_DAMAGED and damaged > sound


def _not_utf8(where: str, what: str, *, is_mostly_damaged: bool = False) -> DataError:
    if is_mostly_damaged:
        return DataError(
            f"{where}: {what} is not valid UTF-8, nor are most others outside ASCII. The text is in another encoding: "
            "convert the file with `iconv -f ENCODING -t UTF-8`, for instance from WINDOWS-1252, GB18030 or SHIFT-JIS."
        )
    return DataError(
        f"{where}: {what} is not valid UTF-8. Convert the file, or prepare with `--encoding-errors replace` "
        "(U+FFFD in its place) or `--encoding-errors skip` (leave the document out)."
    )


def _parse_record(line: str, *, field: str, where: str) -> str:
    try:
        record = parse_record(line)
    except ValueError as error:
        raise InvalidRecordError(
            f"{where}: not valid JSON ({error}), an object on each line. {_SKIP_INVALID}"
        ) from error
    if not isinstance(record, Record):
        raise InvalidRecordError(
            f"{where}: {_type_of(record)}, and no object with the field {field!r}. {_SKIP_INVALID}"
        )
    text = _value_of(record, field, where=where)
    if text is None:
        raise InvalidRecordError(f"{where}: the field {field!r} is null. {_SKIP_INVALID}")
    if type(text) is not str:  # the digits of a long number are no text
        raise InvalidRecordError(
            f"{where}: the field {field!r} holds {_type_of(text)}, and no text. Convert it, or name another field with "
            "--jsonl-field; --skip-invalid leaves such records out."
        )
    return text


def _value_of(record: Record, field: str, *, where: str) -> Any:
    """The value of a field. Raises InvalidRecordError where it is missing, or comes twice: which one counts?"""
    if field in record.repeated:
        raise InvalidRecordError(f"{where}: the field {field!r} comes twice in the record. {_SKIP_INVALID}")
    if field not in record:
        shown = ", ".join(f"{key!r:.40}" for key in list(record)[:_SHOWN_KEYS])
        more = f" and {len(record) - _SHOWN_KEYS} more" if len(record) > _SHOWN_KEYS else ""
        raise InvalidRecordError(
            f"{where}: no field {field!r} (found: {shown or 'none'}{more}). Name the field with --jsonl-field, or "
            "leave such records out with --skip-invalid."
        )
    return record[field]


def _type_of(value: Any) -> str:
    """A word of JSON for the type of a value."""
    if value is None:
        return "null"
    names = {bool: "true or false", str: "a string", list: "a list", Record: "an object", int: "a number"}
    return names.get(type(value), "a number")
