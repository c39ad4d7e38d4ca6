"""The corpora of a run: opened together, with what is trained on, what is evaluated and where a new run begins."""

from __future__ import annotations

from typing import NamedTuple

from txl_dist.config.schema import DataSection
from txl_dist.data.loader.corpus import Corpus, Split, open_corpus
from txl_dist.data.loader.stream_state import StreamState, first_state
from txl_dist.errors import ConfigError
from txl_dist.rng import derive_seed


class Corpora(NamedTuple):
    """All of a run's, that of data.path first."""

    opened: tuple[Corpus, ...]
    train: tuple[Split, ...]
    """What is trained on, of each corpus."""
    eval: tuple[Split, ...]
    """What is evaluated: the split of data.path, and of each further corpus that has it. None where evaluation is
    switched off, or data.path was prepared without the split and the settings name no other."""
    begin: StreamState
    """Where the lanes of a new run begin."""

    @property
    def first(self) -> Corpus:
        """That of data.path, whose tokenizer is that of all."""
        return self.opened[0]


def open_corpora(data: DataSection, *, num_lanes: int, seed: int) -> Corpora:
    """Open every corpus of a run of so many lanes.

    Raises DataError where a corpus cannot be read or lacks a split that is wanted, ConfigError if they do not go
    together, or the weights leave one without a lane.
    """
    opened = open_all(data)
    train = tuple(corpus.split(data.train_split) for corpus in opened)
    has_eval = bool(data.eval_split) and not lacks_eval_split(data, opened[0])
    further = [corpus for corpus in opened[1:] if data.eval_split in corpus.split_names]
    return Corpora(
        opened,
        train,
        eval=tuple(corpus.split(data.eval_split) for corpus in (opened[0], *further)) if has_eval else (),
        begin=first_state(train, weights=data.weights, num_lanes=num_lanes, seed=derive_seed(seed, "documents")),
    )


def open_all(data: DataSection) -> tuple[Corpus, ...]:
    """The corpora that settings name, that of data.path first.

    Raises DataError where one cannot be read, ConfigError if they do not go together.
    """
    opened = tuple(open_corpus(path, data) for path in data.paths)
    for corpus in opened[1:]:
        if corpus.tokenizer_sha256 != opened[0].tokenizer_sha256:
            raise ConfigError(
                f"{corpus.location} and {opened[0].location} were prepared with different tokenizers. Prepare one "
                "with `--tokenizer-file` and the tokenizer.json of the other."
            )
    if len({corpus.fingerprint for corpus in opened}) < len(opened):
        raise ConfigError("a corpus is given twice in data.path and data.more_paths. Raise its weight instead.")
    return opened


def lacks_eval_split(data: DataSection, corpus: Corpus) -> bool:
    """Whether text was prepared without the split that is evaluated where the settings name none."""
    return data.eval_split == DataSection().eval_split and data.eval_split not in corpus.split_names
