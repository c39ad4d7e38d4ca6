"""Readers of input files: return the decompressed bytes of an input from any store, or an error that names the input.

The first 4 KiB of each input, before and after decompression, decide how the input is read (detection.py). These bytes
are buffered and used again, so nothing is read twice, and no URL is requested twice.

An incomplete input is always an error: a compressed file without its end, a URL that returns fewer bytes than
announced, or a command with an exit status other than 0. The exit status 141 (a broken pipe) is an error too, although
webdataset accepts it as success.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import shlex
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from typing_extensions import override

from txl_dist.data.prepare.detection import (
    HEAD_BYTES,
    Content,
    detect_content,
    has_scheme,
    is_named_compressed,
    path_of_name,
    text_suffix,
)
from txl_dist.data.prepare.documents import LONGEST_RECORD, Form, check_length
from txl_dist.data.prepare.sources import PIPE, STDIN, SourceFile, TextSource, plugin_source
from txl_dist.data.storage.fsspec_io import filesystem_of, retrying, watched
from txl_dist.data.storage.remote import end_command, start_command
from txl_dist.errors import DataError, in_one_line, translate_errors
from txl_dist.io.files import open_new

_MIB = 1 << 20
_LONGEST_WINDOW = 1 << 31
_RETRIES = 5
_MOST_LAYERS = 4
"""Maximum number of nested compressions. A compressed file that a server compresses again has two."""
_READ_AS_TEXT = "begins like JSON lines but is read as plain text. To read its records, use --documents jsonl"

_CONTAINERS: dict[str, tuple[str, Form]] = {
    "parquet": ("a parquet file", "parquet"),
    "tar": ("a tar archive", "webdataset"),
}
"""(name in messages, form) of the formats that hold many documents, by the kind of content."""
_SEPARATORS = {".csv": "','", ".tsv": "'\\t'", ".tab": "'\\t'"}
"""Separator of columns as a Python literal, by the suffix of a table's file."""
_TABLE = (
    "is a table and is read as text, with its header and separators. To train on one column: "
    'python -c "import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin, '
    'delimiter=SEPARATOR)]" < FILE > out.jsonl, then prepare out.jsonl with --jsonl-field COLUMN'
)


class Opened(NamedTuple):
    """Open input, positioned at its first decompressed byte."""

    stream: IO[bytes]
    """The decompressed bytes of the input."""
    form: Form
    """Form in which the input is read. The name of the input, the settings and the input's content decide the form."""
    stored_bytes: Callable[[], int]
    """Function that returns the number of stored bytes read so far. It works only for files of known size."""
    note: str = ""
    """Sentence for the user on how the input is read. Empty if there is nothing to say."""


@contextmanager
def open_source(file: SourceFile, allow_protocols: Sequence[str]) -> Iterator[Opened]:
    """Open a file and detect its form by its first bytes.

    Raises DataError with the name of the file if the file cannot be read or is not text.
    """
    with _naming(file), _open_stored(file, allow_protocols) as raw:
        stream, content, num_layers = _decompressed(raw, file)
        form = _form_of(file, content, is_compressed=num_layers > 0)
        yield Opened(stream, form, raw.tell, _note_on(file, content, form))


def _note_on(file: SourceFile, content: Content, form: Form) -> str:
    """Return a hint for the user if a file looks like JSON records or like a table, but is read as plain text.

    Returns an empty string for other files.
    """
    if form in ("jsonl", "ids", "parquet", "webdataset"):
        return ""
    if content.kind == "jsonl":
        return _READ_AS_TEXT
    separator = _SEPARATORS.get(text_suffix(file.path), "")
    if separator:
        return _TABLE.replace("SEPARATOR", separator)
    return ""


def chunks_of(file: SourceFile, allow_protocols: Sequence[str]) -> Iterator[bytes]:
    """Yield a file's decompressed bytes, a MiB at a time. Raises DataError with the name of the file."""
    with open_source(file, allow_protocols) as opened:
        while chunk := opened.stream.read(_MIB):
            yield chunk


def decompress_member(data: bytes, name: str, file: SourceFile) -> bytes:
    """Return the decompressed content of a compressed member of the tar `file`. `name` ends in `.gz`, `.zst` or another
    suffix of compression.

    Raises DataError with the name of the member if its data is damaged or incomplete, or has 2 GiB or more.
    """
    member = file._replace(path=name)
    with _naming(member):
        stream, _, _ = _decompressed(io.BufferedReader(io.BytesIO(data)), member)
        content = stream.read(LONGEST_RECORD)
    check_length(len(content), name)
    return content


