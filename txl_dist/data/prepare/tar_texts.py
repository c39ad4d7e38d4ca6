"""Texts in WebDataset layout: webdataset's own iterators read a tar, and each sample gives one member of text.

    crawl/000017.txt  crawl/000017.json     one sample: the key ends at the first dot, the suffixes name the members

The member is the one that `--member` names, or else the only one that ends in .txt, .json or .jsonl, compressed or not.
A sample that does not have exactly one such member is an invalid record, which `--skip-invalid` counts and leaves out.

webdataset takes a truncation between two members, and a damaged header, for the end of a tar. So the bytes are checked
here before webdataset sees them: each header must have the right checksum, and the tar must end in two blocks of zeros
with nothing after them.

A whole tar without members has no samples, as an empty file has no text.

Limitations: a sample must fit in host memory, with its members that are not text. Members without a suffix, hidden
members (`dir/._1.txt`), and members named like `__NAME__`, belong to no sample.
"""

from __future__ import annotations

import io
import shlex
import tarfile
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from typing_extensions import override

from txl_dist.data.prepare.detection import JSONL_SUFFIXES, is_named_compressed, text_suffix
from txl_dist.data.prepare.documents import Form, check_length
from txl_dist.data.prepare.readers import InputStream, decompress_member
from txl_dist.data.prepare.sources import SourceFile
from txl_dist.errors import DataError

_MIB = 1 << 20
_BLOCK = tarfile.BLOCKSIZE
_TEXT_SUFFIXES = frozenset({".txt", ".json", ".jsonl"})
"""Suffixes of the members that can be chosen without `--member`."""
_EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
"""Types of headers whose content describes the next member."""
_LONGEST_EXTENSION = _MIB
_REMEDY = "Fetch or make the tar again, or remove it from the inputs."


class SampleText(NamedTuple):
    """Member of text of one sample, as raw records for a block."""

    where: str
    """Tar and key of the sample, for messages."""
    form: Form
    data: bytes
    num_records: int
    """Number of raw records. For lines of text or of JSON, the number of lines."""


def read_texts(stream: IO[bytes], file: SourceFile, *, first: int = 0) -> Iterator[SampleText]:
    """Yield the text of each sample of the tar `file`, from the sample number `first` on.

    `stream` is the decompressed tar. Raises DataError if the tar is damaged or incomplete, if it has members but no
    sample, if bytes follow its end, or if a member has 2 GiB or more.
    """
    from webdataset import reraise_exception
    from webdataset.tariterators import group_by_keys, tar_file_expander

    checked = _CheckedTar(stream, file.path)
    buffered = io.BufferedReader(checked, buffer_size=_MIB)
    problems: list[str] = []

    def note(error: Exception) -> bool:
        problems.append(str(error.args[0]))
        return True

    sources = [{"url": file.path, "stream": buffered}]
    members = tar_file_expander(sources, handler=reraise_exception, select_files=_is_visible)
    num_samples = 0
    try:
        for sample in group_by_keys(members, handler=note):
            if num_samples >= first:
                yield _text_of(sample, file, problems)
            problems.clear()
            num_samples += 1
        while buffered.read(_MIB):  # the iterator stops at the first block of zeros
            pass
    except _UnreadableError:
        raise checked.error from None  # webdataset adds its own objects to the arguments of what it raises
    except tarfile.TarError as error:
        raise DataError(f"{file.path} cannot be read as a tar: {error}. {_REMEDY}") from error
    if not num_samples and checked.has_members:
        raise DataError(
            f"{file.path} contains no sample in WebDataset layout: no member's name has a suffix such as .txt. "
            + _unpack(file)
        )


def _is_visible(name: str) -> bool:
    """Return whether a member is not hidden. macOS adds a hidden member to each file with attributes."""
    return not name.rpartition("/")[2].startswith(".")


def _text_of(sample: dict[str, Any], file: SourceFile, problems: list[str]) -> SampleText:
    """Return the raw records of a sample's text, or a record of the form `invalid` with the reason.

    `problems` are what webdataset's handler noted about the sample.
    """
    key = sample["__key__"]
    where = f"{file.path}, sample {key!r}"
    suffixes = [suffix for suffix in sample if not suffix.startswith("__")]
    if file.member:
        chosen = [suffix for suffix in suffixes if suffix == file.member.lower().removeprefix(".")]
    else:
        chosen = [suffix for suffix in suffixes if text_suffix(f"x.{suffix}") in _TEXT_SUFFIXES]
    if problems:
        reason = f"a member occurs twice ({problems[0]}). Give every sample its own key"
        return _invalid(where, reason + ", or leave out such samples with --skip-invalid.")
    if len(chosen) != 1:
        return _invalid(where, _choice(chosen, suffixes, file))
    suffix = chosen[0]
    data = sample[suffix]
    name = f"{file.path}/{key}.{suffix}"
    if is_named_compressed(name):
        data = decompress_member(data, name, file)
    ending = text_suffix(f"x.{suffix}")
    if ending == ".json":
        if not data.strip():
            return _invalid(where, f"the member {suffix} is empty. Leave out such samples with --skip-invalid.")
        return SampleText(where, "json", data, 1)
    if ending in JSONL_SUFFIXES:
        form: Form = "jsonl"
    else:
        form = file.cut
    if form == "file":
        num_records = 1
    else:
        num_records = data.count(b"\n") + 1
    return SampleText(where, form, data, num_records)


