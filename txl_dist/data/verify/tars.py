"""The samples of a tar, read once from front to back: of our own shards in `verify`, of anybody's in `reindex`.

- Nothing is extracted, executed or unpickled: headers are parsed, arrays are taken from their bytes.
- A tar must be whole. Other readers take a damaged header, or a cut at the border of two members, for its end; here
  the end is two blocks of zeros with nothing behind them, and anything else is an error that names the offset.
- What cannot be a sample of tokens is refused by name: links, devices, absolute names, `..`, other types of numbers.
- Memory holds one sample at a time.

What it gives up: compressed tars, whose documents no record can point to.
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
TOKEN_DTYPES = (np.dtype("<u2"), np.dtype("<u4"))
_BLOCK = tarfile.BLOCKSIZE
_REMEDY = "Restore the file from a copy, or make it again."
_BROKEN = (tarfile.TarError, ValueError, ArithmeticError, RecursionError)
"""What the standard library raises on headers that are damaged, or forged."""


class ForwardReader:
    """A file over the bytes of a shard that fetches and hashes each of them once, as long as it is read forward.

    A step back to before the present chunk is possible and reads those bytes again.
    """

    def __init__(
        self, payload: Payload, num_bytes: int, *, name: str, on_bytes: Callable[[int], object] = lambda _: None
    ) -> None:
        """`on_bytes` hears how many bytes were fetched, for progress."""
        self.name = name
        self.num_bytes = num_bytes
        self._payload = payload
        self._on_bytes = on_bytes
        self._digest = hashlib.sha256()
        self._window = bytearray()
        self._begin = 0
        """Where the window begins; it ends where hashing has come to."""
        self._position = 0

    def read(self, count: int) -> bytes:
        """Fewer bytes than asked for at the end of the file only. Raises DataError if they cannot be read."""
        if count < 0:
            raise ValueError(f"a length of {count} bytes")
        end = min(self._position + count, self.num_bytes)
        while self._begin + len(self._window) < end:
            self._fetch()
        if self._position < self._begin:
            found = self._payload.read(self._position, max(end - self._position, 0)).tobytes()
        else:
            found = bytes(memoryview(self._window)[self._position - self._begin : end - self._begin])
        self._position += len(found)
        return found

    def seek(self, offset: int) -> int:
        """Move to an offset from the start of the file."""
        if offset < 0:
            raise ValueError(f"an offset of {offset} bytes")
        self._position = offset
        return offset

    def tell(self) -> int:
        """Offset of the next byte."""
        return self._position

    def sha256(self) -> str:
        """Of the whole file; what was not read yet is."""
        self.seek(self.num_bytes)
        while self._begin + len(self._window) < self.num_bytes:
            self._fetch()
        return self._digest.hexdigest()

    def _fetch(self) -> None:
        hashed = self._begin + len(self._window)
        chunk = self._payload.read(hashed, min(CHUNK_BYTES, self.num_bytes - hashed))
        self._digest.update(chunk.data)
        self._on_bytes(len(chunk))
        # Tar readers go back one byte at most.
        passed = max(0, min(self._position - _BLOCK, hashed) - self._begin)
        del self._window[:passed]
        self._begin += passed
        self._window += chunk.data


class TarSample(NamedTuple):
    """Documents that lie together in a tar as one array."""

    key: str
    offset: int
    """Of the first token in the tar, in bytes."""
    tokens: Tokens
    """[n] uint16 or uint32, all documents joined."""
    starts: npt.NDArray[np.int64]
    """[documents] first token of each, ascending; documents without a token are left out."""
    num_empty: int
    """Documents without a token."""


class _Array(NamedTuple):
    key: str
    is_starts: bool
    member: str
    offset: int
    values: npt.NDArray[Any]


def read_samples(stream: ForwardReader, *, on_ignored: Callable[[str], object] = lambda _: None) -> Iterator[TarSample]:
    """Samples in file order: members KEY.npy, with KEY.docs.npy beside it where several documents share one.

    `on_ignored` hears the names of members that are something else. Raises DataError naming the tar, the member or
    the offset, and the remedy, if the tar is damaged or holds what no sample of tokens holds.
    """
    name = stream.name
    seen: set[str] = set()
    for key, group in itertools.groupby(_arrays(stream, on_ignored), key=lambda array: array.key):
        found = list(group)
        members = {member.is_starts: member for member in found}
        if key in seen or len(members) < len(found):
            raise DataError(f"{name}, sample {key}: {found[-1].member} is there twice. Give every sample its own key.")
        seen.add(key)
        if False not in members:
            raise DataError(
                f"{name}, sample {key}: {members[True].member} has no tokens {key}.npy beside it. Write the two "
                "members of a sample next to each other."
            )
        tokens, offset = members[False].values, members[False].offset
        given = members[True].values.astype(np.int64) if True in members else np.zeros(1, np.int64)
        ends = np.append(given[1:], len(tokens))
        if not len(given) or given[0] != 0 or (ends < given).any():
            raise DataError(
                f"{name}, sample {key}: its starts of documents do not ascend from 0 to its {len(tokens)} tokens. "
                + _REMEDY
            )
        is_empty = ends == given
        yield TarSample(key, offset, tokens, starts=given[~is_empty], num_empty=int(is_empty.sum()))


def _arrays(stream: ForwardReader, on_ignored: Callable[[str], object]) -> Iterator[_Array]:
    """The token arrays of a tar and the starts of their documents, in file order."""
    for member in _members(stream):
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        # As webdataset has it: the key ends at the first dot, and a name that begins with one is hidden.
        field = suffix.lower()
        if not stem or not f".{field}".endswith(".npy"):
            on_ignored(member.name)
            continue
        if field not in ("npy", "docs.npy"):
            raise DataError(
                f"{stream.name}, member {member.name}: the key of a sample ends at its first dot, so these would be "
                f"no tokens but the field {suffix!r} of sample {stem!r}. Name tokens KEY.npy, with a KEY without dots."
            )
        values, offset = _read_array(stream, member, is_starts=field == "docs.npy")
        key = f"{folder}/{stem}" if folder else stem
        yield _Array(key, field == "docs.npy", member.name, offset, values)


def _members(stream: ForwardReader) -> Iterator[tarfile.TarInfo]:
    """The regular files of a tar. Raises DataError for anything dangerous, and if the tar does not end as it should."""
    last = -1
    try:
        with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # else they are all kept
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
        raise DataError(f"{stream.name} is damaged behind offset {max(last, 0)}: {error}. {_REMEDY}") from error
    stream.seek(end)
    block = stream.read(2 * _BLOCK)
    if len(block) < 2 * _BLOCK and not any(block):
        raise DataError(f"{stream.name} is cut at offset {end}: a tar ends in two blocks of zeros. {_REMEDY}")
    if any(block):
        raise DataError(f"{stream.name} is damaged at offset {end}: no header of a member can be read. {_REMEDY}")
    while block := stream.read(CHUNK_BYTES):
        if block.count(0) < len(block):
            raise DataError(
                f"{stream.name} goes on behind its end at offset {end}, as two tars joined into one file do. Readers "
                "of tars stop there: keep the two apart."
            )


def _check_member(name: str, member: tarfile.TarInfo) -> None:
    """Refuse what no shard needs and what could harm whoever extracts it."""
    if member.name.startswith("/") or ".." in member.name.split("/"):
        problem = "its name leads out of the folder"
    elif member.issparse() or not (member.isreg() or member.isdir()):
        kind = "a link" if member.issym() or member.islnk() else "a sparse file" if member.issparse() else "no file"
        problem = f"it is {kind}"
    else:
        return
    raise DataError(f"{name}, member {member.name!r}: {problem}. Do not use this tar; make it again of plain files.")


def _read_array(stream: ForwardReader, member: tarfile.TarInfo, *, is_starts: bool) -> tuple[npt.NDArray[Any], int]:
    """(its values, where they lie in the tar). Raises DataError for arrays of another form or type."""
    where = f"{stream.name}, member {member.name}"
    stream.seek(member.offset_data)
    try:
        version = np.lib.format.read_magic(cast(IO[bytes], stream))
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of the npy format")
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(cast(IO[bytes], stream))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where} is damaged: its npy header cannot be read ({error}). {_REMEDY}") from error
    if len(shape) != 1 or is_fortran:
        order = " in Fortran order" if is_fortran else ""
        raise DataError(f"{where} has the shape {shape}{order}. Write the ids of a sample as one 1-D array.")
    if dtype.kind not in "iu" if is_starts else dtype not in TOKEN_DTYPES:
        wanted = "starts as uint32" if is_starts else "ids as little-endian uint16 (`ids.astype('<u2')`) or uint32"
        raise DataError(f"{where} has the type {dtype.str}. Write {wanted}.")
    offset = stream.tell()
    content = stream.read(member.offset_data + member.size - offset)
    if shape[0] * dtype.itemsize != len(content):
        raise DataError(
            f"{where} is damaged or cut: its npy header says {shape[0]} values of {dtype.itemsize} bytes, "
            f"{len(content)} bytes are there. {_REMEDY}"
        )
    return np.frombuffer(content, dtype=dtype), offset
