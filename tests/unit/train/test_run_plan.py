"""The plan of a run: its phases, and what all of them share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.corpora import random_texts, tiny_corpus
from tests.helpers.tiny import tiny_config
from txl_dist.config.load import Config, load_config
from txl_dist.data.loader import corpora as corpora_module
from txl_dist.distributed.collectives import RankInfo
from txl_dist.errors import ConfigError
from txl_dist.model.flops import count_parameters
from txl_dist.planning import dry_run
from txl_dist.train import run_plan
from txl_dist.train.footprint.rank import bytes_per_rank
from txl_dist.train.run_plan import RunPlan, plan_run

RANK = RankInfo(0, 1, 0, torch.device("cpu"), num_threads=1)
PHASES = {"max_steps": 10, "phases": ["until=0.4 num_lanes=8 segment_len=4 memory_len=6"]}


def planned(folder: Path, **sections: Any) -> RunPlan:
    tiny_corpus(folder)
    train = {"num_lanes": 4, "segment_len": 8, "microbatch_lanes": 2} | sections.pop("train", {})
    return plan_run(tiny_config(data={"path": str(folder / "corpus")}, train=train, **sections), RANK)


def test_each_stage_has_its_own_lanes_and_all_share_what_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    open_corpus = corpora_module.open_corpus

    def open_and_note(location: str, *settings: Any) -> Any:
        opened.append(location)
        return open_corpus(location, *settings)

    monkeypatch.setattr(corpora_module, "open_corpus", open_and_note)
    plan = planned(tmp_path, train=PHASES)
    first, second = (stage.context for stage in plan.stages)
    assert (first.steps, second.steps) == (range(4), range(4, 10))
    assert (first.lanes, second.lanes) == (range(8), range(4))
    assert [context.corpora.begin.num_lanes for context in (first, second)] == [8, 4]
    assert len(opened) == 1
    assert first.corpora.train == second.corpora.train
    assert first.saved_settings is second.saved_settings is plan.saved_settings


def test_a_phase_whose_weights_leave_a_corpus_without_a_lane_is_refused_with_its_steps(tmp_path: Path) -> None:
    first = tiny_corpus(tmp_path, name="first")
    tokenizer = first.folder / "tokenizer.json"
    texts = random_texts(count=30, seed=1)
    second = tiny_corpus(tmp_path, name="second", texts=texts, kind="auto", tokenizer_path=tokenizer)
    data = {"path": first.location, "more_paths": (second.location,), "weights": (1.0, 1.0)}
    train = {"num_lanes": 4, "segment_len": 8, "microbatch_lanes": 2, "max_steps": 10}
    config = tiny_config(data=data, train=train | {"phases": ["until=0.5", "until=0.8 weights=9,1"]})
    with pytest.raises(ConfigError, match=r"train\.phases, steps 6 to 8: corpus .*second gets none of the 4 lanes"):
        plan_run(config, RANK)
    weighted = plan_run(tiny_config(data=data, train=train | {"phases": ["until=0.5 weights=3,1"]}), RANK)
    lanes = [[one.num_lanes for one in stage.context.corpora.begin.corpora] for stage in weighted.stages]
    assert lanes == [[3, 1], [2, 2]]


def test_the_stage_of_a_step_is_the_one_that_makes_the_next_step(tmp_path: Path) -> None:
    plan = planned(tmp_path, train=PHASES)
    assert [plan.stages.index(plan.stage_at(step)) for step in (0, 3, 4, 9, 10, 99)] == [0, 0, 1, 1, 1, 1]


def test_the_saved_settings_are_those_of_the_whole_run_in_every_form(tmp_path: Path) -> None:
    plan = planned(tmp_path, train=PHASES)
    (tmp_path / "config.toml").write_text(plan.saved_settings.toml, encoding="utf-8")
    assert load_config(tmp_path / "config.toml") == plan.saved_settings.config
    assert plan.stages[0].context.config != plan.saved_settings.config


def test_a_vocabulary_that_does_not_fit_is_refused_before_a_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise AssertionError("a model was built")

    monkeypatch.setattr(run_plan, "count_parameters", fail)
    with pytest.raises(ConfigError, match=r"model\.cutoffs=\[50, 999999\] must be below the vocabulary size"):
        planned(tmp_path, model={"cutoffs": [50, 999_999]})


def test_scores_are_kept_only_if_triton_kernels_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "gpu_room", lambda device: 1e12)
    kept = []
    for runs in (True, False):
        monkeypatch.setattr(run_plan, "runs_triton", lambda device, runs=runs: runs)
        kept.append(planned(tmp_path).stages[0].context.config.engine.keep_scores)
    assert kept == ["on", "auto"]  # the engine keeps scores only if the setting is "on"


def test_a_dry_run_counts_the_memory_of_a_gpu_that_runs_no_triton_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = planned(tmp_path, engine={"precision": "bf16"}).stages[0].context
    context = dataclasses.replace(context, ranks=dataclasses.replace(RANK, device=torch.device("cuda")))
    monkeypatch.setattr(dry_run, "room_bytes", lambda device: 2.0**33)
    for runs in (True, False):
        monkeypatch.setattr(dry_run, "runs_triton", lambda device, runs=runs: runs)
        needed = bytes_per_rank(
            context.config, plan=context.plan, vocab_size=context.vocab_size, on_gpu=True, runs_triton=runs
        )
        (line,) = (line for line in dry_run.describe_cost(context) if "memory per rank" in line)
        assert f" {sum(needed.values()) / 2**20:,.1f} MiB " in line


def test_the_number_of_parameters_is_that_of_the_model(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    config: Config = plan.saved_settings.config
    assert plan.num_parameters == count_parameters(config.model, vocab_size=plan.stages[0].context.vocab_size)


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [({}, (8, 12)), ({"segment_len": 5, "memory_len": 0}, (5, 0)), ({"memory_len": 3}, (8, 3))],
)
def test_an_evaluation_has_the_lengths_of_training_unless_the_settings_name_others(
    tmp_path: Path, evaluation: dict[str, int], expected: tuple[int, int]
) -> None:
    plan = planned(tmp_path, train={"memory_len": 12}, eval=evaluation)
    lengths = plan.stages[0].context.evaluation
    assert (lengths.segment_len, lengths.memory_len) == expected
