"""Reading, writing and naming of files on a disk that other users can write too.

Writing   Content goes into a new file, never through a link, and is flushed to the disk. A rename then replaces the old
          file, or a link of that name. So no file in another folder is overwritten, and a crash leaves the old content
          or the new content. The next write removes a temporary file that a crash left. Links are followed only for
          files that grow (`open_to_append`) and files that a user names (`write_output`).
Reading   Only regular files are read, so that no FIFO or device can block. Sizes are bounded, and so is the depth of
          JSON and TOML. Wrong content raises ValueError, and failed access raises OSError. `decode_text` and
          `open_text` read text: a byte order mark, which editors and shells of Windows write, gives the encoding and
          is not part of the text. Text without a mark is UTF-8.
Names     Names that a manifest lists stay in its folder (`resolve_inside`).

Two processes must not write one file at the same time. Where that could happen, the callers hold a lock.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import inspect
import json
import math
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import IO, Any, TypeVar, get_type_hints

from txl_dist.errors import ConfigError, translate_errors

T = TypeVar("T")

MAX_TEXT_BYTES = 1 << 30
"""Maximum size in bytes of a JSON or TOML file. The largest files in use, tokenizers and indices, have some hundred
MiB."""
MAX_DEPTH = 64
"""Maximum depth of nested objects in JSON and TOML. Files of this package have a depth of 6, and a tokenizer of Hugging
Face has about 10."""
_MARKS = {  # the mark of UTF-32 begins with that of UTF-16, so it comes first; these codecs drop the mark
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_LONGEST_MARK = 4
UTF8 = "utf-8-sig"
"""Codec of UTF-8 that drops a byte order mark."""
_MAX_NAME = 255
_MOST_DIGITS = 4000
"""Maximum number of digits of a whole number that is converted. Python's own limit is 4,300."""
_KEPT_DEPTH = 1
"""Number of levels that are read from a record that is nested too deeply."""
_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]')
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def path_of(path: str | Path) -> Path:
    """Convert a string or a Path to a Path. Raises ConfigError for any other type."""
    with translate_errors(ConfigError, f"{path!r:.200} is not a path", "Give a string or a Path.", of=(TypeError,)):
        return Path(path)


def open_new(path: Path, *, buffering: int = -1) -> IO[bytes]:
    """Open a new, empty file to write and read. An existing file or link of this name is removed first.

    Raises OSError if the path is a folder, or if another process creates the file at the same moment.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "w+b", buffering=buffering)


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `path` when the block ends. Before it replaces the old file, the new file is
    flushed to the disk.

    If the block raises an exception, the new file is removed and the old file remains.
    """
    temporary = path.with_name(path.name + ".tmp")
    stream = open_new(temporary)
    try:
        with stream:
            yield stream
            fsync(stream)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    flush_folder(path.parent)


def atomic_replace(path: Path, data: bytes) -> None:
    """Replace the content of a file. After a crash the file has the old content or the new content, never a part."""
    with atomic_write(path) as stream:
        stream.write(data)


def why_unwritable(path: Path, error: OSError) -> str:
    """Return the reason why `path` cannot be written. The text names the closest folder above `path` that exists."""
    above = next(folder for folder in path.absolute().parents if os.path.exists(folder))
    reasons = {
        errno.ENOENT: f"no folder can be made in {above}",
        errno.EPERM: f"no folder can be made in {above}",
        errno.EACCES: f"this user may not write in {above}",
        errno.ENOTDIR: f"{above} is not a folder",
        errno.EROFS: f"{above} is read-only",
        errno.ENOSPC: f"the disk of {above} is full",
        errno.EDQUOT: f"the quota of this user is used up in {above}",
        errno.ENAMETOOLONG: "a name in the path is too long",
    }
    return reasons.get(error.errno or 0, str(error.strerror or error))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new file and flush it to the disk.

    A crash can leave a part of the file, so use it only in folders that get their final name later.
    """
    with open_new(path) as stream:
        stream.write(data)
        fsync(stream)


def create_file(path: Path, data: bytes) -> None:
    """Create a file that appears with its whole content, also for processes that try the same at that moment.

    Raises FileExistsError if the file exists. On a file system without hard links the file appears empty and is then
    written.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_bytes(temporary, data)
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        with path.open("xb") as stream:
            stream.write(data)
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_output(path: Path, data: bytes) -> None:
    """Write data to a file that a user named. Links are followed, and pipes, terminals and /dev/stdout are allowed.

    Raises ConfigError if the file cannot be written.
    """
    with translate_errors(ConfigError, f"cannot write {path}", "Choose another file."), path.open("wb") as stream:
        stream.write(data)
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            fsync(stream)


def open_to_append(path: Path) -> int:
    """Open a file to read and append, and return its descriptor. A missing file is created.

    Links are followed, because a user may keep logs on another disk or in /dev/null. Raises OSError for a folder or a
    FIFO.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    return _regular(descriptor, path, or_device=True)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read. Raises OSError at once for a folder, a FIFO or a device, which could block."""
    descriptor = os.open(path, _READ)
    return os.fdopen(_regular(descriptor, path), "rb")


