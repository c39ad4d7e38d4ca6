"""From a committed checkpoint to an inference bundle, offline and proven by the engine's own probe; and from either, or
from a bundle, to a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from txl_dist.config import Config, load_config
from txl_dist.convert.huggingface import export_huggingface
from txl_dist.convert.huggingface_export import Written, export_huggingface_code
from txl_dist.convert.onnx_graphs import export_onnx
from txl_dist.errors import CheckpointError, ConfigError, TxlError
from txl_dist.files import path_of
from txl_dist.infer.bundle import WEIGHTS, Package, check_device, load_bundle, read_bundle, write_bundle
from txl_dist.infer.language_model import LanguageModel
from txl_dist.log import logger
from txl_dist.run_files import SETTINGS, TRAINED, Kind, kind_of, list_checkpoints, require
from txl_dist.text.tokenizer import load_tokenizer
from txl_dist.train.checkpoint.probe import AVERAGE_LOSSES, read_probe
from txl_dist.train.checkpoint.read import consolidated_weights, kept, scores_first_tokens
from txl_dist.train.checkpoint.soundness import checkpoint_problems, read_state

T = TypeVar("T")


class Trained(NamedTuple):
    """A checkpoint, read."""

    folder: Path
    config: Config
    package: Package


class Exported(NamedTuple):
    """What an export made."""

    source: Path
    """The folder that it came from."""
    error: float
    """Largest difference to the source on the probe, in nats."""
    num_bytes: int
    """Of the file of weights."""
    share: float
    """The same, as a share of the weights in fp32."""


def read_trained(run: Path) -> Trained:
    """`use_trained`, with all weights in memory."""
    return use_trained(run, _in_memory)


def use_trained(run: Path, use: Callable[[Trained], T], *, average: bool = False) -> T:
    """What `use` makes of a run's newest whole checkpoint, or of a checkpoint folder, whose weights, or their averages,
    it may read piece by piece. Raises CheckpointError.

    The run may be training: what is used is kept from being pruned, and what was pruned before that was no choice.
    """
    if kind_of(run) is Kind.CHECKPOINT:
        with kept(run):
            if problems := checkpoint_problems(run):
                raise CheckpointError(
                    f"{run} is damaged: {'; '.join(problems[:5])}. Use another checkpoint of the run."
                )
            return use(_read_checkpoint(run, name=run.name, average=average))
    looked_at: list[Path] | None = None
    rejected: list[str] = []
    while (listed := list_checkpoints(run)) != looked_at:
        looked_at, rejected = listed, []
        for folder in reversed(listed):
            with kept(folder):
                try:
                    if not (problems := checkpoint_problems(folder)):
                        used = use(_read_checkpoint(folder, name=run.name, average=average))
                        for reason in rejected:
                            logger.warning("passed over a damaged checkpoint, %s", reason)
                        return used
                except (TxlError, OSError):
                    if os.path.lexists(folder):
                        raise
                if os.path.lexists(folder):
                    rejected.append(f"{folder.name}: {'; '.join(problems[:3])}")
    why = f" ({'; '.join(rejected[:3])})" if rejected else ""
    raise CheckpointError(f"{run} has no whole checkpoint{why}. Train it, or name a checkpoint folder.")


def _in_memory(trained: Trained) -> Trained:
    weights = {name: rows[:] for name, rows in trained.package.weights.items()}
    return trained._replace(package=dataclasses.replace(trained.package, weights=weights))


def _read_checkpoint(folder: Path, *, name: str, average: bool) -> Trained:
    """`name` says of which run it is, for those who get the model."""
    saved, config = read_state(folder), load_config(folder / SETTINGS)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    precision, probe = config.engine.dtype, read_probe(folder, vocab_size=tokenizer.vocab_size)
    package = Package(
        section=config.model,
        weights=consolidated_weights(folder, average=average),
        tokenizer=tokenizer,
        segment_len=config.train.segment_len,
        memory_len=config.train.memory_len,
        memory_lens=config.train.memory_lens,
        document_border=config.data.document_border,
        begins_documents=scores_first_tokens(config, saved),
        source={"run": name, "step": saved.step, "precision": precision} | ({"average": True} if average else {}),
        probe={"tokens": probe["tokens"], "losses": probe[AVERAGE_LOSSES if average else "losses"]},
        probe_dtype=precision,
    )
    return Trained(folder, config, package)


def _read(source: Path) -> tuple[Path, Package]:
    """(folder it comes from, model) of a run, a checkpoint or a bundle."""
    if kind_of(source) is not Kind.BUNDLE:
        trained = read_trained(source)
        return trained.folder, trained.package
    bundle = load_bundle(source)
    return source, _rounded_once(bundle, bundle.dtype)


def _rounded_once(package: Package, dtype: str) -> Package:
    """Weights that were rounded stay so, whatever type they are written in then."""
    return package if dtype == "fp32" else dataclasses.replace(package, probe_dtype=dtype)


def export_bundle(source: Path, out: Path, *, dtype: str = "fp32", average: bool = False) -> Exported:
    """Write a bundle from a run, a checkpoint or another bundle, some MiB of the weights at a time; by `average` of the
    averages that a run or checkpoint has of its weights.

    Raises CheckpointError if nothing whole is found, the probe disagrees or `out` cannot be written.
    """

    def write(folder: Path, package: Package) -> Exported:
        values = sum(weight.shape.numel() for weight in package.weights.values())
        error = write_bundle(out, package, dtype=dtype)
        num_bytes = (out / WEIGHTS).stat().st_size
        return Exported(folder, error, num_bytes, num_bytes / (4 * values))

    if kind_of(source) is not Kind.BUNDLE:
        return use_trained(source, lambda trained: write(trained.folder, trained.package), average=average)
    package, held = read_bundle(source)
    package.proven(held, where=str(source))
    return write(source, _rounded_once(package, held))


def export_to_huggingface(source: Path, out: Path, *, dtype: str = "fp32") -> Path:
    """Write a Hugging Face folder from a run, a checkpoint or a bundle; returns the folder it came from.

    Raises CheckpointError if nothing whole is found, `out` cannot be written, or the format cannot express the model.
    """
    folder, package = _read(source)
    _check_alike(package)
    export_huggingface(out, package, dtype=dtype)
    return folder


def export_to_onnx(source: Path, out: Path) -> float:
    """Write a folder that ONNX Runtime runs, from a run, a checkpoint or a bundle; returns the largest difference of a
    log-probability to its source, in nats. Raises as `export_onnx`, and CheckpointError if nothing whole is found."""
    bundle = load(source).bundle
    _check_alike(bundle)
    return export_onnx(out, bundle)


def export_to_huggingface_code(source: Path, out: Path, *, dtype: str = "fp32") -> Written:
    """Write a Hugging Face folder with its own code, from a run, a checkpoint or a bundle. Raises as
    `export_huggingface_code`, and CheckpointError if nothing whole is found."""
    folder, package = _read(source)
    _check_alike(package)
    return export_huggingface_code(out, package.open(dtype, where=str(folder)))


def _check_alike(package: Package) -> None:
    """Raises ConfigError for layers that remember differently, which no format but ours can say."""
    if len(set(package.memory_lens)) > 1:
        raise ConfigError(
            f"layers with memories of their own (train.memory_lens={list(package.memory_lens)}) are known to bundles "
            "only. Export a bundle, or train on with memory_lens empty."
        )


def load(source: str | Path, *, device: str = "cpu") -> LanguageModel:
    """A bundle, or what a bundle in fp32 of a run's newest whole checkpoint, or of a checkpoint, would hold.

    Nothing is written. Raises CheckpointError if nothing whole is found, ConfigError for a path to something else and
    for a device that is not there.
    """
    source, device = path_of(source), check_device(device)
    if require(source, *TRAINED) is Kind.BUNDLE:
        return LanguageModel(load_bundle(source, device=device))
    return LanguageModel(use_trained(source, lambda one: one.package.open(device=device, where=str(one.folder))))
