"""From a committed checkpoint to an inference bundle, offline and proven by the engine's own probe."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from txl_dist.config import Config, load_config
from txl_dist.data.stream import Segment
from txl_dist.errors import CheckpointError
from txl_dist.infer.bundle import write_bundle
from txl_dist.infer.probe import PROBE_LEN, probe_tokens
from txl_dist.log import logger
from txl_dist.manifest import check_folder
from txl_dist.text.tokenizer import Tokenizer, load_tokenizer
from txl_dist.train.batch import BatchMaker, to_device
from txl_dist.train.checkpoint import consolidated_weights, newest_checkpoint, read_state
from txl_dist.train.engine import Engine


class Trained(NamedTuple):
    """What an export or an evaluation needs of a checkpoint."""

    folder: Path
    config: Config
    tokenizer: Tokenizer
    weights: dict[str, Tensor]
    step: int


def make_probe(engine: Engine, maker: BatchMaker, *, memory_len: int) -> dict[str, Tensor]:
    """The engine's losses on the probe's tokens. All ranks take part, since parameters may be sharded."""
    tokens = probe_tokens(engine.model.vocab_size)
    memory = engine.empty_memory(num_lanes=1, memory_len=memory_len)
    losses = []
    for start in (0, PROBE_LEN):
        piece = tokens[:, start : start + PROBE_LEN + 1].numpy()
        batch = maker.batch(Segment(tokens=piece, documents=piece * 0))
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
    )


def export_run(run: Path, out: Path, *, dtype: str = "fp32") -> tuple[Path, float]:
    """Write a bundle from a run or checkpoint.

    Returns (the checkpoint it came from, the largest difference in nats to the engine on the probe).

    Raises CheckpointError if nothing whole is found, the probe disagrees or `out` cannot be written.
    """
    trained = read_trained(run)
    error = write_bundle(
        out,
        weights=trained.weights,
        model=trained.config.model,
        tokenizer=trained.tokenizer,
        probe=load_file(trained.folder / "probe.safetensors"),
        dtype=dtype,
        probe_dtype=trained.config.engine.precision,
        segment_len=trained.config.train.segment_len,
        memory_len=trained.config.train.memory_len,
        document_border=trained.config.data.document_border,
        source={"run": run.name, "step": trained.step, "precision": trained.config.engine.precision},
    )
    return trained.folder, error
