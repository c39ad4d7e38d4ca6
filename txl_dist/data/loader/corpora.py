"""Opens all corpora of a run: their training splits, their evaluation splits, and the stream state of a new run."""

from __future__ import annotations

from typing import NamedTuple

from txl_dist.config.schema import DataSection
from txl_dist.data.loader.corpus import Corpus, Split, open_corpus
from txl_dist.data.loader.stream_state import StreamState, first_state
from txl_dist.errors import ConfigError
from txl_dist.rng import derive_seed


class Corpora(NamedTuple):
    """Opened corpora of a run, with the splits to read and the first state of the training stream."""

    opened: tuple[Corpus, ...]
    """Corpora in the order of the settings: the corpus of data.path, then those of data.more_paths."""
    train: tuple[Split, ...]
    """Training split of each corpus, in the order of `opened`."""
    eval: tuple[Split, ...]
    """Splits with the name data.eval_split: first the split of data.path's corpus, then those of the further corpora
    that have such a split. Empty if data.eval_split is empty, or if data.eval_split has its default value and the
    corpus of data.path has no such split."""
    begin: StreamState
    """State of the training stream at the start of a new run. It says which corpus each lane (row of the batch with its
    own token stream) reads."""

    @property
    def first(self) -> Corpus:
        """Corpus of data.path. All corpora of a run have the same tokenizer."""
        return self.opened[0]


def open_corpora(data: DataSection, *, num_lanes: int, seed: int) -> Corpora:
    """Open every corpus that the settings name, for a run with `num_lanes` batch rows (lanes).

    Raises DataError if a corpus cannot be read or lacks a split that is needed. Raises ConfigError if the tokenizers of
    the corpora differ, if a corpus is named twice, or if a corpus with a positive weight gets no lane.
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
    """Return the stream state at the start of a new run: the number of lanes of each corpus, all at position 0.

    A lane is a row of the batch with its own token stream. Raises ConfigError if a corpus with a positive weight gets
    no lane.
    """
    document_seed = derive_seed(seed, "documents")
    return first_state(splits, weights=data.weights, num_lanes=num_lanes, seed=document_seed)


def open_all(data: DataSection) -> tuple[Corpus, ...]:
    """Open the corpora that the settings name, beginning with the corpus of data.path.

    Raises DataError if a corpus cannot be read. Raises ConfigError if the tokenizers differ, or if a corpus is named
    twice.
    """
    opened = tuple(open_corpus(path, data) for path in data.paths)
    first, *others = opened
    for corpus in others:
        if corpus.tokenizer_sha256 != first.tokenizer_sha256:
            raise ConfigError(
                f"{corpus.location} and {first.location} were prepared with different tokenizers. Prepare one of the "
                "two corpora again, with `--tokenizer-file` set to the path of the other corpus's tokenizer.json."
            )
    fingerprints = {corpus.fingerprint for corpus in opened}
    if len(fingerprints) < len(opened):
        raise ConfigError(
            "data.path and data.more_paths name the same corpus twice. Name each corpus once. To train on more "
            "tokens of a corpus, raise its weight in data.weights."
        )
    return opened


def lacks_eval_split(data: DataSection, corpus: Corpus) -> bool:
    """Return whether data.eval_split has its default value and the corpus has no split of this name."""
    default_split = DataSection().eval_split
    return data.eval_split == default_split and data.eval_split not in corpus.split_names
