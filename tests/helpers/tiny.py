"""Small configurations and batches that use every part: adaptive softmax, memory, several lanes."""

from typing import Any

import numpy as np
import torch

from txl_dist.config.load import Config, plan_batch
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo, all_reduce_sum
from txl_dist.model.memory import Memory
from txl_dist.rng import derive_seed
from txl_dist.train.batch import batch_maker, to_device
from txl_dist.train.engine.zero import ZeroEngine

VOCAB_SIZE = 300


def tiny_config(**sections: dict[str, Any]) -> Config:
    """Return settings with two layers and three clusters. Keyword arguments change sections."""
    values: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": 2,
            "width": 32,
            "num_heads": 2,
            "head_width": 16,
            "ff_width": 48,
            "cutoffs": [50, 150],
            "div_value": 2,
            "tie_projections": [False, True, True],
            "dropout": 0.0,
        },
        "optim": {"lr": 2e-3, "clip_norm": 0.5},
        "train": {"num_lanes": 4, "segment_len": 8, "memory_len": 12, "microbatch_lanes": 2, "max_steps": 20},
    }
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    return Config.model_validate(values)


def train_engine(
    ranks: RankInfo,
    config: Config,
    *,
    num_steps: int,
    rare_free: tuple[int, int] | None = None,
    evaluates: bool = False,
) -> Any:
    """Train an engine for some steps on a fixed stream of ids.

    `rare_free` = (step, rank): at this step the lanes of this rank have only frequent words, so that two of its
    clusters are empty. `evaluates` scores a batch after every step. Returns (global loss of each step, {lane: memory},
    loss of fixed tokens at the end).
    """
    plan = plan_batch(config.train, world_size=ranks.world_size)
    engine = ZeroEngine(config, vocab_size=VOCAB_SIZE, plan=plan, ranks=ranks)
    maker = batch_maker(engine.model, mask_documents=False)
    lanes = range(ranks.rank * plan.lanes_per_rank, (ranks.rank + 1) * plan.lanes_per_rank)
    train = config.train
    ids = np.random.default_rng(7).integers(0, VOCAB_SIZE, (train.num_lanes, num_steps * train.segment_len + 1))
    if rare_free is not None:
        step, rank = rare_free
        half = slice(rank * plan.lanes_per_rank, (rank + 1) * plan.lanes_per_rank)
        ids[half, step * train.segment_len : (step + 1) * train.segment_len + 1] %= 50
    memories = [
        engine.empty_memory(num_lanes=plan.microbatch_lanes, memory_len=train.memory_len)
        for _ in range(plan.num_microbatches)
    ]
    losses = []
    for step in range(num_steps):
        piece = ids[lanes.start : lanes.stop, step * train.segment_len : (step + 1) * train.segment_len + 1]
        total = torch.zeros(())
        batches = maker.microbatches(plain_segment(piece), lanes=plan.microbatch_lanes)
        for index, batch in enumerate(batches):
            torch.manual_seed(derive_seed(1, "dropout", step, lanes.start + index * plan.microbatch_lanes))
            loss, memories[index] = engine.forward(
                to_device(batch, ranks.device),
                memories[index],
                normalizer=float(plan.microbatch_lanes * train.segment_len),
            )
            engine.backward(loss)
            total += loss.detach().float().cpu() / plan.num_microbatches / ranks.world_size
        engine.step(lr=config.optim.lr, grad_norm=float(engine.grad_norm()))
        if evaluates:
            engine.losses(to_device(batch, ranks.device), memories[-1])
        losses.append(all_reduce_sum(total).item())
    held_out, _ = engine.losses(to_device(batch, ranks.device), memories[-1])
    return losses, _by_lane(memories, lanes), held_out.float().cpu().numpy()


def _by_lane(memories: list[Memory], lanes: range) -> dict[int, Any]:
    layers = [torch.cat(parts) for parts in zip(*(memory.hidden for memory in memories), strict=True)]
    hidden = torch.cat(layers, dim=1).float().cpu()
    return {lane: hidden[row].numpy() for row, lane in enumerate(lanes)}
