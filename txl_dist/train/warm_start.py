"""Beginning a run with the weights of a bundle (`--init`), in place of random ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from txl_dist.config.load import Config
from txl_dist.config.schema import ModelSection
from txl_dist.data.loader.corpus import Corpus
from txl_dist.errors import ConfigError, DataError
from txl_dist.inference.bundle import load_bundle

FREE = {"same_length", "clamp_len", "init_std", "projection_init_std"}
"""Settings that may differ from the bundle's, besides dropouts: they change no weight."""


def initial_weights(config: Config, corpus: Corpus) -> dict[str, Tensor]:
    """Weights of the bundle `run.init`, under our names, in fp32.

    Raises CheckpointError if it is no sound bundle, ConfigError if the run's model is another one, DataError if the
    corpus was made with another tokenizer.
    """
    bundle = load_bundle(config.run.init)
    ours, theirs = architecture(config.model), architecture(bundle.model.section)
    different = [f"  model.{name}: {theirs[name]} -> {value}" for name, value in ours.items() if theirs[name] != value]
    if different:
        raise ConfigError(
            f"the bundle {config.run.init} holds another model than this run:",
            *different,
            f"Use its settings, as they stand in {config.run.init}/train.toml, or another bundle.",
        )
    if corpus.tokenizer_sha256 != bundle.tokenizer.fingerprint:
        raise DataError(
            f"{config.data.path} was prepared with another tokenizer than the bundle {config.run.init} has. "
            f"Prepare the text with --tokenizer-file {config.run.init}/tokenizer.json, ready ids with its --vocab-list."
        )
    return {name: parameter.detach().float() for name, parameter in bundle.model.named_parameters()}


def architecture(model: ModelSection) -> dict[str, Any]:
    """The settings that weights depend on, equal for equal models."""
    values = model.model_dump(exclude={name for name in ModelSection.model_fields if "dropout" in name} | FREE)
    ties = model.tie_projections if any(model.tie_projections) else ()
    return values | {"embed_width": model.embed_width_or_default(), "tie_projections": ties}
