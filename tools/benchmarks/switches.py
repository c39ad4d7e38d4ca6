"""Settings for improvements that were published after 2019, by name, and a step of the engine with them.

Each switch is one change of configs/quickstart.toml. `WHOLE` is the combination with which the ablation began.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tools.benchmarks.stepping import engine_step
from txl_dist.config.load import Config, changed, load_config, plan_batch
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo
from txl_dist.train.batch import batch_maker
from txl_dist.train.engine.zero import ZeroEngine

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
SWITCHES: dict[str, dict[str, Any]] = {
    "muon": {
        "optim.name": "muon",
        "optim.muon_momentum": 0.9,
    },  # the run is short, so the momentum is lower than the default
    "decay": {"optim.weight_decay": 0.1},
    "short_memory": {"train.memory_len": 32},
    "rms": {"model.norm": "rms"},
    "relu2": {"model.activation": "relu2"},
    "swiglu": {
        "model.activation": "swiglu",
        "model.ff_width": 344,
    },  # as many parameters as width 512 with two matrices
    "zero_init": {"model.zero_init": True},
    "query_key_norm": {"model.query_key_norm": True},
    "residual_scalars": {"model.residual_scalars": True},
    "value_residual": {"model.value_residual": True},
    "wsd": {"optim.schedule": "wsd", "optim.cooldown_fraction": 0.5},
    "ema": {"optim.ema_decay": 0.98, "eval.use_ema": True},
}
WHOLE = ("muon", "decay", "short_memory", "zero_init", "value_residual", "wsd")


def config_with(names: tuple[str, ...] = (), **more: Any) -> Config:
    """Return the quickstart's settings in fp32, on one rank in one micro-batch, with these switches. `more` has keys of
    the form section__key."""
    base = load_config(QUICKSTART)
    values: dict[str, Any] = {"engine.zero_stage": 0, "train.microbatch_lanes": base.train.num_lanes}
    values["engine.precision"] = "fp32"
    for name in names:
        values |= SWITCHES[name]
    return changed(base, values | {key.replace("__", "."): value for key, value in more.items()})


class EngineStep:
    """A training step from ids to the update of the weights."""

    def __init__(self, config: Config, ranks: RankInfo, *, vocab_size: int) -> None:
        plan, train = plan_batch(config.train, world_size=1), config.train
        self._engine = ZeroEngine(config, vocab_size=vocab_size, plan=plan, ranks=ranks)
        self._maker = batch_maker(self._engine.model, mask_documents=False).for_training(half_loss=train.half_loss)
        self._memory = self._engine.empty_memory(num_lanes=train.num_lanes, memory_len=train.memory_len)
        self._normalizer, self._lr = float(train.num_lanes * train.scored_len), config.optim.lr
        self.parameters = sum(int(np.prod(shape)) for shape in self._engine.shapes.values())

    def __call__(self, ids: np.ndarray) -> Tensor:
        """Make a step on ids [lanes, T + 1] and return its loss."""
        (batch,) = self._maker.microbatches(plain_segment(ids), lanes=len(ids))
        loss, self._memory, _ = engine_step(self._engine, batch, self._memory, normalizer=self._normalizer, lr=self._lr)
        return loss
