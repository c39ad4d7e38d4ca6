"""Reader of the inputs of `txl prepare`: reads each input once, front to back, and cuts it into parts for the workers.

A part is a list of blocks of whole raw records, such as lines or parquet rows. The borders of parts depend only on the
files and on `part_bytes`. So a preparation that continues after a kill makes the same parts, and starts after the last
finished part. The workers decode and parse the records later. Host memory holds one part at a time.

Limitations: inputs must not change while they are read. Three kinds of files must fit in host memory: arrays, plain
text files that are one document, and parquet files that are compressed as a whole or read from a pipe. So must each
sample of a WebDataset tar.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from txl_dist.data.prepare.documents import Form, TextBlock, check_length, end_of_records
from txl_dist.data.prepare.readers import Opened, open_source, skip
from txl_dist.data.prepare.sources import SourceFile
from txl_dist.data.prepare.tar_texts import read_texts
from txl_dist.errors import DataError, translate_errors

MOST_RECORDS = 1 << 18
"""Approximate maximum number of raw records or lines in a block or a part. A worker needs some hundred bytes of host
memory for each record."""
_BLOCK_BYTES = 1 << 22
_ROWS = 1024
_MIB = 1 << 20
_TEXT_TYPES = frozenset(
    {
        "string",
        "large_string",
        "string_view",
        "binary",
        "large_binary",
        "binary_view",
        "fixed_size_binary",
    }
)
"""Types of parquet columns that can be read as text, by pyarrow's names."""
_NO_PARQUET = (ValueError, TypeError, KeyError, OverflowError, MemoryError, RuntimeError)
"""Exceptions that pyarrow raises for a damaged file, in addition to its own types and OSError."""
_NO_ARRAY = (ValueError, SyntaxError, TypeError, OverflowError, MemoryError, RecursionError, tokenize.TokenError)
"""Exceptions that numpy raises for a damaged header or content."""


class Cursor(NamedTuple):
    """Position in the inputs where a part begins or ends. A continued preparation starts from a cursor."""

    file: int = 0
    """Index of the file in the list of input files."""
    offset: int = 0
    """Number of decompressed bytes of the file before the position. For parquet files and arrays, the number of
    rows. For WebDataset tars, the number of samples."""
    unit: int = 0
    """Number of the file's lines or rows before the position."""
    ordinal: int = 0
    """Number of raw records (lines, rows or whole files) of all inputs before the position."""


class InputPart(NamedTuple):
    """Consecutive blocks of the inputs that one worker encodes as one task."""

    blocks: list[TextBlock]
    begin: Cursor
    end: Cursor
    """Position where the next part begins."""
    stored_bytes: int
    """Number of bytes of all inputs up to the end of the part, for the progress display. The stored (possibly
    compressed) bytes are counted. For a file of unknown size, the decompressed bytes are counted."""
    notes: tuple[tuple[str, str], ...] = ()
    """(path, sentence for the user on how the file is read) for files that begin in the part and need such a
    sentence."""


