"""Conversion of raw bytes to documents: decode, parse and choose the split. The workers of `txl prepare` run this code.

A `TextBlock` contains consecutive raw records of one input. A record is a line, a paragraph, a parquet row or a file.

- Text must be UTF-8. Newlines and Unicode characters are not normalised. Byte order marks are removed at the beginning
  of a file and of a document.
- Text that is not UTF-8 is refused by default. An option replaces invalid bytes with U+FFFD, skips the document, or
  keeps the bytes for byte tokenizers (as surrogate escapes).
- A hash of the content chooses the split of each document from the train inputs. So equal documents of these inputs are
  never in two splits, and added documents never move other documents to another split. If an input has only few
  documents, the ends of the documents are held out instead (validation_split.py).
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
"""Unit of plain text that becomes a document: a file, a line, the lines between two blank lines, or a line of JSON."""
Form = Literal["file", "line", "blank_line", "jsonl", "parquet", "ids", "npy", "webdataset", "json", "invalid"]
"""Form in which an input is read. `ids`: a JSON list of token ids per line. `npy`: an array of token ids, one document
per row. `webdataset`: a tar of samples, whose blocks have the forms of the members. `json`: one JSON object, possibly
over several lines. `invalid`: a record without a text, whose bytes are the reason."""
_PLAIN_FORMS = ("file", "line", "blank_line")
"""Forms of plain text. The detection of formats examines only the beginning of an input. A NUL byte further on is
refused when its document is read."""

TRAIN, VALID, TEST = SPLITS = ("train", "valid", "test")
LONGEST_RECORD = 1 << 31
"""A document of this size in bytes or more is refused as too long. A document of token ids is first converted to the
names of its ids, and the size of these names in bytes is counted."""
_MARK = "\ufeff"
"""Byte order mark, decoded."""
_SKIP_INVALID = "Correct or remove the record, or leave out such records with --skip-invalid."
_SHOWN_KEYS = 8
_IDS_AT_ONCE = 1 << 12
"""Number of token ids that are converted to text at once."""
_LOOKED_AT = 1 << 16
"""Number of bytes at the beginning of a document with invalid UTF-8 that are searched for signs of another encoding."""
_MANY_DAMAGED = 3
"""A text with at least this many invalid characters is probably in another encoding."""
SHORTEST_TAIL = 100
"""Minimum number of characters in the end of a document that is held out for evaluation. For example, with
--valid-fraction 0.05 only the end of a document with 2,000 characters or more is held out."""


class Document(NamedTuple):
    """Text of one document, and its place in the inputs. A skipped document has an empty text and is only counted."""

    where: str
    """File and line of the document, for messages."""
    ordinal: int
    """Number of the document's raw record, counted over all inputs. Later documents have larger numbers."""
    text: str
    damage: Literal["", "replaced", "skipped", "invalid"] = ""
    """Empty for a valid document. replaced: invalid bytes became U+FFFD. skipped: the bytes are not UTF-8. invalid: the
    record has no text."""


class TextBlock(NamedTuple):
    """Consecutive raw records of one input as undecoded bytes, which a worker converts to documents."""

    where: str
    """Path or URL of the input, for messages."""
    form: Form
    split: str
    """Split for which the user gave the input."""
    unit: int
    """Index of the first record's line or row in the file, from 0."""
    ordinal: int
    """Number of the first record, counted over all inputs."""
    data: bytes


class Reading(NamedTuple):
    """Options for converting blocks to documents and for holding documents out of train."""

    jsonl_field: str = "text"
    """Field of a JSON line, or column of a parquet file, that contains the text."""
    names: tuple[str, ...] = ()
    """Names of the token ids, in the order of the ids, if the inputs are token ids. Empty for text."""
    encoding_errors: EncodingErrors = "refuse"
    valid_fraction: float = 0.0
    """Share of the train documents to hold out for the validation split."""
    test_fraction: float = 0.0
    """Share of the train documents to hold out for the test split."""
    skip_invalid: bool = False
    """Whether records without a text are left out. If False, such a record raises InvalidRecordError."""
    tails: Mapping[bytes, str] | None = None
    """Split of each held-out end of a document, by the `content_digest` of the end. Any other text that is equal to
    such an end goes to the same split. None if whole documents are held out instead of ends."""

    @property
    def shares(self) -> dict[str, float]:
        """Share of the train documents that is held out for the validation split and for the test split, by the name of
        the split. A split with the share 0 is absent."""
        shares = {VALID: self.valid_fraction, TEST: self.test_fraction}
        return {split: share for split, share in shares.items() if share}


class DocumentPiece(NamedTuple):
    """A whole document, or one part of a document whose end is held out, with its split."""

    document: Document
    split: str
    digest: bytes
    """`content_digest` of the piece's text."""
    num_bytes: int
    """Size of the piece's text in UTF-8, in bytes."""


