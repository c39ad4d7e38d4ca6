"""The files of a corpus and how they are written. Reading is in corpus.py.

    CORPUS/
      index.json                 written last: everything else is described and hashed here
      tokenizer.json
      train-000000.tar           samples 000000000.npy [, 000000000.docs.npy], 000000017.npy ...
      train-000000.tar.idx       one 16-byte record per document
      train-counts.npy           how often each id occurs in the split (int64)
      valid-000000.tar ...

- A plain `webdataset.WebDataset(url).decode()` reads the tars. `KEY.npy` is 1-D uint16, or uint32 from 65,537 ids
  on; each document ends with end-of-text. Documents below 4,096 tokens share a sample, whose `KEY.docs.npy` lists
  their starts (uint32): a sample of its own would cost a short document more in headers than in tokens. KEY is the
  number of the sample's first document in its split, in 9 digits.
- A record says where the document's tokens lie in the tar, so that a reader maps the file and never parses it.
- Equal input gives equal bytes: fixed times and owners in the tar, canonical JSON.
- The whole corpus is written beside its place and moved there in one rename. A kill leaves the folder `.NAME.prepare`,
  that nobody takes for a corpus: the same command goes on from it, and it may be removed.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.files import replace_file, replacing, typed

FORMAT_VERSION = 2
INDEX_NAME = "index.json"
TOKENIZER_NAME = "tokenizer.json"
RECORD = np.dtype([("offset", "<u8"), ("tokens", "<u4"), ("crc32", "<u4")])
SHORT_DOCUMENT_LEN = 4096
PACKED_SAMPLE_LEN = 1 << 16
NPY_HEADER_BYTES = 128
"""Of a 1-D array; a multiple of 64, so that tokens are aligned."""

Tokens = npt.NDArray[Any]
"""1-D uint16 or uint32."""


class ShardInfo(NamedTuple):
    """What the index says about one shard."""

    name: str
    bytes: int
    documents: int
    tokens: int
    sha256: str
    idx_sha256: str


@dataclass
class SplitInfo:
    """What the index says about one split."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    """Bytes in UTF-8 that the tokens spell, without end-of-text; where nothing is lost, those of the documents."""
    text_characters: int = 0
    """The same in characters: bytes that begin one."""
    longest: int = 0
    """Tokens of the longest document."""
    changed_documents: int | None = None
    """Documents that do not come back from their tokens byte for byte. None: not counted, the tokenizer has to tell."""
    unknown_tokens: int | None = None
    """Tokens that stand for something unknown. None: not counted."""
    counts_sha256: str = ""
    """Of SPLIT-counts.npy: how often each id occurs (int64), from which cutoffs can be computed."""
    shards: list[ShardInfo] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in index.json: without what was not counted."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return known | {"shards": [shard._asdict() for shard in self.shards]}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> SplitInfo:
        """Back from index.json. Raises ValueError, KeyError or TypeError for other values."""
        return typed(SplitInfo, {**values, "shards": [typed(ShardInfo, shard) for shard in values["shards"]]})


def counts_name(split: str) -> str:
    """The file that says how often each id occurs."""
    return f"{split}-counts.npy"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Type of the ids on disk, little-endian on every machine."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


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
    with replacing(folder / name) as stream:
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
    replace_file(folder / f"{name}.idx", table.tobytes())
    info = ShardInfo(
        name=name,
        bytes=tar.num_bytes,
        documents=len(table),
        tokens=int(table["tokens"].sum(dtype=np.int64)),
        sha256=tar.sha256(),
        idx_sha256=hashlib.sha256(table.tobytes()).hexdigest(),
    )
    return WrittenShard(info, counts)


def npy_bytes(array: npt.NDArray[Any]) -> bytes:
    """The bytes of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


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
