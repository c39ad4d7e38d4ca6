"""`txl export`: write a committed checkpoint or a bundle as a bundle, a Hugging Face folder or ONNX graphs.

The run can be in progress or finished. The training engine recorded a probe in the checkpoint: some tokens and their
losses. The export computes the losses again from the exported weights, and compares them with the recorded losses.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import torch

from txl_dist.artifacts import SETTINGS, TRAINED, ArtifactKind, detect_artifact, list_checkpoints, require
from txl_dist.config.load import Config, load_config
from txl_dist.config.registry import plugin_changes
from txl_dist.console.logging import logger
from txl_dist.convert.huggingface import export_huggingface
from txl_dist.convert.huggingface_export import Written, export_huggingface_code
from txl_dist.convert.onnx_graphs import export_onnx
from txl_dist.convert.training_metadata import card_of_checkpoint
from txl_dist.convert.xlnet import export_xlnet
from txl_dist.errors import CheckpointError, ConfigError, TxlError
from txl_dist.inference.bundle import WEIGHTS, Bundle, Package, check_device, load_bundle, read_bundle, write_bundle
from txl_dist.inference.card import Sample, Stated
from txl_dist.inference.language_model import LanguageModel
from txl_dist.inference.options import InferencePrecision
from txl_dist.io.hub import local_model
from txl_dist.tokenizers.tokenizer import load_tokenizer
from txl_dist.train.checkpoint.engine_probe import AVERAGE_LOSSES, read_probe
from txl_dist.train.checkpoint.read import consolidated_weights, keep_while_reading, scores_first_tokens
from txl_dist.train.checkpoint.validate import checkpoint_problems, read_state
from txl_dist.train.engine.precision import slow_bf16_warning

T = TypeVar("T")
NOTHING_STATED = Stated()
"""Default of the argument `stated` of an export: the user states no facts for the model card."""
MOST_SAMPLED = 16_000_000
"""Largest number of parameters for which an export generates a sample of text for the model card, if training recorded
no sample. An export never has the weights of a larger model in memory as a whole."""
SAMPLE_SETTINGS: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 1}
"""Arguments of `LanguageModel.generate` for the sample of text in the model card."""


class Trained(NamedTuple):
    """Checkpoint that was read: its folder, its settings, and a package with its weights and tokenizer."""

    folder: Path
    config: Config
    package: Package


class Exported(NamedTuple):
    """Result of an export to a bundle."""

    source: Path
    """Folder of the checkpoint or bundle that was exported."""
    error: float
    """Largest difference between the source's losses and the bundle's losses on the probe, in nats."""
    num_bytes: int
    """Size of the bundle's weights file in bytes."""
    share: float
    """Size of the weights file divided by the size that the weights have in fp32."""


def read_trained(run: Path) -> Trained:
    """Read a run's newest undamaged checkpoint, or a checkpoint folder, with all weights in memory.

    Raises CheckpointError if there is no undamaged checkpoint.
    """
    return use_trained(run, _in_memory)


def use_trained(run: Path, use: Callable[[Trained], T], *, use_ema: bool = False) -> T:
    """Call `use` with a run's newest undamaged checkpoint, or with a checkpoint folder, and return the result of `use`.

    The function `use` gets the checkpoint's content, and can read a few rows of the weights at a time. With `use_ema`
    the weights are the moving averages. If the run is still training, it does not delete the
    checkpoint before `use` has returned. Checkpoints that the run has already pruned are ignored.

    Raises CheckpointError if there is no undamaged checkpoint.
    """
    if detect_artifact(run) is ArtifactKind.CHECKPOINT:
        with keep_while_reading(run):
            problems = checkpoint_problems(run)
            if problems:
                raise CheckpointError(
                    f"{run} is damaged: {'; '.join(problems[:5])}. Use another checkpoint of the run."
                )
            trained = _read_checkpoint(run, name=run.name, use_ema=use_ema)
            return use(trained)
    looked_at: list[Path] | None = None
    rejected: list[str] = []
    # Looked at again if the run has added or pruned checkpoints meanwhile.
    while (checkpoints := list_checkpoints(run)) != looked_at:
        looked_at = checkpoints
        rejected = []
        for folder in reversed(checkpoints):
            with keep_while_reading(folder):
                try:
                    problems = checkpoint_problems(folder)
                    if not problems:
                        trained = _read_checkpoint(folder, name=run.name, use_ema=use_ema)
                        result = use(trained)
                        for reason in rejected:
                            logger.warning("skipped a damaged checkpoint, %s", reason)
                        return result
                except (TxlError, OSError):
                    # Only the pruning of the checkpoint excuses an error.
                    if os.path.lexists(folder):
                        raise
                if os.path.lexists(folder):
                    rejected.append(f"{folder.name}: {'; '.join(problems[:3])}")
    if rejected:
        why = f" ({'; '.join(rejected[:3])})"
    else:
        why = ""
    raise CheckpointError(f"{run} has no undamaged checkpoint{why}. Train the run, or name a checkpoint folder.")