def read_parts(
    files: Sequence[SourceFile],
    *,
    part_bytes: int,
    begin: Cursor = Cursor(),  # noqa: B008  immutable
    allow_protocols: Sequence[str] = (),
    jsonl_field: str = "text",
) -> Iterator[InputPart]:
    """Yield the inputs as parts of about `part_bytes` bytes of raw records, starting at the cursor `begin`.

    Raises DataError if a file cannot be read, ends too early, or contains a document of 2 GiB or more.
    """
    blocks: list[TextBlock] = []
    notes: list[tuple[str, str]] = []
    num_bytes = 0
    ordinal = begin.ordinal
    stored = sum(file.size or 0 for file in files[: begin.file])
    start = begin
    for number, file in enumerate(files[start.file :], start=start.file):
        if number == start.file:
            first = start
        else:
            first = Cursor()
        offset = first.offset
        unit = first.unit
        with open_source(file, allow_protocols) as opened:
            notes += [(file.path, opened.note)] if opened.note else []
            block_bytes = min(part_bytes, _BLOCK_BYTES)
            for records in _records_of(file, opened, first.offset, block_bytes, jsonl_field):
                num_bytes += len(records.data)
                first_unit = unit if records.has_units else 0
                block = TextBlock(records.where, records.form, file.split, first_unit, ordinal, records.data)
                blocks.append(block)
                offset += records.length
                unit += records.units
                ordinal += records.units
                if num_bytes >= part_bytes or ordinal - begin.ordinal >= MOST_RECORDS:
                    end = Cursor(number, offset, unit, ordinal)
                    if file.size is None:
                        num_read = offset
                    else:
                        num_read = opened.stored_bytes()
                    yield InputPart(blocks, begin, end, stored + num_read, tuple(notes))
                    blocks = []
                    notes = []
                    num_bytes = 0
                    begin = end
        stored += offset if file.size is None else file.size
    if blocks:
        yield InputPart(blocks, begin, Cursor(len(files), 0, 0, ordinal), stored, tuple(notes))


class _RawRecords(NamedTuple):
    """Raw records of one block, and how far they move the cursor."""

    where: str
    form: Form
    data: bytes
    length: int
    """Increase of the cursor's offset."""
    units: int
    """Number of raw records or lines."""
    has_units: bool = True
    """Whether the records are numbered over the whole file. False for a member of a tar."""


def _records_of(file: SourceFile, opened: Opened, offset: int, block_bytes: int, field: str) -> Iterator[_RawRecords]:
    """Yield the raw records of each block of a file. A sample of a WebDataset tar is one block."""
    if opened.form == "webdataset":
        for sample in read_texts(opened.stream, file, first=offset):
            yield _RawRecords(sample.where, sample.form, sample.data, 1, sample.num_records, has_units=False)
        return
    for data, length, units in _records(file.path, opened.form, opened.stream, offset, block_bytes, field):
        yield _RawRecords(file.path, opened.form, data, length, units)


