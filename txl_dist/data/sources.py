"""Where text comes from: files, folders, JSONL, compressed forms of these, and the standard library of Python.

A source is a function that starts a new pass and yields one `Document` after the other, in a fixed order, holding
one document at a time. A document's name decides its split (`in_valid_split`), so adding documents never moves
others. Text is UTF-8, taken as it is: no newline or Unicode normalisation, a byte order mark stays.

What is not UTF-8 is refused, unless the caller asks to `replace` (U+FFFD) or `skip`: then the document says so in
`damage`, and whoever consumes it counts. A folder gives its files of the known suffixes; `count_left_out` says how
many others lie there. Links to folders are not followed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, NoReturn, cast

from txl_dist.errors import DataError

EncodingErrors = Literal["refuse", "replace", "skip"]

STDLIB = "stdlib"
"""Input name of the built-in corpus."""
TEXT_SUFFIXES = frozenset({".txt", ".md", ".py", ".tokens", ".jsonl"})
"""Files that are taken from a folder, as they are or compressed; a file named by itself may have any suffix."""
COMPRESSED_SUFFIXES = frozenset({".gz", ".zst"})
_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class Document(NamedTuple):
    """One text. A skipped document is yielded without its text, so that it can be counted."""

    name: str
    text: str
    damage: Literal["", "replaced", "skipped"] = ""


Source = Callable[[], Iterator[Document]]


def open_source(
    inputs: Sequence[str | Path], *, jsonl_field: str = "text", encoding_errors: EncodingErrors = "refuse"
) -> Source:
    """A source over files and folders in the given order; the input `stdlib` is the built-in corpus.

    Raises DataError at once if there is no input or one does not exist, and while reading, if it cannot be read.
    """
    if not inputs:
        raise DataError(f"there are no inputs. Give files, folders, or {STDLIB} for the built-in text.")
    for given in inputs:
        if given != STDLIB and not os.path.exists(given):
            raise DataError(f"input {given} does not exist. Give a file, a folder, or {STDLIB} for the built-in text.")

    def read() -> Iterator[Document]:
        for given in inputs:
            for path, name in _files_of(given):
                try:
                    yield from _read_file(path, name, jsonl_field=jsonl_field, encoding_errors=encoding_errors)
                except _read_errors() as error:
                    raise DataError(
                        f"cannot read {path}: {error}. Mend or remove the file, then prepare again."
                    ) from error

    return read


def check_given_once(inputs: Sequence[str | Path]) -> None:
    """Raise DataError if two of the inputs, those of the held-out split among them, lead to the same file."""
    found: dict[str, int] = {}
    for number, given in enumerate(inputs):
        for path, _ in _files_of(given):
            first = found.setdefault(os.path.realpath(path), number)
            if first != number:
                raise DataError(
                    f"{path} is given twice, by the inputs {inputs[first]} and {given}; held-out text must not be "
                    "trained on, nor any text count twice. Give each file once."
                )


def count_left_out(inputs: Sequence[str | Path]) -> int:
    """Files below the given folders that are not taken, because of their suffix. The built-in corpus has none."""
    folders = [Path(given) for given in inputs if given != STDLIB and Path(given).is_dir()]
    return sum(_text_suffix(name) not in TEXT_SUFFIXES for folder in folders for name in _walk(folder))


def in_valid_split(name: str, *, valid_fraction: float) -> bool:
    """Whether a document of this name is held out: a frozen function of the name."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < valid_fraction * 2.0**64


def _files_of(given: str | Path) -> Iterator[tuple[Path, str]]:
    """Files of one input with their names, which do not depend on where the input lies."""
    if given == STDLIB:
        folder = Path(sysconfig.get_path("stdlib"))
        for relative in _walk(folder, left_out=_STDLIB_LEFT_OUT):
            if relative.endswith(".py"):
                yield folder / relative, f"{STDLIB}/{relative}"
        return
    path = Path(given)
    if not path.is_dir():
        yield path, path.name
        return
    for relative in _walk(path):
        if _text_suffix(relative) in TEXT_SUFFIXES:
            yield path / relative, relative


