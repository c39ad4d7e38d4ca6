"""A run that was killed and started again equals the uninterrupted run bit for bit."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.job import Job
from tests.helpers.launch import train
from txl_dist.artifacts import list_checkpoints
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.data.loader.stream import LaneStream
from txl_dist.data.loader.stream_state import StreamState

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def losses(run: Path) -> dict[int, float]:
    """The last loss recorded for each step; JSON keeps every bit of a float."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def last_step(run: Path) -> int:
    try:
        return max(losses(run), default=0)
    except (FileNotFoundError, ValueError):  # not there yet, or half a line
        return 0


def assert_same_state(ours: Path, theirs: Path) -> None:
    """Weights, moments, memories and position are bit for bit the same: the manifests say so of every file."""
    here, there = (json.loads((folder / "MANIFEST.json").read_text())["files"] for folder in (ours, theirs))
    assert here.keys() == there.keys()
    assert {name for name in here if here[name] != there[name]} <= {"config.toml"}, "that one names the run"


def consumed_ids(checkpoint: Path, corpus: Path) -> list[list[int]]:
    """The segment of all lanes that follows a checkpoint: equal streams have consumed equal ids."""
    state = StreamState.from_dict(json.loads((checkpoint / "state.json").read_text())["stream"])
    opened = open_corpus(corpus)
    stream = LaneStream([opened.split(state.corpora[0].split)], state, segment_len=24, lanes=range(8))
    (here,) = state.corpora
    states = [replace(state, corpora=(replace(here, position=at),)) for at in range(0, here.position + 1, 24)]
    segments = [stream.segment_at(state).tokens for state in states]
    return [segment.tolist() for segment in segments]


@pytest.mark.parametrize(
    "stage", [pytest.param(1, marks=pytest.mark.smoke), pytest.param(3, marks=pytest.mark.nightly)]
)
def test_a_killed_run_continues_bit_for_bit(tmp_path: Path, config_file: Path, corpus: Path, stage: int) -> None:
    words = [str(config_file), "--engine.zero_stage", str(stage)]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(*words, "--run.dir", str(whole), cwd=tmp_path)

    with Job("train", *words, "--run.dir", str(killed), log=tmp_path / "killed.log") as job:
        job.wait_for(lambda: last_step(killed) >= 17 and list_checkpoints(killed))
        job.signal(signal.SIGKILL)
    before = losses(killed)
    assert 17 <= max(before) < 30
    assert not (killed / "DONE").exists()
    assert [path.name for path in list_checkpoints(killed)] == ["step_000000015"]
    train(*words, "--run.dir", str(killed), cwd=tmp_path)

    assert losses(killed) == losses(whole)
    assert sorted(losses(whole)) == list(range(1, 31))
    ours, theirs = list_checkpoints(killed)[-1], list_checkpoints(whole)[-1]
    assert ours.name == theirs.name == "step_000000030"
    assert_same_state(ours, theirs)
    assert consumed_ids(ours, corpus) == consumed_ids(theirs, corpus)


@pytest.mark.parametrize(
    "settings",
    [
        ["--train.half_loss", "True", "--train.initial_memory", "zeros"],
        ["--model.positions", "absolute", "--model.absolute_with_memory", "True", "--train.half_loss", "True"],
    ],
    ids=["zeros", "absolute"],
)
def test_what_the_paper_compares_with_continues_bit_for_bit(
    tmp_path: Path, config_file: Path, settings: list[str]
) -> None:
    words = [str(config_file), *settings, "--train.segment_len", "25"]
    whole, branch = tmp_path / "whole", tmp_path / "branch"
    train(*words, "--run.dir", str(whole), cwd=tmp_path, ranks=1)
    middle = whole / "checkpoints/step_000000015"
    train(*words, "--run.dir", str(branch), "--resume", str(middle), cwd=tmp_path, ranks=1)
    assert losses(branch) == {step: loss for step, loss in losses(whole).items() if step > 15}
    assert_same_state(list_checkpoints(branch)[-1], list_checkpoints(whole)[-1])
    first = json.loads((whole / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert list(first["no_bits"]) == ["train"], "half of the text is not what the text costs"
