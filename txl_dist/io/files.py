"""Files at the border to a disk that others can write too: how all of the package writes, reads and names them.

Writing   Into a file that did not exist, never through a link, flushed to the disk; a rename then puts it in the place
          of the old one, or of a link of that name. So nothing outside is overwritten, whatever lies under our names,
          and a crash leaves the old content or the new. What a crash leaves under a temporary name is removed by the
          next write. Files that grow (`open_to_append`) and files that a user names (`write_output`) follow links: to
          link them elsewhere is the choice of whoever owns the folder.
Reading   From regular files only, so that no FIFO or device can keep us waiting; of a bounded size; JSON and TOML of a
          bounded depth. Whatever is wrong with the content is a ValueError, with the access an OSError. Text goes
          through `decode_text` or `open_text`: a byte order mark, which editors and shells of Windows write, says the
          encoding and is no part of the text. Without a mark it is UTF-8.
Names     that a manifest lists stay in its folder (`resolve_inside`).

What it gives up: two processes that write one file at one time, which locks exclude where it matters.
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
"""Of a JSON or TOML file. The largest ones, tokenizers and indices, have some hundred MiB."""
MAX_DEPTH = 64
"""Of objects in objects. Ours have 6, a Hugging Face tokenizer about 10."""
_MARKS = {  # that of UTF-32 begins with that of UTF-16; the codecs named so drop the mark
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
"""Digits of the longest whole number that is converted; Python's own limit is 4,300."""
_KEPT_DEPTH = 1
"""Levels that are kept of a record that is nested too deeply."""
_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]')
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def path_of(path: str | Path) -> Path:
    """Raises ConfigError for what is no path."""
    with translate_errors(ConfigError, f"{path!r:.200} is no path", "Give a string or a Path.", of=(TypeError,)):
        return Path(path)


def open_new(path: Path, *, buffering: int = -1) -> IO[bytes]:
    """An empty file to write and read, which is nothing that others put there: what has this name is removed first.

    Raises OSError, also if somebody makes the name again in between, or if it is a folder.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "w+b", buffering=buffering)


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path`, durably, when the block ends; after an error nothing is left of it."""
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
    """Write a file so that a crash leaves the old content or the new, never a part."""
    with atomic_write(path) as stream:
        stream.write(data)


def why_unwritable(path: Path, error: OSError) -> str:
    """Return why nothing can be written at a path, with the folder above it that prevents it."""
    above = next(folder for folder in path.absolute().parents if os.path.exists(folder))
    reasons = {
        errno.ENOENT: f"no folder can be made in {above}",
        errno.EPERM: f"no folder can be made in {above}",
        errno.EACCES: f"this user may not write in {above}",
        errno.ENOTDIR: f"{above} is no folder",
        errno.EROFS: f"{above} is read-only",
        errno.ENOSPC: f"the disk of {above} is full",
        errno.EDQUOT: f"the quota of this user is used up in {above}",
        errno.ENAMETOOLONG: "a name in it is too long",
    }
    return reasons.get(error.errno or 0, str(error.strerror or error))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it. For folders that are committed as a whole later."""
    with open_new(path) as stream:
        stream.write(data)
        fsync(stream)


def write_output(path: Path, data: bytes) -> None:
    """Write to a file that a user named: a link is followed, and a pipe, a terminal or /dev/stdout will do.

    Raises ConfigError.
    """
    with translate_errors(ConfigError, f"cannot write {path}", "Choose another file."), path.open("wb") as stream:
        stream.write(data)
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            fsync(stream)


def open_to_append(path: Path) -> int:
    """Descriptor of a file that grows, read and written; made if there is none. Raises OSError for a folder or a FIFO.

    A link is followed: logs may lie on another disk, or in /dev/null.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    return _regular(descriptor, path, or_device=True)


def open_regular(path: Path) -> BufferedReader:
    """A regular file to read. Raises OSError at once for a folder, a FIFO or a device, at which reading could wait."""
    return os.fdopen(_regular(os.open(path, _READ), path), "rb")


