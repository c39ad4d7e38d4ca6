"""Writer of shards: the documents of one shard become a tar and a file of records. data/format.py describes both
files."""

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
"""Number of tokens below which a document shares a sample (one array in the tar) with other documents."""
PACKED_SAMPLE_LEN = 1 << 16
"""Maximum number of tokens in a sample of several documents."""


class WrittenShard(NamedTuple):
    """Result of `write_shard`: the shard's entry in the index, and the counts of its token ids."""

    info: ShardInfo
    counts: npt.NDArray[np.int64]
    """[vocabulary] number of occurrences of each id in the shard."""


def write_shard(
    folder: Path, name: str, documents: Sequence[Tokens], *, first_document: int, dtype: np.dtype[Any], vocab_size: int
) -> WrittenShard:
    """Write documents as the tar `name` and its file of records `name`.idx. Each of the two files appears at once when
    it is complete, by a rename.

    The documents already contain end-of-text. `first_document` is the number of the first document in its split.
    Samples are named by the number of their first document, so that shards can be written independently of each other.
    """
    counts: npt.NDArray[np.int64] = np.zeros(vocab_size, dtype=np.int64)
    table = np.empty(len(documents), dtype=RECORD)
    num_written = 0
    with atomic_write(folder / name) as stream:
        tar = _TarStream(stream)
        for sample in _samples(documents):
            key = f"{first_document + num_written:09d}"
            tokens = np.concatenate(sample).astype(dtype, copy=False)
            counts += np.bincount(tokens, minlength=vocab_size)
            lengths = np.array([len(document) for document in sample])
            starts = np.cumsum(lengths) - lengths
            offset = tar.add(f"{key}.npy", npy_bytes(tokens)) + NPY_HEADER_BYTES
            if len(sample) > 1:
                tar.add(f"{key}.docs.npy", npy_bytes(starts.astype("<u4")))
            records = table[num_written : num_written + len(sample)]  # a view
            records["offset"] = offset + starts * dtype.itemsize
            records["tokens"] = lengths
            crc32s = []
            for document in sample:
                ids = np.ascontiguousarray(document, dtype=dtype)
                crc32s.append(zlib.crc32(ids.data))
            records["crc32"] = crc32s
            num_written += len(sample)
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
    """Yield the documents of each sample: one long document, or short documents with at most 65,536 tokens in all."""
    sample: list[Tokens] = []
    sample_len = 0
    for document in documents:
        is_short = len(document) < SHORT_DOCUMENT_LEN
        if sample and (not is_short or sample_len + len(document) > PACKED_SAMPLE_LEN):
            yield sample
            sample = []
            sample_len = 0
        if not is_short:
            yield [document]
            continue
        sample.append(document)
        sample_len += len(document)
    if sample:
        yield sample


class _TarStream:
    """Writer of a tar that computes the sha256 of the written bytes.

    The bytes are those of `webdataset.TarWriter(stream, encoder=False, mtime=0)`. That writer is not used, because it
    is slower and imports torch in every worker.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def add(self, name: str, content: bytes) -> int:
        """Append a member, and return the offset of its content in bytes."""
        info = tarfile.TarInfo(name)
        info.size = len(content)
        info.mode = 0o444
        info.uname = info.gname = "bigdata"
        # The time stays 0, so that equal input gives equal bytes. USTAR needs no PAX header of 1 KiB per member.
        self._write(info.tobuf(tarfile.USTAR_FORMAT))
        offset = self.num_bytes
        self._write(content)
        self._pad(tarfile.BLOCKSIZE)
        return offset

    def close(self) -> None:
        """Write the end of the archive. The underlying stream stays open."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self._pad(tarfile.RECORDSIZE)

    def sha256(self) -> str:
        """Return the hexadecimal sha256 of all bytes written so far."""
        return self._digest.hexdigest()

    def _pad(self, size: int) -> None:
        self._write(bytes(-self.num_bytes % size))

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)
