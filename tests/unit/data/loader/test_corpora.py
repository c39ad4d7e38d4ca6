"""The corpora of a run: which corpora fit together, which splits are trained and evaluated, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.corpora import random_texts, tiny_corpus
from txl_dist.config.schema import DataSection, EvalSection
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
    evaluated = {kind: (split.corpus.fingerprint, split.name) for kind, split in both.eval.items()}
    assert evaluated == {"eval": (first.fingerprint, "valid")}
    assert (both.begin.num_lanes, [one.split for one in both.begin.corpora]) == (6, ["train", "train"])


def test_nothing_is_evaluated_where_that_was_not_prepared_or_is_switched_off(first: Corpus, second: Corpus) -> None:
    assert opened(second).eval == {}
    assert opened(first, eval_split="").eval == {}
    with pytest.raises(DataError, match="has no split 'test'"):
        opened(second, eval_split="test")


def test_corpora_that_do_not_go_together_are_refused(first: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path and data\.more_paths name the same corpus twice"):
        opened(first, first)
    with pytest.raises(ConfigError, match="prepared with different tokenizers"):
        opened(first, tiny_corpus(tmp_path, kind="char"))


def with_sets(*words: str, corpora: tuple[Corpus, ...], **settings: str) -> Corpora:
    path, *more = (corpus.location for corpus in corpora)
    data = DataSection(path=path, more_paths=tuple(more), **settings)  # type: ignore[arg-type]
    return open_corpora(data, num_lanes=6, seed=3, evaluation=EvalSection(sets=words))


def test_held_out_sets_are_evaluated_by_name_after_the_validation_splits(first: Corpus, second: Corpus) -> None:
    corpora = with_sets(f"news={second.location}", corpora=(first,))
    assert {kind: split.name for kind, split in corpora.eval.items()} == {"eval": "valid", "eval_news": "train"}
    assert corpora.first_kind == "eval"
    assert corpora.begin == opened(first).begin, "a held-out set changes nothing in training"


def test_without_a_validation_split_the_first_set_takes_its_place(first: Corpus, second: Corpus) -> None:
    corpora = with_sets(f"a={first.location}", f"b={first.location}", corpora=(second,))
    assert {kind: split.name for kind, split in corpora.eval.items()} == {"eval_a": "valid", "eval_b": "valid"}
    assert corpora.first_kind == "eval_a"


def test_a_set_cannot_have_the_name_of_a_further_corpus(first: Corpus, tmp_path: Path) -> None:
    tokenizer = first.folder / "tokenizer.json"
    other = tiny_corpus(
        tmp_path, name="news", texts=random_texts(count=30, seed=2), tokenizer_path=tokenizer, kind="auto"
    )
    with pytest.raises(ConfigError, match=r"eval\.sets: news is also the name of the corpus .*news, whose split valid"):
        with_sets(f"news={first.location}", corpora=(first, other))


def test_held_out_sets_that_cannot_be_used_are_refused_by_name(first: Corpus, second: Corpus, tmp_path: Path) -> None:
    for words, corpora, settings, problem in (
        ([f"news={second.location}"], (first, second), {}, "eval.sets: news: the split train of .* is trained on"),
        ([f"news={tmp_path}/none"], (first,), {}, "eval.sets: news: .*none is not a readable corpus"),
        ([f"news={first.location}"], (first,), {"eval_split": ""}, "has the splits train, valid. Set data.eval_split"),
        ([f"news={tiny_corpus(tmp_path, kind='char').location}"], (first,), {}, "prepared with different tokenizers"),
    ):
        with pytest.raises(ConfigError, match=problem) as caught:
            with_sets(*words, corpora=corpora, **settings)
        assert "\n" not in str(caught.value)
