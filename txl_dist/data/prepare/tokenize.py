"""Second step of `txl prepare`: tokenize parts of the input, each sorted by the key that orders the corpus.

For each split, a part has two files, and more if near duplicates are searched. A small JSON file is written last:

    part-000007-train.ids         ids of its documents, end-of-text included, sorted by (key, ordinal)
    part-000007-train.records     one `PART_RECORD` per document in that order: key, digest, ordinal, sizes
    part-000007-train.bands       [documents, 8] uint64, see duplicates.py, if near duplicates are estimated
    part-000007-train.signatures  [documents, 128] uint32, see minhash.py, if near duplicates are reported or dropped
    part-000007-train.entries     the bands of these signatures, sorted by value
    part-000007.json              range of the input and counts; without this file the part does not exist

The key of a train document is a fixed hash of (seed, ordinal), so that sorting by key shuffles the documents. In other
splits the key is the ordinal, which keeps the order of the input. In every split, a shard consists of all documents
with first <= key <= last, sorted by key. These documents are contiguous in each part.
"""

from __future__ import annotations

import bisect
import json
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.config.registry import owner_of, plugin_errors
from txl_dist.data.format import Tokens, token_dtype
from txl_dist.data.loader.lanes import hash64
from txl_dist.data.prepare.documents import (
    TRAIN,
    DocumentPiece,
    Reading,
    TextBlock,
    count_characters,
    documents_of,
    pieces_of,
    text_bytes_of,
)
from txl_dist.data.prepare.duplicates import NUM_BANDS, band_keys
from txl_dist.data.prepare.input_splits import Cursor, InputPart
from txl_dist.data.prepare.minhash import BAND_ENTRY, NUM_HASHES, Signatures, band_table, sign
from txl_dist.errors import DataError
from txl_dist.io.files import atomic_replace, read_json, typed, write_bytes
from txl_dist.tokenizers.base import Ids, Tokenizer, batches
from txl_dist.tokenizers.tokenizer import KINDS, load_tokenizer

PART_RECORD = np.dtype(
    [
        ("key", "<u8"),
        ("ordinal", "<u8"),
        ("digest", "<u8", (2,)),
        ("start", "<u8"),
        ("tokens", "<u4"),
        ("text_bytes", "<u4"),
        ("characters", "<u4"),
        ("is_changed", "<u4"),
    ]
)
"""Record of one document in a part. `start`: index of the document's first token in the file of ids. `digest`: 128 bits
of a hash of the document's text. `text_bytes`, `characters`: size of the text that the tokens decode to. `is_changed`:
whether that text differs from the document's text."""
_BATCH_LEN = 1 << 20
"""Number of characters that are encoded at once."""
_BATCH_DOCUMENTS = 1 << 12
"""Maximum number of documents that are encoded at once. `band_keys` needs a kilobyte of host memory for each
document."""


class Encoding(NamedTuple):
    """Settings for encoding that are the same for all parts of a preparation."""

    folder: str
    """Folder that the parts are written to."""
    tokenizer: str
    """Path of the tokenizer's file."""
    fingerprint: str
    """Fingerprint of the tokenizer."""
    reading: Reading
    seed: int
    """Seed of the order of the train documents."""
    has_bands: bool
    """Whether near duplicates are estimated, so that parts contain bands (see duplicates.py)."""
    band_rows: int
    """Number of rows of a band of the signatures (see minhash.py). 0: parts contain no signatures."""
    stamp: str
    """Hash of all settings that change a part."""


class PartTask(NamedTuple):
    """Task of a worker: encode one part."""

    encoding: Encoding
    number: int
    inputs: str
    """Hash of all input files up to the end of the part."""
    part: InputPart


