"""Reads the samples of a tar once, from front to back, for `txl verify` and for `txl prepare --reindex`.

- Nothing is extracted, executed or unpickled. Headers are parsed, and arrays are made from their bytes.
- A tar must be complete. Other readers take a damaged header, or a truncation between two members, for the end of the
  tar. Here a tar must end in two blocks of zeros with nothing after them. Otherwise an error names the offset.
- A member that cannot contain tokens raises an error that names the member. Examples are links, devices, absolute
  names, names with `..`, and other types of numbers.
- Only one sample is in memory at a time.

Not supported: compressed tars, because the index of a shard cannot point to documents inside compressed data.
"""

from __future__ import annotations

import hashlib
import itertools
import tarfile
import tokenize
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from txl_dist.data.format import Tokens
from txl_dist.data.storage.base import Payload
from txl_dist.errors import DataError

CHUNK_BYTES = 1 << 22
"""Number of bytes of a tar that are fetched at once."""
TOKEN_DTYPES = (np.dtype("<u2"), np.dtype("<u4"))
"""Number types that token ids in a tar may have."""
_BLOCK = tarfile.BLOCKSIZE
_REMEDY = "Restore the file from a copy, or make the file again."
_BROKEN = (tarfile.TarError, ValueError, ArithmeticError, RecursionError)
"""Exceptions of the standard library for damaged or forged headers."""


class ForwardReader:
    """File-like reader of a shard, which hashes the bytes while they are read.

    Reading forward fetches and hashes each byte once. Earlier bytes can be read again, but bytes that are no longer
    kept in memory are then fetched again.
    """

    def __init__(
        self, payload: Payload, num_bytes: int, *, name: str, on_bytes: Callable[[int], object] = lambda _: None
    ) -> None:
        """Read the `num_bytes` bytes of `payload`. `on_bytes` is called with the size of each fetch in bytes, for
        progress."""
        self.name = name
        self.num_bytes = num_bytes
        self._payload = payload
        self._on_bytes = on_bytes
        self._digest = hashlib.sha256()
        self._window = bytearray()
        self._begin = 0
        """Offset in the shard of the first byte that is kept in memory. The kept bytes end at the last hashed byte."""
        self._position = 0

    def read(self, count: int) -> bytes:
        """Return `count` bytes, or fewer at the end of the file. Raises DataError if the bytes cannot be read."""
        if count < 0:
            raise ValueError(f"a length of {count} bytes")
        end = min(self._position + count, self.num_bytes)
        while self._begin + len(self._window) < end:
            self._fetch()
        if self._position < self._begin:
            num_bytes = max(end - self._position, 0)
            data = self._payload.read(self._position, num_bytes).tobytes()
        else:
            first = self._position - self._begin
            window = memoryview(self._window)
            data = bytes(window[first : end - self._begin])
        self._position += len(data)
        return data

    def seek(self, offset: int) -> int:
        """Set the position of the next read to `offset` bytes from the start of the file, and return the offset."""
        if offset < 0:
            raise ValueError(f"an offset of {offset} bytes")
        self._position = offset
        return offset

    def tell(self) -> int:
        """Return the offset of the next byte to read."""
        return self._position

    def sha256(self) -> str:
        """Return the sha256 of the whole file, after reading the rest of it. Raises DataError as `read` does."""
        self.seek(self.num_bytes)
        while self._begin + len(self._window) < self.num_bytes:
            self._fetch()
        return self._digest.hexdigest()

    def _fetch(self) -> None:
        """Fetch and hash the next chunk. Earlier bytes are no longer kept in memory, except a few before the position
        of the next read."""
        hashed = self._begin + len(self._window)
        chunk_len = min(CHUNK_BYTES, self.num_bytes - hashed)
        chunk = self._payload.read(hashed, chunk_len)
        self._digest.update(chunk.data)
        self._on_bytes(len(chunk))
        # Readers of tars step back by one byte at most.
        first_kept = min(self._position - _BLOCK, hashed)
        passed = max(0, first_kept - self._begin)
        del self._window[:passed]
        self._begin += passed
        self._window += chunk.data