def begin(
    file: SourceFile, copy: Path, *, at_most: int, allow_protocols: Sequence[str], streams: ExitStack
) -> SourceFile:
    """Copy the first `at_most` bytes of an input that can be read only once to the file `copy`.

    Returns the input together with its copy. If the copy contains the whole input, the input can then be read any
    number of times. Otherwise it can be read only once: first the copy, and then the rest of the stream, which stays
    open until `streams` is closed. Raises DataError with the name of the input.
    """
    raw = streams.enter_context(_open_stored(file, allow_protocols))
    with open_new(copy) as copied:
        size = 0
        while size < at_most:
            chunk_len = min(at_most - size, _MIB)
            chunk = _read(raw, chunk_len, file)
            if not chunk:
                break
            copied.write(chunk)
            size += len(chunk)
    begun = file._replace(spooled=str(copy))
    with open_source(begun, allow_protocols) as opened:
        begun = begun._replace(form=opened.form)
    if size < at_most:
        return begun._replace(size=size)
    return begun._replace(rest=raw)


def _read(stream: IO[bytes], count: int, file: SourceFile) -> bytes:
    with _naming(
        file
    ):  # translate only errors of the input: an error of the copy, such as a full disk, has another cause
        return stream.read(count)


@contextmanager
def _naming(file: SourceFile) -> Iterator[None]:
    """Replace an error of reading by a DataError that names the file."""
    try:
        yield
    except _read_errors() as error:
        raise DataError(f"cannot read {file.path}: {error}. Repair or remove the file, then prepare again.") from error


def _open_stored(file: SourceFile, allow_protocols: Sequence[str]) -> io.BufferedReader:
    """Open an input, and return a stream of its stored bytes without decompression."""
    if file.rest is not None:
        return io.BufferedReader(_JoinedStream(open(file.spooled, "rb"), file.rest), buffer_size=_MIB)
    if file.spooled:
        return io.BufferedReader(io.FileIO(file.spooled), buffer_size=_MIB)
    if file.path == STDIN:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    if file.path.startswith(PIPE):
        return io.BufferedReader(_CommandStream(file.path.removeprefix(PIPE)), buffer_size=_MIB)
    source = plugin_source(file.path)
    if source is not None:
        return io.BufferedReader(_DocumentStream(source, file), buffer_size=_MIB)
    if has_scheme(file.path):
        return io.BufferedReader(_UrlStream(file, allow_protocols), buffer_size=8 * _MIB)
    return io.BufferedReader(io.FileIO(file.path), buffer_size=_MIB)


def _decompressed(raw: io.BufferedReader, file: SourceFile) -> tuple[IO[bytes], Content, int]:
    """Decompress a stream as often as needed. Returns (decompressed stream, format of its content, number of
    compressions)."""
    stream: IO[bytes] = raw
    if raw.seekable() and (file.spooled or not file.is_stream):
        head = raw.peek(HEAD_BYTES)[:HEAD_BYTES]  # seeking back could request a URL again
    else:
        head = raw.read(HEAD_BYTES)
        stream = _put_back(head, raw)
    if not head and file.name and is_named_compressed(file.name):
        raise EOFError("the file is empty, but its name has the ending of a compressed file")
    content = detect_content(head, name=file.name)
    num_layers = 0
    while content.kind in ("gzip", "bzip2", "xz", "zstd"):
        num_layers += 1
        if num_layers > _MOST_LAYERS:
            raise DataError(
                f"{file.path} is compressed more than {_MOST_LAYERS} times. Decompress the file, then try again."
            )
        decompressed = _decompress(stream, content, file)
        head = decompressed.read(HEAD_BYTES)
        content = detect_content(head, name=file.name)
        stream = _put_back(head, decompressed)
    return stream, content, num_layers


def _put_back(head: bytes, stream: IO[bytes]) -> io.BufferedReader:
    """Return a stream that begins with `head`, which was already read from `stream`, and continues with `stream`."""
    return io.BufferedReader(_JoinedStream(io.BytesIO(head), stream), buffer_size=_MIB)