class PartInfo(NamedTuple):
    """Description of a finished part: the content of part-NUMBER.json."""

    number: int
    stamp: str
    """Hash of all settings that change a part, from the run that wrote this part."""
    inputs: str
    """Hash of all input files up to the end of this part."""
    begin: Cursor
    end: Cursor
    stored_bytes: int
    """Number of stored bytes of all inputs up to the end of this part, for the progress display."""
    documents: dict[str, int]
    """Number of documents of each split. A split without documents has no files."""
    counts: dict[str, int]
    """Number of documents by outcome: read (all documents), empty, replaced, skipped, invalid, cut (its end is held
    out)."""


def encode_part(task: PartTask) -> PartInfo:
    """Tokenize the documents of a part and write its files, unless an earlier run has finished the part.

    Returns the content of the part's JSON file. Raises DataError if a document cannot be read or encoded.
    """
    encoding = task.encoding
    part = task.part
    folder = Path(encoding.folder)
    finished = read_part_info(folder, task.number)
    if finished is not None:
        is_same_input = (finished.inputs, finished.begin, finished.end) == (task.inputs, part.begin, part.end)
        if is_same_input and finished.stamp == encoding.stamp:
            return finished
    tokenizer = _tokenizer(encoding.tokenizer, encoding.fingerprint)
    counts: Counter[str] = Counter()
    splits: dict[str, _SplitOfPart] = defaultdict(_SplitOfPart)
    for block in part.blocks:
        pieces = _pieces(block, encoding.reading, counts)
        for batch in batches(
            pieces,
            most_characters=_BATCH_LEN,
            most_items=_BATCH_DOCUMENTS,
            text_of=lambda piece: piece.document.text,
        ):
            _encode_batch(batch, encoding, tokenizer, splits, counts)
    info_path = folder / f"{name_of_part(task.number)}.json"
    info_path.unlink(missing_ok=True)  # it may describe another part
    for split, split_documents in splits.items():
        split_documents.write(folder, name_of_part(task.number, split), split, encoding)
    info = PartInfo(
        number=task.number,
        stamp=encoding.stamp,
        inputs=task.inputs,
        begin=part.begin,
        end=part.end,
        stored_bytes=part.stored_bytes,
        documents={split: len(splits[split].records) for split in sorted(splits)},
        counts=dict(counts),
    )
    atomic_replace(info_path, json.dumps(info._asdict()).encode())
    return info


def read_part_info(folder: Path, number: int) -> PartInfo | None:
    """Read the JSON file of a finished part. Returns None if the file is absent or unreadable."""
    try:
        return part_info_of(read_json(folder / f"{name_of_part(number)}.json"))
    except (OSError, ValueError):
        return None


def part_info_of(values: Any) -> PartInfo | None:
    """Return the description of a part from the values of its JSON file, or None if they are invalid."""
    try:
        begin = typed(Cursor, values["begin"])
        end = typed(Cursor, values["end"])
        return typed(PartInfo, {**values, "begin": begin, "end": end})
    except (ValueError, KeyError, TypeError):
        return None


def name_of_part(number: int, split: str = "") -> str:
    """Return the name of a part, or the beginning of the names of its files of one split: `part-000007-train`."""
    return f"part-{number:06d}" + (f"-{split}" if split else "")


def records_of(folder: Path, number: int, split: str) -> npt.NDArray[Any]:
    """Memory-map the records of one split of a part: [documents] of `PART_RECORD`, sorted by (key, ordinal)."""
    return np.memmap(folder / f"{name_of_part(number, split)}.records", dtype=PART_RECORD, mode="r")


def bands_of(folder: Path, number: int, split: str) -> npt.NDArray[np.uint64]:
    """Memory-map the bands of one split of a part: [documents, bands], in the order of the split's records."""
    path = folder / f"{name_of_part(number, split)}.bands"
    return np.memmap(path, dtype=np.uint64, mode="r").reshape(-1, NUM_BANDS)


def signatures_of(folder: Path, number: int, split: str) -> Signatures:
    """Memory-map the signatures of one split of a part: [documents, hashes], in the order of the split's records."""
    path = folder / f"{name_of_part(number, split)}.signatures"
    return np.memmap(path, dtype=np.uint32, mode="r").reshape(-1, NUM_HASHES)


