"""Traces of single steps: which steps, what they contain, and that the run does not change."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from tests.helpers.logs import recorded_log
from txl_dist.errors import ConfigError
from txl_dist.train.report.profile import StepProfile, parse_steps


def run(profile: StepProfile, *, first: int, last: int) -> None:
    """Steps as the loop makes them; each part is a product of another size."""
    for step in range(first, last + 1):
        profile.on_step(step)
        for name, size in (("data", 2), ("forward", 3), ("backward", 4), ("exchange", 5), ("update", 6)):
            with record_function(name):
                _ = torch.ones(size, size) @ torch.ones(size, size)
    profile.close()


def trace_in(folder: Path) -> list[str]:
    """Names of all events of the one trace."""
    (path,) = folder.glob("*.json.gz")
    return [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


@pytest.mark.parametrize("last", [3, 6], ids=["the run ends with them", "the run goes on"])
def test_the_steps_asked_for_are_traced_with_a_range_around_each_part(tmp_path: Path, last: int) -> None:
    profile = StepProfile(range(2, 4), folder=tmp_path / "profile")
    run(profile, first=1, last=last)
    assert [path.name for path in tmp_path.rglob("*.gz")] == ["steps_2_3_rank0.pt.trace.json.gz"]
    names = trace_in(tmp_path / "profile")
    for part in ("data", "forward", "backward", "exchange", "update"):
        assert names.count(part) == 2, part
    assert names.count("aten::mm") == 10
    assert names.count("[memory]") > 0


def test_a_rewind_does_not_trace_the_same_steps_again(tmp_path: Path) -> None:
    profile = StepProfile(range(2, 3), folder=tmp_path)
    run(profile, first=1, last=3)
    (path,) = tmp_path.iterdir()
    path.unlink()
    run(profile, first=1, last=3)
    assert list(tmp_path.iterdir()) == []


def test_steps_that_lie_behind_the_run_are_said_to_and_a_run_inside_traces_the_rest(tmp_path: Path) -> None:
    with recorded_log() as lines:
        run(StepProfile(range(2, 4), folder=tmp_path / "behind"), first=4, last=5)
    assert any("the run is already past steps 2 to 3" in line for _, line in lines)
    assert not (tmp_path / "behind").exists()
    run(StepProfile(range(2, 4), folder=tmp_path / "inside"), first=3, last=5)
    assert trace_in(tmp_path / "inside").count("aten::mm") == 5


def test_a_trace_that_cannot_be_written_is_no_reason_to_end_a_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    with recorded_log() as lines:
        run(StepProfile(range(1, 2), folder=tmp_path / "profile"), first=1, last=2)
    assert any("the trace is lost" in line for _, line in lines)


def test_a_run_that_is_not_traced_writes_nothing(tmp_path: Path) -> None:
    run(StepProfile(range(0), folder=tmp_path), first=1, last=2)
    assert list(tmp_path.iterdir()) == []


def test_steps_are_read_with_both_ends() -> None:
    assert parse_steps("2:4", max_steps=4) == range(2, 5)
    assert parse_steps("7:7", max_steps=100) == range(7, 8)


@pytest.mark.parametrize("text", ["5", "7:3", "0:2", "-1:2", "9:11", "1:2:3", "a:b", "1.5:2", ":"])
def test_what_names_no_steps_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"1 <= FIRST <= LAST <= train.max_steps = 10, for instance --profile 10:10\."
    ):
        parse_steps(text, max_steps=10)
