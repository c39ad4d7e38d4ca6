"""From a committed checkpoint to an inference bundle, offline and proven by the engine's own probe; and from either, or
from a bundle, to a Hugging Face folder."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from txl_dist.config import Config, load_config
from txl_dist.convert.huggingface import export_huggingface
from txl_dist.data.stream import plain_segment
from txl_dist.errors import CheckpointError
from txl_dist.infer.bundle import Bundle, is_bundle, load, network_of, write_bundle
from txl_dist.infer.probe import PROBE_LEN, probe_tokens
from txl_dist.log import logger
from txl_dist.manifest import check_folder
from txl_dist.sections import ModelSection
from txl_dist.text.tokenizer import Tokenizer, load_tokenizer
from txl_dist.train.batch import BatchMaker, to_device
from txl_dist.train.checkpoint import consolidated_weights, newest_checkpoint, read_state, scores_first_tokens
from txl_dist.train.engine import Engine


class Trained(NamedTuple):
    """What an export or an evaluation needs of a checkpoint."""

    folder: Path
    config: Config
    tokenizer: Tokenizer
    weights: dict[str, Tensor]
    step: int
    begins_documents: bool
    """See `Bundle`."""


def make_probe(engine: Engine, maker: BatchMaker, *, memory_len: int) -> dict[str, Tensor]:
    """The engine's losses on the probe's tokens. All ranks take part, since parameters may be sharded."""
    tokens = probe_tokens(engine.model.vocab_size)
    memory = engine.empty_memory(num_lanes=1, memory_len=memory_len)
    losses = []
    for start in (0, PROBE_LEN):
        piece = tokens[:, start : start + PROBE_LEN + 1].numpy()
        batch = maker.batch(plain_segment(piece))
        nll_BT, memory = engine.losses(to_device(batch, memory.document_BM.device), memory)
        losses.append(nll_BT.cpu())
    return {"tokens": tokens, "losses": torch.cat(losses, dim=1)}


def read_trained(run: Path) -> Trained:
    """Weights and settings of a run's newest whole checkpoint, or of a checkpoint folder. Raises CheckpointError."""
    if (run / "state.json").is_file():
        folder = run
        check_folder(folder, remedy="Use another checkpoint of the run.")
    else:
        newest, rejected = newest_checkpoint(run)
        for reason in rejected if newest is not None else []:
            logger.warning("passed over a damaged checkpoint, %s", reason)
        if newest is None:
            why = f" ({'; '.join(rejected)})" if rejected else ""
            raise CheckpointError(f"{run} has no whole checkpoint{why}. Train it, or name a checkpoint folder.")
        folder = newest
    return Trained(
        folder=folder,
        config=load_config(folder / "config.toml"),
        tokenizer=load_tokenizer(folder / "tokenizer.json"),
        weights=consolidated_weights(folder),
        step=read_state(folder)["step"],
        begins_documents=scores_first_tokens(load_config(folder / "config.toml"), read_state(folder)),
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
    network = network_of(
        found.model,
        vocab_size=found.tokenizer.vocab_size,
        weights=found.weights,
        dtype="fp32",
        where=str(found.folder),
    )
    export_huggingface(
        out,
        weights=dict(network.state_dict()),
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
    if is_bundle(source):
        return load(source)
    found = _read(source)
    network = network_of(
        found.model,
        vocab_size=found.tokenizer.vocab_size,
        weights=found.weights,
        dtype="fp32",
        where=str(found.folder),
    )
    same: dict[str, Any] = {field.name: getattr(found, field.name, None) for field in fields(Bundle)}
    return Bundle(**(same | {"model": network, "dtype": "fp32"}))


def _read(source: Path) -> Exportable:
    if is_bundle(source):
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
        probe=load_file(trained.folder / "probe.safetensors"),
        probe_dtype=precision,
        segment_len=train.segment_len,
        memory_len=train.memory_len,
        document_border=trained.config.data.document_border,
        begins_documents=trained.begins_documents,
        source={"run": source.name, "step": trained.step, "precision": precision},
    )