class TarSample(NamedTuple):
    """Sample of a tar: one array of tokens, which contains one document or several."""

    key: str
    """Name of the sample, which is the part of its members' names before the first dot."""
    offset: int
    """Offset of the first token in the tar, in bytes."""
    tokens: Tokens
    """[n] token ids of all documents, joined, as uint16 or uint32."""
    starts: npt.NDArray[np.int64]
    """[documents] index in `tokens` of each document's first token, ascending. Documents without a token are left
    out."""
    num_empty: int
    """Number of documents without a token."""


class _Array(NamedTuple):
    """Array in a tar: the tokens of a sample, or the starts of its documents."""

    key: str
    """Name of the sample to which the array belongs."""
    is_starts: bool
    """True for the starts of documents, False for tokens."""
    member: str
    """Name of the member, for messages."""
    offset: int
    """Offset of the values in the tar, in bytes."""
    values: npt.NDArray[Any]


def read_samples(stream: ForwardReader, *, on_ignored: Callable[[str], object] = lambda _: None) -> Iterator[TarSample]:
    """Yield the samples of a tar in file order.

    A sample is the member KEY.npy with tokens, and also KEY.docs.npy with the starts of documents if several documents
    share the sample. `on_ignored` is called with the name of every other member. Raises DataError if the tar is
    damaged, or contains a member that no sample of tokens can have. The message names the tar, the member or the
    offset, and the remedy.
    """
    name = stream.name
    seen: set[str] = set()
    for key, group in itertools.groupby(_arrays(stream, on_ignored), key=lambda array: array.key):
        arrays = list(group)
        tokens_arrays = [array for array in arrays if not array.is_starts]
        starts_arrays = [array for array in arrays if array.is_starts]
        if key in seen or len(tokens_arrays) > 1 or len(starts_arrays) > 1:
            raise DataError(f"{name}, sample {key}: {arrays[-1].member} occurs twice. Give every sample its own key.")
        seen.add(key)
        if not tokens_arrays:
            raise DataError(
                f"{name}, sample {key}: the tokens {key}.npy do not stand directly before or after "
                f"{arrays[0].member} in the tar. Write these two members one directly after the other."
            )
        tokens = tokens_arrays[0].values
        offset = tokens_arrays[0].offset
        starts = np.zeros(1, np.int64)
        if starts_arrays:
            starts = starts_arrays[0].values.astype(np.int64)
        ends = np.append(starts[1:], len(tokens))
        if not len(starts) or starts[0] != 0 or (ends < starts).any():
            raise DataError(
                f"{name}, sample {key}: the starts of its documents must ascend from 0 to its {len(tokens)} tokens. "
                + _REMEDY
            )
        is_empty = ends == starts
        yield TarSample(key, offset, tokens, starts=starts[~is_empty], num_empty=int(is_empty.sum()))


def _arrays(stream: ForwardReader, on_ignored: Callable[[str], object]) -> Iterator[_Array]:
    """Yield the arrays of tokens and of starts in file order. Raises DataError as `read_samples` does."""
    for member in _members(stream):
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        # As in webdataset the key ends at the first dot, and a name that begins with a dot is hidden.
        field = suffix.lower()
        if not stem or not f".{field}".endswith(".npy"):
            on_ignored(member.name)
            continue
        if field not in ("npy", "docs.npy"):
            raise DataError(
                f"{stream.name}, member {member.name}: the key of a sample ends at the first dot of the member's "
                f"name. Readers therefore take this member as the field {suffix!r} of sample {stem!r}, not as tokens. "
                "Name the tokens KEY.npy, where KEY contains no dot."
            )
        is_starts = field == "docs.npy"
        values, offset = _read_array(stream, member, is_starts=is_starts)
        key = f"{folder}/{stem}" if folder else stem
        yield _Array(key, is_starts, member.name, offset, values)


