"""From a committed checkpoint to an inference bundle, offline and proven by the engine's own probe; and from either, or
from a bundle, to a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from txl_dist.artifacts import SETTINGS, TRAINED, ArtifactKind, detect_artifact, list_checkpoints, require
from txl_dist.config.load import Config, load_config
from txl_dist.config.registry import plugin_changes
from txl_dist.console.logging import logger
from txl_dist.convert.huggingface import export_huggingface
from txl_dist.convert.huggingface_export import Written, export_huggingface_code
from txl_dist.convert.onnx_graphs import export_onnx
from txl_dist.convert.training_metadata import card_of_checkpoint
from txl_dist.errors import CheckpointError, ConfigError, TxlError
from txl_dist.inference.bundle import WEIGHTS, Bundle, Package, check_device, load_bundle, read_bundle, write_bundle
from txl_dist.inference.card import Sample, Stated
from txl_dist.inference.language_model import LanguageModel
from txl_dist.io.hub import local_model
from txl_dist.tokenizers.tokenizer import load_tokenizer
from txl_dist.train.checkpoint.engine_probe import AVERAGE_LOSSES, read_probe
from txl_dist.train.checkpoint.read import consolidated_weights, keep_while_reading, scores_first_tokens
from txl_dist.train.checkpoint.validate import checkpoint_problems, read_state

T = TypeVar("T")
NOTHING_STATED = Stated()
MOST_SAMPLED = 16_000_000
"""Parameters of the largest model that writes a sample for its card at export, if its training wrote none. A larger one
is never held in memory whole."""
SAMPLE_SETTINGS: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 1}


class Trained(NamedTuple):
    """A checkpoint that was read."""

    folder: Path
    config: Config
    package: Package


class Exported(NamedTuple):
    """Result of an export."""

    source: Path
    """Folder that was exported."""
    error: float
    """Largest difference to the source on the probe, in nats."""
    num_bytes: int
    """Size in bytes of the file of weights."""
    share: float
    """The same, as a share of the weights in fp32."""


def read_trained(run: Path) -> Trained:
    """Return the checkpoint that `use_trained` finds, with all weights in memory."""
    return use_trained(run, _in_memory)


def use_trained(run: Path, use: Callable[[Trained], T], *, use_ema: bool = False) -> T:
    """Return the result of `use` for a run's newest whole checkpoint, or for a checkpoint folder.

    `use` may read the weights, or their averages with `use_ema`, piece by piece. Raises CheckpointError. The run may
    still be training: the checkpoint is kept from being pruned while it is used. A checkpoint that was pruned before is
    not a candidate.
    """
    if detect_artifact(run) is ArtifactKind.CHECKPOINT:
        with keep_while_reading(run):
            if problems := checkpoint_problems(run):
                raise CheckpointError(
                    f"{run} is damaged: {'; '.join(problems[:5])}. Use another checkpoint of the run."
                )
            return use(_read_checkpoint(run, name=run.name, use_ema=use_ema))
    looked_at: list[Path] | None = None
    rejected: list[str] = []
    while (listed := list_checkpoints(run)) != looked_at:
        looked_at = listed
        rejected = []
        for folder in reversed(listed):
            with keep_while_reading(folder):
                try:
                    if not (problems := checkpoint_problems(folder)):
                        used = use(_read_checkpoint(folder, name=run.name, use_ema=use_ema))
                        for reason in rejected:
                            logger.warning("skipped a damaged checkpoint, %s", reason)
                        return used
                except (TxlError, OSError):
                    if os.path.lexists(folder):
                        raise
                if os.path.lexists(folder):
                    rejected.append(f"{folder.name}: {'; '.join(problems[:3])}")
    if rejected:
        why = f" ({'; '.join(rejected[:3])})"
    else:
        why = ""
    raise CheckpointError(f"{run} has no whole checkpoint{why}. Train it, or name a checkpoint folder.")


def _in_memory(trained: Trained) -> Trained:
    weights = {name: rows[:] for name, rows in trained.package.weights.items()}
    return trained._replace(package=dataclasses.replace(trained.package, weights=weights))


def _read_checkpoint(folder: Path, *, name: str, use_ema: bool) -> Trained:
    """`name` says of which run it is, for those who get the model."""
    saved = read_state(folder)
    config = load_config(folder / SETTINGS)
    for change in plugin_changes(saved.values.get("plugins", ()), where=folder.name):
        logger.warning(change)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    precision = config.engine.dtype
    probe = read_probe(folder, vocab_size=tokenizer.vocab_size)
    package = Package(
        section=config.model,
        weights=consolidated_weights(folder, use_ema=use_ema),
        tokenizer=tokenizer,
        segment_len=config.train.segment_len,
        memory_len=config.train.memory_len,
        memory_lens=config.train.memory_lens,
        document_mask=config.data.document_mask,
        begins_documents=scores_first_tokens(config, saved),
        source={"run": name, "step": saved.step, "precision": precision} | ({"average": True} if use_ema else {}),
        probe={"tokens": probe["tokens"], "losses": probe[AVERAGE_LOSSES if use_ema else "losses"]},
        probe_dtype=precision,
    )
    return Trained(folder, config, package)


def _read(source: Path, stated: Stated) -> tuple[Path, Package]:
    """(folder it comes from, model with its card) of a run, a checkpoint or a bundle."""
    if detect_artifact(source) is not ArtifactKind.BUNDLE:
        trained = read_trained(source)
        return trained.folder, _with_card(trained, stated)
    bundle = load_bundle(source)
    card = bundle.card.with_stated(stated)
    return source, dataclasses.replace(_rounded_once(bundle, bundle.dtype), card=card)


def _with_card(trained: Trained, stated: Stated) -> Package:
    """Return the package of a checkpoint with a card: what its run recorded and the user states."""
    package = trained.package
    saved = read_state(trained.folder)
    is_average = bool(package.source.get("average"))
    card = card_of_checkpoint(trained.folder, saved, trained.config, use_ema=is_average).with_stated(stated)
    if card.sample is None:
        card = card.model_copy(update={"sample": _sample(package, where=str(trained.folder))})
    return dataclasses.replace(package, card=card)


def _sample(package: Package, *, where: str) -> Sample | None:
    """Generate a sample for the card; None for a large model, and for a model that cannot begin a document."""
    if sum(weight.shape.numel() for weight in package.weights.values()) > MOST_SAMPLED:
        return None
    try:
        text = LanguageModel(package.open(where=where)).generate("", **SAMPLE_SETTINGS).text
    except ConfigError:
        return None
    how = ", ".join(f"{name} {value}" for name, value in SAMPLE_SETTINGS.items())
    return Sample(prompt="", text=text, how=f"drawn at export with {how}")


def _rounded_once(package: Package, dtype: str) -> Package:
    """Weights that were rounded stay so, whatever type they are written in then."""
    if dtype == "fp32":
        return package
    return dataclasses.replace(package, probe_dtype=dtype)


def export_bundle(
    source: Path, out: Path, *, dtype: str = "fp32", use_ema: bool = False, stated: Stated = NOTHING_STATED
) -> Exported:
    """Write a bundle from a run, a checkpoint or another bundle, some MiB of the weights at a time; by `use_ema` of the
    averages that a run or checkpoint has of its weights. Its card includes what is `stated`.

    Raises CheckpointError if nothing whole is found, the probe disagrees or `out` cannot be written.
    """

    def write(folder: Path, package: Package) -> Exported:
        values = sum(weight.shape.numel() for weight in package.weights.values())
        error = write_bundle(out, package, dtype=dtype)
        num_bytes = (out / WEIGHTS).stat().st_size
        return Exported(folder, error, num_bytes, num_bytes / (4 * values))

    if detect_artifact(source) is not ArtifactKind.BUNDLE:
        return use_trained(source, lambda trained: write(trained.folder, _with_card(trained, stated)), use_ema=use_ema)
    package, held = read_bundle(source)
    package.proven(held, where=str(source))
    described = dataclasses.replace(package, card=package.card.with_stated(stated))
    return write(source, _rounded_once(described, held))


def export_to_huggingface(source: Path, out: Path, *, dtype: str = "fp32", stated: Stated = NOTHING_STATED) -> Path:
    """Write a Hugging Face folder from a run, a checkpoint or a bundle; returns the folder it came from.

    Raises CheckpointError if nothing whole is found, `out` cannot be written, or the format cannot express the model.
    """
    folder, package = _read(source, stated)
    _check_alike(package)
    export_huggingface(out, package, dtype=dtype)
    return folder


def export_to_onnx(source: Path, out: Path, *, stated: Stated = NOTHING_STATED) -> float:
    """Write a folder that ONNX Runtime runs, from a run, a checkpoint or a bundle; returns the largest difference of a
    log-probability to its source, in nats. Raises as `export_onnx`, and CheckpointError if nothing whole is found."""
    folder, package = _read(source, stated)
    _check_alike(package)
    if isinstance(package, Bundle):
        bundle = package
    else:
        bundle = package.open(where=str(folder))
    return export_onnx(out, bundle)


def export_to_huggingface_code(
    source: Path, out: Path, *, dtype: str = "fp32", stated: Stated = NOTHING_STATED
) -> Written:
    """Write a Hugging Face folder with its own code, from a run, a checkpoint or a bundle. Raises as
    `export_huggingface_code`, and CheckpointError if nothing whole is found."""
    folder, package = _read(source, stated)
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
    """Open a trained model: a bundle, a checkpoint, or a run's newest complete checkpoint.

    A checkpoint is opened as the bundle in fp32 that `txl export` would write. A string may be the address of a bundle
    on the Hugging Face Hub, hf://OWNER/NAME[@REVISION], which is downloaded.

    Raises CheckpointError if no complete checkpoint is found, ConfigError for a path to something else and for a
    device that does not exist.
    """
    source = local_model(source)
    device = check_device(device)
    if require(source, *TRAINED) is ArtifactKind.BUNDLE:
        return LanguageModel(load_bundle(source, device=device))
    return LanguageModel(use_trained(source, lambda one: one.package.open(device=device, where=str(one.folder))))
