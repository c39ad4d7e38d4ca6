"""Warm start of a run: the weights of a bundle (`--init`) in place of random ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from txl_dist.config.load import Config
from txl_dist.config.schema import ModelSection
from txl_dist.data.loader.corpus import Corpus
from txl_dist.errors import ConfigError, DataError
from txl_dist.inference.bundle import load_bundle

FREE = {"same_length", "clamp_len", "init_std", "projection_init_std"}
"""Settings, apart from dropouts, that may differ from the bundle's: they change no weight."""


def initial_weights(config: Config, corpus: Corpus) -> dict[str, Tensor]:
    """Return the fp32 weights of the bundle `run.init` by the names of this package's parameters.

    Raises CheckpointError if it is not a valid bundle, ConfigError if it has another model than the run, and
    DataError if the corpus was prepared with another tokenizer.
    """
    bundle = load_bundle(config.run.init)
    ours = architecture(config.model)
    theirs = architecture(bundle.model.section)
    different = [f"  model.{name}: {theirs[name]} -> {value}" for name, value in ours.items() if theirs[name] != value]
    if different:
        raise ConfigError(
            f"the bundle {config.run.init} holds another model than this run:",
            *different,
            f"Use its settings, which are in {config.run.init}/train.toml, or another bundle.",
        )
    if corpus.tokenizer_sha256 != bundle.tokenizer.fingerprint:
        raise DataError(
            f"{config.data.path} was prepared with another tokenizer than the bundle {config.run.init} has. "
            f"Prepare the text with --tokenizer-file {config.run.init}/tokenizer.json, token ids with its --vocab-list."
        )
    return {name: parameter.detach().float() for name, parameter in bundle.model.named_parameters()}


def architecture(model: ModelSection) -> dict[str, Any]:
    """Return the settings that the weights depend on. They are equal for models with the same architecture."""
    values = model.model_dump(exclude={name for name in ModelSection.model_fields if "dropout" in name} | FREE)
    if any(model.tie_projections):
        ties = model.tie_projections
    else:
        ties = ()
    return values | {"embed_width": model.embed_width_or_default(), "tie_projections": ties}