def _members(stream: ForwardReader) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a tar. Raises DataError if a member could do harm when it is extracted, or if the tar
    is not complete."""
    last = -1
    try:
        with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # otherwise tarfile keeps all members
                if member.size < 0 or member.offset <= last:
                    raise tarfile.ReadError("a header points backwards")
                last = member.offset
                _check_member(stream.name, member)
                if not member.isdir():
                    yield member
            end = tar.offset  # type: ignore[attr-defined,unused-ignore]
    except _BROKEN as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{stream.name} is damaged after byte {max(last, 0)}: {error}. {_REMEDY}") from error
    stream.seek(end)
    block = stream.read(2 * _BLOCK)
    if len(block) < 2 * _BLOCK and not any(block):
        raise DataError(f"{stream.name} is truncated at byte {end}: a tar must end with two blocks of zeros. {_REMEDY}")
    if any(block):
        raise DataError(
            f"{stream.name} is damaged at byte {end}: the header of the next member cannot be read. {_REMEDY}"
        )
    while block := stream.read(CHUNK_BYTES):
        if block.count(0) < len(block):
            raise DataError(
                f"{stream.name} contains more data after the end of the tar at byte {end}. Perhaps two tars were "
                "joined into one file. Readers of tar files stop at the end of the first tar. Keep the two tars in "
                "separate files."
            )


def _check_member(name: str, member: tarfile.TarInfo) -> None:
    """Raise DataError for a member that no shard needs and that could do harm when it is extracted, such as a link."""
    if member.name.startswith("/") or ".." in member.name.split("/"):
        problem = "its name leads out of the folder"
    elif member.issparse() or not (member.isreg() or member.isdir()):
        if member.issym() or member.islnk():
            kind = "a link"
        elif member.issparse():
            kind = "a sparse file"
        else:
            kind = "not a file"
        problem = f"it is {kind}"
    else:
        return
    raise DataError(
        f"{name}, member {member.name!r}: {problem}. Do not use this tar file. Make the tar file again from plain "
        f"files."
    )


def _read_array(stream: ForwardReader, member: tarfile.TarInfo, *, is_starts: bool) -> tuple[npt.NDArray[Any], int]:
    """Return (values of an array, offset of the values in the tar in bytes).

    Raises DataError if the member is not a 1-D array of a type that tokens, or starts of documents, can have.
    """
    where = f"{stream.name}, member {member.name}"
    stream.seek(member.offset_data)
    try:
        version = np.lib.format.read_magic(cast(IO[bytes], stream))
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of the npy format is not supported")
        read_header = np.lib.format.read_array_header_2_0
        if version == (1, 0):
            read_header = np.lib.format.read_array_header_1_0
        shape, is_fortran, dtype = read_header(cast(IO[bytes], stream))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where} is damaged: its npy header cannot be read ({error}). {_REMEDY}") from error
    if len(shape) != 1 or is_fortran:
        if is_fortran:
            order = " in Fortran order"
        else:
            order = ""
        raise DataError(f"{where} has the shape {shape}{order}. Write the ids of a sample as one 1-D array.")
    if is_starts:
        is_type_right = dtype.kind in "iu"
        wanted = "the starts of the documents as uint32"
    else:
        is_type_right = dtype in TOKEN_DTYPES
        wanted = "the ids as little-endian uint16 (`ids.astype('<u2')`) or uint32"
    if not is_type_right:
        raise DataError(f"{where} contains an array of type {dtype.str}. Write {wanted}.")
    offset = stream.tell()
    content = stream.read(member.offset_data + member.size - offset)
    if shape[0] * dtype.itemsize != len(content):
        raise DataError(
            f"{where} is damaged or cut: its npy header says {shape[0]} values of {dtype.itemsize} bytes, but there "
            f"are {len(content)} bytes. {_REMEDY}"
        )
    return np.frombuffer(content, dtype=dtype), offset