def _invalid(where: str, reason: str) -> SampleText:
    return SampleText(where, "invalid", reason.encode(), 1)


def _choice(chosen: list[str], suffixes: list[str], file: SourceFile) -> str:
    """Return the reason and the remedy for a sample with no member of text, or with several."""
    found = ", ".join(f"{suffix:.40}" for suffix in suffixes[:8]) or "none"
    if len(chosen) > 1:
        return (
            f"several members can be the text ({', '.join(chosen[:8])}). Name the member to read: --member {chosen[0]}"
        )
    if file.member:
        what = f"there is no member {file.member}"
    else:
        what = "there is no member txt, json or jsonl"
    return (
        f"{what} (the sample's members: {found}). Name the member that contains the text with --member, or leave out "
        f"such samples with --skip-invalid. {_unpack(file)}"
    )


def _unpack(file: SourceFile) -> str:
    return (
        f"A tar that is not in WebDataset layout must be unpacked (`tar -xf {shlex.quote(file.path)}`). For tars of "
        "token ids use --reindex."
    )


class _UnreadableError(Exception):
    """Error of the tar's stream, in place of `_CheckedTar.error`."""


class _CheckedTar(InputStream):
    """Stream of a tar that passes its bytes on and checks them: the header of every member, and the end of the tar.

    A problem raises `_UnreadableError`. `error` is then the DataError, or the error of the stream.
    """

    def __init__(self, stream: IO[bytes], path: str) -> None:
        self.error: Exception = EOFError("the tar is incomplete")
        """Error that the last read raised."""
        self.has_members = False
        """Whether a member has begun."""
        self._stream = stream
        self._path = path
        self._offset = 0
        """Number of bytes that were checked."""
        self._header = bytearray()
        """First bytes of the header that is read."""
        self._payload_left = 0
        """Number of bytes up to the next header."""
        self._extension: bytearray | None = None
        """Content of a PAX header that is read, or None."""
        self._next_size = -1
        """Size of the next member by its PAX header, in bytes. -1: its own header says the size."""
        self._num_zeros = 0
        """Number of zero bytes at the end of the tar. 0 before the end."""

    @override
    def take(self, count: int) -> bytes:
        try:
            data = self._stream.read(count)
            self._check(memoryview(data))
            if not data and self._num_zeros < 2 * _BLOCK:
                raise DataError(
                    f"{self._path} is truncated at byte {self._offset:,}: a tar must end with two blocks of zeros. "
                    + _REMEDY
                )
        except Exception as error:
            self.error = error
            raise _UnreadableError from error
        return data

    def _check(self, data: memoryview) -> None:
        """Follow the members through the next bytes. Raises DataError for damage."""
        while data:
            if self._num_zeros:
                self._check_end(data)
                passed = len(data)
            elif self._payload_left:
                passed = min(self._payload_left, len(data))
                self._payload_left -= passed
                if self._extension is not None:
                    self._extension += data[:passed]
                    if not self._payload_left:
                        self._next_size = _size_of_next(self._extension)
                        self._extension = None
            else:
                passed = min(_BLOCK - len(self._header), len(data))
                self._header += data[:passed]
                if len(self._header) == _BLOCK:
                    self._begin_member(bytes(self._header))
                    self._header.clear()
            data = data[passed:]
            self._offset += passed

    def _check_end(self, data: memoryview) -> None:
        if bytes(data).count(0) < len(data):
            raise DataError(
                f"{self._path} contains more data after the end of the tar, from byte {self._offset:,} on. Perhaps "
                "the next header is damaged, or two tars were joined into one file. Keep them in separate files, or "
                "fetch the tar again."
            )
        self._num_zeros += len(data)

    def _begin_member(self, header: bytes) -> None:
        """Find the end of the member that a header begins, or the end of the tar in a block of zeros."""
        if not any(header):
            self._num_zeros = _BLOCK
            return
        self.has_members = True
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise DataError(
                f"{self._path} is damaged near byte {self._offset:,}: the header of the next member cannot be read "
                f"({error}). {_REMEDY}"
            ) from error
        is_extension = member.type in _EXTENSIONS
        size = member.size
        if self._next_size >= 0 and not is_extension:
            size = self._next_size
            self._next_size = -1
        if member.issparse() or size < 0 or (is_extension and size > _LONGEST_EXTENSION):
            raise DataError(
                f"{self._path}, member {member.name!r}: no sample has such a member (a sparse file, or a size of "
                f"{size:,} bytes). {_REMEDY}"
            )
        check_length(size, f"{self._path}, member {member.name!r}")
        if is_extension or member.isreg() or member.type not in tarfile.SUPPORTED_TYPES:
            self._payload_left = -(-size // _BLOCK) * _BLOCK
        if member.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE) and size:
            self._extension = bytearray()


def _size_of_next(content: bytearray) -> int:
    """Return the size in bytes that a PAX header gives the next member, or -1."""
    size = -1
    for record in bytes(content).split(b"\n"):
        key, _, value = record.partition(b" ")[2].partition(b"=")
        if key == b"size" and value.isdigit():
            size = int(value)
    return size