def _decompress(stream: IO[bytes], content: Content, file: SourceFile) -> IO[bytes]:
    """Return the decompressed stream. Raises DataError if a package is missing."""
    if content.kind == "gzip":
        return cast(IO[bytes], gzip.open(stream))
    if content.kind == "bzip2":
        return bz2.open(stream)
    if content.kind == "xz":
        return cast(IO[bytes], lzma.open(stream))
    remedy = "Run `pip install zstandard`, or decompress the file."
    with translate_errors(DataError, f"reading {file.path} needs the package zstandard", remedy, of=(ImportError,)):
        import zstandard  # type: ignore[import-not-found,import-untyped,unused-ignore]
    frames = zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW)
    return io.BufferedReader(_FrameStream(stream, frames.decompressobj), buffer_size=_MIB)


def _form_of(file: SourceFile, content: Content, *, is_compressed: bool) -> Form:
    """Return the form in which to read a file of this content. Raises DataError with advice if the file cannot be
    read."""
    is_ids = file.form in ("ids", "npy")
    if content.kind == "npy":
        if is_ids:
            return "npy"
        raise DataError(
            f"{file.path} contains token ids. Give a file with the names of the ids, one per line: --vocab-list FILE."
        )
    container = _CONTAINERS.get(content.kind)
    if container is not None:
        what, form = container
        if is_ids:
            raise DataError(f"{file.path} is {what}. Token ids (--vocab-list) must be .npy files or JSON lines.")
        return form
    is_kept = file.keeps_bytes and content.kind == "binary" and file.form not in ("jsonl", "parquet")
    is_no_record = content.kind == "json" and file.form == "jsonl"
    if is_no_record or (content.kind in ("binary", "refused") and not is_kept):
        if file.path == STDIN:
            name = "standard input"
        else:
            name = file.path
        raise DataError(f"{name} is {content.what}. {_remedy(file, content, is_compressed=is_compressed)}")
    if file.form == "parquet":
        raise DataError(
            f"{file.path} is text, not a parquet file. Rename the file: .jsonl for JSON lines, .txt for text."
        )
    if content.kind == "jsonl" and file.is_form_open and not is_ids:
        return "jsonl"
    return file.form


def _remedy(file: SourceFile, content: Content, *, is_compressed: bool) -> str:
    """Return the advice for a format that cannot be read, with the name of the file in its commands."""
    name = file.path
    if file.is_stream:
        name = "FILE"
    elif has_scheme(name):
        name = path_of_name(name).name or "FILE"
    inner = name
    if file.name:
        suffix = text_suffix(file.name)
    else:
        suffix = ""
    if is_compressed and "{file}" in content.remedy:
        inner = f"unpacked{suffix}"
    remedy = content.remedy.replace("{stored}", shlex.quote(name)).replace("{file}", shlex.quote(inner))
    remedy = remedy.replace("{out}", shlex.quote(f"out{suffix or '.txt'}"))
    if inner != name:
        remedy = f"Decompress {name} to {inner}. {remedy}"
    is_remote = file.is_stream or has_scheme(file.path)
    if is_remote and name in remedy:
        return f"Save the input as a file. {remedy}"
    return remedy


class InputStream(io.RawIOBase):
    """Base class of the input streams in this module. A subclass implements `take`.

    A read returns at least HEAD_BYTES bytes, unless fewer bytes are requested or the stream ends.
    """

    def readable(self) -> bool:
        """Return True, because the stream can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, and return the number of bytes. 0 at the end of the stream."""
        filled = 0
        wanted = min(len(buffer), HEAD_BYTES)
        while filled < wanted:
            data = self.take(len(buffer) - filled)
            if not data:
                break
            buffer[filled : filled + len(data)] = data
            filled += len(data)
        return filled

    def take(self, count: int) -> bytes | memoryview:
        """Return up to `count` bytes. Returns no bytes only at the end of the stream."""
        raise NotImplementedError


