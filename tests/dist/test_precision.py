"""engine.precision = "auto" on real ranks: all ranks get one word, and a run keeps it on another processor."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import txl_dist
from tests.helpers import forked
from tests.helpers.corpora import tiny_corpus
from tests.helpers.ranks import run_ranks
from txl_dist.artifacts import list_checkpoints
from txl_dist.config.load import load_config
from txl_dist.distributed.collectives import RankInfo
from txl_dist.distributed.rendezvous import free_port
from txl_dist.errors import TxlError
from txl_dist.train.engine import precision
from txl_dist.train.engine.precision import Bf16Support, ChosenPrecision

pytestmark = pytest.mark.dist


def pretend(*, has_bf16: bool) -> None:
    """In this process the processor has instructions for bf16, or has none."""
    if has_bf16:
        support = Bf16Support(True, "AMX, products 4.0 times as fast as in fp32")
    else:
        support = Bf16Support(False, "the processor has neither AMX nor AVX-512 BF16")
    precision.bf16_support = lambda device: support


def agree(ranks: RankInfo) -> list[ChosenPrecision]:
    """The choice if only rank 0 has bf16, then the choice if both ranks have it."""
    chosen = []
    for has_bf16 in (ranks.is_rank0, True):
        pretend(has_bf16=has_bf16)
        chosen.append(precision.agree_on_precision("auto", kept=None, device=torch.device("cpu")))
    return chosen


def test_ranks_agree_on_bf16_only_if_all_have_it(tmp_path: Path) -> None:
    first, second = run_ranks(agree, world_size=2, folder=tmp_path)
    assert first == second
    mixed, same = first
    assert (mixed.word, same.word) == ("fp32", "bf16")
    assert mixed.reason.startswith("1 of 2 ranks without fast bf16, the first is rank 1 (the processor has neither")


def fail(ranks: RankInfo) -> str:
    """The error of this rank if the question fails on rank 1."""

    def support(device: torch.device) -> Bf16Support:
        if not ranks.is_rank0:
            raise RuntimeError("no product")
        return Bf16Support(True, "AMX")

    precision.bf16_support = support
    with pytest.raises((RuntimeError, TxlError)) as caught:
        precision.agree_on_precision("auto", kept=None, device=torch.device("cpu"))
    return str(caught.value)


def test_a_question_that_fails_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    assert all("no product" in said for said in run_ranks(fail, world_size=2, folder=tmp_path))


def train(folder: Path, has_bf16: bool, max_steps: int) -> None:
    """A rank of a tiny run on a processor that has bf16, or has none."""
    pretend(has_bf16=has_bf16)
    config = {
        "run": {"dir": "run"},
        "data": {"path": "corpus"},
        "model": {"num_layers": 1, "width": 16, "num_heads": 1, "head_width": 16, "ff_width": 16},
        "train": {"num_lanes": 2, "microbatch_lanes": 1, "segment_len": 8, "memory_len": 8, "max_steps": max_steps},
        "engine": {"precision": "auto"},
        "metrics": {"tensorboard": False},
    }
    txl_dist.pretrain(config)
    os._exit(0)


def test_a_run_stores_its_precision_and_keeps_it_on_another_processor(tmp_path: Path) -> None:
    tiny_corpus(tmp_path)
    for has_bf16, max_steps in ((True, 2), (False, 4)):
        variables = forked.environment(**forked.place(0, 1, free_port()))
        process = forked.start(
            train, tmp_path, has_bf16, max_steps, variables=variables, cwd=tmp_path, out=tmp_path / "out.txt"
        )
        process.join(120)
        process.kill()
        assert process.exitcode == 0, (tmp_path / "out.txt").read_text(encoding="utf-8")[-3000:]
    checkpoints = list_checkpoints(tmp_path / "run")
    assert [path.name for path in checkpoints] == ["step_000000002", "step_000000004"]
    for folder in checkpoints:
        assert json.loads((folder / "state.json").read_text(encoding="utf-8"))["precision"] == "bf16"
        assert load_config(folder / "config.toml").engine.precision == "bf16"
    assert load_config(tmp_path / "run" / "config.toml").engine.precision == "bf16"
    before, after = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8").split("resume: from")
    assert "bf16 (auto: AMX, products 4.0 times as fast as in fp32)" in before
    assert "slower" not in before
    assert "bf16 (auto: the run's precision so far)" in after
    assert "engine.precision=bf16 is slower than fp32 here: the processor has neither AMX" in after
    assert "engine.precision changed" not in after
