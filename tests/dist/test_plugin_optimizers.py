"""The optimizer of a plugin: its state survives a checkpoint, or the first step names the part that would be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config, train_engine
from txl_dist import plugins
from txl_dist.distributed.collectives import RankInfo
from txl_dist.errors import TrainingError

pytestmark = pytest.mark.dist


class Keeping(torch.optim.SGD):
    """SGD that counts its updates where `place` says, and keeps a moment of type `dtype`."""

    place, dtype = "tensor", torch.float32

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if self.place != "group" and "step" not in state:
                    state["step"] = 0 if self.place == "number" else torch.tensor(0.0)
                state.setdefault("moment", torch.zeros_like(parameter, dtype=self.dtype))
                state["moment"].add_(parameter.grad)
                parameter.add_(state["moment"], alpha=-group["lr"])
                if self.place != "group":
                    state["step"] += 1
            if self.place == "group":
                group["updates"] = group.get("updates", 0) + 1


class Counting(Keeping):
    place = "number"


class Grouping(Keeping):
    place = "group"


class Halving(Keeping):
    dtype = torch.bfloat16


def worker(ranks: RankInfo) -> dict[tuple[str, int], str]:
    """By optimizer and ZeRO stage: the error of a training of two steps; empty if there is none."""
    kinds = {"keeping": Keeping, "counting": Counting, "grouping": Grouping, "halving": Halving}
    kinds |= {"rmsprop": torch.optim.RMSprop, "nadam": torch.optim.NAdam}
    errors = {}
    for name, kind in kinds.items():
        plugins.register_optimizer(name, kind, settings=())
        for stage in (0, 1, 3):
            try:
                train_engine(ranks, tiny_config(optim={"name": name}, engine={"zero_stage": stage}), num_steps=2)
                errors[name, stage] = ""
            except TrainingError as error:
                errors[name, stage] = str(error)
    return errors


def test_state_that_a_checkpoint_would_lose_is_named_at_the_first_step(tmp_path: Path) -> None:
    lost = {
        "counting": "Counting keeps state['step'], which",
        "grouping": "Grouping keeps group['updates'], which",
        "halving": "Halving keeps state['moment'], which",
        "nadam": "NAdam keeps state['mu_product'], which",
    }
    for errors in run_ranks(worker, world_size=2, folder=tmp_path):
        assert len(errors) == 18
        for (name, stage), error in errors.items():
            assert lost.get(name, "") in error, (name, stage)
            assert bool(error) == (name in lost), (name, stage, error)
            assert "\n" not in error
