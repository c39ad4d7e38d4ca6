"""Starting a run with a bundle's weights works only if the model and the vocabulary are the bundle's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.corpora import tiny_corpus
from tests.helpers.models import tiny_section
from txl_dist.config.load import Config, load_config
from txl_dist.config.schema import ModelSection
from txl_dist.data.loader.corpus import Corpus
from txl_dist.errors import CheckpointError, ConfigError, DataError
from txl_dist.inference.bundle import Package, write_bundle
from txl_dist.inference.probe import probe_of
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.train.warm_start import initial_weights

SETTINGS = {"cutoffs": (20, 100), "div_value": 2, "tie_projections": (False, True, True)}


def write(folder: Path, corpus: Corpus, model: ModelSection) -> TransformerXL:
    """A bundle of random weights."""
    torch.manual_seed(0)
    network = TransformerXL(model, vocab_size=corpus.vocab_size).eval()
    package = Package(
        section=model,
        weights=dict(network.named_parameters()),
        tokenizer=corpus.tokenizer,
        segment_len=8,
        memory_len=16,
        source={},
        probe=probe_of(network, memory_len=16),
    )
    write_bundle(folder, package)
    return network


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


def config_for(bundle: Path, corpus: Corpus, **model: Any) -> Config:
    section = tiny_section(**{**SETTINGS, **model}).model_dump()
    return Config.model_validate({"run": {"init": str(bundle)}, "data": {"path": str(corpus.folder)}, "model": section})


def test_the_weights_are_the_bundles(tmp_path: Path, corpus: Corpus) -> None:
    network = write(tmp_path / "bundle", corpus, tiny_section(**SETTINGS))
    weights = initial_weights(config_for(tmp_path / "bundle", corpus), corpus)
    assert weights.keys() == dict(network.named_parameters()).keys()
    assert all(torch.equal(weights[name], parameter) for name, parameter in network.named_parameters())


def test_the_settings_beside_a_bundle_are_those_to_go_on_with(tmp_path: Path, corpus: Corpus) -> None:
    model = tiny_section(**SETTINGS)
    write(tmp_path / "bundle", corpus, model)
    config = load_config(tmp_path / "bundle" / "train.toml")
    assert (config.model, config.train.segment_len, config.train.memory_len) == (model, 8, 16)


@pytest.mark.parametrize(
    "changes", [{"dropout": 0.3, "ff_dropout": 0.1}, {"clamp_len": 9}, {"same_length": "memory"}, {"embed_width": 12}]
)
def test_what_changes_no_weight_may_differ(changes: dict[str, Any], tmp_path: Path, corpus: Corpus) -> None:
    write(tmp_path / "bundle", corpus, tiny_section(**SETTINGS))
    assert initial_weights(config_for(tmp_path / "bundle", corpus, **changes), corpus)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 2},
        {"activation": "gelu"},
        {"pre_norm": True},
        {"cutoffs": (20, 90)},
        {"share_biases": False},
        {"tie_projections": (False, True, False)},
        {"positions": "absolute"},
        {"norm_eps": 1e-3},
    ],
)
def test_another_model_is_refused_with_the_settings_that_differ(
    changes: dict[str, Any], tmp_path: Path, corpus: Corpus
) -> None:
    write(tmp_path / "bundle", corpus, tiny_section(**SETTINGS))
    (name,) = changes
    with pytest.raises(ConfigError, match=rf"model\.{name}: .* -> (?s:.)*train\.toml"):
        initial_weights(config_for(tmp_path / "bundle", corpus, **changes), corpus)


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path, corpus: Corpus) -> None:
    write(tmp_path / "bundle", corpus, tiny_section(**SETTINGS))
    texts = [f"other text {i}, other characters" for i in range(40)]
    other = tiny_corpus(tmp_path, name="other", kind="char", texts=texts)
    with pytest.raises(DataError, match=r"--tokenizer-file .*bundle/tokenizer\.json"):
        initial_weights(config_for(tmp_path / "bundle", other), other)


def test_what_is_no_bundle_is_refused(tmp_path: Path, corpus: Corpus) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a bundle"):
        initial_weights(config_for(tmp_path / "nowhere", corpus), corpus)
