"""Where the corpora of a run lie, seen from another working directory than the one that it was trained in.

Settings keep the paths as they were given, which may be relative; a checkpoint keeps them absolute beside that. No
comparison of settings looks at these.
"""

from __future__ import annotations

import os
from pathlib import Path

from txl_dist.config import Config, changed
from txl_dist.errors import DataError, TxlError
from txl_dist.run_files import Kind, is_url, kind_of
from txl_dist.train.checkpoint.soundness import read_state


def absolute_paths(config: Config) -> list[str]:
    """The corpora of a run, data.path first, as they are found from any working directory."""
    return [path if is_url(path) else os.path.abspath(path) for path in _given(config)]


def with_corpora_found(config: Config, checkpoint: Path) -> Config:
    """The settings of a checkpoint with its corpora where they are: as they were given, else where it knows them."""
    try:
        known = read_state(checkpoint).get("corpora")
    except TxlError:
        return config
    given = _given(config)
    if not known or len(known) != len(given):
        return config  # a checkpoint of before, which knows none
    path, *more = (
        other if kind_of(one) is not Kind.CORPUS and kind_of(other) is Kind.CORPUS else one
        for one, other in zip(given, known, strict=True)
    )
    return changed(config, {"data.path": path, "data.more_paths": tuple(more)})


def require_corpus(checkpoint: Path, config: Config) -> str:
    """The corpus that a checkpoint was trained on. Raises DataError, which names the places, if it is not there."""
    path = with_corpora_found(config, checkpoint).data.path
    if kind_of(path) is Kind.CORPUS:
        return path
    known = read_state(checkpoint).get("corpora")
    kept = known[0] if known else os.path.abspath(path)
    places = " or ".join(dict.fromkeys([kept, os.path.abspath(path)]))
    raise DataError(f"the corpus of {checkpoint} is no longer at {places}. Name the place where it is with --data.")


def _given(config: Config) -> tuple[str, ...]:
    return config.data.path, *config.data.more_paths
