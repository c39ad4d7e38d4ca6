"""The files of a corpus and how they are written. Reading is in corpus.py.

    CORPUS/
      index.json                 written last: everything else is described and hashed here
      tokenizer.json
      train-000000.tar           samples 000000000.npy [, 000000000.docs.npy], 000000001.npy ...
      train-000000.tar.idx       one 16-byte record per document
      train-counts.npy           how often each id occurs in the split (int64)
      valid-000000.tar ...

- A plain `webdataset.WebDataset(url).decode()` reads the tars. `KEY.npy` is 1-D uint16, or uint32 from 65,537 ids
  on; each document ends with end-of-text. Documents below 4,096 tokens share a sample, whose `KEY.docs.npy` lists
  their starts (uint32): a sample of its own would cost a short document more in headers than in tokens.
- A record says where the document's tokens lie in the tar, so that a reader maps the file and never parses it.
- Equal input gives equal bytes: fixed times and owners in the tar, canonical JSON.
- The whole corpus is written beside its place and moved there in one rename. A kill leaves a folder `.NAME.tmp-PID`
  that nobody takes for a corpus; it may be removed.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.files import flush_to_disk, sha256_of_file, write_bytes

FORMAT_VERSION = 2
INDEX_NAME = "index.json"
TOKENIZER_NAME = "tokenizer.json"
RECORD = np.dtype([("offset", "<u8"), ("tokens", "<u4"), ("crc32", "<u4")])
SHORT_DOCUMENT_LEN = 4096
PACKED_SAMPLE_LEN = 1 << 16
DEFAULT_SHARD_LEN = 1 << 25
"""Tokens after which a new shard begins."""

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
    """Bytes of the documents in UTF-8, without end-of-text: turns nats per token into bits per byte."""
    text_characters: int = 0
    """The same in characters (code points), for bits per character."""
    longest: int = 0
    """Tokens of the longest document."""
    counts_sha256: str = ""
    """Of SPLIT-counts.npy: how often each id occurs (int64), from which cutoffs can be computed."""
    shards: list[ShardInfo] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in index.json."""
        return asdict(self) | {"shards": [shard._asdict() for shard in self.shards]}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> SplitInfo:
        """Back from index.json."""
        return SplitInfo(**{**values, "shards": [ShardInfo(**shard) for shard in values["shards"]]})


def counts_name(split: str) -> str:
    """The file that says how often each id occurs."""
    return f"{split}-counts.npy"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Type of the ids on disk, little-endian on every machine."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class SplitWriter:
    """Writes the documents of one split into shards, in the order in which they come."""

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        dtype: np.dtype[Any],
        vocab_size: int,
        shard_len: int = DEFAULT_SHARD_LEN,
    ) -> None:
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._shard_len = shard_len
        self._num_samples = 0
        self._pack: list[Tokens] = []
        self._pack_len = 0
        self._shard: _OpenShard | None = None
        self._counts: npt.NDArray[np.int64] = np.zeros(vocab_size, dtype=np.int64)
        self.info = SplitInfo()

    def add(self, tokens: npt.NDArray[Any], *, text_bytes: int, text_characters: int) -> None:
        """Append one document, end-of-text included."""
        document = np.ascontiguousarray(tokens, dtype=self._dtype)
        self.info.text_bytes += text_bytes
        self.info.text_characters += text_characters
        self.info.longest = max(self.info.longest, len(document))
        self._counts += np.bincount(document, minlength=len(self._counts))
        is_short = len(document) < SHORT_DOCUMENT_LEN
        if not is_short or self._pack_len + len(document) > PACKED_SAMPLE_LEN:
            self._flush_pack()
        self._pack.append(document)
        self._pack_len += len(document)
        shard_tokens = self._pack_len + (self._shard.num_tokens if self._shard else 0)
        if not is_short or shard_tokens >= self._shard_len:
            self._flush_pack()

    def close(self) -> SplitInfo:
        """Finish the last shard and return what the index should say."""
        self._flush_pack()
        self._close_shard()
        content = _npy_bytes(self._counts)
        write_bytes(self._folder / counts_name(self._split), content)
        self.info.counts_sha256 = hashlib.sha256(content).hexdigest()
        return self.info

    def _flush_pack(self) -> None:
        if not self._pack:
            return
        if self._shard is None:
            self._shard = _OpenShard(self._folder / f"{self._split}-{len(self.info.shards):06d}.tar")
        self._shard.write(f"{self._num_samples:09d}", self._pack)
        self._num_samples += 1
        self._pack, self._pack_len = [], 0
        if self._shard.num_tokens >= self._shard_len:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._shard is None:
            return
        shard = self._shard.close()
        self._shard = None
        self.info.shards.append(shard)
        self.info.documents += shard.documents
        self.info.tokens += shard.tokens


class _OpenShard:
    """One tar being written, and the lengths and checksums of its documents."""

    def __init__(self, path: Path) -> None:
        from webdataset import TarWriter  # type: ignore[import-untyped,unused-ignore]  # late: it imports torch

        self._path = path
        self._stream = path.open("wb")
        # mtime=0: no PAX header of 1 KiB per member, and equal bytes for equal input.
        self._tar = TarWriter(self._stream, encoder=False, mtime=0)
        self._samples: list[list[tuple[int, int]]] = []
        self.num_tokens = 0

    def write(self, key: str, documents: list[Tokens]) -> None:
        """One sample; several documents come with their starts."""
        lengths = [len(document) for document in documents]
        sample = {"__key__": key, "npy": _npy_bytes(np.concatenate(documents))}
        if len(documents) > 1:
            starts = np.cumsum([0, *lengths[:-1]])
            sample["docs.npy"] = _npy_bytes(starts.astype("<u4"))
        self._tar.write(sample)
        self._samples.append([(len(document), zlib.crc32(document.tobytes())) for document in documents])
        self.num_tokens += sum(lengths)

    def close(self) -> ShardInfo:
        """Write the records and describe both files."""
        self._tar.close()
        flush_to_disk(self._stream)
        self._stream.close()
        records = np.array(list(self._records()), dtype=RECORD)
        idx_path = self._path.with_name(self._path.name + ".idx")
        write_bytes(idx_path, records.tobytes())
        return ShardInfo(
            name=self._path.name,
            bytes=self._path.stat().st_size,
            documents=len(records),
            tokens=int(records["tokens"].sum(dtype=np.int64)),
            sha256=sha256_of_file(self._path),
            idx_sha256=sha256_of_file(idx_path),
        )

    def _records(self) -> Iterator[tuple[int, int, int]]:
        """Offsets are read back from the finished tar rather than computed from assumptions about its writer."""
        with self._path.open("rb") as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            payloads = [member.offset_data for member in tar if not member.name.endswith(".docs.npy")]
            for offset, documents in zip(payloads, self._samples, strict=True):
                stream.seek(offset)
                np.lib.format.read_magic(stream)
                _, _, dtype = np.lib.format.read_array_header_1_0(stream)
                position = stream.tell()
                for length, crc32 in documents:
                    yield position, length, crc32
                    position += length * dtype.itemsize


def _npy_bytes(array: npt.NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()