def band_entries_of(folder: Path, number: int, split: str) -> npt.NDArray[Any]:
    """Read the bands of one split of a part from its file: `BAND_ENTRY`, sorted by value."""
    path = folder / f"{name_of_part(number, split)}.entries"
    if not path.stat().st_size:  # all documents are too short
        return np.empty(0, BAND_ENTRY)
    return np.memmap(path, dtype=BAND_ENTRY, mode="r")


def gather(
    folder: Path, numbers: Sequence[int], split: str, *, keys: tuple[int, int], dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], list[Tokens]]:
    """Read the documents of one split with keys[0] <= key <= keys[1] from the parts `numbers`.

    Returns ([documents] records, the tokens of each document), sorted by (key, ordinal).
    """
    records_of_parts = [np.empty(0, PART_RECORD)]
    documents: list[Tokens] = []
    for number in numbers:
        mapped = records_of(folder, number, split)
        first = bisect.bisect_left(mapped["key"], keys[0], key=int)
        last = bisect.bisect_right(mapped["key"], keys[1], lo=first, key=int)
        if first == last:
            continue
        records = np.array(mapped[first:last])
        starts = records["start"]
        begin = int(starts[0])
        end = int(starts[-1]) + int(records["tokens"][-1])
        path = folder / f"{name_of_part(number, split)}.ids"
        tokens = np.fromfile(path, dtype=dtype, count=end - begin, offset=begin * dtype.itemsize)
        borders = (starts[1:] - starts[0]).astype(np.int64)
        records_of_parts.append(records)
        documents += np.split(tokens, borders)
    joined = np.concatenate(records_of_parts)
    order = np.lexsort((joined["ordinal"], joined["key"]))
    return joined[order], [documents[i] for i in order]


class _SplitOfPart:
    """Encoded documents of one split of one part. `_encode_batch` adds them in input order, and `write` writes their
    files."""

    def __init__(self) -> None:
        self.records: list[tuple[Any, ...]] = []
        """Fields of each document's `PART_RECORD`. The fields key and start are 0 until `write` computes them."""
        self.documents: list[Tokens] = []
        self.bands: list[npt.NDArray[np.uint64]] = []
        """One array of shape [1, bands] for each document. Empty unless near duplicates are estimated."""
        self.signatures: list[Signatures] = []
        """One array of shape [1, hashes] for each document. Empty unless near duplicates are reported or dropped."""

    def write(self, folder: Path, name: str, split: str, encoding: Encoding) -> None:
        """Sort the documents by (key, ordinal) and write their files, which begin with `name`."""
        table = np.array(self.records, dtype=PART_RECORD)
        if split == TRAIN:
            table["key"] = hash64(encoding.seed, table["ordinal"])
        else:
            table["key"] = table["ordinal"]
        order = np.lexsort((table["ordinal"], table["key"]))
        table = table[order]
        table["start"] = np.cumsum(table["tokens"], dtype=np.uint64) - table["tokens"]
        tokens = np.concatenate([self.documents[i] for i in order])
        write_bytes(folder / f"{name}.ids", tokens.tobytes())
        write_bytes(folder / f"{name}.records", table.tobytes())
        if encoding.has_bands:
            write_bytes(folder / f"{name}.bands", np.concatenate(self.bands)[order].tobytes())
        if encoding.band_rows:
            signatures = np.concatenate(self.signatures)[order]
            entries = band_table(signatures, num_rows=encoding.band_rows)
            write_bytes(folder / f"{name}.signatures", signatures.tobytes())
            write_bytes(folder / f"{name}.entries", entries.tobytes())


@lru_cache(maxsize=1)
def _tokenizer(path: str, fingerprint: str) -> Tokenizer:
    """Load the tokenizer, once per process."""
    tokenizer = load_tokenizer(path)
    assert tokenizer.fingerprint == fingerprint
    return tokenizer


