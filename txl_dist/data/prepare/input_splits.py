"""Reads the inputs of `txl prepare` once, front to back, and cuts them into parts for the workers.

A part is a list of blocks of whole raw records. Where parts begin and end is a pure function of the files and of
`part_bytes`, from any cursor on: a preparation that goes on after a kill makes the parts that the first one would
have made, and starts behind those that are there. Nothing is decoded or parsed here; memory holds one part.

What it gives up: inputs that grow or change while they are read; an array has to fit in memory, a plain text file
unless its documents are lines or paragraphs, and a parquet file that is compressed as a whole or comes from a pipe.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from txl_dist.data.prepare.documents import Form, TextBlock, check_length, end_of_records
from txl_dist.data.prepare.readers import open_source, skip
from txl_dist.data.prepare.sources import SourceFile
from txl_dist.errors import DataError, translate_errors

MOST_RECORDS = 1 << 18
"""Raw records, or lines, in a block or a part, about: a worker keeps some hundred bytes of each, however short."""
_BLOCK_BYTES = 1 << 22
_ROWS = 1024
_MIB = 1 << 20
_TEXT_TYPES = frozenset(
    {
        *("string", "large_string", "string_view"),
        *("binary", "large_binary", "binary_view", "fixed_size_binary"),
    }
)
"""Types of parquet's columns that are read, by pyarrow's names."""
_NO_PARQUET = (ValueError, TypeError, KeyError, OverflowError, MemoryError, RuntimeError)
"""Exceptions of pyarrow for a damaged file, in addition to its own types and OSError."""
_NO_ARRAY = (ValueError, SyntaxError, TypeError, OverflowError, MemoryError, RecursionError, tokenize.TokenError)
"""What numpy raises for a damaged header or content."""


class Cursor(NamedTuple):
    """Where a part begins."""

    file: int = 0
    """Index of the file."""
    offset: int = 0
    """Bytes of it, decompressed, that lie before; rows of a parquet file."""
    unit: int = 0
    """Lines, or rows, of it that lie before."""
    ordinal: int = 0
    """Lines, rows and whole files that lie before in all inputs."""


class InputPart(NamedTuple):
    """A piece of the input that one worker encodes."""

    blocks: list[TextBlock]
    begin: Cursor
    end: Cursor
    """Where the next part begins."""
    stored_bytes: int
    """Bytes of all input up to the end of the part, as stored, or decompressed if their number is unknown; for
    progress."""
    notes: tuple[tuple[str, str], ...] = ()
    """(file, sentence on how it is read) of files that begin in the part."""


def read_parts(
    files: Sequence[SourceFile],
    *,
    part_bytes: int,
    begin: Cursor = Cursor(),  # noqa: B008  immutable
    allow_protocols: Sequence[str] = (),
    jsonl_field: str = "text",
) -> Iterator[InputPart]:
    """Parts of about `part_bytes` bytes of raw records, from a cursor on.

    Raises DataError if a file cannot be read, ends too early, or holds a document of 2 GiB or more.
    """
    blocks: list[TextBlock] = []
    notes: list[tuple[str, str]] = []
    held, ordinal = 0, begin.ordinal
    stored = sum(file.size or 0 for file in files[: begin.file])
    start = begin
    for number, file in enumerate(files[start.file :], start=start.file):
        first = start if number == start.file else Cursor()
        at, unit = first.offset, first.unit
        with open_source(file, allow_protocols) as opened:
            notes += [(file.path, opened.note)] if opened.note else []
            block_bytes = min(part_bytes, _BLOCK_BYTES)
            records = _records(file.path, opened.form, opened.stream, first.offset, block_bytes, jsonl_field)
            for data, length, units in records:
                blocks.append(TextBlock(file.path, opened.form, file.split, unit, ordinal, data))
                held, at, unit, ordinal = held + len(data), at + length, unit + units, ordinal + units
                if held >= part_bytes or ordinal - begin.ordinal >= MOST_RECORDS:
                    end = Cursor(number, at, unit, ordinal)
                    read = at if file.size is None else opened.stored_bytes()
                    yield InputPart(blocks, begin, end, stored + read, tuple(notes))
                    blocks, notes, held, begin = [], [], 0, end
        stored += at if file.size is None else file.size
    if blocks:
        yield InputPart(blocks, begin, Cursor(len(files), 0, 0, ordinal), stored, tuple(notes))


def _records(
    path: str, form: Form, stream: IO[bytes], offset: int, block_bytes: int, field: str
) -> Iterator[tuple[bytes, int, int]]:
    """(data, how far it moves the offset, raw records or lines in it) of each block of a file."""
    if form in ("parquet", "npy"):
        found = _array_rows(stream, offset, path) if form == "npy" else _row_batches(stream, offset, field, path)
        yield from ((data, rows, rows) for data, rows in found)
        return
    skip(stream, offset)
    if form == "file":
        if not offset:
            whole = bytearray()
            while chunk := stream.read(_MIB):
                whole += chunk
                check_length(len(whole), path)
            yield bytes(whole), len(whole), 1
        return
    held = b""

    def take(count: int) -> bytes:
        nonlocal held
        taken, held = held[:count], held[count:]
        return taken + stream.read(count - len(taken)) if len(taken) < count else taken

    while True:
        data = take(block_bytes)
        is_last = len(data) < block_bytes
        while not is_last and not (end := end_of_records(data, form)):
            check_length(len(data), path)
            more = take(len(data))  # doubled each time: a long record costs no quadratic copying
            is_last = len(more) < len(data)
            data += more
        if is_last:
            end = len(data)
        while data.count(b"\n", 0, end) > MOST_RECORDS and (half := end_of_records(data[: end // 2], form)):
            end = half
        if not data:
            return
        yield data[:end], end, data.count(b"\n", 0, end) + (not data.endswith(b"\n", 0, end))
        held = data[end:] + held


def _array_rows(stream: IO[bytes], first_row: int, path: str) -> Iterator[tuple[bytes, int]]:
    """(up to 1,024 rows of an array of ids as a file of their own, number of rows); one of one dimension is a row."""
    try:  # numpy.load would open archives too
        array = np.lib.format.read_array(io.BytesIO(stream.read()), allow_pickle=False)
    except _NO_ARRAY as error:
        reason = " ".join(str(error).split())  # numpy's may have several lines
        raise DataError(f"{path} is no .npy file of numbers: {reason}. Save an array by numpy.save.") from error
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise DataError(
            f"{path}: an array of {array.dtype}, shape {list(array.shape)}. Give whole numbers: one document as [ids], "
            "or documents of one length as [documents, ids]."
        )
    if not array.size:
        raise DataError(f"{path}: no ids, shape {list(array.shape)}. Leave empty documents out.")
    num_rows = 1 if array.ndim == 1 else len(array)
    for row in range(first_row, num_rows, _ROWS):
        rows = array if array.ndim == 1 else array[row : row + _ROWS]
        sink = io.BytesIO()
        np.save(sink, rows)
        yield sink.getvalue(), min(_ROWS, num_rows - row)


def _row_batches(stream: IO[bytes], first_row: int, field: str, path: str) -> Iterator[tuple[bytes, int]]:
    """(the bytes of a column of up to 1,024 rows as an Arrow stream, number of rows), one row group in memory."""
    remedy = "Run `pip install 'txl_dist[parquet]'`."
    with translate_errors(DataError, f"reading {path} needs the package pyarrow", remedy, of=(ImportError,)):
        import pyarrow
        import pyarrow.parquet
    row = 0
    try:
        source = stream if stream.seekable() else io.BytesIO(stream.read())  # it is read from its end
        table = pyarrow.parquet.ParquetFile(source, page_checksum_verification=True)
        _check_column(table.schema_arrow, field, path)
        if pyarrow.types.is_dictionary(table.schema_arrow.field(field).type):
            # Asked for by name its text is not checked, which pyarrow else does while it reads.
            options = {"page_checksum_verification": True, "read_dictionary": [field]}
            table = pyarrow.parquet.ParquetFile(source, **options)
        for group in range(table.num_row_groups):
            count = table.metadata.row_group(group).num_rows
            if row + count <= first_row:
                row += count
                continue
            for batch in table.iter_batches(_ROWS, row_groups=[group], columns=[field]):
                if row >= first_row:
                    yield _as_stream(batch.column(0)), batch.num_rows
                row += batch.num_rows
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, *_NO_PARQUET) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__  # pyarrow's may have several lines
        raise DataError(
            f"cannot read {path}, column {field!r}, from row {row + 1:,} on: {reason}. Repair or remove the file, then "
            "prepare again."
        ) from error


def _check_column(schema: Any, field: str, path: str) -> None:
    """Raise DataError unless one column of this name holds text, or bytes that may be text."""
    kinds = [column.type for column in schema if column.name == field]
    if len(kinds) == 1 and _is_text(kinds[0]):
        return
    if len(kinds) > 1:
        raise DataError(f"{path}: {len(kinds)} columns are named {field!r}. Rename them, then prepare again.")
    columns = ", ".join(f"{column.name} ({column.type})" for column in schema)
    raise DataError(
        f"{path}: no text in the column {field!r} (found: {columns}). Name a column of strings with --jsonl-field."
    )


def _is_text(kind: Any) -> bool:
    """Whether a type of pyarrow is text or bytes, in any layout."""
    inner = getattr(kind, "storage_type", kind)  # of an extension type
    inner = getattr(inner, "value_type", inner) if str(inner).startswith("dictionary") else inner
    return str(inner).partition("[")[0] in _TEXT_TYPES


def _as_stream(column: Any) -> bytes:
    """The column as bytes, which may not be UTF-8 even where its type says so, as an Arrow stream."""
    import pyarrow

    if hasattr(column.type, "storage_type"):
        column = column.storage
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    batch = pyarrow.record_batch([column.cast(pyarrow.large_binary())], names=["text"])
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    raw: bytes = sink.getvalue().to_pybytes()
    return raw
