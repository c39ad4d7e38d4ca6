"""txl_dist is a system to pretrain Transformer-XL language models at scale.

Importing the package imports neither torch nor DeepSpeed. Each public name is imported at its first use:

    lm = txl_dist.load("runs/first")                     # a run, a checkpoint or a bundle: inference/language_model.py
    config = txl_dist.configure("configs/quickstart.toml", train={"num_lanes": 8})
    corpus = txl_dist.open_corpus("data/first")
    result = txl_dist.pretrain(config, callbacks=[MyCallback()])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from txl_dist.version import __version__

if TYPE_CHECKING:
    from txl_dist.config.load import Config as Config
    from txl_dist.config.load import configure as configure
    from txl_dist.convert.export import load as load
    from txl_dist.data.loader.corpus import Corpus as Corpus
    from txl_dist.data.loader.corpus import open_corpus as open_corpus
    from txl_dist.inference.language_model import LanguageModel as LanguageModel
    from txl_dist.model.transformer_xl import SegmentLoss as SegmentLoss
    from txl_dist.model.transformer_xl import TransformerXL as TransformerXL
    from txl_dist.train.batch import lane_batches as lane_batches
    from txl_dist.train.callbacks import Callback as Callback
    from txl_dist.train.callbacks import RunResult as RunResult
    from txl_dist.train.start import pretrain as pretrain

_HOME = {
    "Callback": "train.callbacks",
    "Config": "config.load",
    "Corpus": "data.loader.corpus",
    "LanguageModel": "inference.language_model",
    "RunResult": "train.callbacks",
    "SegmentLoss": "model.transformer_xl",
    "TransformerXL": "model.transformer_xl",
    "configure": "config.load",
    "lane_batches": "train.batch",
    "load": "convert.export",
    "open_corpus": "data.loader.corpus",
    "pretrain": "train.start",
}
"""Module in which each public name is defined."""

_MODULES = ("plugins",)
"""Names of public modules. A program that imports `txl_dist` can use these modules, such as `txl_dist.plugins`, without
another import."""

__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use and return it. Raises AttributeError for any other name."""
    if name in _MODULES:
        return importlib.import_module(f"txl_dist.{name}")
    if name not in _HOME:
        public_names = ", ".join(sorted((*_HOME, *_MODULES)))
        raise AttributeError(f"module 'txl_dist' has no attribute {name!r}. Its public names are {public_names}")
    module = importlib.import_module(f"txl_dist.{_HOME[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
