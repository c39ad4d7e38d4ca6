"""Choice of a file's split by its name, because data sets come as folders of train, valid and test files.

The same rule applies to text, parquet, token ids, tars, folders, patterns and URLs. The last three columns show the
result for a file alone, for a file next to its train counterpart, and for a file in or below a folder that contains any
file or folder named train.

    name                                                              alone      next to it   below train
    test.txt  DEV.jsonl  eval_00.txt  held-out/a.txt  split=test/     held out   held out     held out
    wiki.valid.tokens  test.en.txt  test-v1.1.json                    held out   held out     held out
    c4-validation.00000-of-00008.json  test-00000-of-00001-5f1c.txt   held out   held out     held out
    test_clean.txt  dev-other/a.txt  my_val_03.txt  wiki-test.tar     held out   held out     held out
    tests.tar  testing-0.tar                                          held out   held out     held out
    tests/a.txt  testing.md  evaluation.md  (code bases have them)    train      held out     train
    dev-notes.md  release_test.md                                     doubtful   held out     held out
    train-test.txt  train/valid_a.txt  test_model.py                  doubtful   doubtful     doubtful
    evaluation.py  testing.py  validation.py                          train      train        train
    latest.txt  contest.txt  developer.txt                            train      train        train

The counterpart of `test_clean.txt` is `train_clean.txt` in the same folder. Numbers, versions, hashes and words such as
`set` and `data` are ignored in both names. The name of an input itself is doubtful, because the user gave this input
for training. The folders in which several inputs differ (`data/train/a.txt data/test/a.txt`) are doubtful too. A
doubtful file is trained on, and the summary names this file. The summary also names every file that is held out.
"""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from txl_dist.data.prepare.detection import has_scheme, path_of_name
from txl_dist.data.prepare.documents import SPLITS, TEST, TRAIN, VALID
from txl_dist.data.prepare.sources import STDLIB, SourceFile, fixed_folder, has_braces, is_stream

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "trn"), TRAIN),
    **dict.fromkeys(("valid", "validation", "val", "dev", "devel", "development", "newsdev", "testa"), VALID),
    **dict.fromkeys(("eval", "evaluation", "heldout", "holdout"), VALID),
    **dict.fromkeys(("test", "tests", "testing", "tst", "devtest", "newstest", "testb"), TEST),
}
_QUIET_WORDS = frozenset({"tests", "testing", "development"})
"""Names of splits that are also common names in code bases. Such a word alone does not put a file into the validation
or test split."""
_QUIET_BESIDE_CODE = _QUIET_WORDS | {"eval", "evaluation", "heldout", "holdout", "validation"}
"""Names of splits that alone do not put a Python file or a Markdown page into the validation or test split."""
_CODE, _PAGE = ".py", ".md"
"""Suffixes of Python source code and of Markdown pages, which are among the suffixes of text."""
_TAR = ".tar"
"""Suffix of shards. Programs choose the names of shards, and so every word in such a name is intended."""
_NUMBERING = frozenset({"of", "part", "parts", "shard", "shards", "chunk", "chunks", "batch", "rank", "v", "k", "m"})
"""Words that only number a file, such as `shard` in `test-shard-3`."""
_FILLERS = frozenset({"set", "sets", "data", "dataset", "split", "splits", "file", "files", "text", "texts", "corpus"})
"""Words that do not say which text a file contains. For example, `test_data` is the counterpart of `train`, because
`data` is such a word."""
_HELD_OUT = re.compile(r"(held|hold)[\W_]+(?=out)")
"""Pattern of `held-out`, which becomes the word `heldout`."""
_COMPOUND = re.compile(rf"({'|'.join(SPLIT_WORDS)})(sets?|data|splits?)")
"""Pattern of a word such as `testset`, which is read as the two words `test` and `set`."""
_COUNTED = re.compile(r"\d+[-_ ]?of[-_ ]?\d+", re.IGNORECASE)
"""Pattern of shard numbering such as `00000-of-00032`, which Hugging Face writes after the name of a split."""
_HASH = re.compile(r"(?<![a-z0-9])(?=[a-f]*\d)[0-9a-f]{8,}(-[0-9a-f]{4,})*(?![a-z0-9])")
"""Pattern of a hash such as `6fbcb5959cd8d5bf`, or a UUID, which Hugging Face and Spark write after the shard
number."""
_PARTITION = re.compile(r"(split|subset|partition|set)=", re.IGNORECASE)
"""Pattern of the prefix of folders of partitioned tables, as in `split=test`."""