def _regular(descriptor: int, path: Path, *, or_device: bool = False) -> int:
    """Return `descriptor` if it is a regular file, or with `or_device` a character device.

    Otherwise close it and raise OSError.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or (or_device and stat.S_ISCHR(mode)):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_bytes(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a file. Raises OSError if it is not a regular file or is larger than `max_bytes`."""
    with open_regular(path) as stream:
        if os.fstat(stream.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return stream.read()


def text_encoding(start: bytes) -> str:
    """Return the codec of a text whose first four bytes are `start`.

    A byte order mark determines the codec, which drops the mark. Without a mark the codec is UTF-8.
    """
    for mark, encoding in _MARKS.items():
        if start.startswith(mark):
            return encoding
    return UTF8


def decode_text(content: bytes) -> str:
    """Return text that a user may have written, without its byte order mark. Raises UnicodeDecodeError if the bytes are
    not text."""
    return content.decode(text_encoding(content[:_LONGEST_MARK]))


def has_mark(content: bytes) -> bool:
    """Return whether a text begins with a byte order mark, which other programs may read as a character."""
    return content.startswith((codecs.BOM_UTF8, *_MARKS))


def read_text(path: Path) -> str:
    """Return the content of a text file, without its byte order mark. Raises OSError, or UnicodeDecodeError if the file
    is not text."""
    return decode_text(read_bytes(path))


def open_text(path: Path, *, errors: str = "strict") -> TextIOWrapper:
    """Open a text file to read it line by line, without its byte order mark. Carriage returns are kept.

    The file may be a FIFO. Raises OSError. Reading the result raises UnicodeDecodeError if the text is invalid.
    """
    stream = path.open("rb")
    try:
        encoding = text_encoding(stream.peek(_LONGEST_MARK)[:_LONGEST_MARK])
    except BaseException:
        stream.close()
        raise
    return TextIOWrapper(stream, encoding=encoding, errors=errors, newline="\n")


def read_as_text(stream: TextIOWrapper) -> None:
    """Set up standard input to be decoded like a text file, in every locale. Invalid bytes become surrogates."""
    start = b""
    if isinstance(stream.buffer, BufferedReader):
        start = stream.buffer.peek(_LONGEST_MARK)[:_LONGEST_MARK]
    stream.reconfigure(encoding=text_encoding(start), errors="surrogateescape", newline="\n")


def read_json(path: Path) -> Any:
    """Return the value in a JSON file. Raises OSError if it cannot be read, ValueError if it is not JSON."""
    return parse_json(read_bytes(path))


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text. Raises ValueError if the text is not JSON or is nested too deeply."""
    if isinstance(content, bytes):
        text = decode_text(content)
    else:
        text = content
    try:
        values = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(values)
    return values


class Record(dict[str, Any]):
    """JSON object in a user's file. If a key occurs more than once, its last value is kept."""

    repeated: frozenset[str] = frozenset()
    """Keys that occur more than once."""


class LongNumber(str):
    """Digits of a whole number that is too long for Python to convert."""


def parse_record(line: str) -> Any:
    """Return the value of a line of JSON that a user wrote. Objects become `Record`s.

    The line can have any depth. If it is nested too deeply for Python's parser, nested values are left empty. Whole
    numbers of more than 4,000 digits become `LongNumber`s. Raises ValueError if the line is not JSON.
    """
    try:
        return _decode_record(line)
    except RecursionError:
        return _shallow(line)


def _decode_record(line: str) -> Any:
    """Return the value of a line of JSON, as Python's parser reads it. Raises ValueError or RecursionError."""
    return json.loads(line, object_pairs_hook=_as_record, parse_int=_as_int)


def _as_record(members: list[tuple[str, Any]]) -> Record:
    record = Record(members)
    if len(record) < len(members):
        keys = [key for key, _ in members]
        record.repeated = frozenset(key for key in record if keys.count(key) > 1)
    return record


def _as_int(digits: str) -> int | LongNumber:
    if len(digits) <= _MOST_DIGITS:
        return int(digits)
    return LongNumber(digits)


def _shallow(line: str) -> Any:
    """Return the value of a JSON object or list in which all nested objects and lists are left empty.

    Brackets are matched without recursion.
    """
    flat = []
    depth = end = 0
    for token in _BRACKETS.finditer(line):
        if token[0] in ("{", "["):
            depth += 1
            if depth == _KEPT_DEPTH + 1:
                flat.append(line[end : token.start()])
                opened = token[0]
        elif token[0] in ("}", "]"):
            depth -= 1
            if depth == _KEPT_DEPTH:
                flat.append("{}" if opened == "{" else "[]")
                end = token.end()
    if depth:
        raise ValueError(f"{depth} brackets are not closed")
    return _decode_record("".join(flat) + line[end:])


def parse_object(content: bytes | str) -> dict[str, Any]:
    """Return the value of a JSON text that must be an object. Raises ValueError for any other text."""
    values = parse_json(content)
    if not isinstance(values, dict):
        raise ValueError("it holds no JSON object")
    return values


def typed(kind: Callable[..., T], values: object) -> T:
    """Make a named tuple or dataclass from a JSON object, or from a JSON list in the order of the fields.

    Fields of type str, int, float and bool are checked, and integers must be in 0 .. 2**63 - 1. The caller checks all
    other fields. Raises ValueError if a field is missing, unknown or of the wrong type.
    """
    names, hints = _form(kind)
    if isinstance(values, list) and len(values) <= len(names):
        values = dict(zip(names, values, strict=False))
    if not isinstance(values, dict):
        raise ValueError(f"{_shown(values)} is no {kind.__name__}")
    for name, value in values.items():
        hint = hints.get(name)
        is_wrong = hint in (int, str, bool) and type(value) is not hint
        is_wrong |= hint is float and (type(value) not in (int, float) or not math.isfinite(value))
        if is_wrong or (hint is int and not 0 <= value < 1 << 63):
            raise ValueError(f"{name} is {_shown(value)}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error)) from error


@lru_cache  # an index names tens of thousands of shards, and this takes longer than making one
def _form(kind: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return (names of the fields in order, types of the fields by name)."""
    return tuple(inspect.signature(kind).parameters), get_type_hints(kind)


def _shown(value: object) -> str:
    return f"{value!r:.60}"


def parse_toml(content: bytes | str) -> dict[str, Any]:
    """Return the values of a TOML text. Raises ValueError if the text is not TOML or is nested too deeply."""
    if isinstance(content, bytes):
        text = decode_text(content)
    else:
        text = content
    try:
        values = tomllib.loads(text)
        repr(values)  # raises ValueError for a hexadecimal number with more digits than Python prints
    except RecursionError:
        raise _too_deep() from None
    _check_depth(values)
    return values


def _check_depth(values: Any) -> None:
    """Raise ValueError if values are nested more than MAX_DEPTH deep. Levels are checked in turn, without recursion."""
    if isinstance(values, dict | list):
        level = [values]
    else:
        level = []
    for _ in range(MAX_DEPTH):
        next_level: list[Any] = []
        for container in level:
            children = container.values() if isinstance(container, dict) else container
            next_level += [child for child in children if isinstance(child, dict | list)]
        level = next_level
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"the content has more than {MAX_DEPTH} nested levels")


def is_file_name(name: object) -> bool:
    """Return whether `name` is a valid name of a file directly in a folder, without any path."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    return len(name.encode(errors="replace")) <= _MAX_NAME


def resolve_inside(folder: Path, name: object, *, nested: bool = False) -> Path:
    """Return the path of a file that is listed in the manifest of `folder`.

    `nested` allows names with /. Raises ValueError if the name is invalid, or if the path leads out of the folder. One
    exception is allowed: a snapshot in huggingface_hub's cache contains links to the blobs of its repository.
    """
    parts: list[object] = [name]
    if nested and isinstance(name, str):
        parts = [*name.split("/")]
    if not all(map(is_file_name, parts)):
        raise ValueError(f"{_shown(name)} is not the name of a file in this folder")
    path = folder
    for part in map(str, parts):
        path = path / part
        # os.path.islink makes one system call; resolving every path would make many.
        if os.path.islink(path) and not _leads_inside(path, folder):
            raise ValueError(f"{name!r} is a link that leads out of this folder")
    return path


def _leads_inside(link: Path, folder: Path) -> bool:
    """Return whether a link leads to a file in the folder, or from a snapshot in the Hub's cache to its blobs."""
    home = Path(os.path.realpath(folder))
    target = Path(os.path.realpath(link))
    if target.is_relative_to(home):
        return True
    return home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / "blobs")


def canonical_hash(values: dict[str, Any]) -> str:
    """Return the sha256 of JSON values in a canonical form.

    The key `self_sha256` is left out, because a file stores this hash under that key.
    """
    hashed = {key: value for key, value in values.items() if key != "self_sha256"}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def hashed_json(values: dict[str, Any]) -> bytes:
    """Return the content of a JSON file that includes its own canonical hash. The hash detects any flipped bit."""
    text = json.dumps(values | {"self_sha256": canonical_hash(values)}, sort_keys=True, indent=1)
    return text.encode() + b"\n"


def write_hashed_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file that includes its own canonical hash, and flush it to the disk."""
    write_bytes(path, hashed_json(values))


def fsync(stream: IO[bytes]) -> None:
    """Flush a file to the disk. Otherwise a power cut could keep a later rename of the file but lose its content."""
    stream.flush()
    os.fsync(stream.fileno())


def flush_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that new and renamed files in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def was_removed(folder: Path) -> bool:
    """Return whether a folder that existed is missing now. Returns False for any other error of the file system."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def unique_path(path: Path, word: str) -> Path:
    """Return the first of the paths NAME.word-1, NAME.word-2 and so on that does not exist."""
    number = 1
    while True:
        candidate = path.with_name(f"{path.name}.{word}-{number}")
        if not os.path.lexists(candidate):
            return candidate
        number += 1


def sha256_of_bytes(data: bytes) -> str:
    """Return the sha256 of bytes as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the sha256 of a file of any size. Raises OSError if it cannot be read or is not a regular file."""
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
