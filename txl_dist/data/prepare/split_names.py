"""Which split a file belongs to by its name, since data sets come as folders of train, valid and test files.

The same rule serves text, parquet, ready ids, tars, folders, patterns and URLs. The last three columns are what happens
to a file alone, next to its like of train, and below a folder that has another name of train.

    name                                                              alone      next to its like  below train
    test.txt  DEV.jsonl  eval_00.txt  held-out/a.txt  split=test/     held out   held out          held out
    wiki.valid.tokens  test.en.txt  test-v1.1.json                    held out   held out          held out
    c4-validation.00000-of-00008.json  test-00000-of-00001-5f1c.txt   held out   held out          held out
    test_clean.txt  dev-other/a.txt  testset.txt  enwik8-test.txt     doubtful   held out          held out
    tests/a.txt  testing.md  evaluation.md  (code bases have them)    trained    held out          trained
    evaluation.py  testing.py  validation.py                          trained    trained           trained
    latest.txt  contest.txt  developer.txt                            trained    trained           trained

The like of `test_clean.txt` is `train_clean.txt` in the same folder: words such as set and data, numbers, versions and
hashes make no difference. An input's own name is doubtful, because its user named it for training; so are the folders
in which several inputs differ (`data/train/a.txt data/test/a.txt`). Doubtful text is trained on, and the summary says
so. Doubtful tars are held out: programs name them, and a name such as `my-valid-000.tar` is no accident.
"""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from txl_dist.data.prepare.detection import has_scheme, path_of_name
from txl_dist.data.prepare.documents import SPLITS, TEST, TRAIN, VALID
from txl_dist.data.prepare.sources import STDLIB, SourceFile, fixed_folder, is_stream

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "trn"), TRAIN),
    **dict.fromkeys(("valid", "validation", "val", "dev", "devel", "development", "newsdev", "testa"), VALID),
    **dict.fromkeys(("eval", "evaluation", "heldout", "holdout"), VALID),
    **dict.fromkeys(("test", "tests", "testing", "tst", "devtest", "newstest", "testb"), TEST),
}
_QUIET_WORDS = frozenset({"tests", "testing", "development"})
"""Code bases have them too: alone they mean nothing."""
_QUIET_BESIDE_CODE = _QUIET_WORDS | {"eval", "evaluation", "heldout", "holdout", "validation"}
"""The same, for source code and for the pages that describe it."""
_CODE, _PAGE = ".py", ".md"
"""Suffixes of source code and of such pages among those that a folder of text has."""
_NUMBERING = frozenset({"of", "part", "parts", "shard", "shards", "chunk", "chunks", "batch", "rank", "v", "k", "m"})
_FILLERS = frozenset({"set", "sets", "data", "dataset", "split", "splits", "file", "files", "text", "texts", "corpus"})
"""Words that do not say which text it is: `test_data` is the like of `train`."""
_HELD_OUT = re.compile(r"(held|hold)[\W_]+(?=out)")
_COMPOUND = re.compile(rf"({'|'.join(SPLIT_WORDS)})(sets?|data|splits?)")
_COUNTED = re.compile(r"\d+[-_ ]?of[-_ ]?\d+", re.IGNORECASE)
"""`00000-of-00032`, which data hubs write after the name of a split."""
_HASH = re.compile(r"(?<![a-z0-9])(?=[a-f]*\d)[0-9a-f]{8,}(-[0-9a-f]{4,})*(?![a-z0-9])")
"""`6fbcb5959cd8d5bf`, or a UUID, which data hubs and Spark write after the number."""
_PARTITION = re.compile(r"(split|subset|partition|set)=", re.IGNORECASE)
"""Folders of partitioned tables: `split=test`."""


class _Name(NamedTuple):
    """What one part of a path says."""

    split: str
    word: str
    folder: PurePosixPath
    """The folder in which the part lies."""
    family: str
    """Equal for parts of one folder that differ only in the word, in fillers and in numbers."""
    is_sure: bool
    """It is nothing but the word, or ends in the word before a hub's numbering; and it is no input's own name, unless
    that says train."""
    is_mixed: bool
    """It names train and a held-out split."""
    is_quiet: bool
    is_code: bool
    """A Python file: `test_model.py` next to `train.py` is a unit test, and `evaluation.py` next to it is a program."""
    is_input: bool
    """The part belongs to an input's own path."""