def _regular(descriptor: int, path: Path, *, or_device: bool = False) -> int:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or (or_device and stat.S_ISCHR(mode)):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_bytes(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """A small file, whole. Raises OSError if it is no regular file, or larger than that."""
    with open_regular(path) as stream:
        if os.fstat(stream.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return stream.read()


def text_encoding(start: bytes) -> str:
    """Name the codec of a text by its first four bytes: that of its byte order mark, else UTF-8. It drops the mark."""
    return next((encoding for mark, encoding in _MARKS.items() if start.startswith(mark)), UTF8)


def decode_text(content: bytes) -> str:
    """Decode text that a user may have written, without its byte order mark. Raises UnicodeDecodeError."""
    return content.decode(text_encoding(content[:_LONGEST_MARK]))


def has_mark(content: bytes) -> bool:
    """Whether a text begins with a byte order mark, which other programs may take for its first character."""
    return content.startswith((codecs.BOM_UTF8, *_MARKS))


def read_text(path: Path) -> str:
    """A small text file, without its byte order mark. Raises OSError, UnicodeDecodeError."""
    return decode_text(read_bytes(path))


def open_text(path: Path, *, errors: str = "strict") -> TextIOWrapper:
    """Open a text to read it line by line, without its byte order mark; `\\r` stays. A FIFO will do.

    Raises OSError; reading raises UnicodeDecodeError.
    """
    stream = path.open("rb")
    try:
        encoding = text_encoding(stream.peek(_LONGEST_MARK)[:_LONGEST_MARK])
    except BaseException:
        stream.close()
        raise
    return TextIOWrapper(stream, encoding=encoding, errors=errors, newline="\n")


def read_as_text(stream: TextIOWrapper) -> None:
    """Make standard input read as a file would be, whatever the locale. Bytes that are no text become surrogates."""
    start = stream.buffer.peek(_LONGEST_MARK)[:_LONGEST_MARK] if isinstance(stream.buffer, BufferedReader) else b""
    stream.reconfigure(encoding=text_encoding(start), errors="surrogateescape", newline="\n")


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises OSError, and ValueError as `parse_json` does."""
    return parse_json(read_bytes(path))


def parse_json(content: bytes | str) -> Any:
    """Parse JSON. Raises ValueError for anything else, and where it is nested too deeply."""
    try:
        values = json.loads(decode_text(content) if isinstance(content, bytes) else content)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(values)
    return values


class Record(dict[str, Any]):
    """A JSON object of a user. A key may occur more than once; its last value is kept."""

    repeated: frozenset[str] = frozenset()
    """Keys that come more than once."""


class LongNumber(str):
    """The digits of a whole number that is too long for Python to convert."""


def parse_record(line: str) -> Any:
    """Parse a line of a user's JSON, of any depth and with numbers of any length; objects become `Record`s.

    Whole numbers of more than 4,000 digits are `LongNumber`s. Objects that are nested too deeply for
    Python's parser are read by their own members, and what is nested in those is passed over. Raises ValueError.
    """
    try:
        return _decode_record(line)
    except RecursionError:
        return _shallow(line)


def _decode_record(line: str) -> Any:
    return json.loads(line, object_pairs_hook=_as_record, parse_int=_as_int)


def _as_record(members: list[tuple[str, Any]]) -> Record:
    record = Record(members)
    if len(record) < len(members):
        keys = [key for key, _ in members]
        record.repeated = frozenset(key for key in record if keys.count(key) > 1)
    return record


def _as_int(digits: str) -> int | LongNumber:
    return int(digits) if len(digits) <= _MOST_DIGITS else LongNumber(digits)


def _shallow(line: str) -> Any:
    """An object, or a list, whose nested values are empty: found by their brackets, without recursion."""
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
    """The same for an object. Raises ValueError."""
    values = parse_json(content)
    if not isinstance(values, dict):
        raise ValueError("it holds no JSON object")
    return values


def typed(kind: Callable[..., T], values: object) -> T:
    """A named tuple or dataclass of the members of a JSON object, or of a JSON list in the order of its fields.

    Its text, numbers and truth values are looked at, and integers lie in 0 .. 2**63 - 1; what else it holds is the
    caller's business. Raises ValueError.
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


@lru_cache  # an index names tens of thousands of shards, and Python takes longer to say this than to make one
def _form(kind: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of the fields in their order, and types by name."""
    return tuple(inspect.signature(kind).parameters), get_type_hints(kind)


def _shown(value: object) -> str:
    return f"{value!r:.60}"


def parse_toml(content: bytes | str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError for anything else, and where it is nested too deeply."""
    text = decode_text(content) if isinstance(content, bytes) else content
    try:
        values = tomllib.loads(text)
        repr(values)  # a hexadecimal number may have more digits than Python prints, which is a ValueError
    except RecursionError:
        raise _too_deep() from None
    _check_depth(values)
    return values


def _check_depth(values: Any) -> None:
    level = [values]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [child for children in inner for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_DEPTH} deep")


def is_file_name(name: object) -> bool:
    """Whether this can only name a file in the folder at hand."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    return len(name.encode(errors="replace")) <= _MAX_NAME


def resolve_inside(folder: Path, name: object, *, nested: bool = False) -> Path:
    """The path of a file that a manifest lists: below its folder, whatever the manifest and links say.

    `nested` allows names with /. A snapshot of huggingface_hub's cache holds links to the blobs of its repository,
    which count as inside. Raises ValueError for a name that is none or leaves the folder.
    """
    parts = name.split("/") if nested and isinstance(name, str) else [name]
    if not all(map(is_file_name, parts)):
        raise ValueError(f"{_shown(name)} is no name of a file in this folder")
    path = folder
    for part in map(str, parts):
        path = path / part
        # os.path.islink is one look at the disk; to resolve every path would be many.
        if os.path.islink(path) and not _leads_inside(path, folder):
            raise ValueError(f"{name!r} is a link that leads out of this folder")
    return path


def _leads_inside(link: Path, folder: Path) -> bool:
    home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(link))
    if target.is_relative_to(home):
        return True
    return home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / "blobs")


def canonical_hash(values: dict[str, Any]) -> str:
    """sha256 of JSON values in one spelling, leaving out the key `self_sha256`, where a file keeps this very hash."""
    rest = {key: value for key, value in values.items() if key != "self_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def hashed_json(values: dict[str, Any]) -> bytes:
    """The bytes of a JSON file that holds its own canonical hash: one spelling, so that any flipped bit shows."""
    text = json.dumps(values | {"self_sha256": canonical_hash(values)}, sort_keys=True, indent=1)
    return text.encode() + b"\n"


def write_hashed_json(path: Path, values: dict[str, Any]) -> None:
    """Write JSON together with its own canonical hash, durably."""
    write_bytes(path, hashed_json(values))


def fsync(stream: IO[bytes]) -> None:
    """Without this a rename can survive a power cut that the content did not."""
    stream.flush()
    os.fsync(stream.fileno())


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def was_removed(folder: Path) -> bool:
    """Whether a folder that was there is no more. What a failing file system answers is no answer."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def unique_path(path: Path, word: str) -> Path:
    """The first of NAME.word-1, NAME.word-2 ... that does not exist."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{word}-{number}")):
        number += 1
    return aside


def sha256_of_bytes(data: bytes) -> str:
    """Hash of what is in memory."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Hash of a file of any size. Raises OSError, also if it is no regular file."""
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
