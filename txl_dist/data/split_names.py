"""Which split a file belongs to by its name, since data sets come as folders of train, valid and test files.

    train.txt  DEV.jsonl  test-00001-of-00004.parquet  valid/a.txt     the whole name says it, but for its numbers
    wiki.valid.tokens  test.en.txt                                     or a whole part of it between dots
    test_clean.txt  enwik8-test.txt                                    only beside train_clean.txt, enwik8-train.txt
    latest.txt  contest.txt  tests/a.txt                               no name of a split

A file or a folder that is an input itself was named for training by its user, so it counts like the third row. What
is held out is said, and so is what looks held out and is trained on all the same.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from txl_dist.data.documents import SPLITS, TEST, TRAIN, VALID
from txl_dist.data.sources import PIPE, STDIN, STDLIB, SourceFile

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("valid", "validation", "val", "dev"), VALID),
    "test": TEST,
}
_NUMBERING = frozenset({"of", "part", "shard"})


class _Name(NamedTuple):
    """What one part of a path says."""

    split: str
    is_sure: bool
    word: str
    family: str
    """Equal for parts that differ in the word and in numbers only, in the same folder."""


class Named(NamedTuple):
    """Files by their split, and sentences on that for people."""

    files: list[list[SourceFile]]
    """Of each input."""
    remarks: list[str]


def split_by_name(inputs: Sequence[tuple[str, Sequence[SourceFile]]], *, given: Collection[str] = ()) -> Named:
    """Each (input for train, its files) with the splits that their names say.

    Files whose names hold them out and that are `given` (real paths) for a held-out split anyway are left out here.
    """
    names = [[_name_of(file.path, one) for file in files] for one, files in inputs]
    families: dict[str, set[str]] = defaultdict(set)
    for each in filter(None, (name for own in names for name in own)):
        families[each.family].add(each.split)
    found: list[list[SourceFile]] = []
    held_out: dict[str, list[tuple[str, str]]] = defaultdict(list)
    doubtful = []
    for (_, files), own in zip(inputs, names, strict=True):
        found.append([])
        for file, name in zip(files, own, strict=True):
            split = name.split if name and (name.is_sure or TRAIN in families[name.family]) else TRAIN
            if split != TRAIN and os.path.realpath(file.path) in given:
                continue
            found[-1].append(file._replace(split=split))
            if name and split != TRAIN:
                held_out[split].append((name.word, file.path))
            elif name and name.split != TRAIN:
                doubtful.append(file.path)
    return Named(found, [*_remarks(held_out), *_doubts(doubtful)])


def _name_of(path: str, given: str) -> _Name | None:
    """What a path says from the last part of its input on; None if that names no split. Test goes before valid, valid
    before train."""
    if given in (STDIN, STDLIB) or given.startswith(PIPE):
        return None
    root = PurePosixPath(given)
    if path != given and (magic := re.search(r"[*?[]", given)):
        root = PurePosixPath(given[: magic.start()].rpartition("/")[0])
    try:
        below = PurePosixPath(path).relative_to(root).parts
    except ValueError:  # a store spells its URLs in another way
        below = PurePosixPath(path).parts[-1:]
    found = []
    folder = root.parent
    for number, part in enumerate((root.name, *below)):
        is_file = number == len(below)
        name = _name_in(part.lower(), is_file=is_file, family=f"{folder}/")
        if name:
            found.append(name._replace(is_sure=name.is_sure and number > 0))
        folder /= part
    return max(found, key=lambda name: (SPLITS.index(name.split), name.is_sure), default=None)


def _name_in(part: str, *, is_file: bool, family: str) -> _Name | None:
    """What a file's or a folder's name says."""
    pieces = [_words(piece) for piece in (part.split(".") if is_file else [part])]
    while len(pieces) > 1 and not SPLIT_WORDS.keys() & set(pieces[-1]):
        pieces.pop()  # suffixes
    hits = [word for word in pieces[-1] if word in SPLIT_WORDS]
    is_sure = len(pieces[-1]) == 1
    if not hits or not (is_sure or is_file):
        return None
    word = max(hits, key=lambda word: SPLITS.index(SPLIT_WORDS[word]))
    rest = [" ".join("*" if each in SPLIT_WORDS else each for each in words) for words in pieces]
    return _Name(SPLIT_WORDS[word], is_sure, word, family + ".".join(rest))


def _words(name: str) -> list[str]:
    return [word for word in re.findall(r"[^\W\d_]+", name) if word not in _NUMBERING]


def _remarks(held_out: dict[str, list[tuple[str, str]]]) -> list[str]:
    remarks = []
    for split in sorted(held_out, key=SPLITS.index):
        words = sorted({word for word, _ in held_out[split]})
        both = f" ({' and '.join(words)} together)" if len(words) > 1 else ""
        paths = _listed([path for _, path in held_out[split]])
        remarks.append(f"{split} by name{both}, not trained on: {paths}. To train on all: --ignore-split-names")
    return remarks


def _doubts(paths: list[str]) -> list[str]:
    if not paths:
        return []
    return [f"trained on, though named like held-out text: {_listed(paths)}. To hold out: --valid PATH, --test PATH"]


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3:,} more" if len(paths) > 3 else "")
