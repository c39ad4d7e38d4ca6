"""Which split a file belongs to by its name, since data sets come as folders of train, valid and test files.

    train.txt  DEV.jsonl  test-00001-of-00004.parquet  valid/a.txt     the whole name says it, but for its numbers
    wiki.valid.tokens  test.en.txt                                     or a whole part of it between dots
    test_clean.txt  dev-other/a.txt  enwik8-test.txt                   only beside train_clean.txt, train-other/a.txt,
    testset.txt  testData/a.txt  eval.jsonl  held-out/a.txt            enwik8-train.txt; beside train, train_set.txt
    tests/a.txt  testing.md  development.md                            the same, but else ordinary text
    latest.txt  contest.txt  developer.txt                             no name of a split

A file or a folder that is an input itself was named for training by its user, so it counts like the third row. What
is held out is said, and so is what looks held out and is trained on all the same: rows three and four without their
like of train.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from txl_dist.data.prepare.documents import SPLITS, TEST, TRAIN, VALID
from txl_dist.data.prepare.sources import PIPE, STDIN, STDLIB, SourceFile

_SURE_WORDS = frozenset({"train", "training", "valid", "validation", "val", "dev", "test"})
_QUIET_WORDS = frozenset({"tests", "testing", "development"})
"""Of code bases too: alone they mean nothing."""
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("valid", "validation", "val", "dev", "development"), VALID),
    **dict.fromkeys(("eval", "evaluation", "heldout", "holdout"), VALID),
    **dict.fromkeys(("test", "tests", "testing", "tst"), TEST),
}
_NUMBERING = frozenset({"of", "part", "shard"})
_FILLERS = frozenset({"set", "sets", "data", "dataset", "split", "splits", "file", "files", "text", "texts", "corpus"})
"""Words that say nothing of which text it is: `test_data` is the like of `train`."""
_HELD_OUT = re.compile(r"(held|hold)[\W_]+(?=out)")
_COMPOUND = re.compile(rf"({'|'.join(SPLIT_WORDS)})(sets?|data|splits?)")


class _Name(NamedTuple):
    """What one part of a path says."""

    split: str
    word: str
    family: str
    """Equal for parts that differ in the word, in fillers and in numbers only, in the same folder."""
    is_sure: bool
    is_quiet: bool
    is_input: bool = False
    """The part is an input's own name."""


class Named(NamedTuple):
    """Files by their split, and sentences on that for people."""

    files: list[list[SourceFile]]
    """Of each input."""
    remarks: list[str]


def split_by_name(inputs: Sequence[tuple[str, Sequence[SourceFile]]], *, given: Collection[str] = ()) -> Named:
    """Each (input for train, its files) with the splits that their names say.

    Files whose names hold them out and that are `given` (real paths) for a held-out split anyway are left out here.
    """
    names = [[_names_of(file.path, one) for file in files] for one, files in inputs]
    families: dict[str, set[str]] = defaultdict(set)
    for name in (name for own in names for of_file in own for name in of_file):
        families[name.family].add(name.split)
    found: list[list[SourceFile]] = []
    held_out: dict[str, list[tuple[str, str]]] = defaultdict(list)
    doubtful = []
    for (_, files), own in zip(inputs, names, strict=True):
        found.append([])
        for file, of_file in zip(files, own, strict=True):
            meant = [name for name in of_file if name.is_sure or TRAIN in families[name.family]]
            found_in = [(name.split, name.word) for name in meant]  # test goes before valid, valid before train
            split, word = max(found_in, key=lambda named: SPLITS.index(named[0]), default=(TRAIN, ""))
            if split != TRAIN and os.path.realpath(file.path) in given:
                continue
            found[-1].append(file._replace(split=split))
            if split != TRAIN:
                held_out[split].append((word, file.path))
            elif _is_doubtful(of_file):
                doubtful.append(file.path)
    remarks = _remarks(held_out)
    if doubtful:
        remarks.append(
            f"trained on, though named like held-out text: {_listed(doubtful)}. To hold out: --valid PATH, --test PATH"
        )
    return Named(found, remarks)


def _is_doubtful(names: Sequence[_Name]) -> bool:
    """Whether a file that is trained on looks held out; what surely is train in an input of any name does not."""
    is_train = any(name.is_sure and name.split == TRAIN for name in names)
    return any(name.split != TRAIN and not name.is_quiet and not (name.is_input and is_train) for name in names)


def _names_of(path: str, given: str) -> list[_Name]:
    """What the parts of a path say, from the last part of its input on; those that name no split are left out."""
    if given in (STDIN, STDLIB) or given.startswith(PIPE):
        return []
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
        name = _name_in(part, is_file=number == len(below), family=f"{folder}/")
        if name:
            found.append(name if number else name._replace(is_sure=False, is_input=True))
        folder /= part
    return found


def _name_in(part: str, *, is_file: bool, family: str) -> _Name | None:
    """What a file's or a folder's name says."""
    pieces = [_words(piece) for piece in (part.split(".") if is_file else [part])]
    while len(pieces) > 1 and not SPLIT_WORDS.keys() & set(pieces[-1]):
        pieces.pop()  # suffixes
    hits = [word for word in pieces[-1] if word in SPLIT_WORDS]
    if not hits:
        return None
    word = max(hits, key=lambda word: SPLITS.index(SPLIT_WORDS[word]))
    like = (["*" if each in SPLIT_WORDS else each for each in words if each not in _FILLERS] for words in pieces)
    return _Name(
        SPLIT_WORDS[word],
        word,
        family + ".".join(map(" ".join, like)),
        is_sure=len(pieces[-1]) == 1 and word in _SURE_WORDS,
        is_quiet=_QUIET_WORDS.issuperset(hits),
    )


def _words(name: str) -> list[str]:
    """In lower case, the numbering left out: `test`, `set` of testSet-01, of TESTSET and of test_set."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
    words = re.findall(r"[^\W\d_]+", _HELD_OUT.sub(r"\1", parted))
    compounds = ((_COMPOUND.fullmatch(word), word) for word in words if word not in _NUMBERING)
    return [part for compound, word in compounds for part in (compound.groups() if compound else [word])]


def _remarks(held_out: dict[str, list[tuple[str, str]]]) -> list[str]:
    remarks = []
    for split in sorted(held_out, key=SPLITS.index):
        words = sorted({word for word, _ in held_out[split]})
        both = f" ({' and '.join(words)} together)" if len(words) > 1 else ""
        paths = _listed([path for _, path in held_out[split]])
        remarks.append(f"{split} by name{both}, not trained on: {paths}. To train on all: --ignore-split-names")
    return remarks


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3:,} more" if len(paths) > 3 else "")
