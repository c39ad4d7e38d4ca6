"""The corpora of a run: which corpora fit together, which splits are trained and evaluated, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.corpora import random_texts, tiny_corpus
from txl_dist.config.schema import DataSection
from txl_dist.data.loader.corpora import Corpora, open_corpora
from txl_dist.data.loader.corpus import Corpus
from txl_dist.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def second(first: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Of the same tokenizer, without a split that is held out."""
    return tiny_corpus(
        tmp_path_factory.mktemp("second"),
        texts=random_texts(count=30, seed=1),
        valid_fraction=0.0,
        kind="auto",
        tokenizer_path=first.folder / "tokenizer.json",
    )


def opened(*corpora: Corpus, **settings: str) -> Corpora:
    path, *more = (corpus.location for corpus in corpora)
    return open_corpora(DataSection(path=path, more_paths=tuple(more), **settings), num_lanes=6, seed=3)  # type: ignore[arg-type]


def test_each_corpus_is_trained_on_and_evaluated_where_it_has_the_split(first: Corpus, second: Corpus) -> None:
    both = opened(first, second)
    assert both.first.fingerprint == first.fingerprint
    assert [split.corpus.fingerprint for split in both.train] == [first.fingerprint, second.fingerprint]
    assert [(split.corpus.fingerprint, split.name) for split in both.eval] == [(first.fingerprint, "valid")]
    assert (both.begin.num_lanes, [one.split for one in both.begin.corpora]) == (6, ["train", "train"])


def test_nothing_is_evaluated_where_that_was_not_prepared_or_is_switched_off(first: Corpus, second: Corpus) -> None:
    assert opened(second).eval == ()
    assert opened(first, eval_split="").eval == ()
    with pytest.raises(DataError, match="has no split 'test'"):
        opened(second, eval_split="test")


def test_corpora_that_do_not_go_together_are_refused(first: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path and data\.more_paths name the same corpus twice"):
        opened(first, first)
    with pytest.raises(ConfigError, match="prepared with different tokenizers"):
        opened(first, tiny_corpus(tmp_path, kind="char"))