class Named(NamedTuple):
    """Files by their split, and sentences on that for people."""

    files: list[list[SourceFile]]
    """Of each input."""
    remarks: list[str]


class NamedPaths(NamedTuple):
    """The splits of paths, and sentences on that for people."""

    splits: list[list[str]]
    """Splits of each input, in the order of its paths."""
    remarks: list[str]


def split_by_name(inputs: Sequence[tuple[str, Sequence[SourceFile]]], *, given: Collection[str] = ()) -> Named:
    """Put the files of each (input for train, its files) into the splits that their names say.

    Files whose names hold them out and that are `given` (real paths) for a held-out split anyway are left out here.
    """
    named = splits_of_paths([(one, [file.path for file in files]) for one, files in inputs], given=given)
    found: list[list[SourceFile]] = []
    for (_, files), splits in zip(inputs, named.splits, strict=True):
        pairs = zip(files, splits, strict=True)
        found.append([file._replace(split=split) for file, split in pairs if not _is_given(file.path, split, given)])
    return Named(found, named.remarks)


def splits_of_paths(
    inputs: Sequence[tuple[str, Sequence[str]]], *, holds_out_doubtful: bool = False, given: Collection[str] = ()
) -> NamedPaths:
    """Return the split of each path of each (input for train, its paths).

    With `holds_out_doubtful` every name of a held-out split below an input counts. The remarks leave out what is
    `given` (real paths) for a held-out split.
    """
    roots = [_root_of(one, paths) for one, paths in inputs]
    top = _common_folder([root for root in roots if root is not None])
    names = [[_names_of(path, root, top) for path in paths] for (_, paths), root in zip(inputs, roots, strict=True)]
    known = [name for of_input in names for of_path in of_input for name in of_path]
    families = {name.family for name in known if name.split == TRAIN}
    train_folders = {name.folder for name in known if _is_only_train(name) and not name.is_code}

    def counts(name: _Name, *, is_in_train: bool) -> bool:
        if name.is_code and name.is_quiet:
            return False
        if name.is_sure or name.family in families:
            return True
        if holds_out_doubtful and not name.is_input:
            return True
        is_below_train = not train_folders.isdisjoint((name.folder, *name.folder.parents))
        is_ordinary = name.is_quiet or name.is_mixed or name.is_code
        return is_below_train and not is_in_train and not is_ordinary

    splits: list[list[str]] = []
    held_out: dict[str, list[tuple[str, str]]] = defaultdict(list)
    doubtful = []
    for (_, paths), of_input in zip(inputs, names, strict=True):
        splits.append([])
        for path, of_path in zip(paths, of_input, strict=True):
            is_in_train = any(map(_is_only_train, of_path))
            meant = [(name.split, name.word) for name in of_path if counts(name, is_in_train=is_in_train)]
            # test goes before valid, valid before train
            split, word = max(meant, key=lambda named: SPLITS.index(named[0]), default=(TRAIN, ""))
            splits[-1].append(split)
            if split != TRAIN and not _is_given(path, split, given):
                held_out[split].append((word, path))
            elif split == TRAIN and _is_doubtful(of_path):
                doubtful.append(path)
    remarks = _remarks(held_out)
    if doubtful:
        remarks.append(
            f"trained on, though named like held-out text: {_listed(doubtful)}. To hold out: --valid PATH, --test PATH"
        )
    return NamedPaths(splits, remarks)


def _is_given(path: str, split: str, given: Collection[str]) -> bool:
    return split != TRAIN and os.path.realpath(path) in given


def _is_only_train(name: _Name) -> bool:
    """Whether this part of a path is train's name and nothing else; an input's own name may be."""
    return name.split == TRAIN and name.is_sure


