"""A prepared corpus: opens its index.json, and gives its splits.

Opening checks the format version and the hash of index.json. shards.py reads the splits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from txl_dist.config.schema import DataSection
from txl_dist.data.format import FORMAT_VERSION, INDEX_NAME, SplitInfo
from txl_dist.data.loader.shards import CorpusIndex
from txl_dist.data.storage.base import REMEDY, Storage
from txl_dist.data.storage.factory import open_storage
from txl_dist.errors import DataError, translate_errors
from txl_dist.io.files import canonical_hash, is_file_name, parse_json


class Corpus(CorpusIndex):
    """Prepared corpus: its splits, vocabulary and tokenizer, as index.json describes them."""

    def lanes(
        self,
        split: str = "train",
        *,
        num_lanes: int,
        segment_len: int,
        seed: int = 1,
        first_step: int = 0,
        rank: int = -1,
        world_size: int = 1,
    ) -> Any:
        """Return the segments that training reads, as an endless torch dataset with `state_dict` and `load_state_dict`.

        An item holds T + 1 = `segment_len` + 1 tokens of each lane (row of the batch) of a rank. `seed` is the setting
        run.seed. By default the rank is that of this process. Imports torch. Raises DataError if there is no such
        split, or if it has fewer tokens than lanes. Raises ConfigError if the ranks cannot share the lanes equally.
        """
        from txl_dist.data.loader.torch_datasets import LaneDataset

        return LaneDataset(
            self.split(split),
            num_lanes=num_lanes,
            segment_len=segment_len,
            seed=seed,
            first_step=first_step,
            rank=rank,
            world_size=world_size,
        )

    def webdataset(self, split: str = "train", *, chunk_len: int = 0) -> Any:
        """Return a webdataset pipeline over the documents of a split, or over chunks of `chunk_len` tokens.

        A sample is a dictionary with the token ids in `tokens`. Imports torch. Raises DataError if there is no such
        split. Raises ConfigError for a negative `chunk_len`.
        """
        from txl_dist.data.loader.torch_datasets import document_pipeline

        return document_pipeline(self.split(split), chunk_len=chunk_len)


def storage_of(location: str | Path, settings: DataSection) -> Storage:
    """Open the storage of a corpus with the cache, retries and protocols of the settings section `data`.

    Raises DataError as `open_storage` does.
    """
    return open_storage(
        location,
        cache_dir=settings.cache_dir,
        cache_gib=settings.cache_gib,
        retries=settings.retries,
        allow_protocols=settings.allow_protocols,
    )


def open_corpus(location: str | Path, settings: DataSection | None = None) -> Corpus:
    """Open a corpus that `txl prepare` wrote, in a folder or at a URL.

    Raises DataError if the URL is not allowed, or if the index.json of the corpus is missing, edited or not an index.
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
    """Return the content of an index.json, with each split as a `SplitInfo`.

    Raises DataError if the file is not an index of this format version, is damaged, or was edited.
    """
    with translate_errors(DataError, f"{name} is damaged", REMEDY, of=(ValueError,)):
        index = parse_json(content)
    if not isinstance(index, dict) or "self_sha256" not in index:
        raise DataError(f"{name} is not the index of a corpus. Set data.path to a folder that `txl prepare` wrote.")
    if index.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{name} has format version {index.get('format_version')}, but this version of txl_dist reads format "
            f"version {FORMAT_VERSION}. Prepare the corpus again with this version, or use the version of txl_dist "
            "that prepared the corpus."
        )
    if canonical_hash(index) != index["self_sha256"]:
        raise DataError(
            f"{name} was edited or is damaged: its content does not match the hash that the file itself contains "
            f"(self_sha256). {REMEDY}"
        )
    try:
        splits = {name: SplitInfo.from_dict(values) for name, values in index["splits"].items()}
        is_known = _has_valid_values(index)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{name} is not a valid index ({error!r}). {REMEDY}") from error
    if not is_known:
        raise DataError(
            f"{name} is not a valid index: the value of dtype, vocab_size or another key is invalid. {REMEDY}"
        )
    files = list(splits)
    for split in splits.values():
        files.extend(shard.name for shard in split.shards)
    strange = [file for file in files if not is_file_name(file) or file.startswith(".")]
    if strange:
        raise DataError(f"{name} lists a file outside the corpus folder ({strange[0]!r:.80}). Do not use this corpus.")
    return index | {"splits": splits}


def _has_valid_values(index: dict[str, Any]) -> bool:
    """Return whether the values have the types and ranges of an index. Raises KeyError if a key is missing."""
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
