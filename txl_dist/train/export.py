"""From a committed checkpoint to an inference bundle, offline and proven by the engine's own probe; and from either, or
from a bundle, to a Hugging Face folder. The probe is made, and looked at again when a run goes on, here too."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from txl_dist.config import Config, load_config
from txl_dist.convert.huggingface import export_huggingface
from txl_dist.data.stream import plain_segment
from txl_dist.dist import from_first, gather_objects, together
from txl_dist.errors import CheckpointError, TxlError
from txl_dist.infer.bundle import Bundle, load, network_of, probe_tolerance, write_bundle
from txl_dist.infer.probe import PROBE_LEN, probe_tokens
from txl_dist.log import logger
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.run_files import Kind, kind_of, list_checkpoints
from txl_dist.sections import ModelSection
from txl_dist.text.tokenizer import Tokenizer, load_tokenizer
from txl_dist.train.batch import BatchMaker, to_device
from txl_dist.train.checkpoint import consolidated_weights, kept, scores_first_tokens
from txl_dist.train.engine import Engine
from txl_dist.train.soundness import checkpoint_problems, read_state


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


def make_probe(
    engine: Engine, maker: BatchMaker, *, memory_len: int, tokens: Tensor | None = None
) -> dict[str, Tensor]:
    """The engine's losses on tokens [1, 2 * PROBE_LEN + 1], by default the probe's. All ranks take part, since
    parameters may be sharded."""
    tokens = probe_tokens(engine.model.vocab_size) if tokens is None else tokens
    memory = engine.empty_memory(num_lanes=1, memory_len=memory_len)
    losses = []
    for start in (0, PROBE_LEN):
        piece = tokens[:, start : start + PROBE_LEN + 1].numpy()
        batch = maker.batch(plain_segment(piece))
        nll_BT, memory = engine.losses(to_device(batch, memory.document_BM.device), memory)
        losses.append(nll_BT.cpu())
    return {"tokens": tokens, "losses": torch.cat(losses, dim=1)}


def check_probe(engine: Engine, maker: BatchMaker, folder: Path, *, precision: str) -> str:
    """Hold what the engine has loaded from a checkpoint against the losses that were computed when it was saved: one
    pass over 64 tokens, of the memory length of then. All ranks call it. Returns what it showed, in words.

    Raises CheckpointError on every rank if the two differ by more than their precisions do: an export's tolerance.
    """
    start_s = time.perf_counter()
    saved, config = together(
        lambda: (
            _read_probe(folder, vocab_size=engine.model.vocab_size),
            load_config(folder / "config.toml"),
        )
    )
    tokens, expected = from_first((saved["tokens"], saved["losses"]))
    losses = make_probe(engine, maker, memory_len=config.train.memory_len, tokens=tokens)["losses"]

    def compare() -> float:
        worst = float((losses.float() - expected.float()).abs().max())
        tolerance = probe_tolerance({precision, config.engine.precision}, largest_loss=float(expected.max()))
        if not worst <= tolerance:
            raise CheckpointError(
                f"{folder} does not reproduce its probe: a loss differs by {worst:.3g} nats from the one that it was "
                f"saved with, more than {tolerance:.3g}. Its weights are another's. Move it away, and the same command "
                "goes on from the checkpoint before it; if none reproduces its probe, report it."
            )
        return worst

    worst = max(gather_objects(together(compare)))
    return f"its weights reproduce its probe to {worst:.1e} nats; this took {time.perf_counter() - start_s:.2f} s"


def _read_probe(folder: Path, *, vocab_size: int) -> dict[str, Tensor]:
    path = folder / "probe.safetensors"
    try:
        probe = load_file(path)
        tokens, losses = probe["tokens"], probe["losses"]
        is_probe = tokens.shape == (1, 2 * PROBE_LEN + 1) and losses.shape == (1, 2 * PROBE_LEN)
        if is_probe and int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size:
            return probe
    except (OSError, RuntimeError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Use another checkpoint.") from error
    raise CheckpointError(f"{path} holds no probe. Use another checkpoint.")


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
    state, config = read_state(folder), load_config(folder / "config.toml")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    return Trained(
        folder=folder,
        config=config,
        tokenizer=tokenizer,
        weights=consolidated_weights(folder),
        step=state["step"],
        probe=_read_probe(folder, vocab_size=tokenizer.vocab_size),
        begins_documents=scores_first_tokens(config, state),
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