class InvalidRecordError(DataError):
    """Error for a record without a text. If `Reading.skip_invalid` is set, such a record is left out instead."""


def documents_of(block: TextBlock, reading: Reading) -> Iterator[Document]:
    """Yield the documents of a block, including empty and skipped documents. Raises DataError for an unreadable
    record."""
    for document in _documents_of(block, reading):
        if document.text.startswith(_MARK):
            document = document._replace(text=document.text.lstrip(_MARK))
        yield document


def _documents_of(block: TextBlock, reading: Reading) -> Iterator[Document]:
    if block.form == "parquet":
        yield from _documents_of_rows(block, reading)
        return
    if block.form == "npy":
        yield from _documents_of_array(block, reading.names)
        return
    if block.form == "invalid":
        if not reading.skip_invalid:
            raise InvalidRecordError(f"{block.where}: {block.data.decode()}")
        yield Document(block.where, block.ordinal, "", "invalid")
        return
    for number, raw in _records_of(block):
        if block.form in ("file", "json"):
            where = block.where
        else:
            where = f"{block.where}, line {block.unit + number + 1}"
        ordinal = block.ordinal + number
        if block.form not in ("jsonl", "json", "ids"):
            yield _decode(raw, where, ordinal, reading.encoding_errors, block.form)
            continue
        document = _document_of_line(raw, where, ordinal, reading, block.form)
        if document is not None:
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
            raise InvalidRecordError(f"{where}: the value is null. {_SKIP_INVALID}")


def _document_of_line(raw: bytes, where: str, ordinal: int, reading: Reading, form: Form) -> Document | None:
    """Return the document of a line of JSON. Returns None for a blank line. Raises DataError for an invalid line."""
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
    """Raise DataError if a document has 2 GiB or more. `where` is the document's place, for the message."""
    if num_bytes >= LONGEST_RECORD:
        raise DataError(
            f"{where} contains a document of 2 GiB or more. (Token ids are first converted to text: each id is "
            "replaced by its name, and the size is the size of this text.) Cut plain text into documents with "
            "`--documents line` or `--documents blank_line`. For token ids, write one document per row of a "
            "two-dimensional array, or one document per JSON line. In other inputs, divide the document into shorter "
            "documents."
        )


def text_bytes_of(text: str) -> bytes:
    """Return the bytes that a text was decoded from, including bytes that are not UTF-8 and were kept (`keep`)."""
    return text.encode("utf-8", "surrogateescape")


def count_characters(raw: bytes) -> int:
    """Return the number of characters in a text in UTF-8. Counts the bytes that begin a character."""
    import numpy as np  # imported here: the command line reads this file, and --help should not wait for numpy

    data = np.frombuffer(raw, dtype=np.uint8)
    is_first = data & 0xC0 != 0x80
    return int(is_first.sum())


def content_digest(data: bytes) -> bytes:
    """Return the first 16 bytes of the sha256 of a document's bytes. Equal documents have equal digests."""
    return hashlib.sha256(data).digest()[:16]


def split_of(digest: bytes, *, given_for: str, reading: Reading) -> str:
    """Return the split of a document.

    A train document goes to the validation or test split if its digest falls into the share that is held out for that
    split. Any other document goes to `given_for`, the split for which the user gave its input.
    """
    if given_for != TRAIN:
        return given_for
    place = int.from_bytes(digest[:8], "big") / 2.0**64
    if place < reading.test_fraction:
        return TEST
    if place < reading.test_fraction + reading.valid_fraction:
        return VALID
    return TRAIN


def pieces_of(document: Document, *, given_for: str, reading: Reading) -> list[DocumentPiece]:
    """Return a document as a list of pieces, each with its split.

    If whole documents are held out, the only piece is the whole document. If ends are held out, the pieces are the
    beginning and the ends, and each piece has its own ordinal.
    """
    if given_for != TRAIN or reading.tails is None:
        raw = text_bytes_of(document.text)
        digest = content_digest(raw)
        split = split_of(digest, given_for=given_for, reading=reading)
        return [DocumentPiece(document, split, digest, len(raw))]
    pieces = []
    texts = cut_tails(document.text, reading.shares, whole_words=bool(reading.names))
    for number, (split, text) in enumerate(texts):
        raw = text_bytes_of(text)
        digest = content_digest(raw)
        ordinal = len(SPLITS) * document.ordinal + number
        piece = document._replace(text=text, ordinal=ordinal)
        split_of_piece = reading.tails.get(digest, split)
        pieces.append(DocumentPiece(piece, split_of_piece, digest, len(raw)))
    return pieces


