"""What is scored: the model of a run, a checkpoint or a bundle, and held-out text of the same tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from txl_dist.artifacts import ArtifactKind, detect_artifact
from txl_dist.config.load import Config, changed, config_from_dict
from txl_dist.console.logging import warn_for_all
from txl_dist.convert.export import read_trained
from txl_dist.data.loader.corpus import Corpus, Split, open_corpus
from txl_dist.distributed.collectives import gather_objects
from txl_dist.errors import CheckpointError, DataError, raised_everywhere
from txl_dist.inference.bundle import Bundle, load_bundle
from txl_dist.train.checkpoint.read import require_corpus


class Target(NamedTuple):
    """A model that is to be scored."""

    path: Path
    """What was named."""
    bundle: Bundle
    config: Config
    where: str
    """What it turned out to be, for people."""

    def held_out(self, config: Config) -> Split:
        """The split that these settings name. Raises DataError if there is none, or if it is of other tokens."""
        corpus = self._corpus(config.data.path, config)
        if config.data.eval_split not in corpus.split_names:
            known = ", ".join(corpus.split_names)
            raise DataError(
                f"{config.data.path} has no split {config.data.eval_split!r} to score; it has {known}. "
                "Name one with --split; or, with --data, a corpus that has it, prepared with --tokenizer-file and the "
                f"tokenizer.json of {self.path}."
            )
        return corpus.split(config.data.eval_split)

    def train_text(self, path: str, config: Config) -> Split:
        """The training split of a corpus; empty means that of the settings. Raises DataError as `held_out` does."""
        corpus = self._corpus(path or config.data.path, config)
        if config.data.train_split not in corpus.split_names:
            raise DataError(
                f"{corpus.location} has no split {config.data.train_split!r} to measure gradients on; it has "
                f"{', '.join(corpus.split_names)}. Name a corpus that has it with --adapt-train, of the same tokenizer."
            )
        return corpus.split(config.data.train_split)

    def _corpus(self, path: str, config: Config) -> Corpus:
        corpus = open_corpus(path, config.data)
        if corpus.tokenizer_sha256 != self.bundle.tokenizer.fingerprint:
            raise DataError(
                f"{path} was prepared with another tokenizer than {self.path} was trained with. "
                f"Prepare the text with --tokenizer-file and the tokenizer.json of {self.path}, ready ids with its "
                "--vocab-list."
            )
        return corpus


def open_target(path: Path, *, data: str | Path) -> Target:
    """A run, a checkpoint or a bundle; `data` is the corpus, empty takes that of the run.

    Raises CheckpointError or ConfigError if it cannot be read.
    """
    if detect_artifact(path) is ArtifactKind.BUNDLE:
        bundle, where = load_bundle(path), str(path)
        values = {
            "data": {"path": str(data), "document_mask": bundle.document_border == "mask"},
            "model": bundle.section.model_dump(),
            "train": {
                "segment_len": bundle.segment_len,
                "memory_len": bundle.memory_len,
                "memory_lens": bundle.memory_lens,
            },
        }
        config = config_from_dict(values, source=where)
        where += _origin(bundle.source)
    else:
        trained = read_trained(path)
        where = str(trained.folder)
        bundle = trained.package.open(where=where)
        config = changed(trained.config, {"data.path": str(data) or require_corpus(trained.folder, trained.config)})
    if bundle.document_border == "mask" and not bundle.begins_documents:
        warn_for_all(
            "this model was trained by an older program, which scored no first token of a document: here they are "
            "scored, and it never learnt to predict them"
        )
    return Target(path, bundle, config, where)


def require_same(targets: Sequence[Target]) -> None:
    """All ranks call it: one that reads another checkpoint, of a run that saved between two looks, would add its scores
    to theirs. Raises CheckpointError."""
    for found in zip(*gather_objects([target.where for target in targets]), strict=True):
        if len(chosen := sorted(set(found))) > 1:
            raise raised_everywhere(
                CheckpointError(f"the ranks have read different models: {', '.join(chosen)}. Name one of them.")
            )


def _origin(source: dict[str, Any]) -> str:
    return f", step {source['step']}" if "step" in source else f", imported from {source.get('file', 'elsewhere')}"
