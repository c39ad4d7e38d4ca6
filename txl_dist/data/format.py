"""The files of a corpus, written by prepare/shard_writer.py and read by loader/corpus.py.

    CORPUS/
      index.json                 written last: everything else is described and hashed here
      tokenizer.json
      train-000000.tar           samples 000000000.npy [, 000000000.docs.npy], 000000017.npy ...
      train-000000.tar.idx       one 16-byte record per document
      train-counts.npy           how often each id occurs in the split (int64)
      prepared.json              hashes of what it was prepared from; readers do not need it
      valid-000000.tar ...

- A plain `webdataset.WebDataset(url).decode()` reads the tars. `KEY.npy` is 1-D uint16, or uint32 from 65,537 ids on.
  Each document ends with end-of-text. KEY is the number of the sample's first document in its split, in 9 digits.
- Documents below 4,096 tokens share a sample, whose `KEY.docs.npy` lists their starts (uint32). In a sample of its own,
  a short document would take more bytes for headers than for tokens.
- A record says where the document's tokens are in the tar, so that a reader maps the file and never parses it.
- Equal input gives equal bytes: fixed times and owners in the tar, canonical JSON.
- The whole corpus is written next to its place and moved there in one rename. A kill leaves the folder `.NAME.prepare`,
  which nothing reads as a corpus. The same command continues from it, and it may be removed.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.io.files import typed
from txl_dist.tokenizers.base import Tokenizer

FORMAT_VERSION = 2
INDEX_NAME = "index.json"
TOKENIZER_NAME = "tokenizer.json"
PREPARED_NAME = "prepared.json"
RECORD = np.dtype([("offset", "<u8"), ("tokens", "<u4"), ("crc32", "<u4")])
NPY_HEADER_BYTES = 128
"""Header of a 1-D array in bytes; a multiple of 64, so that tokens are aligned."""

Tokens = npt.NDArray[Any]
"""1-D array of uint16 or uint32 token ids."""


class ShardInfo(NamedTuple):
    """Entry of one shard in the index."""

    name: str
    bytes: int
    documents: int
    tokens: int
    sha256: str
    idx_sha256: str


@dataclass
class SplitInfo:
    """Entry of one split in the index."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    """Bytes in UTF-8 that the tokens spell, without end-of-text. Equal to the documents' bytes if nothing is lost."""
    text_characters: int = 0
    """Number of characters in `text_bytes`: the bytes that begin one."""
    longest: int = 0
    """Number of tokens of the longest document."""
    changed_documents: int | None = None
    """Number of documents that their tokens do not spell byte for byte. None: not counted; ask the tokenizer."""
    unknown_tokens: int | None = None
    """Number of tokens that stand for something unknown. None: not counted."""
    counts_sha256: str = ""
    """Hash of SPLIT-counts.npy: how often each id occurs (int64), from which cutoffs can be computed."""
    shards: list[ShardInfo] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the values for index.json, without those that were not counted."""
        counted = {name: value for name, value in asdict(self).items() if value is not None}
        return counted | {"shards": [shard._asdict() for shard in self.shards]}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> SplitInfo:
        """Read the values of index.json. Raises ValueError, KeyError or TypeError for other values."""
        shards = [typed(ShardInfo, shard) for shard in values["shards"]]
        return typed(SplitInfo, {**values, "shards": shards})


def index_of(
    tokenizer: Tokenizer, *, dtype: np.dtype[Any], splits: Mapping[str, SplitInfo], statistics: Mapping[str, int]
) -> dict[str, Any]:
    """Return the content of index.json, except its own hash."""
    return {
        "format_version": FORMAT_VERSION,
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "tokenizer_sha256": tokenizer.fingerprint,
        "splits": {name: info.to_dict() for name, info in splits.items()},
        "statistics": dict(statistics),
    }


def counts_name(split: str) -> str:
    """Return the name of the file that says how often each id occurs."""
    return f"{split}-counts.npy"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type of the ids on disk, little-endian on every machine."""
    if vocab_size <= 1 << 16:
        return np.dtype("<u2")
    return np.dtype("<u4")


def npy_bytes(array: npt.NDArray[Any]) -> bytes:
    """Return the bytes of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()
