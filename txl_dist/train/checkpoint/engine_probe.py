"""The probe of a checkpoint: the engine's losses on a few fixed tokens, saved together with the weights.

A run that resumes the checkpoint computes these losses again. The losses differ if the loaded weights are not the saved
weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from txl_dist.artifacts import PROBE, SETTINGS
from txl_dist.config.load import load_config
from txl_dist.data.loader.stream import Int64s, plain_segment
from txl_dist.data.loader.target_sampler import TargetBatch
from txl_dist.distributed.collectives import broadcast_object, gather_objects, run_on_all_ranks
from txl_dist.errors import CheckpointError, translate_errors
from txl_dist.inference.bundle import probe_tolerance
from txl_dist.inference.probe import PROBE_LEN, probe_order, probe_tokens
from txl_dist.model.memory import empty_memory
from txl_dist.model.transformer_xl import Batch
from txl_dist.train.batch import BatchMaker, to_device
from txl_dist.train.engine.protocol import Engine

AVERAGE_LOSSES = "average_losses"
"""Name of the tensor in the probe that contains the losses of the averaged weights."""


def make_probe(
    engine: Engine, maker: BatchMaker, *, memory_lens: Sequence[int], tokens: Tensor | None = None
) -> dict[str, Tensor]:
    """Make a probe: fixed tokens, and the engine's losses on them.

    Returns `tokens` [1, 2 * PROBE_LEN + 1] and `losses` [1, 2 * PROBE_LEN] in nats. `memory_lens` are the memory
    lengths of the layers, in tokens. If `tokens` are not given, `probe_tokens` chooses them. All ranks call this
    function together, because parameters may be sharded. Matrix products of fp32 weights are never computed in tf32, so
    that any device can reproduce the losses.
    """
    if tokens is None:
        tokens = probe_tokens(engine.model.vocab_size)
    model = engine.model
    memory = empty_memory(memory_lens, num_lanes=1, width=model.stored_width, like=model.embedding.weight(0))
    losses = []
    matmul_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for start in (0, PROBE_LEN):
            piece = tokens[:, start : start + PROBE_LEN + 1].numpy()
            if model.section.any_order:
                batch = _ordered_batch(piece, maker, with_types=model.section.segment_terms)
            else:
                batch = maker.batch(plain_segment(piece))
            nll_BT, memory = engine.losses(to_device(batch, memory.document_BM.device), memory)
            losses.append(nll_BT.cpu())
    finally:
        torch.set_float32_matmul_precision(matmul_precision)
    return {"tokens": tokens, "losses": torch.cat(losses, dim=1)}


def _ordered_batch(tokens: Int64s, maker: BatchMaker, *, with_types: bool) -> Batch:
    """Make the batch of a segment of the probe for a model that predicts in any order (XLNet).

    `tokens` are the segment's PROBE_LEN + 1 tokens. See `probe_order` for the order and for `with_types`.
    """
    order = probe_order(with_types=with_types)
    targets = TargetBatch(
        place_Bm=order.place_Bm.numpy(),
        is_drawn_Bm=np.ones(order.place_Bm.shape, dtype=bool),
        query_level_BT=order.query_level_BT.numpy(),
        key_level_BT=order.key_level_BT.numpy(),
        reuse_len=order.reuse_len,
    )
    # `ordered_batch` skips the token before a segment.
    batch = maker.ordered_batch(plain_segment(np.concatenate([tokens[:, :1], tokens], axis=1)), targets)
    return batch._replace(order=order)


def make_probes(
    engine: Engine, maker: BatchMaker, *, memory_lens: Sequence[int], with_average: bool
) -> dict[str, Tensor]:
    """Make the tensors of a checkpoint's probe: fixed tokens, and the engine's losses on these tokens.

    With `with_average` the probe also has the losses that the averaged weights give. `memory_lens` are the memory
    lengths of the layers, in tokens.
    """
    probe = make_probe(engine, maker, memory_lens=memory_lens)
    if with_average:
        engine.swap_averages()
        probe[AVERAGE_LOSSES] = make_probe(engine, maker, memory_lens=memory_lens)["losses"]
        engine.swap_averages()
    return probe


def check_probe(engine: Engine, maker: BatchMaker, folder: Path, *, precision: str) -> str:
    """Compare the engine's losses after a checkpoint was loaded with the losses that the checkpoint's probe contains.

    The check costs one pass over 64 tokens, with the memory length of the saved settings. All ranks call it together.
    Returns the outcome as text for the log. Raises CheckpointError on every rank if a loss differs by more than
    `probe_tolerance` allows for the precision of the saved run and of this run.
    """
    start_s = time.perf_counter()
    saved, config = run_on_all_ranks(
        lambda: (read_probe(folder, vocab_size=engine.model.vocab_size), load_config(folder / SETTINGS))
    )
    tokens, expected = broadcast_object((saved["tokens"], saved["losses"]))
    lens = config.train.memory_per_layer(config.model.num_layers)
    losses = make_probe(engine, maker, memory_lens=lens, tokens=tokens)["losses"]

    def compare() -> float:
        worst = float((losses.float() - expected.float()).abs().max())
        tolerance = probe_tolerance({precision, config.engine.dtype}, largest_loss=float(expected.max()))
        if not worst <= tolerance:
            raise CheckpointError(
                f"{folder} does not reproduce its probe: a loss on the probe's tokens differs by {worst:.3g} nats from "
                f"the saved loss. A difference of at most {tolerance:.3g} nats is allowed. Therefore the loaded "
                "weights are not the saved weights. Move the checkpoint to a folder outside the run. The same command "
                "then resumes from the previous checkpoint. If no checkpoint reproduces its probe, report a bug."
            )
        return worst

    worst = max(gather_objects(run_on_all_ranks(compare)))
    return (
        f"the weights reproduce the saved losses of the probe to {worst:.1e} nats. The check took "
        f"{time.perf_counter() - start_s:.2f} s"
    )


def read_probe(folder: Path, *, vocab_size: int) -> dict[str, Tensor]:
    """Return the tokens and losses of a checkpoint's probe. Raises CheckpointError if the checkpoint has no valid
    probe."""
    path = folder / PROBE
    damage = (OSError, RuntimeError, SafetensorError, KeyError)
    with translate_errors(CheckpointError, f"{path} cannot be read", "Use another checkpoint.", of=damage):
        probe = load_file(path)
        tokens = probe["tokens"]
        losses = probe["losses"]
        is_probe = tokens.shape == (1, 2 * PROBE_LEN + 1) and losses.shape == (1, 2 * PROBE_LEN)
        if is_probe and int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size:
            return probe
    raise CheckpointError(f"{path} contains no valid probe (fixed tokens and their losses). Use another checkpoint.")
