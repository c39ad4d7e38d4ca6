"""A run in phases equals, bit for bit, a run that a user resumes with other lengths."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.e2e.test_resume import assert_same_state, last_step, losses
from tests.helpers.job import Job
from tests.helpers.launch import train, txl
from txl_dist.artifacts import list_checkpoints, step_of
from txl_dist.config.load import load_config
from txl_dist.report.inspect_run import checkpoint_facts

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STAGES = ["until=0.4 num_lanes=32 segment_len=6 memory_len=10", "until=0.7 num_lanes=16 segment_len=12 memory_len=20"]
CONSTANT = ["--optim.schedule", "constant"]


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Weights, moments, memories and the probe's losses."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def stream_of(checkpoint: Path) -> object:
    return json.loads((checkpoint / "state.json").read_text())["stream"]


def test_it_is_bit_for_bit_the_run_that_is_resumed_by_hand(tmp_path: Path, config_file: Path) -> None:
    words = [str(config_file), *CONSTANT]
    train(*words, "--train.phases", *STAGES, "--run.dir", "staged", cwd=tmp_path, ranks=1)
    by_hand = [*words, "--run.dir", "by_hand"]
    lengths = "--train.num_lanes {} --train.segment_len {} --train.memory_len {} --train.microbatch_lanes {}"
    for end, sizes in ((12, (32, 6, 10, 8)), (21, (16, 12, 20, 4)), (30, (8, 24, 40, 2))):
        train(*by_hand, "--train.max_steps", str(end), *lengths.format(*sizes).split(), cwd=tmp_path, ranks=1)
    staged, resumed = tmp_path / "staged", tmp_path / "by_hand"
    assert losses(staged) == losses(resumed)
    assert sorted(losses(staged)) == list(range(1, 31))
    last, other = (list_checkpoints(run)[-1] for run in (staged, resumed))
    assert stream_of(last) == stream_of(other)
    ours, theirs = tensors_of(last), tensors_of(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    config = load_config(staged / "config.toml")
    assert config.train.phases == tuple(STAGES)
    assert (config.train.num_lanes, config.train.segment_len) == (8, 24), "the settings that were given are kept"
    assert (staged / "DONE").read_text() == "30\n"


BETWEEN = [  # the stages end at 12, 21 and 30
    ("kill:0:12:saved", 12),  # the first stage's last checkpoint is complete, its engine not yet closed
    ("kill:0:21:load", 21),  # the second stage's engine is closed, the third's built but empty
]
WITHIN = [("kill:0:18:boundary", 18), ("kill:0:27:boundary", 27)]


@pytest.mark.parametrize("kills", [BETWEEN, pytest.param(WITHIN, marks=pytest.mark.nightly)], ids=["between", "within"])
def test_killed_between_two_stages_and_within_later_ones_it_goes_on_bit_for_bit(
    tmp_path: Path, config_file: Path, kills: list[tuple[str, int]]
) -> None:
    words = [str(config_file), "--train.phases", *STAGES, "--train.memory_lens", "13", "40"]
    words += ["--checkpoint.every_steps", "4"]
    train(*words, "--run.dir", "whole", cwd=tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for fault, step in kills:
        with Job("train", *words, "--run.dir", "killed", log=tmp_path / "log", cwd=tmp_path, fault=fault) as job:
            job.wait_for(lambda job=job: bool(job.struck))  # type: ignore[misc]
            job.signal(signal.SIGKILL)
        assert last_step(killed) in (step - 1, step), fault
        assert not (killed / "DONE").exists()
    train(*words, "--run.dir", "killed", cwd=tmp_path)
    assert losses(killed) == losses(whole)
    assert sorted(losses(whole)) == list(range(1, 31))
    assert_same_state(list_checkpoints(killed)[-1], list_checkpoints(whole)[-1])


def test_asked_to_stop_in_a_stage_it_goes_on_there_on_one_rank(tmp_path: Path, config_file: Path) -> None:
    words = [str(config_file), "--train.phases", *STAGES, "--run.dir", "run"]
    with Job("train", *words, log=tmp_path / "log", cwd=tmp_path) as job:
        job.wait_for(lambda: last_step(tmp_path / "run") >= 14)
        job.signal(signal.SIGTERM)
        assert job.wait() == [75, 75]
    stopped_at = last_step(tmp_path / "run")
    assert 14 <= stopped_at < 30
    train(*words, cwd=tmp_path, ranks=1)
    assert sorted(losses(tmp_path / "run")) == list(range(1, 31))
    first, second = (
        txl("inspect", "run", "--step", str(step), "--json", f"{step}.json", cwd=tmp_path) for step in (3, 25)
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    lanes = (32, 16, 8)  # of the stages until 12, until 21, and of [train]
    for checkpoint in list_checkpoints(tmp_path / "run"):
        stage = checkpoint_facts(checkpoint)["phase"]
        number = 1 + sum(step_of(checkpoint) > end for end in (12, 21))
        assert (stage["number"], stage["of"], stage["num_lanes"]) == (number, 3, lanes[number - 1])


def test_stages_that_cannot_be_are_refused_before_anything_is_built(tmp_path: Path, config_file: Path) -> None:
    for stages, words in (
        (["until=0.5 num_lanes=16 segment_len=6"], "16 x 6 = 96 tokens"),
        (["until=0.5 memory_len=x"], "memory_len=x is not a whole number"),
    ):
        result = txl("train", str(config_file), "--train.phases", *stages, "--run.dir", "run", cwd=tmp_path)
        assert result.returncode == 2
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert not (tmp_path / "run").exists()