def _in_memory(trained: Trained) -> Trained:
    """Read all weights of a checkpoint into memory."""
    weights = {name: rows[:] for name, rows in trained.package.weights.items()}
    package = dataclasses.replace(trained.package, weights=weights)
    return trained._replace(package=package)


def _read_checkpoint(folder: Path, *, name: str, use_ema: bool) -> Trained:
    """Read a checkpoint. `name` is the name of its run, which the bundle records as its source."""
    saved = read_state(folder)
    config = load_config(folder / SETTINGS)
    for change in plugin_changes(saved.values.get("plugins", ()), where=folder.name):
        logger.warning(change)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    precision = config.engine.dtype
    probe = read_probe(folder, vocab_size=tokenizer.vocab_size)
    weights = consolidated_weights(folder, use_ema=use_ema)  # raises if the checkpoint has no average
    losses = probe[AVERAGE_LOSSES] if use_ema else probe["losses"]
    source: dict[str, Any] = {"run": name, "step": saved.step, "precision": precision}
    if use_ema:
        source["average"] = True
    package = Package(
        section=config.model,
        weights=weights,
        tokenizer=tokenizer,
        segment_len=config.train.segment_len,
        target_lengths=config.train.target_lengths,
        memory_len=config.train.memory_len,
        memory_lens=config.train.memory_lens,
        document_mask=config.data.document_mask,
        begins_documents=scores_first_tokens(config, saved),
        source=source,
        probe={"tokens": probe["tokens"], "losses": losses},
        probe_dtype=precision,
    )
    return Trained(folder, config, package)


def _read(source: Path, stated: Stated) -> tuple[Path, Package]:
    """Return (folder with the weights, package with a model card) for a run, a checkpoint or a bundle."""
    if detect_artifact(source) is not ArtifactKind.BUNDLE:
        trained = read_trained(source)
        return trained.folder, _with_card(trained, stated)
    bundle = load_bundle(source)
    package = _rounded_once(bundle, bundle.dtype)
    card = bundle.card.with_stated(stated)
    return source, dataclasses.replace(package, card=card)


def _with_card(trained: Trained, stated: Stated) -> Package:
    """Return a checkpoint's package with a model card.

    The card has the metadata that the run recorded, and `stated`, the statements of the user.
    """
    package = trained.package
    saved = read_state(trained.folder)
    is_average = bool(package.source.get("average"))
    card = card_of_checkpoint(trained.folder, saved, trained.config, use_ema=is_average)
    card = card.with_stated(stated)
    if card.sample is None:
        sample = _sample(package, where=str(trained.folder))
        card = card.model_copy(update={"sample": sample})
    return dataclasses.replace(package, card=card)


def _sample(package: Package, *, where: str) -> Sample | None:
    """Generate a sample of text for the model card.

    Returns None for a large model, and for a model that cannot begin a document.
    """
    if _num_parameters(package) > MOST_SAMPLED:
        return None
    try:
        model = LanguageModel(package.open(where=where))
        generated = model.generate("", **SAMPLE_SETTINGS)
    except ConfigError:
        return None
    how = ", ".join(f"{name} {value}" for name, value in SAMPLE_SETTINGS.items())
    return Sample(prompt="", text=generated.text, how=f"drawn at export with {how}")


def _num_parameters(package: Package) -> int:
    """Count the parameters (single numbers) in a package's weights."""
    return sum(weight.shape.numel() for weight in package.weights.values())


def _rounded_once(package: Package, dtype: str) -> Package:
    """Return a bundle's package whose probe is marked as computed in the number type `dtype`.

    The bundle's weights are already rounded to `dtype`. So the next export must compare the losses of the probe with
    the tolerance of `dtype`, which is larger than the tolerance of fp32.
    """
    if dtype == "fp32":
        return package
    return dataclasses.replace(package, probe_dtype=dtype)