def _is_doubtful(names: Sequence[_Name]) -> bool:
    """Whether a file that is trained on looks held out; what surely is train in an input of any name does not."""
    is_train = any(map(_is_only_train, names))
    return any(name.split != TRAIN and not name.is_quiet and not (name.is_input and is_train) for name in names)


def _plain(path: str) -> PurePosixPath:
    """An absolute path, or a URL without its query and with its %20 as blanks."""
    if has_scheme(path):
        return PurePosixPath(unquote(str(path_of_name(path))))
    return PurePosixPath(os.path.abspath(path))


def _root_of(given: str, paths: Sequence[str]) -> PurePosixPath | None:
    """The file or folder that an input names; of a pattern the folder above its first `*`. None: it has no name."""
    if given == STDLIB or is_stream(given):
        return None
    if glob.has_magic(given) and given not in paths:
        given = fixed_folder(given) or ("/" if given.startswith("/") else ".")
    return _plain(given)


def _common_folder(roots: Sequence[PurePosixPath]) -> PurePosixPath:
    """The deepest folder that holds all roots."""
    if not roots:
        return PurePosixPath()
    common = roots[0].parent
    for root in roots[1:]:
        while not root.parent.is_relative_to(common):
            common = common.parent
    return common


def _names_of(path: str, root: PurePosixPath | None, top: PurePosixPath) -> list[_Name]:
    """Return the split names in the parts of a path below `top`, from the last part up."""
    if root is None:
        return []
    plain = _plain(path)
    if not plain.is_relative_to(root):  # a store spells its URLs in another way
        plain = root / plain.name
    found = []
    for part in (plain, *plain.parents):
        if part == top:
            break
        name = _name_in(part, is_file=part == plain, is_input=root.is_relative_to(part))
        if name:
            found.append(name)
    return found


def _name_in(path: PurePosixPath, *, is_file: bool, is_input: bool) -> _Name | None:
    """Return the split name in the last part of a path; None if it names no split."""
    part = _PARTITION.sub("", path.name)
    is_counted = _COUNTED.search(part) is not None
    part = _COUNTED.sub(" ", part)
    pieces = [_words(piece) for piece in (part.split(".") if is_file else [part])]
    while len(pieces) > 1 and not SPLIT_WORDS.keys() & set(pieces[-1]):
        pieces.pop()  # suffixes
    words = pieces[-1]
    hits = [word for word in words if word in SPLIT_WORDS]
    if not hits:
        return None
    word = max(hits, key=lambda word: SPLITS.index(SPLIT_WORDS[word]))
    split, splits = SPLIT_WORDS[word], {SPLIT_WORDS[hit] for hit in hits}
    suffix = path.suffix.lower() if is_file else ""
    is_code = suffix == _CODE
    quiet_words = _QUIET_BESIDE_CODE if suffix in (_CODE, _PAGE) else _QUIET_WORDS
    is_quiet = quiet_words.issuperset(hits)
    says_only_this = words[-1] in hits if is_counted else len(words) == 1 and not is_quiet
    return _Name(
        split,
        word,
        path.parent,
        f"{path.parent}/{_family(pieces)}" + (suffix if is_code else ""),
        is_sure=says_only_this and len(splits) == 1 and (split == TRAIN or not is_input),
        is_mixed=TRAIN in splits and len(splits) > 1,
        is_quiet=is_quiet,
        is_code=is_code,
        is_input=is_input,
    )


def _family(pieces: Sequence[Sequence[str]]) -> str:
    """`*.en` of test.en and of train_set.en."""
    found = []
    for words in pieces:
        kept = [word for word in words if word not in _FILLERS]
        found.append(" ".join("*" if word in SPLIT_WORDS else word for word in kept))
    return ".".join(found)


def _words(name: str) -> list[str]:
    """In lower case, without numbering and hashes: `test`, `set` of testSet-01, of TESTSET and of test_set."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
    parted = _HELD_OUT.sub(r"\1", _HASH.sub(" ", parted))
    found: list[str] = []
    for word in re.findall(r"[^\W\d_]+", parted):
        compound = _COMPOUND.fullmatch(word)
        if compound:
            found += compound.groups()
        elif word not in _NUMBERING:
            found.append(word)
    return found


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
