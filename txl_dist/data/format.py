"""The files of a corpus, written by prepare/shard_writer.py and read by loader/corpus.py.

    CORPUS/
      index.json                 sizes and hashes of all other files except prepared.json
      tokenizer.json
      train-000000.tar           samples 000000000.npy [, 000000000.docs.npy], 000000017.npy ...
      train-000000.tar.idx       one 16-byte record per document
      train-counts.npy           how often each id occurs in the split (int64)
      prepared.json              hashes of inputs, settings and index.json, for `txl prepare` and `txl verify`
      valid-000000.tar ...       the files of the other splits

- A plain `webdataset.WebDataset(url).decode()` reads the tars. `KEY.npy` is 1-D uint16, or uint32 from 65,537 ids on.
  Each document ends with end-of-text. A sample is one such array. KEY is the number of the sample's first document,
  counted over the split from 0, in 9 digits.
- Documents below 4,096 tokens share a sample, because a short document in a sample of its own would take more bytes for
  headers than for tokens. The member `KEY.docs.npy` lists where each document begins in the array (uint32).
- A record says where a document's tokens are in the tar. So a reader maps the tar into memory and never parses it.
- Equal input gives equal bytes: fixed times and owners in the tar, canonical JSON.
- The corpus is written into the folder `.NAME.prepare`, which is renamed to NAME at the end. If `txl prepare` is
  killed, this folder remains. The same command continues from it, and a user may remove it.
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
"""Size in bytes of the header of a 1-D .npy file. It is a multiple of 64, so that tokens are aligned."""

Tokens = npt.NDArray[Any]
"""1-D array of uint16 or uint32 token ids."""


class ShardInfo(NamedTuple):
    """Entry of one shard in index.json."""

    name: str
    """File name of the tar."""
    bytes: int
    """Size of the tar in bytes."""
    documents: int
    """Number of documents in the shard."""
    tokens: int
    """Number of tokens in the shard."""
    sha256: str
    """Hash of the tar."""
    idx_sha256: str
    """Hash of the file of records, `NAME.tar.idx`."""


@dataclass
class SplitInfo:
    """Entry of one split in index.json."""

    documents: int = 0
    """Number of documents in the split."""
    tokens: int = 0
    """Number of tokens in the split, end-of-text included."""
    text_bytes: int = 0
    """Number of UTF-8 bytes that the tokens spell, without end-of-text. It equals the size of the documents in bytes if
    the tokenizer loses no text."""
    text_characters: int = 0
    """Number of characters that the tokens spell, without end-of-text."""
    longest: int = 0
    """Number of tokens of the longest document."""
    changed_documents: int | None = None
    """Number of documents whose tokens do not spell the original text byte for byte. None if this number is not
    known."""
    unknown_tokens: int | None = None
    """Number of tokens that are the unknown symbol. None if this number is not known."""
    counts_sha256: str = ""
    """Hash of SPLIT-counts.npy, which says how often each id occurs (int64). The cutoffs of adaptive softmax can be
    computed from these counts."""
    shards: list[ShardInfo] = field(default_factory=list)
    """Entries of the shards of the split, in order."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON values for index.json. Values that are not known are left out."""
        counted = {name: value for name, value in asdict(self).items() if value is not None}
        return counted | {"shards": [shard._asdict() for shard in self.shards]}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> SplitInfo:
        """Make an entry from its values in index.json. Raises ValueError, KeyError or TypeError if they are invalid."""
        shards = [typed(ShardInfo, shard) for shard in values["shards"]]
        return typed(SplitInfo, {**values, "shards": shards})


def index_of(
    tokenizer: Tokenizer, *, dtype: np.dtype[Any], splits: Mapping[str, SplitInfo], statistics: Mapping[str, int]
) -> dict[str, Any]:
    """Return the content of index.json as JSON values, without the hash of the index itself.

    `statistics` are counts of the preparation, such as the number of empty documents. The index records these counts
    for the user.
    """
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
    """Return the name of the file that says how often each id occurs in a split."""
    return f"{split}-counts.npy"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type of the token ids in shards: little-endian uint16 for up to 65,536 ids, otherwise uint32."""
    if vocab_size <= 1 << 16:
        return np.dtype("<u2")
    return np.dtype("<u4")


def npy_bytes(array: npt.NDArray[Any]) -> bytes:
    """Return the content of a .npy file that holds the array."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()