def _walk(folder: Path, *, left_out: frozenset[str] = frozenset()) -> list[str]:
    """Regular files below a folder, relative, with `/`, sorted by code points; not those in folders `left_out`."""
    found = []
    try:
        for root, folders, names in os.walk(folder, onerror=_raise):
            folders[:] = [name for name in folders if name not in left_out]
            paths = map(Path(root).joinpath, names)
            found += [path.relative_to(folder).as_posix() for path in paths if path.is_file()]
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename}: {error.strerror}. Mend its permissions, or give inputs without it."
        ) from error
    return sorted(found)


def _raise(error: OSError) -> NoReturn:
    raise error


def _read_errors() -> tuple[type[Exception], ...]:
    """What reading a file may raise; the error of zstandard is known only once it is in use."""
    known: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    library = sys.modules.get("zstandard")
    return known if library is None else (*known, library.ZstdError)


def _text_suffix(name: str) -> str:
    """`.jsonl` for x.jsonl and for x.jsonl.gz."""
    path = Path(name)
    return Path(path.stem).suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix


def _read_file(path: Path, name: str, *, jsonl_field: str, encoding_errors: EncodingErrors) -> Iterator[Document]:
    with _open_bytes(path) as stream:
        if _text_suffix(path.name) != ".jsonl":
            yield _decode(stream.read(), name=name, where=str(path), encoding_errors=encoding_errors)
            return
        for number, line in enumerate(stream, start=1):
            where = f"{path}, line {number}"
            decoded = _decode(line, name=f"{name}:{number}", where=where, encoding_errors=encoding_errors)
            if decoded.damage == "skipped":
                yield decoded
            elif decoded.text.strip():
                record = _parse_record(decoded.text, field=jsonl_field, where=where)
                document_name = str(record.get("id", decoded.name))
                yield _without_surrogates(
                    Document(document_name, record[jsonl_field], decoded.damage), where, encoding_errors
                )


def _open_bytes(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if path.suffix == ".zst":
        try:
            import zstandard  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise DataError(
                f"reading {path} needs the package zstandard. Run `pip install zstandard`, or decompress the file."
            ) from error
        reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
        return io.BufferedReader(reader)
    return path.open("rb")


def _decode(data: bytes, *, name: str, where: str, encoding_errors: EncodingErrors) -> Document:
    try:
        return Document(name, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        if encoding_errors == "refuse":
            raise _not_utf8(where, f"byte {error.start} (0x{data[error.start]:02x})") from error
    if encoding_errors == "skip":
        return Document(name, "", "skipped")
    return Document(name, data.decode("utf-8", errors="replace"), "replaced")


def _without_surrogates(document: Document, where: str, encoding_errors: EncodingErrors) -> Document:
    """JSON can spell half a surrogate pair, which no UTF-8 can hold: the same policy applies."""
    try:
        document.text.encode("utf-8")
    except UnicodeEncodeError as error:
        if encoding_errors == "refuse":
            raise _not_utf8(where, f"character {error.start} (a lone surrogate)") from error
        if encoding_errors == "skip":
            return document._replace(text="", damage="skipped")
        paired = document.text.encode("utf-16", "surrogatepass").decode("utf-16", errors="replace")
        return document._replace(text=paired, damage="replaced")
    return document


def _not_utf8(where: str, what: str) -> DataError:
    return DataError(
        f"{where}: {what} is not valid UTF-8. Convert the file, or prepare with `--encoding-errors replace` "
        "(U+FFFD in its place) or `--encoding-errors skip` (leave the document out)."
    )


def _parse_record(line: str, *, field: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({error}). Mend or remove the line.") from error
    except RecursionError:
        raise DataError(f"{where}: JSON nested too deeply. Mend or remove the line.") from None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        known = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{where}: no text in the field {field!r} (found: {known}). Name the field with --jsonl-field.")
    return record