def _pieces(block: TextBlock, reading: Reading, counts: Counter[str]) -> Iterator[DocumentPiece]:
    """Yield the pieces of the documents of a block, except documents without text. Adds every document to `counts`."""
    for document in documents_of(block, reading):
        counts["read"] += 1
        if document.damage:
            counts[document.damage] += 1
        elif not document.text:
            counts["empty"] += 1
        if document.text:
            pieces = pieces_of(document, given_for=block.split, reading=reading)
            counts["cut"] += len(pieces) > 1
            yield from pieces


def _encode_batch(
    batch: Sequence[DocumentPiece],
    encoding: Encoding,
    tokenizer: Tokenizer,
    splits: dict[str, _SplitOfPart],
    counts: Counter[str],
) -> None:
    """Tokenize a batch of pieces, and add each piece to the documents of the piece's split."""
    encoded = _encode(batch, tokenizer)
    if encoding.has_bands:
        bands = band_keys(encoded, kind=tokenizer.kind)
    else:
        bands = None
    if encoding.band_rows:
        signatures = sign(encoded, kind=tokenizer.kind)
    else:
        signatures = None
    dtype = token_dtype(tokenizer.vocab_size)
    ends = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype=dtype)
    for number, (piece, ids) in enumerate(zip(batch, encoded, strict=True)):
        tokens = np.concatenate([ids.astype(dtype), ends])
        if not len(tokens):  # a tokenizer of words gives no tokens for a text of blanks
            counts["empty"] += 1
            continue
        document = piece.document
        raw = text_bytes_of(document.text)
        num_unknown = int((ids == tokenizer.unknown_id).sum())
        if tokenizer.keeps_text(num_unknown=num_unknown):
            spelled = raw
        else:
            spelled = text_bytes_of(tokenizer.decode(ids.tolist()))
        digest = struct.unpack(">2Q", piece.digest)
        sizes = (len(tokens), len(spelled), count_characters(spelled))
        split = splits[piece.split]
        split.records.append((0, document.ordinal, digest, 0, *sizes, spelled != raw))
        split.documents.append(tokens)
        if bands is not None:
            split.bands.append(bands[number : number + 1])
        if signatures is not None:
            split.signatures.append(signatures[number : number + 1])


def _encode(batch: Sequence[DocumentPiece], tokenizer: Tokenizer) -> list[Ids]:
    """Return the ids of each piece. Raises DataError naming the document that cannot be encoded."""
    documents = [piece.document for piece in batch]
    try:
        with plugin_errors(KINDS, tokenizer.kind, what="tokenizer", kind=DataError):
            encoded = tokenizer.encode_batch([document.text for document in documents])
        if owner_of(KINDS, tokenizer.kind) is not None:
            _check_ids(encoded, tokenizer)
        return encoded
    except DataError:  # encode one document at a time to find the one that fails
        for document in documents:
            try:
                with plugin_errors(KINDS, tokenizer.kind, what="tokenizer", kind=DataError):
                    tokenizer.encode(document.text)
            except DataError as error:
                raise DataError(f"{document.where}: {error}") from error
        raise


def _check_ids(encoded: Sequence[object], tokenizer: Tokenizer) -> None:
    """Raise DataError unless a plugin's tokenizer returned 1-D arrays of ids in the vocabulary."""
    for ids in encoded:
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(
                f"the plugin's tokenizer {tokenizer.kind!r}: encode returned a {type(ids).__name__}. It must return a "
                "numpy array of whole numbers with one dimension. Correct the plugin."
            )
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            if ids.min() >= 0:
                outside = ids.max()
            else:
                outside = ids.min()
            raise DataError(
                f"the plugin's tokenizer {tokenizer.kind!r}: encode returned the id {outside}, but the vocabulary has "
                f"{tokenizer.vocab_size:,} ids. Correct the plugin."
            )
