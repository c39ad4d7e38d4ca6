"""Target of an evaluation: the model of a run, a checkpoint or a bundle, and text with the same tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from txl_dist.artifacts import ArtifactKind, detect_artifact
from txl_dist.config.load import Config, changed, config_from_dict
from txl_dist.console.logging import warn_for_all
from txl_dist.convert.export import read_trained
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.loader.shards import Split
from txl_dist.distributed.collectives import gather_objects
from txl_dist.errors import CheckpointError, DataError, raised_everywhere
from txl_dist.inference.bundle import Bundle, load_bundle, require_causal
from txl_dist.train.checkpoint.read import require_corpus


class Target(NamedTuple):
    """A model to score, with its settings. `open_target` reads it."""

    path: Path
    """Path of the run, checkpoint or bundle, as the user typed it."""
    bundle: Bundle
    """Model with its weights and tokenizer."""
    config: Config
    """Settings of the run, or settings made from the bundle."""
    where: str
    """Description of the checkpoint or bundle that was read, for people."""

    def held_out(self, config: Config) -> Split:
        """Open the validation split that a config names. Raises DataError if the split is missing or has another
        tokenizer than the model."""
        corpus = self._corpus(config.data.path, config)
        if config.data.eval_split not in corpus.split_names:
            split_names = ", ".join(corpus.split_names)
            raise DataError(
                f"{config.data.path} has no split {config.data.eval_split!r} to score. The corpus has {split_names}. "
                "Name another split with --split. Or name with --data a corpus that has this split and was prepared "
                f"with --tokenizer-file and the tokenizer.json of {self.path}."
            )
        return corpus.split(config.data.eval_split)

    def train_text(self, path: str, config: Config) -> Split:
        """Open the training split of the corpus at a path. An empty path means the corpus of the config.

        Raises DataError if the split is missing or has another tokenizer than the model.
        """
        corpus = self._corpus(path or config.data.path, config)
        if config.data.train_split not in corpus.split_names:
            raise DataError(
                f"{corpus.location} has no split {config.data.train_split!r} to measure gradients on. The corpus has "
                f"{', '.join(corpus.split_names)}. Give with --adapt-train a corpus that has this split and the same "
                "tokenizer."
            )
        return corpus.split(config.data.train_split)

    def _corpus(self, path: str, config: Config) -> Corpus:
        """Open a corpus. Raises DataError if it has another tokenizer than the model."""
        corpus = open_corpus(path, config.data)
        if corpus.tokenizer_sha256 != self.bundle.tokenizer.fingerprint:
            raise DataError(
                f"{path} was prepared with another tokenizer than {self.path} was trained with. "
                "If the corpus comes from text, prepare it again with --tokenizer-file and the tokenizer.json of "
                f"{self.path}. If it comes from token ids, prepare it again with --vocab-list and the list of token "
                f"names that was used for the corpus of {self.path}."
            )
        return corpus


def open_target(path: Path, *, data: str | Path, needs_causal: bool = True) -> Target:
    """Read the model of a run, a checkpoint or a bundle at a path, to score it.

    `data` is the path of the corpus. If it is empty, the run's corpus is used. Raises CheckpointError or ConfigError if
    the model cannot be read. With `needs_causal`, a model that predicts in any order (XLNet) raises ConfigError.
    """
    if detect_artifact(path) is ArtifactKind.BUNDLE:
        bundle = load_bundle(path)
        where = str(path)
        values: dict[str, Any] = {
            "data": {"path": str(data), "document_mask": bundle.document_mask},
            "model": bundle.section.model_dump(),
            "train": {
                "segment_len": bundle.segment_len,
                "memory_len": bundle.memory_len,
                "memory_lens": bundle.memory_lens,
            },
        }
        if bundle.section.any_order:
            values["train"] |= {"objective": "permutation", **bundle.target_lengths._asdict()}
        config = config_from_dict(values, source=where)
        where += _origin(bundle.source)
    else:
        trained = read_trained(path)
        where = str(trained.folder)
        bundle = trained.package.open(where=where)
        corpus_path = str(data) or require_corpus(trained.folder, trained.config)
        config = changed(trained.config, {"data.path": corpus_path})
    if needs_causal:
        require_causal(bundle.section, where=where)
    if bundle.document_mask and not bundle.begins_documents:
        warn_for_all(
            "this model was trained by an older version of txl_dist, which did not train on the first token of a "
            "document. This evaluation scores these tokens too"
        )
    return Target(path, bundle, config, where)


def require_same(targets: Sequence[Target]) -> None:
    """Raise CheckpointError on all ranks if ranks have read different models. All ranks call this function.

    A run can save a checkpoint after one rank has read the model and before another rank reads it. Then the ranks would
    add scores of different checkpoints.
    """
    names_by_rank = gather_objects([target.where for target in targets])
    for names in zip(*names_by_rank, strict=True):  # of one target on all ranks
        distinct = sorted(set(names))
        if len(distinct) > 1:
            raise raised_everywhere(
                CheckpointError(
                    f"the ranks read different models: {', '.join(distinct)}. Name one model for all ranks."
                )
            )


def _origin(source: dict[str, Any]) -> str:
    """Describe where a bundle comes from: a step of training, or a file of another program."""
    if "step" in source:
        return f", step {source['step']}"
    return f", imported from {source.get('file', 'elsewhere')}"
