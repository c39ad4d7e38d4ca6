"""From a committed checkpoint to an inference bundle, offline and proven by the engine's own probe; and from either, or
from a bundle, to a Hugging Face folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from txl_dist.config import Config, load_config
from txl_dist.convert.huggingface import export_huggingface
from txl_dist.errors import CheckpointError, TxlError
from txl_dist.infer.bundle import Bundle, load, network_of, write_bundle
from txl_dist.log import logger
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.run_files import Kind, kind_of, list_checkpoints
from txl_dist.sections import ModelSection
from txl_dist.text.tokenizer import Tokenizer, load_tokenizer
from txl_dist.train.checkpoint.probe import read_probe
from txl_dist.train.checkpoint.read import consolidated_weights, kept, scores_first_tokens
from txl_dist.train.checkpoint.soundness import checkpoint_problems, read_state


class Trained(NamedTuple):
    """What an export or an evaluation needs of a checkpoint."""

    folder: Path
    config: Config
    tokenizer: Tokenizer
    weights: dict[str, Tensor]
    step: int
    probe: dict[str, Tensor]
    begins_documents: bool
    """See `Bundle`."""

    @property
    def model(self) -> ModelSection:
        """Its settings."""
        return self.config.model


def read_trained(run: Path) -> Trained:
    """Weights and settings of a run's newest whole checkpoint, or of a checkpoint folder. Raises CheckpointError.

    The run may be training: what is read is kept from being pruned, and what was pruned before that was no choice.
    """
    if kind_of(run) is Kind.CHECKPOINT:
        with kept(run):
            if problems := checkpoint_problems(run):
                raise CheckpointError(
                    f"{run} is damaged: {'; '.join(problems[:5])}. Use another checkpoint of the run."
                )
            return _read_checkpoint(run)
    looked_at: list[Path] | None = None
    rejected: list[str] = []
    while (listed := list_checkpoints(run)) != looked_at:
        looked_at, rejected = listed, []
        for folder in reversed(listed):
            with kept(folder):
                try:
                    if not (problems := checkpoint_problems(folder)):
                        trained = _read_checkpoint(folder)
                        for reason in rejected:
                            logger.warning("passed over a damaged checkpoint, %s", reason)
                        return trained
                except (TxlError, OSError):
                    if os.path.lexists(folder):
                        raise
                if os.path.lexists(folder):
                    rejected.append(f"{folder.name}: {'; '.join(problems[:3])}")
    why = f" ({'; '.join(rejected[:3])})" if rejected else ""
    raise CheckpointError(f"{run} has no whole checkpoint{why}. Train it, or name a checkpoint folder.")


def _read_checkpoint(folder: Path) -> Trained:
    saved, config = read_state(folder), load_config(folder / "config.toml")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    return Trained(
        folder=folder,
        config=config,
        tokenizer=tokenizer,
        weights=consolidated_weights(folder),
        step=saved.step,
        probe=read_probe(folder, vocab_size=tokenizer.vocab_size),
        begins_documents=scores_first_tokens(config, saved),
    )


class Exportable(NamedTuple):
    """A model with all that a bundle needs, wherever it comes from."""

    folder: Path
    model: ModelSection
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    probe: dict[str, Tensor]
    probe_dtype: str
    segment_len: int
    memory_len: int
    document_border: str
    begins_documents: bool
    source: dict[str, Any]


def network_in_fp32(found: Trained | Exportable) -> TransformerXL:
    """The model, in evaluation mode. Raises CheckpointError if its weights do not fit its settings."""
    return network_of(
        found.model,
        vocab_size=found.tokenizer.vocab_size,
        weights=found.weights,
        dtype="fp32",
        where=str(found.folder),
    )


def export_bundle(source: Path, out: Path, *, dtype: str = "fp32") -> tuple[Path, float]:
    """Write a bundle from a run, a checkpoint or another bundle.

    Returns (the folder it came from, the largest difference in nats to the engine on the probe).

    Raises CheckpointError if nothing whole is found, the probe disagrees or `out` cannot be written.
    """
    found = _read(source)
    error = write_bundle(
        out,
        weights=found.weights,
        model=found.model,
        tokenizer=found.tokenizer,
        probe=found.probe,
        probe_dtype=found.probe_dtype,
        dtype=dtype,
        segment_len=found.segment_len,
        memory_len=found.memory_len,
        document_border=found.document_border,
        begins_documents=found.begins_documents,
        source=found.source,
    )
    return found.folder, error


def export_to_huggingface(source: Path, out: Path, *, dtype: str = "fp32") -> Path:
    """Write a Hugging Face folder from a run, a checkpoint or a bundle; returns the folder it came from.

    Raises CheckpointError if nothing whole is found, `out` cannot be written, or the format cannot express the model.
    """
    found = _read(source)
    export_huggingface(
        out,
        weights=dict(network_in_fp32(found).state_dict()),
        model=found.model,
        tokenizer=found.tokenizer,
        dtype=dtype,
        segment_len=found.segment_len,
        memory_len=found.memory_len,
    )
    return found.folder


def load_trained(source: Path) -> Bundle:
    """A bundle, or what a bundle in fp32 of a run's newest whole checkpoint, or of a checkpoint, would hold.

    Nothing is written. Raises CheckpointError if nothing whole is found.
    """
    if kind_of(source) is Kind.BUNDLE:
        return load(source)
    found = _read(source)
    return Bundle(
        model=network_in_fp32(found),
        tokenizer=found.tokenizer,
        segment_len=found.segment_len,
        memory_len=found.memory_len,
        document_border=found.document_border,
        begins_documents=found.begins_documents,
        dtype="fp32",
        source=found.source,
        probe=found.probe,
        probe_dtype=found.probe_dtype,
    )


def _read(source: Path) -> Exportable:
    if kind_of(source) is Kind.BUNDLE:
        bundle = load(source)
        return Exportable(
            folder=source,
            model=bundle.model.section,
            weights=dict(bundle.model.named_parameters()),
            tokenizer=bundle.tokenizer,
            probe=bundle.probe,
            # Weights that were rounded once stay so.
            probe_dtype=bundle.probe_dtype if bundle.dtype == "fp32" else bundle.dtype,
            segment_len=bundle.segment_len,
            memory_len=bundle.memory_len,
            document_border=bundle.document_border,
            begins_documents=bundle.begins_documents,
            source=bundle.source,
        )
    trained = read_trained(source)
    precision, train = trained.config.engine.precision, trained.config.train
    return Exportable(
        folder=trained.folder,
        model=trained.config.model,
        weights=trained.weights,
        tokenizer=trained.tokenizer,
        probe=trained.probe,
        probe_dtype=precision,
        segment_len=train.segment_len,
        memory_len=train.memory_len,
        document_border=trained.config.data.document_border,
        begins_documents=trained.begins_documents,
        source={"run": source.name, "step": trained.step, "precision": precision},
    )
