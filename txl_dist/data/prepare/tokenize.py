"""The middle of `txl prepare`: parts of the input, encoded, each sorted by the key that orders the corpus.

A part gives, per split, two files (three where near duplicates are looked for) and, last, a small JSON:

    part-000007-train.ids         ids of its documents, end-of-text included, sorted by (key, ordinal)
    part-000007-train.records     one `PART_RECORD` per document in that order: key, digest, ordinal, sizes
    part-000007-train.bands       [documents, 8] uint64, see duplicates.py
    part-000007.json              what it covers and counts; without it the part does not exist

The key of a train document is a frozen hash of (seed, ordinal), so sorting shuffles; other splits keep the order of
the input, their key is the ordinal. Either way a shard is "all documents with first <= key <= last, sorted", which
each part answers with one contiguous read.
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
"""`start`: first token in the file of tokens. `digest`: 128 bits of the content. `text_bytes`, `characters`: of the
text that the tokens spell. `is_changed`: whether that is another than the content."""
_BATCH_LEN = 1 << 20
"""Characters that are encoded at once."""
_BATCH_DOCUMENTS = 1 << 12
"""Documents that are encoded at once, since `band_keys` takes a kilobyte for each, however short."""


class Encoding(NamedTuple):
    """How parts are made."""

    folder: str
    tokenizer: str
    """Its file."""
    fingerprint: str
    """Of the tokenizer."""
    reading: Reading
    seed: int
    has_bands: bool
    stamp: str
    """Hash of all settings that change a part."""


class PartTask(NamedTuple):
    """One part to encode."""

    encoding: Encoding
    number: int
    inputs: str
    """Hash of all input files up to the end of the part."""
    part: InputPart


class PartInfo(NamedTuple):
    """What part-NUMBER.json says."""

    number: int
    stamp: str
    inputs: str
    begin: Cursor
    end: Cursor
    stored_bytes: int
    documents: dict[str, int]
    """Per split; a split without documents has no files."""
    counts: dict[str, int]
    """Documents read, empty, replaced, skipped, invalid, cut into train and held out."""


def encode_part(task: PartTask) -> PartInfo:
    """Write the files of a part. Raises DataError if a document cannot be read or encoded."""
    encoding, part = task.encoding, task.part
    found = read_part_info(Path(encoding.folder), task.number)
    if found and found[1:5] == (encoding.stamp, task.inputs, part.begin, part.end):  # of the run before a kill
        return found
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
    folder = Path(encoding.folder)
    (folder / f"{name_of_part(task.number)}.json").unlink(missing_ok=True)  # it may speak of another part
    for split, gathered in splits.items():
        gathered.write(folder, name_of_part(task.number, split), split, encoding, tokenizer)
    documents = {split: len(gathered.records) for split, gathered in sorted(splits.items())}
    known = encoding.stamp, task.inputs, part.begin, part.end, part.stored_bytes
    info = PartInfo(task.number, *known, documents=documents, counts=dict(counts))
    atomic_replace(folder / f"{name_of_part(task.number)}.json", json.dumps(info._asdict()).encode())
    return info


def read_part_info(folder: Path, number: int) -> PartInfo | None:
    """What a finished part says; None if it is not there."""
    try:
        values = read_json(folder / f"{name_of_part(number)}.json")
        begin, end = (typed(Cursor, values[key]) for key in ("begin", "end"))
        return typed(PartInfo, {**values, "begin": begin, "end": end})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def name_of_part(number: int, split: str = "") -> str:
    """`part-000007-train`."""
    return f"part-{number:06d}" + (f"-{split}" if split else "")


def records_of(folder: Path, number: int, split: str) -> npt.NDArray[Any]:
    """[documents] of `PART_RECORD`, mapped."""
    return np.memmap(folder / f"{name_of_part(number, split)}.records", dtype=PART_RECORD, mode="r")


def bands_of(folder: Path, number: int, split: str) -> npt.NDArray[np.uint64]:
    """[documents, bands], mapped."""
    path = folder / f"{name_of_part(number, split)}.bands"
    return np.memmap(path, dtype=np.uint64, mode="r").reshape(-1, NUM_BANDS)


def gather(
    folder: Path, numbers: Sequence[int], split: str, *, keys: tuple[int, int], dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], list[Tokens]]:
    """(records, tokens) of all documents with keys[0] <= key <= keys[1] in these parts, sorted by (key, ordinal)."""
    records, documents = [np.empty(0, PART_RECORD)], []
    for number in numbers:
        mapped = records_of(folder, number, split)
        first = bisect.bisect_left(mapped["key"], keys[0], key=int)
        last = bisect.bisect_right(mapped["key"], keys[1], lo=first, key=int)
        if first < last:
            own = np.array(mapped[first:last])
            path = folder / f"{name_of_part(number, split)}.ids"
            begin = int(own["start"][0])
            count = int(own["start"][-1]) + int(own["tokens"][-1]) - begin
            tokens = np.fromfile(path, dtype=dtype, count=count, offset=begin * dtype.itemsize)
            records.append(own)
            documents += np.split(tokens, (own["start"][1:] - own["start"][0]).astype(np.int64))
    joined = np.concatenate(records)
    order = np.lexsort((joined["ordinal"], joined["key"]))
    return joined[order], [documents[i] for i in order]


class _SplitOfPart:
    """The documents of one split in one part, in the order of the input."""

    def __init__(self) -> None:
        self.records: list[tuple[Any, ...]] = []
        """Fields of `PART_RECORD`; key and start are filled in where they are written."""
        self.documents: list[Tokens] = []
        self.bands: list[npt.NDArray[np.uint64]] = []
        """Of each document, if near duplicates are looked for."""

    def write(self, folder: Path, name: str, split: str, encoding: Encoding, tokenizer: Tokenizer) -> None:
        """Sort and write."""
        table = np.array(self.records, dtype=PART_RECORD)
        table["key"] = hash64(encoding.seed, table["ordinal"]) if split == TRAIN else table["ordinal"]
        order = np.lexsort((table["ordinal"], table["key"]))
        table = table[order]
        table["start"] = np.cumsum(table["tokens"], dtype=np.uint64) - table["tokens"]
        tokens = np.concatenate([self.documents[i] for i in order])
        write_bytes(folder / f"{name}.ids", tokens.tobytes())
        write_bytes(folder / f"{name}.records", table.tobytes())
        if encoding.has_bands:
            write_bytes(folder / f"{name}.bands", np.concatenate(self.bands)[order].tobytes())


@lru_cache(maxsize=1)
def _tokenizer(path: str, fingerprint: str) -> Tokenizer:
    """Loaded once per process."""
    tokenizer = load_tokenizer(path)
    assert tokenizer.fingerprint == fingerprint
    return tokenizer


def _pieces(block: TextBlock, reading: Reading, counts: Counter[str]) -> Iterator[DocumentPiece]:
    """Of the documents that have text; the others, and the damaged ones, are counted."""
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
    encoded = _encode(batch, tokenizer)
    bands = band_keys(encoded, kind=tokenizer.kind) if encoding.has_bands else None
    dtype, end_of_text = token_dtype(tokenizer.vocab_size), tokenizer.end_of_text
    for number, (piece, ids) in enumerate(zip(batch, encoded, strict=True)):
        tokens = ids.astype(dtype) if end_of_text is None else np.append(ids, end_of_text).astype(dtype)
        if not len(tokens):  # a text of nothing but blanks, in words
            counts["empty"] += 1
            continue
        document, split = piece.document, splits[piece.split]
        raw = text_bytes_of(document.text)
        is_kept = tokenizer.keeps_text(num_unknown=int((ids == tokenizer.unknown_id).sum()))
        spelled = raw if is_kept else text_bytes_of(tokenizer.decode(ids.tolist()))
        sizes = len(tokens), len(spelled), count_characters(spelled)
        split.records.append((0, document.ordinal, struct.unpack(">2Q", piece.digest), 0, *sizes, spelled != raw))
        split.documents.append(tokens)
        if bands is not None:
            split.bands.append(bands[number : number + 1])


def _encode(batch: Sequence[DocumentPiece], tokenizer: Tokenizer) -> list[Ids]:
    documents = [piece.document for piece in batch]
    try:
        with plugin_errors(KINDS, tokenizer.kind, what="tokenizer", kind=DataError):
            encoded = tokenizer.encode_batch([document.text for document in documents])
        if owner_of(KINDS, tokenizer.kind) is not None:
            _check_ids(encoded, tokenizer)
        return encoded
    except DataError:  # once more, one by one, to know which
        for document in documents:
            try:
                with plugin_errors(KINDS, tokenizer.kind, what="tokenizer", kind=DataError):
                    tokenizer.encode(document.text)
            except DataError as error:
                raise DataError(f"{document.where}: {error}") from error
        raise


def _check_ids(encoded: Sequence[object], tokenizer: Tokenizer) -> None:
    """Raises DataError for anything but arrays of ids of the vocabulary, which a plugin's tokenizer may have made."""
    for ids in encoded:
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(
                f"the plugin's tokenizer {tokenizer.kind!r}: encode returned a {type(ids).__name__}. It must return a "
                "numpy array of whole numbers with one dimension. Correct the plugin."
            )
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            outside = ids.max() if ids.min() >= 0 else ids.min()
            raise DataError(
                f"the plugin's tokenizer {tokenizer.kind!r}: encode returned the id {outside}, but the vocabulary has "
                f"{tokenizer.vocab_size:,} ids. Correct the plugin."
            )
