"""Reader of a prepared corpus: the index, its splits, and shards whose documents are located without parsing.

Damage is an error that names the file, the document and the remedy. It is detected as early as that is cheap:

    opening a corpus     index.json: version, its own hash
    opening a shard      size of the tar (a cut at a member boundary is silent in other readers), hash of its .idx
    touching a document  crc32 of its tokens, ids below the vocabulary size; once per open shard
    `verify` (verify.py) all of that for every document, and sha256 of every file

Limitations: the sha256 of a whole shard is not checked at each opening, since that takes seconds. A document is
checked whole when it is first touched: 100 million tokens take a tenth of a second. A file that is cut while it is
mapped ends the process. The place of the files is left to storage/.
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

from txl_dist.config.schema import DataSection
from txl_dist.data.format import (
    FORMAT_VERSION,
    INDEX_NAME,
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
from txl_dist.data.storage.factory import open_storage
from txl_dist.errors import DataError, translate_errors
from txl_dist.io.files import canonical_hash, is_file_name, parse_json
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.tokenizer import read_tokenizer


class Shard:
    """One open shard, with its documents by their index in file order."""

    def __init__(self, storage: Storage, info: ShardInfo, *, dtype: np.dtype[Any], vocab_size: int) -> None:
        """Open a shard. Raises DataError if the tar or its records are missing or not what the index describes."""
        self.name = storage.name_of(info.name)
        records = storage.read(f"{info.name}.idx", sha256=info.idx_sha256)
        self._payload = storage.open_payload(info)
        if len(records) % RECORD.itemsize:
            raise DataError(f"{self.name}.idx has {len(records)} bytes, not a whole number of records. {REMEDY}")
        table = np.frombuffer(records, dtype=RECORD)
        self.offsets: npt.NDArray[np.int64] = table["offset"].astype(np.int64)
        """[documents] offset in the tar of each document's tokens, in bytes."""
        self.lengths: npt.NDArray[np.int64] = table["tokens"].astype(np.int64)
        """[documents] number of tokens of each document."""
        num_tokens = int(self.lengths.sum())
        if (len(table), num_tokens) != (info.documents, info.tokens):
            raise DataError(
                f"{self.name}.idx lists {len(table)} documents of {num_tokens} tokens, but the index says "
                f"{info.documents} documents of {info.tokens} tokens. {REMEDY}"
            )
        self.crc32s: npt.NDArray[np.uint32] = table["crc32"]
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._is_checked = np.zeros(len(table), dtype=bool)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """[documents] index of each document's first token in the shard."""
        starts: npt.NDArray[np.int64] = np.cumsum(self.lengths) - self.lengths
        return starts

    def document(self, index: int) -> Tokens:
        """Return the tokens of one document, a view into the file. Raises DataError if they are damaged."""
        offset = int(self.offsets[index])
        num_bytes = int(self.lengths[index]) * self._dtype.itemsize
        crc32 = int(self.crc32s[index])
        raw = self._payload.read(offset, num_bytes, crc32=crc32)
        if not self._is_checked[index]:
            self.check(raw, index)
            self._is_checked[index] = True
        return raw.view(self._dtype)

    def check(self, raw: npt.NDArray[np.uint8], index: int) -> None:
        """Raise DataError if `raw` is not the bytes of this document."""
        if zlib.crc32(raw.data) != int(self.crc32s[index]):
            raise DataError(
                f"{self._place(index)}: damaged, because its crc32 differs from the record. {self._payload.remedy}"
            )
        largest = int(raw.view(self._dtype).max())
        if largest >= self._vocab_size:
            raise DataError(
                f"{self._place(index)}: id {largest} is outside the vocabulary of {self._vocab_size}. "
                + self._payload.remedy
            )

    def _place(self, index: int) -> str:
        """Name a document's shard, index, sample key and bytes, for messages."""
        size = self._dtype.itemsize
        begin = int(self.offsets[index])
        end = begin + int(self.lengths[index]) * size
        key = self._sample_key(index)
        return f"{self.name}, document {index} (sample {key!r}, bytes {begin:,} to {end:,})"

    def _sample_key(self, index: int) -> str:
        """Read the key of the sample that holds a document from the tar; `unknown` if that is damaged."""
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
    """One split of a corpus. It keeps no file open; `Shards` does."""

    def __init__(self, corpus: Corpus, name: str, info: SplitInfo) -> None:
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
        """Number of tokens that stand for something unknown."""
        if self._info.unknown_tokens is not None:
            return self._info.unknown_tokens
        tokenizer = self.corpus.tokenizer
        if tokenizer.unknown_id is None or tokenizer.is_lossless:
            return 0
        return int(self.counts()[tokenizer.unknown_id])

    @cached_property
    def lost(self) -> str:
        """Description of the text that the tokens do not give back, for messages; empty if they give back all."""
        tokenizer = self.corpus.tokenizer
        num_changed = self._info.changed_documents
        if not tokenizer.spells_text:
            return "its ids were made elsewhere, and their names are no text"
        if num_changed == 0:
            return ""
        if num_changed is None:
            if tokenizer.keeps_text(num_unknown=self.num_unknown):
                return ""
            return f"it is not on record whether the tokenizer ({tokenizer.kind}) lost some of the text"
        return (
            f"{num_changed:,} of {self.documents:,} documents do not come back from the tokenizer ({tokenizer.kind}) "
            "byte for byte"
        )

    @cached_property
    def is_separated(self) -> bool:
        """Whether there is an end-of-text before every document but the first."""
        if self.corpus.end_of_text is None:
            return self.documents < 2
        # A corpus prepared from text is separated. For tars that an older program indexed it is not known.
        statistics = self.corpus.statistics
        return "documents_read" in statistics or statistics.get("unended_documents") == 0

    def check_files(self) -> None:
        """Check every shard's size, without opening it. Raises DataError if one is missing or has another size."""
        self.corpus.storage.check_sizes(self.shards)

    def open_shard(self, index: int) -> Shard:
        """Map one shard. Raises DataError if it is missing or damaged."""
        corpus = self.corpus
        return Shard(corpus.storage, self.shards[index], dtype=corpus.dtype, vocab_size=corpus.vocab_size)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Hint to the storage that these shards will be opened soon."""
        self.corpus.storage.prefetch([self.shards[index] for index in indices])

    def counts(self) -> npt.NDArray[np.int64]:
        """Read how often each id occurs: [vocab_size] int64. Raises DataError if the file is missing or damaged."""
        content = self.corpus.storage.read(counts_name(self.name), sha256=self._info.counts_sha256)
        try:
            counts: npt.NDArray[np.int64] = np.load(io.BytesIO(content), allow_pickle=False)
            shape = (self.corpus.vocab_size,)
            is_whole = counts.dtype == np.int64 and counts.shape == shape
        except Exception:  # noqa: BLE001  reading the header fails in a dozen ways
            is_whole = False
        if not is_whole:
            name = self.corpus.storage.name_of(counts_name(self.name))
            raise DataError(f"{name} does not hold the counts of {self.corpus.vocab_size} ids. {REMEDY}")
        return counts

    def each_document(self) -> Iterator[Tokens]:
        """Yield all documents in file order. Raises DataError for a damaged one."""
        for index in range(len(self.shards)):
            shard = self.open_shard(index)
            for document in range(len(shard.lengths)):
                yield shard.document(document)

    def read_all(self) -> Tokens:
        """Read all tokens in file order into memory. Raises DataError for a damaged document."""
        tokens = np.empty(self.tokens, dtype=self.corpus.dtype)
        filled = 0
        for document in self.each_document():
            tokens[filled : filled + len(document)] = document
            filled += len(document)
        return tokens


class LostShard:
    """Stand-in for a shard that cannot be opened and may be skipped: one damaged document of as many tokens."""

    def __init__(self, info: ShardInfo) -> None:
        self.lengths = np.array([info.tokens], dtype=np.int64)
        self.starts = np.zeros(1, dtype=np.int64)


class Shards:
    """Open shards of a split: a shard is opened on demand, and the least recently used one is closed."""

    def __init__(self, split: Split, *, max_open: int, damage: CorruptionPolicy | None = None) -> None:
        self._split = split
        self._max_open = max_open
        self._damage = damage or CorruptionPolicy()
        self._open: OrderedDict[int, Shard | LostShard] = OrderedDict()
        filler_id = split.corpus.end_of_text or 0
        self._filler = np.zeros((), dtype=split.corpus.dtype) + filler_id

    def lengths(self, index: int) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each document. Raises DataError if the shard cannot be opened or skipped."""
        return self._opened(index).lengths

    def starts(self, index: int) -> npt.NDArray[np.int64]:
        """Return the index of each document's first token in the shard. Raises DataError as `lengths` does."""
        return self._opened(index).starts

    def document(self, index: int, document: int) -> tuple[Tokens, bool]:
        """Return (the document's tokens, whether they are intact).

        A damaged document that may be skipped gives as many end-of-text tokens. Raises DataError if it may not.
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


class Corpus:
    """A prepared corpus, as its index describes it."""

    def __init__(self, storage: Storage, index: dict[str, Any]) -> None:
        """Describe the corpus in `storage` by its index, as `parse_index` returns it."""
        self.storage = storage
        self.location = storage.location
        self.name = storage.location.rstrip("/").rpartition("/")[2]
        """Last part of the location, for messages."""
        self.vocab_size: int = index["vocab_size"]
        self.end_of_text: int | None = index["end_of_text"]
        self.dtype = np.dtype(index["dtype"]).newbyteorder("<")
        self.tokenizer_sha256: str = index["tokenizer_sha256"]
        self.fingerprint: str = index["self_sha256"]
        """Data fingerprint: equal for corpora of equal content."""
        self.statistics: dict[str, int] = index["statistics"]
        self.splits: dict[str, Split] = {}
        for name, info in index["splits"].items():
            self.splits[name] = Split(self, name, info)

    @property
    def folder(self) -> Path:
        """Folder of the files. Only for a corpus that is not at a URL."""
        return Path(self.location)

    @property
    def split_names(self) -> tuple[str, ...]:
        """Names of the corpus's splits."""
        return tuple(self.splits)

    def split(self, name: str) -> Split:
        """Return a split by its name. Raises DataError if the corpus has no such split."""
        if name not in self.splits:
            raise DataError(
                f"corpus {self.location} has no split {name!r}; it has {', '.join(self.splits)}. Name one of these "
                f"splits, or prepare the text again with `--valid PATH` or `--valid-fraction`. Training goes without "
                f"evaluation "
                'with `--data.eval_split ""`.'
            )
        return self.splits[name]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the corpus, read once. Raises DataError if it is missing, damaged or another one."""
        name = self.storage.name_of(TOKENIZER_NAME)
        tokenizer = read_tokenizer(self.storage.read(TOKENIZER_NAME), name=name)
        if tokenizer.fingerprint != self.tokenizer_sha256:
            raise DataError(f"{name} is not the tokenizer that made this corpus. {REMEDY}")
        return tokenizer


def storage_of(location: str | Path, settings: DataSection) -> Storage:
    """Open the storage of a corpus. Raises DataError as `open_storage`."""
    return open_storage(
        location,
        cache_dir=settings.cache_dir,
        cache_gib=settings.cache_gib,
        retries=settings.retries,
        allow_protocols=settings.allow_protocols,
    )


def open_corpus(location: str | Path, settings: DataSection | None = None) -> Corpus:
    """Open what `txl prepare` wrote, in a folder or at a URL.

    Raises DataError if its index is missing, foreign or edited, or if the URL is not allowed.
    """
    storage = storage_of(location, settings or DataSection())
    try:
        content = storage.read(INDEX_NAME)
    except DataError as error:
        raise DataError(
            f"{location} is not a readable corpus: {error} Make a corpus with `txl prepare`, or set data.path to the "
            f"folder of a corpus."
        ) from error
    return Corpus(storage, parse_index(content, name=storage.name_of(INDEX_NAME)))


def parse_index(content: bytes, *, name: str) -> dict[str, Any]:
    """Parse an index.json, its splits into `SplitInfo`. Raises DataError if it is foreign, damaged or edited."""
    with translate_errors(DataError, f"{name} is damaged", REMEDY, of=(ValueError,)):
        index = parse_json(content)
    if not isinstance(index, dict) or "self_sha256" not in index:
        raise DataError(f"{name} is not the index of a corpus. Point data.path at a folder of `txl prepare`.")
    if index.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{name} has format version {index.get('format_version')}, but this version of txl_dist reads format "
            f"version {FORMAT_VERSION}. "
            "Prepare the corpus again, or use the program that wrote it."
        )
    if canonical_hash(index) != index["self_sha256"]:
        raise DataError(f"{name} was edited or is damaged: its content does not match its own hash. {REMEDY}")
    try:
        splits = {name: SplitInfo.from_dict(values) for name, values in index["splits"].items()}
        is_known = _has_valid_values(index)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{name} is not a valid index ({error!r}). {REMEDY}") from error
    if not is_known:
        raise DataError(f"{name} is not a valid index: dtype, vocab_size or other keys are wrong. {REMEDY}")
    files = list(splits)
    for split in splits.values():
        files.extend(shard.name for shard in split.shards)
    strange = [file for file in files if not is_file_name(file) or file.startswith(".")]
    if strange:
        raise DataError(f"{name} names files outside its folder ({strange[0]!r:.80}). Do not use this corpus.")
    return index | {"splits": splits}


def _has_valid_values(index: dict[str, Any]) -> bool:
    """Return whether the values have the types and ranges of an index. Raises KeyError if one is missing."""
    dtype = index["dtype"]
    vocab_size = index["vocab_size"]
    end_of_text = index["end_of_text"]
    statistics = index["statistics"]
    tokenizer_sha256 = index["tokenizer_sha256"]
    if dtype not in ("uint16", "uint32") or not isinstance(tokenizer_sha256, str):
        return False
    if type(vocab_size) is not int or not 0 < vocab_size <= 1 << 32:
        return False
    is_id = type(end_of_text) is int and 0 <= end_of_text < vocab_size
    if end_of_text is not None and not is_id:
        return False
    if not isinstance(statistics, dict):
        return False
    return all(type(count) is int for count in statistics.values())
