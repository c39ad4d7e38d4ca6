"""From a committed checkpoint to an inference bundle, offline and proven by the engine's own probe; and from either, or
from a bundle, to a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

from txl_dist.config import Config, load_config
from txl_dist.convert.huggingface import export_huggingface
from txl_dist.convert.huggingface_export import Written, export_huggingface_code
from txl_dist.convert.onnx_graphs import export_onnx
from txl_dist.errors import CheckpointError, TxlError
from txl_dist.files import path_of
from txl_dist.infer.bundle import Package, check_device, load_bundle, write_bundle
from txl_dist.infer.language_model import LanguageModel
from txl_dist.log import logger
from txl_dist.run_files import SETTINGS, TRAINED, Kind, kind_of, list_checkpoints, require
from txl_dist.text.tokenizer import load_tokenizer
from txl_dist.train.checkpoint.probe import read_probe
from txl_dist.train.checkpoint.read import consolidated_weights, kept, scores_first_tokens
from txl_dist.train.checkpoint.soundness import checkpoint_problems, read_state


class Trained(NamedTuple):
    """A checkpoint, read."""

    folder: Path
    config: Config
    package: Package


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
            return _read_checkpoint(run, name=run.name)
    looked_at: list[Path] | None = None
    rejected: list[str] = []
    while (listed := list_checkpoints(run)) != looked_at:
        looked_at, rejected = listed, []
        for folder in reversed(listed):
            with kept(folder):
                try:
                    if not (problems := checkpoint_problems(folder)):
                        trained = _read_checkpoint(folder, name=run.name)
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


def _read_checkpoint(folder: Path, *, name: str) -> Trained:
    """`name` says of which run it is, for those who get the model."""
    saved, config = read_state(folder), load_config(folder / SETTINGS)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    precision = config.engine.precision
    package = Package(
        section=config.model,
        weights=consolidated_weights(folder),
        tokenizer=tokenizer,
        segment_len=config.train.segment_len,
        memory_len=config.train.memory_len,
        document_border=config.data.document_border,
        begins_documents=scores_first_tokens(config, saved),
        source={"run": name, "step": saved.step, "precision": precision},
        probe=read_probe(folder, vocab_size=tokenizer.vocab_size),
        probe_dtype=precision,
    )
    return Trained(folder, config, package)


def _read(source: Path) -> tuple[Path, Package]:
    """(folder it comes from, model) of a run, a checkpoint or a bundle."""
    if kind_of(source) is not Kind.BUNDLE:
        trained = read_trained(source)
        return trained.folder, trained.package
    bundle = load_bundle(source)
    # Weights that were rounded once stay so.
    return source, bundle if bundle.dtype == "fp32" else dataclasses.replace(bundle, probe_dtype=bundle.dtype)


def export_bundle(source: Path, out: Path, *, dtype: str = "fp32") -> tuple[Path, float]:
    """Write a bundle from a run, a checkpoint or another bundle.

    Returns (the folder it came from, the largest difference in nats to the engine on the probe).

    Raises CheckpointError if nothing whole is found, the probe disagrees or `out` cannot be written.
    """
    folder, package = _read(source)
    return folder, write_bundle(out, package, dtype=dtype)


def export_to_huggingface(source: Path, out: Path, *, dtype: str = "fp32") -> Path:
    """Write a Hugging Face folder from a run, a checkpoint or a bundle; returns the folder it came from.

    Raises CheckpointError if nothing whole is found, `out` cannot be written, or the format cannot express the model.
    """
    folder, package = _read(source)
    export_huggingface(out, package, dtype=dtype)
    return folder


def export_to_onnx(source: Path, out: Path) -> float:
    """Write a folder that ONNX Runtime runs, from a run, a checkpoint or a bundle; returns the largest difference of a
    log-probability to its source, in nats. Raises as `export_onnx`, and CheckpointError if nothing whole is found."""
    return export_onnx(out, load(source).bundle)


def export_to_huggingface_code(source: Path, out: Path, *, dtype: str = "fp32") -> Written:
    """Write a Hugging Face folder with its own code, from a run, a checkpoint or a bundle. Raises as
    `export_huggingface_code`, and CheckpointError if nothing whole is found."""
    folder, package = _read(source)
    return export_huggingface_code(out, package.open(dtype, where=str(folder)))


def load(source: str | Path, *, device: str = "cpu") -> LanguageModel:
    """A bundle, or what a bundle in fp32 of a run's newest whole checkpoint, or of a checkpoint, would hold.

    Nothing is written. Raises CheckpointError if nothing whole is found, ConfigError for a path to something else and
    for a device that is not there.
    """
    source, device = path_of(source), check_device(device)
    if require(source, *TRAINED) is Kind.BUNDLE:
        return LanguageModel(load_bundle(source, device=device))
    trained = read_trained(source)
    return LanguageModel(trained.package.open(device=device, where=str(trained.folder)))