def cut_tails(text: str, shares: Mapping[str, float], *, whole_words: bool = False) -> list[tuple[str, str]]:
    """Cut a text into a beginning for train and one end for each split in `shares`.

    Returns (split, piece) in the order of the text. The pieces joined together are the text. A text that is too short
    to be cut stays whole. The shares give the wanted position of each cut. A cut moves to the nearest end of a
    paragraph, by at most a quarter of the smallest share. If there is no paragraph end, the cut is after a line end, or
    else after a word, or else between two characters. With `whole_words` the cut is never inside a word, however far
    away the nearest word border is.
    """
    length = len(text)
    smallest = min(shares.values(), default=0.0)
    train_share = 1 - sum(shares.values())
    if min(smallest, train_share) * length < SHORTEST_TAIL:
        return [(TRAIN, text)]
    test_share = shares.get(TEST, 0.0)
    valid_share = shares.get(VALID, 0.0)
    begins = {
        VALID: round(length * (1 - test_share - valid_share)),
        TEST: round(length * (1 - test_share)),
    }
    if whole_words:
        slack = length
    else:
        slack = int(smallest * length / 4)
    borders = [0]
    for split in shares:
        borders.append(_nearest_border(text, begins[split], slack))
    borders.append(length)
    pieces = [text[begin:end] for begin, end in pairwise(borders)]
    if any(piece.isspace() for piece in pieces):
        return [(TRAIN, text)]
    return list(zip((TRAIN, *shares), pieces, strict=True))


def _nearest_border(text: str, wanted: int, slack: int) -> int:
    """Return the index after the separator that is nearest to the index `wanted`, at most `slack` characters away.

    The separator is a blank line, or else a line end, or else a blank. Returns `wanted` if there is no separator.
    """
    for separator in ("\n\n", "\r\n\r\n", "\n", " "):
        first_before = max(wanted - slack, 0)
        first_after = max(wanted - len(separator), 0)
        before = text.rfind(separator, first_before, wanted)
        after = text.find(separator, first_after, wanted + slack)
        borders = [start + len(separator) for start in (before, after) if start >= 0]
        if borders:
            return min(borders, key=lambda border: (abs(border - wanted), border))
    return wanted


def is_learnt_from(digest: bytes, *, fraction: float) -> bool:
    """Return whether the tokenizer is trained on a document.

    The last 8 bytes of `digest` choose the share `fraction` of the documents, independently of their splits.
    """
    place = int.from_bytes(digest[8:], "big")
    return place < fraction * 2.0**64


def end_of_records(data: bytes, form: Form) -> int:
    """Return the length in bytes of the records in `data` that are certainly complete. Returns 0 if no record is
    complete."""
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
    """Yield (index of the record's first line in the block, raw record without its line end)."""
    data = block.data
    while block.unit == 0 and data.startswith(codecs.BOM_UTF8):
        data = data.removeprefix(codecs.BOM_UTF8)
    if block.form in ("file", "json"):
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
        if array.ndim == 1:
            where = block.where
        else:
            where = f"{block.where}, row {block.unit + row + 1}"
        yield Document(where, block.ordinal + row, _named(ids, names, where=where))


def _parse_ids(line: bytes, *, field: str, where: str) -> list[Any]:
    try:
        ids = parse_record(line.decode("utf-8-sig"))
    except ValueError as error:
        raise InvalidRecordError(
            f"{where}: not valid JSON ({error}). Each line must be a list of ids. {_SKIP_INVALID}"
        ) from error
    if isinstance(ids, Record):
        ids = _value_of(ids, field, where=where)
    if not isinstance(ids, list):
        raise InvalidRecordError(
            f"{where}: found {_type_of(ids)}, not a list of ids. Write one list per line, for instance [5, 17], or "
            "name the field that contains the list with --jsonl-field."
        )
    if not ids:
        raise InvalidRecordError(f"{where}: the list of ids is empty. {_SKIP_INVALID}")
    return ids


def _named(ids: Any, names: Sequence[str], *, where: str) -> str:
    """Return the text of a document of token ids: the name of each id, followed by a blank.

    `ids` is a list or an array. Only a few ids are converted at once, because a list takes many times the memory of an
    array. Raises DataError with the index of an invalid id, or if the text is too long.
    """
    texts = []
    num_bytes = 0
    for first in range(0, len(ids), _IDS_AT_ONCE):
        some_ids = ids[first : first + _IDS_AT_ONCE]
        if not isinstance(some_ids, list):
            some_ids = some_ids.tolist()
        for index, value in enumerate(some_ids, start=first):
            if type(value) is not int or not 0 <= value < len(names):
                raise DataError(
                    f"{where}, index {index}: {value!r:.40} is not an id of the vocabulary list, which has names for "
                    f"the {len(names):,} ids 0 to {len(names) - 1:,}. Correct the ids, or give the vocabulary list "
                    "that belongs to these ids with --vocab-list."
                )
        texts.append("".join([f"{names[i]} " for i in some_ids]))
        num_bytes += len(texts[-1].encode())
        check_length(num_bytes, where)
    return "".join(texts)