def export_bundle(
    source: Path, out: Path, *, dtype: str = "fp32", use_ema: bool = False, stated: Stated = NOTHING_STATED
) -> Exported:
    """Write a bundle (a folder with all that inference needs) from a run, a checkpoint or another bundle.

    The weights are read and written a few MiB at a time. With `use_ema` the bundle gets the moving averages of the
    weights, if the run kept them. `stated` holds statements of the user for the model card.

    Raises CheckpointError if no undamaged source is found, if the losses of the probe differ too much, or if `out`
    cannot be written.
    """

    def write(folder: Path, package: Package) -> Exported:
        num_bytes_in_fp32 = 4 * _num_parameters(package)
        error = write_bundle(out, package, dtype=dtype)
        num_bytes = (out / WEIGHTS).stat().st_size
        return Exported(folder, error, num_bytes, share=num_bytes / num_bytes_in_fp32)

    def write_trained(trained: Trained) -> Exported:
        return write(trained.folder, _with_card(trained, stated))

    if detect_artifact(source) is not ArtifactKind.BUNDLE:
        return use_trained(source, write_trained, use_ema=use_ema)
    package, stored_dtype = read_bundle(source)
    package.proven(stored_dtype, where=str(source))
    card = package.card.with_stated(stated)
    described = dataclasses.replace(package, card=card)
    return write(source, _rounded_once(described, stored_dtype))


def export_to_huggingface(source: Path, out: Path, *, dtype: str = "fp32", stated: Stated = NOTHING_STATED) -> Path:
    """Write a folder for Hugging Face's own TransfoXL from a run, a checkpoint or a bundle.

    Returns the folder of the weights that were exported. `dtype` is the type of the written weights. `stated` holds
    statements of the user for the model card.

    Raises CheckpointError if no undamaged source is found, if `out` cannot be written, or if the format cannot express
    the model.
    """
    folder, package = _read(source, stated)
    _check_alike(package)
    export_huggingface(out, package, dtype=dtype)
    return folder


def export_to_xlnet(source: Path, out: Path, *, dtype: str = "fp32", stated: Stated = NOTHING_STATED) -> Path:
    """Write a folder for Hugging Face's XLNet from a run, a checkpoint or a bundle.

    Returns the folder of the weights that were exported. Raises the errors of `export_xlnet`, and CheckpointError if no
    undamaged source is found.
    """
    folder, package = _read(source, stated)
    _check_alike(package)
    export_xlnet(out, package, dtype=dtype)
    return folder


def export_to_onnx(source: Path, out: Path, *, stated: Stated = NOTHING_STATED) -> float:
    """Write a folder that ONNX Runtime runs, from a run, a checkpoint or a bundle.

    Returns the largest difference between the graphs' and the source's log-probabilities, in nats. Raises the errors of
    `export_onnx`, and CheckpointError if no undamaged source is found.
    """
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
    """Write a Hugging Face folder that includes the model's code, from a run, a checkpoint or a bundle.

    transformers loads it with `trust_remote_code=True`. Raises the errors of `export_huggingface_code`, and
    CheckpointError if no undamaged source is found.
    """
    folder, package = _read(source, stated)
    _check_alike(package)
    bundle = package.open(dtype, where=str(folder))
    return export_huggingface_code(out, bundle)


def _check_alike(package: Package) -> None:
    """Raise ConfigError if the layers have memories of different lengths. Only bundles can express such models."""
    if len(set(package.memory_lens)) > 1:
        raise ConfigError(
            f"a model with a different memory length per layer (train.memory_lens={list(package.memory_lens)}) can be "
            "exported only to a bundle. Export a bundle, or continue the training with an empty train.memory_lens."
        )


def load(source: str | Path, *, device: str = "cpu", precision: InferencePrecision = "stored") -> LanguageModel:
    """Open a trained model: a bundle, a checkpoint, or a run's newest complete checkpoint.

    A checkpoint is opened as if `txl export` had written it as a bundle in fp32. A string can be the address of a
    bundle on the Hugging Face Hub, hf://OWNER/NAME[@REVISION]. That bundle is downloaded.

    `precision` is the number type in which the model computes: stored (the type of the bundle's weights), fp32 or bf16.
    A warning is logged if the device is slow in bf16.

    Raises CheckpointError if no complete checkpoint is found. Raises ConfigError if `source` is neither a bundle,
    a checkpoint nor a run, or if the device or the precision does not exist.
    """
    if precision not in get_args(InferencePrecision):
        raise ConfigError(f"precision={precision!r:.200}: it must be {', '.join(get_args(InferencePrecision))}.")
    path = local_model(source)
    device = check_device(device)
    if require(path, *TRAINED) is ArtifactKind.BUNDLE:
        bundle = load_bundle(path, device=device).in_precision(precision, device=device, where=str(path))
    else:
        dtype = "fp32" if precision == "stored" else precision

        def open_trained(trained: Trained) -> Bundle:
            return trained.package.open(dtype, device=device, where=str(trained.folder))

        bundle = use_trained(path, open_trained)
    slow = slow_bf16_warning(bundle.dtype, torch.device(device))
    if slow:
        logger.warning(slow)
    return LanguageModel(bundle)