class _Name(NamedTuple):
    """Split that one part of a path (a file or folder name) mentions, and how certain this is."""

    split: str
    word: str
    """Word in the part that is the name of the split."""
    folder: PurePosixPath
    """Folder that contains the part."""
    family: str
    """Key by which files such as train.en and test.en are found to be counterparts. Parts in one folder have the same
    key if they differ only in the split's word, fillers and numbers."""
    is_sure: bool
    """Whether the part certainly names the split. This is so if the part is only the split's word, or if shard
    numbering such as `00000-of-00032` follows the split's word. False for the name of an input itself, unless the name
    says train."""
    is_mixed: bool
    """Whether the part mentions train and another split."""
    is_quiet: bool
    """Whether the part mentions splits only by words that are common in code bases too."""
    is_code: bool
    """Whether the part is a Python file. `test_model.py` next to `train.py` is a unit test, and `evaluation.py` is a
    program."""
    is_page: bool
    """Whether the part is a Markdown file. `dev-notes.md` is a page about development, unless its folder has a part
    named train."""
    is_input: bool
    """Whether the part belongs to the path of the input itself."""


class Named(NamedTuple):
    """Result of `split_by_name`: the files with their splits, and sentences about the splits for the user."""

    files: list[list[SourceFile]]
    """Files of each input, without files that the user also gave for another split."""
    remarks: list[str]


class NamedPaths(NamedTuple):
    """Result of `splits_of_paths`: the splits of paths, and sentences about the splits for the user."""

    splits: list[list[str]]
    """Splits of each input, in the order of its paths."""
    remarks: list[str]


def split_by_name(inputs: Sequence[tuple[str, Sequence[SourceFile]]], *, given: Collection[str] = ()) -> Named:
    """Assign the train files to the splits that their names say. `inputs` are pairs (input for train, its files).

    `given` are the real paths of files that the user gave for the validation or test split. Such a file is left out of
    the result if its name says validation or test too.
    """
    paths_of_inputs = []
    for train_input, files in inputs:
        paths_of_inputs.append((train_input, [file.path for file in files]))
    named = splits_of_paths(paths_of_inputs, given=given)
    files_of_inputs: list[list[SourceFile]] = []
    for (_, files), splits in zip(inputs, named.splits, strict=True):
        kept = []
        for file, split in zip(files, splits, strict=True):
            if not _is_given(file.path, split, given):
                kept.append(file._replace(split=split))
        files_of_inputs.append(kept)
    return Named(files_of_inputs, named.remarks)


