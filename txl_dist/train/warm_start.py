"""Warm start of a run: training begins with the weights of a bundle (`--init`) and not with random weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from txl_dist.config.load import Config
from txl_dist.config.schema import ModelSection
from txl_dist.data.loader.corpus import Corpus
from txl_dist.errors import ConfigError, DataError
from txl_dist.inference.bundle import load_bundle

FREE = {"same_length", "clamp_len", "init_std", "projection_init_std"}
"""Model settings that may differ from the bundle's settings, in addition to all dropout settings. Loaded weights can be
used with any values of these settings."""


def initial_weights(config: Config, corpus: Corpus) -> dict[str, Tensor]:
    """Return the weights of the bundle `run.init` in fp32, by parameter name.

    Raises CheckpointError if the folder is not a valid bundle. Raises ConfigError if the run's model settings do not
    fit the bundle, and DataError if the corpus was prepared with another tokenizer.
    """
    bundle = load_bundle(config.run.init)
    ours = architecture(config.model)
    theirs = architecture(bundle.model.section)
    different = [f"  model.{name}: {theirs[name]} -> {value}" for name, value in ours.items() if theirs[name] != value]
    if different:
        raise ConfigError(
            f"the bundle {config.run.init} holds another model than this run. These settings differ (bundle -> run):",
            *different,
            f"Train with the settings of the bundle in {config.run.init}/train.toml, or choose another bundle.",
        )
    if corpus.tokenizer_sha256 != bundle.tokenizer.fingerprint:
        raise DataError(
            f"{config.data.path} was prepared with another tokenizer than the bundle {config.run.init}. "
            f"If the corpus comes from text, prepare it with --tokenizer-file {config.run.init}/tokenizer.json. If "
            "it comes from token ids, prepare it with the --vocab-list of the corpus that the bundle was trained on."
        )
    return {name: parameter.detach().float() for name, parameter in bundle.model.named_parameters()}


def architecture(model: ModelSection) -> dict[str, Any]:
    """Return the model settings that the weights depend on, by name.

    The results are equal for two models whose weights can be exchanged.
    """
    values = model.model_dump(exclude={name for name in ModelSection.model_fields if "dropout" in name} | FREE)
    if any(model.tie_projections):
        ties = model.tie_projections
    else:
        ties = ()
    return values | {"embed_width": model.embed_width_or_default(), "tie_projections": ties}
