"""How the documents of one shard become a tar and its records. What such files hold is said in data/format.py."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.data.format import NPY_HEADER_BYTES, RECORD, ShardInfo, Tokens, npy_bytes
from txl_dist.io.files import atomic_replace, atomic_write

SHORT_DOCUMENT_LEN = 4096
PACKED_SAMPLE_LEN = 1 << 16


class WrittenShard(NamedTuple):
    """A shard that `write_shard` wrote."""

    info: ShardInfo
    counts: npt.NDArray[np.int64]
    """[vocabulary] how often each id occurs in it."""


def write_shard(
    folder: Path, name: str, documents: Sequence[Tokens], *, first_document: int, dtype: np.dtype[Any], vocab_size: int
) -> WrittenShard:
    """Write documents, end-of-text included, as NAME and its records, each in one rename.

    `first_document` is the number of the first one in its split: samples are named by the number of their first
    document, so a shard needs to know nothing about the shards before it.
    """
    counts: npt.NDArray[np.int64] = np.zeros(vocab_size, dtype=np.int64)
    with atomic_write(folder / name) as stream:
        tar = _TarStream(stream)
        table, number = np.empty(len(documents), dtype=RECORD), first_document
        for sample in _samples(documents):
            tokens = np.concatenate(sample).astype(dtype, copy=False)
            counts += np.bincount(tokens, minlength=vocab_size)
            starts = np.cumsum([0, *map(len, sample[:-1])])
            offset = tar.add(f"{number:09d}.npy", npy_bytes(tokens)) + NPY_HEADER_BYTES
            if len(sample) > 1:
                tar.add(f"{number:09d}.docs.npy", npy_bytes(starts.astype("<u4")))
            own = table[number - first_document :][: len(sample)]
            own["offset"], own["tokens"] = offset + starts * dtype.itemsize, [len(document) for document in sample]
            own["crc32"] = [zlib.crc32(np.ascontiguousarray(document, dtype=dtype).data) for document in sample]
            number += len(sample)
        tar.close()
    atomic_replace(folder / f"{name}.idx", table.tobytes())
    info = ShardInfo(
        name=name,
        bytes=tar.num_bytes,
        documents=len(table),
        tokens=int(table["tokens"].sum(dtype=np.int64)),
        sha256=tar.sha256(),
        idx_sha256=hashlib.sha256(table.tobytes()).hexdigest(),
    )
    return WrittenShard(info, counts)


def _samples(documents: Iterable[Tokens]) -> Iterator[list[Tokens]]:
    """Documents that share a sample: short ones, up to 65,536 tokens together."""
    pack: list[Tokens] = []
    held = 0
    for document in documents:
        is_short = len(document) < SHORT_DOCUMENT_LEN
        if pack and (not is_short or held + len(document) > PACKED_SAMPLE_LEN):
            yield pack
            pack, held = [], 0
        if not is_short:
            yield [document]
            continue
        pack.append(document)
        held += len(document)
    if pack:
        yield pack


class _TarStream:
    """Writes a tar with the headers of webdataset's own writer, which would import torch, and hashes it on the way."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def add(self, name: str, content: bytes) -> int:
        """Append a member and return where its content begins."""
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.uname, info.gname = len(content), 0o444, "bigdata", "bigdata"
        # USTAR, no PAX header of 1 KiB per member; a fixed time (0): equal bytes for equal input.
        self._write(info.tobuf(tarfile.USTAR_FORMAT))
        offset = self.num_bytes
        self._write(content)
        self._pad(tarfile.BLOCKSIZE)
        return offset

    def close(self) -> None:
        """End the archive; the stream stays open."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self._pad(tarfile.RECORDSIZE)

    def sha256(self) -> str:
        """Of all that was written."""
        return self._digest.hexdigest()

    def _pad(self, size: int) -> None:
        self._write(bytes(-self.num_bytes % size))

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)