def splits_of_paths(inputs: Sequence[tuple[str, Sequence[str]]], *, given: Collection[str] = ()) -> NamedPaths:
    """Return the split of each path. `inputs` are pairs (input for train, its paths).

    `given` are the real paths of files that the user gave for the validation or test split. The sentences for the user
    do not mention these files.
    """
    roots = [_root_of(train_input, paths) for train_input, paths in inputs]
    top = _common_folder([root for root in roots if root is not None])
    names_of_inputs: list[list[list[_Name]]] = []  # for each input, for each of its paths
    for (_, paths), root in zip(inputs, roots, strict=True):
        names_of_paths = [_names_of(path, root, top) for path in paths]
        names_of_inputs.append(names_of_paths)
    families = set()
    train_folders = set()
    for name in chain.from_iterable(chain.from_iterable(names_of_inputs)):
        if name.split == TRAIN:
            families.add(name.family)
        if _is_only_train(name) and not name.is_code:
            train_folders.add(name.folder)

    def counts(name: _Name, *, is_in_train: bool) -> bool:
        """Return whether a name decides the split of its path."""
        if name.is_code and name.is_quiet:
            return False
        if name.is_sure or name.family in families:
            return True
        if is_in_train or name.is_quiet or name.is_mixed or name.is_code:
            return False
        is_below_train = not train_folders.isdisjoint((name.folder, *name.folder.parents))
        return is_below_train or not (name.is_input or name.is_page)

    splits: list[list[str]] = []
    held_out: dict[str, list[tuple[str, str]]] = defaultdict(list)
    doubtful = []
    for (_, paths), names_of_paths in zip(inputs, names_of_inputs, strict=True):
        splits_of_input = []
        for path, names in zip(paths, names_of_paths, strict=True):
            is_in_train = any(_is_only_train(name) for name in names)
            deciding = [name for name in names if counts(name, is_in_train=is_in_train)]
            split = TRAIN
            word = ""
            if deciding:  # a name of test outweighs one of valid, and that outweighs one of train
                strongest = max(deciding, key=lambda name: SPLITS.index(name.split))
                split = strongest.split
                word = strongest.word
            splits_of_input.append(split)
            if split != TRAIN and not _is_given(path, split, given):
                held_out[split].append((word, path))
            elif split == TRAIN and _is_doubtful(names):
                doubtful.append(path)
        splits.append(splits_of_input)
    remarks = _remarks(held_out)
    if doubtful:
        remarks.append(
            f"used for training, although named like validation or test text: {_listed(doubtful)}. To hold text out, "
            "give its path with --valid PATH or --test PATH"
        )
    return NamedPaths(splits, remarks)


def _is_given(path: str, split: str, given: Collection[str]) -> bool:
    """Return whether the user also gave this path for the validation or test split.

    `split` is the split that the path's name says. The result is False if `split` is train.
    """
    return split != TRAIN and os.path.realpath(path) in given


def _is_only_train(name: _Name) -> bool:
    """Return whether a part of a path certainly names train. The part can be the name of an input itself."""
    return name.split == TRAIN and name.is_sure


def _is_doubtful(names: Sequence[_Name]) -> bool:
    """Return whether a train file has a name that looks like validation or test.

    The name of an input itself does not count if another part of the path certainly says train.
    """
    is_train = any(_is_only_train(name) for name in names)
    for name in names:
        if name.split == TRAIN or name.is_quiet:
            continue
        if not (name.is_input and is_train):
            return True
    return False


def _plain(path: str) -> PurePosixPath:
    """Return a local path as an absolute path, or a URL without its query and with %20 as a blank."""
    if has_scheme(path):
        return PurePosixPath(unquote(str(path_of_name(path))))
    return PurePosixPath(os.path.abspath(path))


def _root_of(given: str, paths: Sequence[str]) -> PurePosixPath | None:
    """Return the path of the file or folder that an input names. For a pattern, return the folder above the first
    wildcard.

    Returns None for an input without a name, such as stdin.
    """
    if given == STDLIB or is_stream(given):
        return None
    is_pattern = glob.has_magic(given) or has_braces(given)
    if is_pattern and given not in paths:
        given = fixed_folder(given) or ("/" if given.startswith("/") else ".")
    return _plain(given)


def _common_folder(roots: Sequence[PurePosixPath]) -> PurePosixPath:
    """Return the deepest folder that holds all roots."""
    if not roots:
        return PurePosixPath()
    common = roots[0].parent
    for root in roots[1:]:
        while not root.parent.is_relative_to(common):
            common = common.parent
    return common


def _names_of(path: str, root: PurePosixPath | None, top: PurePosixPath) -> list[_Name]:
    """Return the splits that the parts of a path below `top` mention, from the last part up."""
    if root is None:
        return []
    plain = _plain(path)
    if not plain.is_relative_to(root):  # the store spells its URLs differently
        plain = root / plain.name
    names = []
    for part in (plain, *plain.parents):
        if part == top:
            break
        name = _name_in(part, is_file=part == plain, is_input=root.is_relative_to(part))
        if name:
            names.append(name)
    return names