class _FrameStream(InputStream):
    """Stream of the decompressed content of zstd frames.

    It raises EOFError if the last frame is incomplete. The reader of the package zstandard does not detect this.
    """

    def __init__(self, raw: IO[bytes], new_frame: Callable[[], Any]) -> None:
        self._raw = raw
        self._new_frame = new_frame
        self._frame: Any = None
        self._unread = memoryview(b"")

    @override
    def take(self, count: int) -> memoryview:
        while not self._unread:
            if self._frame and self._frame.eof:
                data = self._frame.unused_data
            else:
                data = b""
            data = data or self._raw.read(_MIB // 8)
            is_between = self._frame is None or self._frame.eof
            if not data and is_between:
                return self._unread
            if not data:
                raise EOFError("the compressed data is incomplete: it ends inside a compressed frame")
            if is_between:
                self._frame = self._new_frame()
            self._unread = memoryview(self._frame.decompress(data))
        taken = self._unread[:count]
        self._unread = self._unread[count:]
        return taken


class _JoinedStream(InputStream):
    """Stream that returns the bytes of several streams, one stream after the other."""

    def __init__(self, *streams: IO[bytes]) -> None:
        self._streams = streams

    @override
    def take(self, count: int) -> bytes:
        for stream in self._streams:
            data = stream.read(count)
            if data:
                return data
        return b""

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        super().close()


class _CommandStream(InputStream):
    """Stream of the output of a shell command. At the end of the output it raises DataError if the command failed."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._process = start_command(command, output=subprocess.PIPE)

    @override
    def take(self, count: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(count)
        if not data and (status := self._process.wait()):
            raise DataError(
                f"the command {self._command!r} ended with exit status {status}, so its output can be incomplete. "
                "Correct the command, then prepare again."
            )
        return data

    def close(self) -> None:
        assert self._process.stdout is not None
        end_command(self._process)
        self._process.stdout.close()
        super().close()


class _DocumentStream(InputStream):
    """Stream of the documents of a plugin's text source, as JSON lines."""

    def __init__(self, source: TextSource, file: SourceFile) -> None:
        self._file = file
        self._unread = memoryview(b"")
        self._texts = self._documents(source)

    def _documents(self, source: TextSource) -> Iterator[str]:
        path = self._file.path
        try:
            for number, text in enumerate(source.read(path.partition(":")[2])):
                if not isinstance(text, str):
                    raise DataError(
                        f"{path}: document {number + 1} that the plugin's text source returned is a "
                        f"{type(text).__name__}, not a str. Correct the plugin."
                    )
                yield text
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{path}: the plugin's text source raised an error: {in_one_line(error)}. Correct the plugin, or the "
                "input that the plugin reads."
            ) from error

    @override
    def take(self, count: int) -> memoryview:
        if not self._unread:
            text = next(self._texts, None)
            if text is None:
                line = b""
            else:
                line = json.dumps({self._file.jsonl_field: text}).encode() + b"\n"
            self._unread = memoryview(line)
        taken = self._unread[:count]
        self._unread = self._unread[count:]
        return taken


class _UrlStream(InputStream):
    """Stream of the file at a URL. A failed read is retried from the position where the last successful read ended.

    It raises an error if the file has fewer bytes than announced.
    """

    def __init__(self, file: SourceFile, allow_protocols: Sequence[str]) -> None:
        self._url = file.path
        self._size = file.size
        self._filesystem, self._path = filesystem_of(file.path, allow=allow_protocols)
        self._file: Any = None
        self._block_size = 8 * _MIB
        self._position = 0

    def seekable(self) -> bool:
        return self._size is not None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size or 0}
        self._position = origins[whence] + offset
        self._file = None
        return self._position

    @override
    def take(self, count: int) -> bytes:
        data = retrying(lambda: watched(lambda: self._read(count)), what=self._url, retries=_RETRIES)
        self._position += len(data)
        return data

    def _read(self, count: int) -> bytes:
        file = self._file or self._open()
        self._file = None
        try:
            data: bytes = file.read(count)
        except ValueError:
            if not self._block_size:
                raise
            self._block_size = 0  # the server does not support ranges: read one response from front to back
            return self._read(count)
        if not data and self._size is not None and self._position < self._size:
            raise OSError(f"the file ended after {self._position:,} of {self._size:,} bytes")
        self._file = file
        return data

    def _open(self) -> Any:
        file = self._filesystem.open(self._path, "rb", block_size=self._block_size, cache_type="readahead")
        try:
            file.seek(self._position)
        except ValueError:  # the file can only be read from front to back
            _discard(file, self._position)
        return file


def _read_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that reading a file can raise.

    The exception of zstandard is included only if the package is imported.
    """
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    library = sys.modules.get("zstandard")
    if library is None:
        return errors
    return (*errors, library.ZstdError)


def skip(stream: IO[bytes], offset: int) -> None:
    """Advance a stream from its beginning to an offset in bytes."""
    if stream.seekable():
        stream.seek(offset)
    else:
        _discard(stream, offset)


def _discard(stream: IO[bytes], count: int) -> None:
    while count and (passed := len(stream.read(min(count, _MIB)))):
        count -= passed
