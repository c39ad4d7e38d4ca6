"""Run train.py of the original authors' code on one of our corpora, for speedrun and parity.

    python -m tools.benchmarks.original_train DIR CORPUS CUTOFF ... -- FLAGS OF THEIR TRAIN.PY

DIR is the folder `pytorch` of their code. Model, initial weights, batches, optimizer, schedule and loop are those of
their program. The source is changed in memory in three points. It is adapted to today's torch (peers.py, and whole
modules in `torch.load`). The cutoffs of the adaptive softmax are set, because the program has no flag for them. The ids
are those of our corpus, with the documents in order. Their own evaluation also uses these ids, but no result depends on
it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tools.benchmarks.peers import checked, load, load_original
from txl_dist.data.loader.corpus import open_corpus

PATCHES = (
    (r"cutoffs = \[20000, 40000, 200000\]", "cutoffs = {cutoffs}"),
    (r"torch\.load\(f\)", "torch.load(f, weights_only=False)"),
)


def main() -> None:
    """Read the arguments before `--`, and run their train.py with the flags after it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", help="folder `pytorch` of the authors' code")
    parser.add_argument("corpus", metavar="CORPUS", help="corpus that txl prepare wrote")
    parser.add_argument("cutoffs", type=int, nargs="*", metavar="CUTOFF", help="cutoffs of the adaptive softmax")
    words = sys.argv[1:]
    border = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:border])
    path = prepare(arguments.folder)
    data = _data(arguments.corpus, iterator=load("data_utils", path).LMOrderedIterator)
    run_train(path, words[border + 1 :], cutoffs=arguments.cutoffs, data=data, variables={})


def prepare(folder: str | Path) -> Path:
    """Make their modules importable for the rest of this process, and return the folder.

    Raises ConfigError if the folder does not contain their code.
    """
    path = checked(Path(folder)).resolve()
    sys.path[:0] = [str(path), str(path / "utils")]
    load_original(path)
    return path


def run_train(
    path: Path, words: Sequence[str], *, cutoffs: Sequence[int], data: ModuleType, variables: dict[str, Any]
) -> None:
    """Run their train.py to its end, with `data` instead of their data_utils. Its global variables are stored in
    `variables`."""
    sys.modules["data_utils"] = data
    source = (path / "train.py").read_text(encoding="utf-8")
    for pattern, replacement in PATCHES:
        source, num_found = re.subn(pattern, replacement.format(cutoffs=list(cutoffs)), source)
        assert num_found, pattern
    os.chdir(path)  # train.py copies itself from this folder
    sys.argv = ["train.py", *words]
    variables["__name__"] = "__main__"
    exec(compile(source, str(path / "train.py"), "exec"), variables)


def _data(location: str, *, iterator: type) -> ModuleType:
    """Return a module that replaces their data_utils. Its corpus has our ids, and its batches are made by their
    iterator."""
    corpus = open_corpus(Path(location).resolve())

    def get_iterator(split: str, *words: object, **named: object) -> object:
        ids = corpus.split("train" if split == "train" else "valid").read_all()
        return iterator(torch.from_numpy(ids.astype("int64")), *words, **named)

    module = ModuleType("data_utils")
    shown = SimpleNamespace(vocab=range(corpus.vocab_size), get_iterator=get_iterator)
    module.get_lm_corpus = lambda folder, dataset: shown  # type: ignore[attr-defined]
    return module


if __name__ == "__main__":
    main()