def _records(
    path: str, form: Form, stream: IO[bytes], offset: int, block_bytes: int, field: str
) -> Iterator[tuple[bytes, int, int]]:
    """Yield (data, increase of the cursor's offset, number of raw records or lines) for each block of a file."""
    if form in ("parquet", "npy"):
        if form == "npy":
            batches = _array_rows(stream, offset, path)
        else:
            batches = _row_batches(stream, offset, field, path)
        for data, num_rows in batches:
            yield data, num_rows, num_rows
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
    unused = b""

    def take(count: int) -> bytes:
        nonlocal unused
        taken = unused[:count]
        unused = unused[count:]
        if len(taken) < count:
            return taken + stream.read(count - len(taken))
        return taken

    while True:
        data = take(block_bytes)
        is_last = len(data) < block_bytes
        while not is_last and not (end := end_of_records(data, form)):
            check_length(len(data), path)
            more = take(len(data))  # doubled each time, so that a long record is not copied again and again
            is_last = len(more) < len(data)
            data += more
        if is_last:
            end = len(data)
        while data.count(b"\n", 0, end) > MOST_RECORDS and (half := end_of_records(data[: end // 2], form)):
            end = half
        if not data:
            return
        num_lines = data.count(b"\n", 0, end)
        if not data.endswith(b"\n", 0, end):
            num_lines += 1
        yield data[:end], end, num_lines
        unused = data[end:] + unused


def _array_rows(stream: IO[bytes], first_row: int, path: str) -> Iterator[tuple[bytes, int]]:
    """Yield (bytes of a .npy file with up to 1,024 rows of an array of ids, number of rows).

    `stream` is the .npy file of the whole array. A one-dimensional array is one row. Raises DataError if the array is
    damaged or does not contain ids.
    """
    try:  # numpy.load would open archives too
        array = np.lib.format.read_array(io.BytesIO(stream.read()), allow_pickle=False)
    except _NO_ARRAY as error:
        reason = " ".join(str(error).split())  # numpy's message may have several lines
        raise DataError(f"{path} is not a .npy file of numbers: {reason}. Save the array with numpy.save.") from error
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise DataError(
            f"{path} contains an array of {array.dtype} with shape {list(array.shape)}. Token ids must be an array of "
            "whole numbers with the shape [ids] (one document) or [documents, ids]."
        )
    if not array.size:
        raise DataError(
            f"{path} contains no ids: its shape is {list(array.shape)}. Remove this file from the inputs, or save an "
            "array that contains ids."
        )
    if array.ndim == 1:
        num_rows = 1
    else:
        num_rows = len(array)
    for row in range(first_row, num_rows, _ROWS):
        if array.ndim == 1:
            rows = array
        else:
            rows = array[row : row + _ROWS]
        buffer = io.BytesIO()
        np.save(buffer, rows)
        yield buffer.getvalue(), min(_ROWS, num_rows - row)


def _row_batches(stream: IO[bytes], first_row: int, field: str, path: str) -> Iterator[tuple[bytes, int]]:
    """Yield (up to 1,024 rows of the column `field` as an Arrow stream, number of rows) of a parquet file.

    Host memory holds one row group at a time. Raises DataError if the file is damaged or has no text column `field`.
    """
    remedy = "Run `pip install 'txl_dist[parquet]'`."
    with translate_errors(DataError, f"reading {path} needs the package pyarrow", remedy, of=(ImportError,)):
        import pyarrow
        import pyarrow.parquet
    row = 0
    try:
        source = stream if stream.seekable() else io.BytesIO(stream.read())  # a parquet file is read from its end
        table = pyarrow.parquet.ParquetFile(source, page_checksum_verification=True)
        _check_column(table.schema_arrow, field, path)
        if pyarrow.types.is_dictionary(table.schema_arrow.field(field).type):
            # Reading the column as a dictionary skips the check for UTF-8, which pyarrow makes otherwise.
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
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__  # may have several lines
        raise DataError(
            f"cannot read {path}, column {field!r}, from row {row + 1:,} on: {reason}. Repair or remove the file, then "
            "prepare again."
        ) from error


def _check_column(schema: Any, field: str, path: str) -> None:
    """Raise DataError unless exactly one column has the name `field` and contains text, or bytes that can be text."""
    kinds = [column.type for column in schema if column.name == field]
    if len(kinds) == 1 and _is_text(kinds[0]):
        return
    if len(kinds) > 1:
        raise DataError(
            f"{path}: {len(kinds)} columns are named {field!r}. Give each of these columns its own name, then prepare "
            "again."
        )
    columns = ", ".join(f"{column.name} ({column.type})" for column in schema)
    raise DataError(
        f"{path} has no text column {field!r} (found: {columns}). Name a column of strings with --jsonl-field."
    )


def _is_text(kind: Any) -> bool:
    """Return whether a pyarrow type is text or bytes, in any memory layout."""
    inner = getattr(kind, "storage_type", kind)  # the type below an extension type
    if str(inner).startswith("dictionary"):
        inner = getattr(inner, "value_type", inner)
    return str(inner).partition("[")[0] in _TEXT_TYPES


def _as_stream(column: Any) -> bytes:
    """Return a column as an Arrow stream of byte strings.

    The text stays undecoded, because it can be invalid UTF-8 even if the type of the column is string.
    """
    import pyarrow

    if hasattr(column.type, "storage_type"):
        column = column.storage
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    batch = pyarrow.record_batch([column.cast(pyarrow.large_binary())], names=["text"])
    buffer = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(buffer, batch.schema) as writer:
        writer.write_batch(batch)
    raw: bytes = buffer.getvalue().to_pybytes()
    return raw
