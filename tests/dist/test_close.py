"""`Engine.close` frees an engine's memory at every ZeRO stage, and a run closes the engine of each phase."""

from __future__ import annotations

import gc
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.corpora import tiny_corpus
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config, train_engine
from txl_dist.distributed.collectives import RankInfo, barrier
from txl_dist.errors import TrainingError
from txl_dist.train import start
from txl_dist.train.callbacks import StepEnd
from txl_dist.train.engine.zero import ZeroEngine

pytestmark = pytest.mark.dist

KINDS: list[dict[str, dict[str, Any]]] = [
    *({"engine": {"zero_stage": stage}} for stage in range(4)),
    {"engine": {"zero_stage": 1, "precision": "bf16"}, "optim": {"name": "muon"}},
]


def live_bytes() -> int:
    """Of all storages of tensors made since `gc.freeze` that Python can reach, each counted once."""
    gc.collect()
    sizes = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated objects of torch warn when they are looked at
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                storage = thing.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def settled_bytes(*, most: int = 0, wait_s: float = 5.0) -> int:
    """Return `live_bytes` once it is at most `most`, or after `wait_s`. A thread of gloo drops the tensors of a
    collective later."""
    end_s = time.monotonic() + wait_s
    while (num_bytes := live_bytes()) > most and time.monotonic() < end_s:
        time.sleep(0.05)
    return num_bytes


def phases_worker(ranks: RankInfo) -> list[list[tuple[int, int]]]:
    """By kind, for four engines in turn: bytes before and after the engine is closed, twice. Each of them is
    still referred to, as by the traceback of an error."""
    gc.freeze()  # what is imported is not looked at: a collection takes milliseconds
    kept: list[ZeroEngine] = []

    class Kept(ZeroEngine):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            kept.append(self)

    tiny.ZeroEngine = Kept  # type: ignore[misc]
    seen = []
    for sections in KINDS:
        phases: list[tuple[int, int]] = []
        for _ in range(4):
            train_engine(ranks, tiny_config(**sections), num_steps=2)
            before = settled_bytes(most=phases[0][0]) if phases else live_bytes()
            kept[-1].close()
            kept[-1].close()
            phases.append((before, settled_bytes()))
        seen.append(phases)
    return seen


def test_four_phases_need_no_more_memory_than_one_and_a_closed_engine_holds_none(tmp_path: Path) -> None:
    for seen in run_ranks(phases_worker, world_size=2, folder=tmp_path):
        for kind, phases in zip(KINDS, seen, strict=True):
            first, _ = phases[0]
            assert first > 4 * 20_000, "an engine has weights"
            for before, after in phases:
                assert before < 1.05 * first, (kind, phases)
                assert after < 0.05 * first, (kind, phases)


class Measuring:
    """A callback that keeps the live bytes at each step, and so the most of each phase."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_step_end(self, end: StepEnd) -> None:
        self.bytes.append(live_bytes())


def phased_worker(ranks: RankInfo, folder: str, corpus: str) -> dict[int, tuple[list[int], list[int]]]:
    """By ZeRO stage: live bytes at the two steps of a run of one phase, and at the eight of a run of four."""
    start.distributed_context = lambda **_: nullcontext(ranks)  # type: ignore[assignment]
    gc.collect()
    gc.freeze()
    seen = {}
    for zero_stage in (1, 2, 3):
        measured = []
        for num_phases in (1, 4):
            measuring = Measuring()
            stages = [f"until={number / num_phases} num_lanes=8 segment_len=4" for number in range(1, num_phases)]
            config = tiny_config(
                model={"num_layers": 3, "width": 256, "head_width": 128, "ff_width": 1024, "cutoffs": [10, 25]},
                run={"dir": f"{folder}/zero{zero_stage}-{num_phases}"},
                data={"path": corpus},
                train={"max_steps": 2 * num_phases, "num_lanes": 8, "segment_len": 4, "phases": stages},
                engine={"check_memory": False, "zero_stage": zero_stage},
                eval={"num_lanes": 2, "max_tokens": 64},
                checkpoint={"keep_last": 1},
            )
            start.pretrain(config, callbacks=[measuring])
            barrier()
            measured.append(measuring.bytes)
        seen[zero_stage] = (measured[0], measured[1])
    return seen


@pytest.mark.nightly
def test_the_fourth_phase_of_a_run_needs_as_much_memory_as_a_run_of_one_phase(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path)
    for seen in run_ranks(phased_worker, str(tmp_path), corpus.location, world_size=2, folder=tmp_path / "ranks"):
        for zero_stage, (alone, phased) in seen.items():
            assert max(alone) > 20e6, "an engine of several MB"
            assert len(phased) == 8
            assert max(phased[-2:]) < 1.05 * max(alone), (zero_stage, alone, phased)


def runs_worker(ranks: RankInfo, folder: str, corpus: str) -> dict[str, list[bool]]:
    """By what happens to a run: whether each of its engines is closed behind it."""
    start.distributed_context = lambda **_: nullcontext(ranks)  # type: ignore[assignment]
    closed: dict[str, list[bool]] = {}
    errors = {"all ranks know": TrainingError("stopped on purpose."), "unknown": ValueError("on purpose")}
    for name, error in {"four phases": None, **errors}.items():
        engines: list[ZeroEngine] = []

        class Noted(ZeroEngine):
            noted, raised = engines, error

            def __init__(self, *arguments: Any, **settings: Any) -> None:
                assert all(engine._is_closed for engine in self.noted), "the one before it is closed first"
                super().__init__(*arguments, **settings)
                self.noted.append(self)

            def step(self, *, lr: float, grad_norm: float) -> None:
                if self.raised is not None:
                    raise self.raised
                super().step(lr=lr, grad_norm=grad_norm)

        start.ZeroEngine = Noted  # type: ignore[misc]
        stages = [f"until={until} num_lanes=8 segment_len=4" for until in (0.25, 0.5, 0.75)]
        config = tiny_config(
            model={"cutoffs": [10, 25]},
            run={"dir": f"{folder}/{name}"},
            data={"path": corpus},
            train={"max_steps": 4, "phases": stages},
            engine={"check_memory": False},
            eval={"num_lanes": 2},
        )
        if error is None:
            assert start.pretrain(config).steps == 4
        else:
            with pytest.raises(type(error), match="on purpose"):
                start.pretrain(config)
        closed[name] = [engine._is_closed for engine in engines]
        barrier()
    return closed


def test_a_run_closes_its_engine_behind_each_phase_and_after_an_error(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path)
    for closed in run_ranks(runs_worker, str(tmp_path), corpus.location, world_size=1, folder=tmp_path / "ranks"):
        assert closed == {"four phases": [True] * 4, "all ranks know": [True], "unknown": [True]}
