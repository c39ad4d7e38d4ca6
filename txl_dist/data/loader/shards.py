"""Reads the splits of a prepared corpus, and shards whose documents are found without parsing the tar.

Damage raises an error that names the file, the document and the remedy. Each check runs at the earliest of these times
at which it is cheap:

    opening a shard      size of the tar (other readers do not notice a cut between two members), hash of its .idx
    reading a document   crc32 of its tokens, and ids below the vocabulary size, at the first read after opening
    `txl verify`         all of these checks for every document, and sha256 of every file

Limitations: the sha256 of a shard is not checked at each opening, because hashing a whole shard takes seconds. The
first read of a document checks the whole document, which takes 0.1 s for 100 million tokens. If a file is truncated
while it is mapped into memory, the process is killed. The package storage/ reads files from folders and URLs.
"""

from __future__ import annotations

import io
import tarfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from txl_dist.data.format import (
    NPY_HEADER_BYTES,
    RECORD,
    TOKENIZER_NAME,
    ShardInfo,
    SplitInfo,
    Tokens,
    counts_name,
)
from txl_dist.data.loader.corruption import CorruptionPolicy
from txl_dist.data.storage.base import REMEDY, Storage
from txl_dist.errors import DataError
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.tokenizer import read_tokenizer


class CorpusIndex:
    """Splits, vocabulary and tokenizer of a prepared corpus, as index.json describes them."""

    def __init__(self, storage: Storage, index: dict[str, Any]) -> None:
        """Set up the corpus in `storage`. `index` is the content of its index.json, as `parse_index` returns it."""
        self.storage = storage
        self.location = storage.location
        self.name = storage.location.rstrip("/").rpartition("/")[2]
        """Last part of the location, for messages."""
        self.vocab_size: int = index["vocab_size"]
        self.end_of_text: int | None = index["end_of_text"]
        self.dtype = np.dtype(index["dtype"]).newbyteorder("<")
        self.tokenizer_sha256: str = index["tokenizer_sha256"]
        self.fingerprint: str = index["self_sha256"]
        """Data fingerprint, the hash of the index. Corpora of equal content have equal fingerprints."""
        self.statistics: dict[str, int] = index["statistics"]
        self.splits: dict[str, Split] = {}
        for name, info in index["splits"].items():
            self.splits[name] = Split(self, name, info)

    @property
    def folder(self) -> Path:
        """Folder of the corpus's files. Use it only for a corpus in a folder, not at a URL."""
        return Path(self.location)

    @property
    def split_names(self) -> tuple[str, ...]:
        """Names of the corpus's splits."""
        return tuple(self.splits)

    def split(self, name: str) -> Split:
        """Return a split by its name. Raises DataError if the corpus has no such split."""
        if name not in self.splits:
            raise DataError(
                f"corpus {self.location} has no split {name!r}. Its splits are {', '.join(self.splits)}. Name one of "
                f"these splits, or prepare the text again with `--valid PATH` or `--valid-fraction`. To train without "
                'evaluation, add `--data.eval_split ""`.'
            )
        return self.splits[name]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer that made the corpus. It is read from the corpus on first use, and then kept. Raises DataError if
        the file is missing or damaged, or holds another tokenizer.
        """
        name = self.storage.name_of(TOKENIZER_NAME)
        tokenizer = read_tokenizer(self.storage.read(TOKENIZER_NAME), name=name)
        if tokenizer.fingerprint != self.tokenizer_sha256:
            raise DataError(f"{name} is not the tokenizer that made this corpus. {REMEDY}")
        return tokenizer


class Shard:
    """Shard of a split that is open for reading. It returns the tokens of each document by the document's index in file
    order."""

    def __init__(self, storage: Storage, info: ShardInfo, *, dtype: np.dtype[Any], vocab_size: int) -> None:
        """Open the tar of a shard and its file of records (`NAME.tar.idx`).

        Raises DataError if one of the two files is missing or differs from the index of the corpus.
        """
        self.name = storage.name_of(info.name)
        records = storage.read(f"{info.name}.idx", sha256=info.idx_sha256)
        self._payload = storage.open_payload(info)
        if len(records) % RECORD.itemsize:
            raise DataError(
                f"{self.name}.idx has {len(records)} bytes, but its size must be a multiple of 16 bytes, the size of "
                f"one record. {REMEDY}"
            )
        table = np.frombuffer(records, dtype=RECORD)
        self.offsets: npt.NDArray[np.int64] = table["offset"].astype(np.int64)
        """[documents] offset in the tar of each document's first token, in bytes."""
        self.lengths: npt.NDArray[np.int64] = table["tokens"].astype(np.int64)
        """[documents] number of tokens of each document."""
        num_tokens = int(self.lengths.sum())
        if (len(table), num_tokens) != (info.documents, info.tokens):
            raise DataError(
                f"{self.name}.idx lists {len(table)} documents with {num_tokens} tokens in all, but index.json says "
                f"{info.documents} documents with {info.tokens} tokens in all. {REMEDY}"
            )
        self.crc32s: npt.NDArray[np.uint32] = table["crc32"]
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._is_checked = np.zeros(len(table), dtype=bool)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """[documents] index of each document's first token among the tokens of the shard."""
        starts: npt.NDArray[np.int64] = np.cumsum(self.lengths) - self.lengths
        return starts

    def document(self, index: int) -> Tokens:
        """Return the token ids of one document, without a copy if the file is mapped into memory.

        The first read of a document checks its crc32. Raises DataError if the tokens are damaged.
        """
        offset = int(self.offsets[index])
        num_bytes = int(self.lengths[index]) * self._dtype.itemsize
        crc32 = int(self.crc32s[index])
        raw = self._payload.read(offset, num_bytes, crc32=crc32)
        if not self._is_checked[index]:
            self.check(raw, index)
            self._is_checked[index] = True
        return raw.view(self._dtype)

    def check(self, raw: npt.NDArray[np.uint8], index: int) -> None:
        """Raise DataError if the bytes `raw` are not the tokens of document `index`.

        The crc32 of the bytes must be that of the document's record, and all ids must be in the vocabulary.
        """
        if zlib.crc32(raw.data) != int(self.crc32s[index]):
            raise DataError(
                f"{self._place(index)}: the tokens are damaged. Their crc32 differs from the crc32 in the "
                f"document's record. {self._payload.remedy}"
            )
        largest = int(raw.view(self._dtype).max())
        if largest >= self._vocab_size:
            raise DataError(
                f"{self._place(index)}: id {largest} is outside the vocabulary of {self._vocab_size} ids. "
                + self._payload.remedy
            )

    def _place(self, index: int) -> str:
        """Describe where a document is, for messages: shard, document index, sample key and byte range."""
        size = self._dtype.itemsize
        begin = int(self.offsets[index])
        end = begin + int(self.lengths[index]) * size
        key = self._sample_key(index)
        return f"{self.name}, document {index} (sample {key!r}, bytes {begin:,} to {end:,})"

    def _sample_key(self, index: int) -> str:
        """Read from the tar the key of the sample that contains a document. Returns `unknown` if the tar is damaged
        there."""
        ends = self.offsets + self.lengths * self._dtype.itemsize
        first = index
        # The documents of a sample touch. Before the first one are the headers of its array and of the tar member.
        while first and ends[first - 1] == self.offsets[first]:
            first -= 1
        header = int(self.offsets[first]) - NPY_HEADER_BYTES - tarfile.BLOCKSIZE
        with suppress(DataError):  # the caller reports other damage
            name = self._payload.read(max(header, 0), 100).tobytes()
            key, suffix, _ = name.partition(b".npy\0")
            if suffix:
                return key.decode("ascii", errors="replace")
        return "unknown"