def _name_in(path: PurePosixPath, *, is_file: bool, is_input: bool) -> _Name | None:
    """Return the split that the last part of a path mentions. Returns None if it mentions no split."""
    part = _PARTITION.sub("", path.name)
    is_counted = _COUNTED.search(part) is not None
    part = _COUNTED.sub(" ", part)
    dotted = part.split(".") if is_file else [part]
    pieces = [_words(piece) for piece in dotted]
    while len(pieces) > 1 and SPLIT_WORDS.keys().isdisjoint(pieces[-1]):
        pieces.pop()  # a suffix
    words = pieces[-1]
    hits = [word for word in words if word in SPLIT_WORDS]
    if not hits:
        return None
    word = max(hits, key=lambda word: SPLITS.index(SPLIT_WORDS[word]))
    split = SPLIT_WORDS[word]
    splits = {SPLIT_WORDS[hit] for hit in hits}
    if is_file:
        suffix = path.suffix.lower()
    else:
        suffix = ""
    is_code = suffix == _CODE
    quiet_words: Collection[str]
    if suffix == _TAR:
        quiet_words = ()
    elif suffix in (_CODE, _PAGE):
        quiet_words = _QUIET_BESIDE_CODE
    else:
        quiet_words = _QUIET_WORDS
    is_quiet = all(hit in quiet_words for hit in hits)
    is_alone = len(words) == 1 and not is_quiet
    says_only_this = words[-1] in hits if is_counted else is_alone
    is_sure = says_only_this and len(splits) == 1 and (split == TRAIN or not is_input)
    family = f"{path.parent}/{_family(pieces)}"
    if is_code:
        family += suffix
    return _Name(
        split=split,
        word=word,
        folder=path.parent,
        family=family,
        is_sure=is_sure,
        is_mixed=TRAIN in splits and len(splits) > 1,
        is_quiet=is_quiet,
        is_code=is_code,
        is_page=suffix == _PAGE,
        is_input=is_input,
    )


def _family(pieces: Sequence[Sequence[str]]) -> str:
    """Return a name with `*` in place of its split: `*.en` for test.en and for train_set.en."""
    parts = []
    for words in pieces:
        kept = [word for word in words if word not in _FILLERS]
        starred = ["*" if word in SPLIT_WORDS else word for word in kept]
        parts.append(" ".join(starred))
    return ".".join(parts)


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case, without numbers and hashes.

    The words of testSet-01, of TESTSET and of test_set are `test` and `set`.
    """
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
    parted = _HASH.sub(" ", parted)
    parted = _HELD_OUT.sub(r"\1", parted)
    words: list[str] = []
    for word in re.findall(r"[^\W\d_]+", parted):
        compound = _COMPOUND.fullmatch(word)
        if compound:
            words += compound.groups()
        elif word not in _NUMBERING:
            words.append(word)
    return words


def _remarks(held_out: dict[str, list[tuple[str, str]]]) -> list[str]:
    """Return the sentences for the user about files that are held out because of their names.

    `held_out` contains pairs (word in the name, path), by split.
    """
    remarks = []
    for split in sorted(held_out, key=SPLITS.index):
        words = sorted({word for word, _ in held_out[split]})
        if len(words) > 1:
            both = f" ({' and '.join(words)} together)"
        else:
            both = ""
        paths = _listed([path for _, path in held_out[split]])
        remarks.append(
            f"{split} split chosen by name{both}: {paths}. To train on these files too, use --ignore-split-names"
        )
    return remarks


def _listed(paths: Sequence[str]) -> str:
    """Return the first three paths and the number of the remaining paths, as text."""
    shown = ", ".join(paths[:3])
    num_others = len(paths) - 3
    if num_others > 0:
        return f"{shown} and {num_others:,} more"
    return shown
