"""`checkpoint.every_minutes`: the clock of rank 0 decides, all ranks save at the same step, and the training is the
same."""

from __future__ import annotations

import functools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import tiny_corpus
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config
from txl_dist.artifacts import list_checkpoints, step_of
from txl_dist.distributed.collectives import RankInfo, barrier
from txl_dist.train import loop, start
from txl_dist.train.callbacks import Callback, StepEnd
from txl_dist.train.checkpoint.manager import CheckpointManager

pytestmark = pytest.mark.dist

STEP_S = 30.0


class Clock(Callback):
    """A step takes half a minute on rank 0. The clock of rank 1 is far ahead, and counts for nothing."""

    def __init__(self, rank: int) -> None:
        self.rank, self.now_s = rank, 1000.0

    def on_step_end(self, end: StepEnd) -> None:
        self.now_s += 1e6 if self.rank else STEP_S


def minutes_worker(ranks: RankInfo, folder: str, corpus: str, cases: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """The steps of all checkpoints that a run of 12 steps has at its end, by case; `stop` goes on from there to 20."""
    start.distributed_context = lambda **_: nullcontext(ranks)  # type: ignore[assignment]
    kept = {}
    for name, checkpoint in cases.items():
        for max_steps in (12, 20) if name == "continued" else (12,):
            clock = Clock(ranks.rank)
            loop.CheckpointManager = functools.partial(CheckpointManager, clock_s=lambda clock=clock: clock.now_s)  # type: ignore[misc]
            config = tiny_config(
                run={"dir": f"{folder}/{name}"},
                data={"path": corpus},
                train={"max_steps": max_steps},
                metrics={"log_every_steps": 1},
                optim={"schedule": "constant"},
                eval={"num_lanes": 2},
                checkpoint=checkpoint,
            )
            start.pretrain(config, callbacks=[clock])
            barrier()
        kept[name] = [step_of(path) for path in list_checkpoints(Path(folder, name))]
        barrier()
    return kept


def losses_of(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}


def test_all_ranks_save_when_the_clock_of_rank_0_says_so_and_every_other_rule_holds_too(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path)
    never = {"every_steps": 0, "keep_last": 20}
    cases: dict[str, dict[str, Any]] = {
        "never": never,
        "synchronous": never | {"every_minutes": 2.0, "asynchronous": False},
        "both": never | {"every_minutes": 2.0, "every_steps": 7},
        "kept": {"every_steps": 0, "every_minutes": 1.0, "keep_last": 1, "keep_every": 6},
        "less than a step": never | {"every_minutes": 0.001},
        "continued": never | {"every_minutes": 2.0},
    }
    ranks = run_ranks(minutes_worker, str(tmp_path), corpus.location, cases, world_size=2, folder=tmp_path / "ranks")
    assert ranks[0] == ranks[1]
    assert ranks[0] == {
        "never": [12],
        "synchronous": [5, 10, 12],
        "both": [5, 7, 12],
        "kept": [6, 12],
        "less than a step": [2, 4, 6, 8, 10, 12],  # the step that saves begins the minutes at its end
        # Two minutes are over after step 4, the ranks agree in step 5, and from its end they count again.
        "continued": [5, 10, 12, 17, 20],
    }
    for name in cases:
        losses = losses_of(tmp_path / name)
        assert {step: losses[step] for step in range(1, 13)} == losses_of(tmp_path / "never")