def _decode(raw: bytes, where: str, ordinal: int, encoding_errors: EncodingErrors, form: Form) -> Document:
    if form in _PLAIN_FORMS and encoding_errors != "keep" and b"\0" in raw:
        if encoding_errors == "skip":
            return Document(where, ordinal, "", "skipped")
        raise DataError(
            f"{where}: byte {raw.index(0):,} is NUL, which is not allowed in text. Remove the NUL bytes (`tr -d "
            "'\\000' < FILE > NEW_FILE`) and give the new file as the input, or use `--encoding-errors skip` (leave "
            "out the document)."
        )
    try:
        return Document(where, ordinal, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        if encoding_errors == "keep" and form not in ("jsonl", "json"):
            return Document(where, ordinal, raw.decode("utf-8", "surrogateescape"))
        if encoding_errors in ("refuse", "keep"):
            what = f"byte {error.start} (0x{raw[error.start]:02x})"
            raise _not_utf8(where, what, is_mostly_damaged=_is_mostly_damaged(raw)) from error
    if encoding_errors == "skip":
        return Document(where, ordinal, "", "skipped")
    return Document(where, ordinal, raw.decode("utf-8", errors="replace"), "replaced")


def _without_surrogates(document: Document, encoding_errors: EncodingErrors) -> Document:
    """Return a document in which lone surrogates are handled as `encoding_errors` says.

    JSON can contain a lone surrogate as an escape, but UTF-8 cannot encode it.
    """
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
    """Return whether most characters outside ASCII are invalid UTF-8. If so, the text is in another encoding."""
    beginning = raw[:_LOOKED_AT]
    num_damaged = beginning.decode("utf-8", errors="replace").count("\ufffd")
    sound_text = beginning.decode("utf-8", errors="ignore")
    num_sound = sum(not character.isascii() for character in sound_text)
    return num_damaged >= _MANY_DAMAGED and num_damaged > num_sound


def _not_utf8(where: str, what: str, *, is_mostly_damaged: bool = False) -> DataError:
    if is_mostly_damaged:
        return DataError(
            f"{where}: {what} and most other bytes outside ASCII are not valid UTF-8. The text is in another encoding. "
            "Convert the file with `iconv -f ENCODING -t UTF-8`, for instance from WINDOWS-1252, GB18030 or SHIFT-JIS."
        )
    return DataError(
        f"{where}: {what} is not valid UTF-8. Convert the file to UTF-8, or use `--encoding-errors replace` (read "
        "invalid bytes as U+FFFD) or `--encoding-errors skip` (leave out the document)."
    )


def _parse_record(line: str, *, field: str, where: str) -> str:
    try:
        record = parse_record(line)
    except ValueError as error:
        raise InvalidRecordError(
            f"{where}: not valid JSON ({error}). Each line must be an object. {_SKIP_INVALID}"
        ) from error
    if not isinstance(record, Record):
        raise InvalidRecordError(
            f"{where}: found {_type_of(record)}, not an object with the field {field!r}. {_SKIP_INVALID}"
        )
    text = _value_of(record, field, where=where)
    if text is None:
        raise InvalidRecordError(f"{where}: the field {field!r} is null. {_SKIP_INVALID}")
    if type(text) is not str:  # a long number is read as its digits, which are no text
        raise InvalidRecordError(
            f"{where}: the field {field!r} contains {_type_of(text)}, not text. Convert the value to a string, or name "
            "another field with --jsonl-field, or leave out such records with --skip-invalid."
        )
    return text


def _value_of(record: Record, field: str, *, where: str) -> Any:
    """Return the value of a field. Raises InvalidRecordError if the field is missing or occurs twice in the record."""
    if field in record.repeated:
        raise InvalidRecordError(f"{where}: the field {field!r} occurs twice in the record. {_SKIP_INVALID}")
    if field not in record:
        shown = ", ".join(f"{key!r:.40}" for key in list(record)[:_SHOWN_KEYS])
        if len(record) > _SHOWN_KEYS:
            more = f" and {len(record) - _SHOWN_KEYS} more"
        else:
            more = ""
        raise InvalidRecordError(
            f"{where}: the record has no field {field!r} (its fields: {shown or 'none'}{more}). Name the field that "
            "contains the text with --jsonl-field, or leave out such records with --skip-invalid."
        )
    return record[field]


def _type_of(value: Any) -> str:
    """Return JSON's name for the type of a value, for messages."""
    if value is None:
        return "null"
    names = {bool: "true or false", str: "a string", list: "a list", Record: "an object", int: "a number"}
    return names.get(type(value), "a number")
