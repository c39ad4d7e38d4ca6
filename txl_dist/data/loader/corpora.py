"""Opens all corpora of a run: their training splits, their evaluation splits, and the stream state of a new run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from txl_dist.config.schema import DataSection, EvalSection, paths_of_sets
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.loader.shards import Split
from txl_dist.data.loader.stream_state import StreamState, document_seed, first_state
from txl_dist.errors import ConfigError, DataError, UnreachableError


class Corpora(NamedTuple):
    """Opened corpora of a run, with the splits to read and the first state of the training stream."""

    opened: tuple[Corpus, ...]
    """Corpora in the order of the settings: the corpus of data.path, then those of data.more_paths."""
    train: tuple[Split, ...]
    """Training split of each corpus, in the order of `opened`."""
    eval: Mapping[str, Split]
    """Splits to evaluate, by the kind of their records. First come the splits with the name data.eval_split: `eval` of
    data.path's corpus, then `eval_NAME` of the further corpora that have such a split. There are none if
    data.eval_split is empty, or if it has its default value and the corpus of data.path has no such split. Then come
    the held-out sets of eval.sets, `eval_NAME`."""
    begin: StreamState
    """State of the training stream at the start of a new run. It says which corpus each lane (row of the batch with its
    own token stream) reads."""

    @property
    def first(self) -> Corpus:
        """Corpus of data.path. All corpora of a run have the same tokenizer."""
        return self.opened[0]

    @property
    def first_kind(self) -> str:
        """Kind of the records whose loss decides which checkpoint is the best: that of the first split in `eval`."""
        return next(iter(self.eval), "eval")


def open_corpora(data: DataSection, *, num_lanes: int, seed: int, evaluation: EvalSection | None = None) -> Corpora:
    """Open every corpus that the settings name, for a run with `num_lanes` batch rows (lanes).

    The held-out sets of `evaluation` are opened too. Raises DataError if a corpus cannot be read or lacks a split that
    is needed. Raises ConfigError if the tokenizers of the corpora differ, if a corpus is named twice, if a corpus with
    a positive weight gets no lane, or if a held-out set cannot be used.
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
    splits = {labelled("eval", split, evaluated): split for split in evaluated}
    if evaluation is not None:
        for name, path in paths_of_sets(evaluation.sets):
            kind = f"eval_{name}"
            if kind in splits:
                raise ConfigError(
                    f"eval.sets: {name} is also the name of the corpus {splits[kind].corpus.location}, whose split "
                    f"{splits[kind].name} is evaluated. Give the held-out set another name."
                )
            splits[kind] = _open_set(name, path, data, train)
    begin = first_stream(train, data, num_lanes=num_lanes, seed=seed)
    return Corpora(opened, train, eval=splits, begin=begin)


def _open_set(name: str, path: str, data: DataSection, train: Sequence[Split]) -> Split:
    """Open a held-out set, and return its split to evaluate. `train` are the training splits.

    Raises UnreachableError if the set cannot be reached. Raises ConfigError if it cannot be read, has another
    tokenizer, has several splits of which none is data.eval_split, or is trained on.
    """
    try:
        corpus = open_corpus(path, data)
    except UnreachableError:
        raise
    except DataError as error:
        raise ConfigError(f"eval.sets: {name}: {error}") from error
    if corpus.tokenizer_sha256 != train[0].corpus.tokenizer_sha256:
        raise ConfigError(
            f"eval.sets: {name}: {path} and {train[0].corpus.location} were prepared with different tokenizers. "
            f"Prepare {path} again, with `--tokenizer-file` set to the path of the other corpus's tokenizer.json."
        )
    names = corpus.split_names
    if data.eval_split in names:
        split = corpus.split(data.eval_split)
    elif len(names) == 1:
        split = corpus.split(names[0])
    else:
        raise ConfigError(
            f"eval.sets: {name}: {path} has the splits {', '.join(names)}. Set data.eval_split to one of them, or "
            "prepare the held-out text as a corpus with one split."
        )
    for trained in train:
        if (trained.corpus.fingerprint, trained.name) == (corpus.fingerprint, split.name):
            raise ConfigError(
                f"eval.sets: {name}: the split {split.name} of {path} is trained on. A held-out set must be text that "
                "the run does not read. Remove the set, or give another path."
            )
    return split


def labelled(word: str, split: Split, splits: Sequence[Split]) -> str:
    """Return the name of a split's records: `word`, followed by the name of the corpus unless it is the first corpus.

    For instance with the word `eval`, the name is `eval` for the first corpus and `eval_news` for a further corpus
    `news`. If several corpora have the same name, the number of the corpus is added.
    """
    number = splits.index(split)
    if number == 0:
        return word
    names = [other.corpus.name for other in splits]
    if names.count(names[number]) > 1:
        suffix = f"_{number}"
    else:
        suffix = ""
    return f"{word}_{names[number]}{suffix}"


def first_stream(splits: tuple[Split, ...], data: DataSection, *, num_lanes: int, seed: int) -> StreamState:
    """Return the stream state at the start of a new run: the number of lanes of each corpus, all at position 0.

    A lane is a row of the batch with its own token stream. Raises ConfigError if a corpus with a positive weight gets
    no lane.
    """
    return first_state(splits, weights=data.weights, num_lanes=num_lanes, seed=document_seed(seed))


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