class Split:
    """Split of a corpus, such as train or valid: its sizes, its shards and its documents.

    A `Split` keeps no file open. `Shards` keeps the open files of a split.
    """

    def __init__(self, corpus: CorpusIndex, name: str, info: SplitInfo) -> None:
        self.name = name
        self.documents = info.documents
        self.tokens = info.tokens
        self.text_bytes = info.text_bytes
        self.text_characters = info.text_characters
        self.longest = info.longest
        self._info = info
        self.shards = tuple(info.shards)
        shard_tokens = [shard.tokens for shard in info.shards]
        self.shard_tokens: npt.NDArray[np.int64] = np.array(shard_tokens, dtype=np.int64)
        self.corpus = corpus

    @cached_property
    def num_unknown(self) -> int:
        """Number of tokens that are the unknown symbol, such as `<unk>`."""
        if self._info.unknown_tokens is not None:
            return self._info.unknown_tokens
        tokenizer = self.corpus.tokenizer
        if tokenizer.unknown_id is None or tokenizer.is_lossless:
            return 0
        return int(self.counts()[tokenizer.unknown_id])

    @cached_property
    def lost(self) -> str:
        """Reason why decoding the tokens does not give the original text, for messages.

        Empty if decoding gives the text back byte for byte.
        """
        tokenizer = self.corpus.tokenizer
        num_changed = self._info.changed_documents
        if not tokenizer.spells_text:
            return "its ids are names from a vocabulary list, not text"
        if num_changed == 0:
            return ""
        if num_changed is None:
            if tokenizer.keeps_text(num_unknown=self.num_unknown):
                return ""
            return f"the corpus does not record whether the tokenizer ({tokenizer.kind}) lost some of the text"
        return (
            f"the tokenizer ({tokenizer.kind}) does not restore {num_changed:,} of {self.documents:,} documents "
            "byte for byte"
        )

    @cached_property
    def is_separated(self) -> bool:
        """Whether an end-of-text token precedes every document except the first. False if this is not known."""
        if self.corpus.end_of_text is None:
            return self.documents < 2
        # A corpus prepared from text is separated. For tars that an older program indexed it is not known.
        statistics = self.corpus.statistics
        return "documents_read" in statistics or statistics.get("unended_documents") == 0

    def check_files(self) -> None:
        """Compare the size of every shard file with the index, without opening the files.

        Nothing is compared if the corpus is at a URL whose server cannot list files. Raises DataError if a shard is
        missing or has another size.
        """
        self.corpus.storage.check_sizes(self.shards)

    def open_shard(self, index: int) -> Shard:
        """Open the shard with this index in the split. Raises DataError if the shard is missing or damaged."""
        corpus = self.corpus
        return Shard(corpus.storage, self.shards[index], dtype=corpus.dtype, vocab_size=corpus.vocab_size)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Hint to the storage that these shards will be opened soon."""
        self.corpus.storage.prefetch([self.shards[index] for index in indices])

    def counts(self) -> npt.NDArray[np.int64]:
        """Return how often each token id occurs in the split, as [vocab_size] int64.

        Raises DataError if the file of counts is missing or damaged.
        """
        content = self.corpus.storage.read(counts_name(self.name), sha256=self._info.counts_sha256)
        try:
            counts: npt.NDArray[np.int64] = np.load(io.BytesIO(content), allow_pickle=False)
            shape = (self.corpus.vocab_size,)
            is_whole = counts.dtype == np.int64 and counts.shape == shape
        except Exception:  # noqa: BLE001  reading the header fails in a dozen ways
            is_whole = False
        if not is_whole:
            name = self.corpus.storage.name_of(counts_name(self.name))
            raise DataError(
                f"{name} must be an int64 array with one count for each of the {self.corpus.vocab_size} ids of the "
                f"vocabulary. {REMEDY}"
            )
        return counts

    def each_document(self) -> Iterator[Tokens]:
        """Yield the token ids of each document, in file order. Raises DataError for a damaged document."""
        for index in range(len(self.shards)):
            shard = self.open_shard(index)
            for document in range(len(shard.lengths)):
                yield shard.document(document)

    def read_all(self) -> Tokens:
        """Return the token ids of all documents in file order, as one array. Raises DataError for a damaged
        document."""
        tokens = np.empty(self.tokens, dtype=self.corpus.dtype)
        filled = 0
        for document in self.each_document():
            tokens[filled : filled + len(document)] = document
            filled += len(document)
        return tokens


class LostShard:
    """Placeholder for a shard that cannot be opened, in a run that may skip damaged data.

    The documents of such a shard are not known, so the placeholder has one document with as many tokens as the shard.
    `Shards` returns end-of-text tokens for this document.
    """

    def __init__(self, info: ShardInfo) -> None:
        self.lengths = np.array([info.tokens], dtype=np.int64)
        self.starts = np.zeros(1, dtype=np.int64)


class Shards:
    """Cache of the open shards of one split.

    It opens a shard on demand, and closes the least recently used shard if more than `max_open` shards are open.
    `damage` decides whether a damaged document ends the run or is replaced by end-of-text tokens.
    """

    def __init__(self, split: Split, *, max_open: int, damage: CorruptionPolicy | None = None) -> None:
        self._split = split
        self._max_open = max_open
        self._damage = damage or CorruptionPolicy()
        self._open: OrderedDict[int, Shard | LostShard] = OrderedDict()
        filler_id = split.corpus.end_of_text or 0
        self._filler = np.zeros((), dtype=split.corpus.dtype) + filler_id

    def lengths(self, index: int) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each document in shard `index`.

        Raises DataError if the shard cannot be opened and `damage` does not allow skipping it.
        """
        return self._opened(index).lengths

    def starts(self, index: int) -> npt.NDArray[np.int64]:
        """Return the index of each document's first token among the tokens of shard `index`. The shape is [documents].

        Raises DataError as `lengths` does.
        """
        return self._opened(index).starts

    def document(self, index: int, document: int) -> tuple[Tokens, bool]:
        """Return (token ids of a document of shard `index`, whether the document is intact).

        If a damaged document may be skipped, the same number of end-of-text tokens is returned in its place (id 0 in a
        corpus without end-of-text). Otherwise DataError is raised.
        """
        shard = self._opened(index)
        if isinstance(shard, Shard):
            try:
                return shard.document(document), True
            except DataError as error:
                self._damage.skip(error, shard=shard.name, document=document)
        return np.broadcast_to(self._filler, int(shard.lengths[document])), False

    def _opened(self, index: int) -> Shard | LostShard:
        shard = self._open.get(index)
        if shard is None:
            shard = self._open[index] = self._open_shard(index)
            if len(self._open) > self._max_open:
                self._open.popitem(last=False)
        self._open.move_to_end(index)
        return shard

    def _open_shard(self, index: int) -> Shard | LostShard:
        try:
            return self._split.open_shard(index)
        except DataError as error:
            info = self._split.shards[index]
            name = self._split.corpus.storage.name_of(info.name)
            self._damage.skip(error, shard=name, document=-1, count=info.documents)
            return LostShard(info)
