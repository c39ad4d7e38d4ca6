"""The corpora of a run: opened together, with their training and evaluation splits and a new run's first state."""

from __future__ import annotations

from typing import NamedTuple

from txl_dist.config.schema import DataSection
from txl_dist.data.loader.corpus import Corpus, Split, open_corpus
from txl_dist.data.loader.stream_state import StreamState, first_state
from txl_dist.errors import ConfigError
from txl_dist.rng import derive_seed


class Corpora(NamedTuple):
    """The corpora of a run, that of data.path first."""

    opened: tuple[Corpus, ...]
    train: tuple[Split, ...]
    """Training split of each corpus."""
    eval: tuple[Split, ...]
    """Evaluation splits: that of data.path, and of each further corpus that has it. Empty where evaluation is switched
    off, or data.path was prepared without the split and the settings name no other."""
    begin: StreamState
    """State of the lanes at the start of a new run."""

    @property
    def first(self) -> Corpus:
        """The corpus of data.path. All corpora have its tokenizer."""
        return self.opened[0]


def open_corpora(data: DataSection, *, num_lanes: int, seed: int) -> Corpora:
    """Open every corpus of a run with `num_lanes` lanes.

    Raises DataError if a corpus cannot be read or lacks a split that is needed. Raises ConfigError if the corpora do
    not fit together, or the weights leave one without a lane.
    """
    opened = open_all(data)
    train = tuple(corpus.split(data.train_split) for corpus in opened)
    evaluated: list[Split] = []
    first, *others = opened
    if data.eval_split and not lacks_eval_split(data, first):
        evaluated.append(first.split(data.eval_split))
        for corpus in others:
            if data.eval_split in corpus.split_names:
                evaluated.append(corpus.split(data.eval_split))
    begin = first_stream(train, data, num_lanes=num_lanes, seed=seed)
    return Corpora(opened, train, eval=tuple(evaluated), begin=begin)


def first_stream(splits: tuple[Split, ...], data: DataSection, *, num_lanes: int, seed: int) -> StreamState:
    """Return where the lanes of a new run begin. Raises ConfigError if the weights leave a corpus without a lane."""
    document_seed = derive_seed(seed, "documents")
    return first_state(splits, weights=data.weights, num_lanes=num_lanes, seed=document_seed)


def open_all(data: DataSection) -> tuple[Corpus, ...]:
    """Open the corpora that the settings name, that of data.path first.

    Raises DataError if one cannot be read, ConfigError if they do not fit together.
    """
    opened = tuple(open_corpus(path, data) for path in data.paths)
    first, *others = opened
    for corpus in others:
        if corpus.tokenizer_sha256 != first.tokenizer_sha256:
            raise ConfigError(
                f"{corpus.location} and {first.location} were prepared with different tokenizers. Prepare one corpus "
                f"with `--tokenizer-file` and the tokenizer.json of the other corpus."
            )
    fingerprints = {corpus.fingerprint for corpus in opened}
    if len(fingerprints) < len(opened):
        raise ConfigError(
            "a corpus is given twice in data.path and data.more_paths. To read more of a corpus, raise its weight in "
            "data.weights."
        )
    return opened


def lacks_eval_split(data: DataSection, corpus: Corpus) -> bool:
    """Return whether the settings name no evaluation split and the corpus lacks the default one."""
    default_split = DataSection().eval_split
    return data.eval_split == default_split and data.eval_split not in corpus.split_names
