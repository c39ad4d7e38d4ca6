"""A split that is too short for the objective is refused when the run starts."""

from __future__ import annotations

import pytest

from tests.helpers.corpora import tiny_corpus
from txl_dist.config.schema import DataSection
from txl_dist.data.loader.corpora import Corpora, open_corpora
from txl_dist.errors import ConfigError
from txl_dist.train.preflight import check_text


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    corpus = tiny_corpus(tmp_path_factory.mktemp("short"))
    return open_corpora(DataSection(path=str(corpus.folder)), num_lanes=2, seed=1)


def test_xlnets_objective_needs_a_whole_segment_of_validation_text(corpora: Corpora) -> None:
    (split,) = corpora.eval.values()
    check_text(corpora, segment_len=8, eval_segment_len=split.tokens - 1, sample_prompt=None)
    check_text(corpora, segment_len=split.tokens, sample_prompt=None)
    with pytest.raises(ConfigError) as caught:
        check_text(corpora, segment_len=split.tokens, eval_segment_len=split.tokens, sample_prompt=None)
    message = str(caught.value)
    assert f"has {split.tokens:,} tokens, but an evaluation needs at least {split.tokens + 1:,}" in message
    assert f"(train.segment_len={split.tokens} and one more)" in message
    assert 'lower train.segment_len, or switch evaluation off with --data.eval_split "".' in message


def test_training_text_shorter_than_a_segment_of_each_lane_is_refused(corpora: Corpora) -> None:
    (split,) = corpora.train
    with pytest.raises(ConfigError, match=r"but a step with train\.num_lanes=2 and train\.segment_len=\d+ needs"):
        check_text(corpora, segment_len=split.tokens, sample_prompt=None)
