"""Asynchronous saves: the checkpoint has the state at the beginning of the save, completely or not at all."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.checkpoints import sign
from tests.helpers.jobs import job_of
from tests.helpers.logs import recorded_log
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config
from txl_dist.artifacts import checkpoint_folder, list_checkpoints
from txl_dist.config.load import Config
from txl_dist.console.logging import logger
from txl_dist.data.loader.stream_state import CorpusState, StreamState
from txl_dist.distributed.collectives import RankInfo, distributed_context, gather_objects
from txl_dist.errors import CheckpointError
from txl_dist.io.manifest import files_of, problems_of
from txl_dist.model.memory import Memory
from txl_dist.train.callbacks import Callbacks
from txl_dist.train.checkpoint import manager as saving_module
from txl_dist.train.checkpoint.manager import CheckpointManager
from txl_dist.train.checkpoint.mirror.mirror import Mirror
from txl_dist.train.checkpoint.read import choose_checkpoint
from txl_dist.train.checkpoint.validate import checkpoint_problems, read_state
from txl_dist.train.checkpoint.writer import AsyncWriter, HostCopy
from txl_dist.train.engine.partitions import WEIGHT, Fragment
from txl_dist.train.monitoring.preemption import PreemptionRequests
from txl_dist.train.monitoring.watch import Watch
from txl_dist.train.stability import Health
from txl_dist.train.state import TrainState

PROBE = {"tokens": torch.arange(4), "losses": torch.ones(1, 4)}


class FakeEngine:
    """Weights of one parameter, a slice per rank."""

    def __init__(self, *, size: int = 1000, rank: int = 0, world_size: int = 1) -> None:
        self.weight = torch.arange(float(size)) + rank * size
        self.model = torch.nn.Module()
        self._start = rank * size
        self.shapes = {"w": [world_size * size]}

    def fragments(self) -> list[Fragment]:
        return [Fragment("w", self._start, {WEIGHT: self.weight, "exp_avg": self.weight}, 1.0)]

    def loss_scale(self) -> dict[str, Any]:
        return {}


class Parts(NamedTuple):
    """What a save needs."""

    ranks: RankInfo
    config: Config
    engine: Any
    saver: AsyncWriter

    def state(self, step: int) -> TrainState:
        """Memories that hold the number of their step."""
        stream = StreamState(seed=1, corpora=(CorpusState("text", "data", "train", num_lanes=4, position=step),))
        lanes = 4 // self.ranks.world_size
        memory = Memory(tuple(torch.full((2, lanes, 3, 5), float(step))), torch.full((lanes, 3), step))
        return TrainState(step, 32 * step, Health(), stream, (memory,))

    def folder(self, step: int) -> Path:
        return checkpoint_folder(Path(self.config.run.dir), step)

    def save(self, step: int) -> str:
        """Begin and finish; returns the error."""
        self.saver.begin(self.state(step), self.engine, probe=PROBE)
        return self.saver.finish().error


def parts(ranks: RankInfo, run_dir: Path, *, size: int = 1000, **checkpoint: Any) -> Parts:
    config = tiny_config(run={"dir": str(run_dir)}, engine={"zero_stage": 1}, checkpoint=checkpoint)
    silent: Any = SimpleNamespace(beat=lambda phase: None)
    saver = AsyncWriter(job_of(config, ranks), Watch(silent, silent, lock=None, nonce="nonce"))
    return Parts(ranks, config, FakeEngine(size=size, rank=ranks.rank, world_size=ranks.world_size), saver)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankInfo]:
    """A job of one rank in this process, whose environment is put back behind it."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    with distributed_context(timeout_s=60, num_threads=torch.get_num_threads()) as ranks:
        yield ranks


def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing of tensors is written until the event is set."""
    from txl_dist.train.checkpoint import writer as saver_module

    go_on, write = threading.Event(), saver_module.write_tensors

    def write_later(*arguments: Any, **keywords: Any) -> dict[str, Any]:
        assert go_on.wait(timeout=60)
        return write(*arguments, **keywords)

    monkeypatch.setattr(saver_module, "write_tensors", write_later)
    return go_on


def weights_in(folder: Path) -> Tensor:
    return load_file(folder / "engine" / "00000.safetensors")["weight/w"]


def test_what_training_changes_after_the_beginning_of_a_save_is_not_in_it(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, go_on = parts(alone, tmp_path, asynchronous=True), held_back(monkeypatch)
    state, before = it.state(4), it.engine.weight.clone()
    it.saver.begin(state, it.engine, probe=PROBE)
    assert it.saver.in_flight
    assert not it.saver.is_written
    it.engine.weight.fill_(-1.0)
    state.memories[0].hidden[0].fill_(-1.0)
    go_on.set()
    assert it.saver.finish().error == ""
    assert not it.saver.in_flight
    assert torch.equal(weights_in(it.folder(4)), before)
    assert bool((load_file(it.folder(4) / "lanes" / "00000-00003.safetensors")["hidden"] == 4.0).all())
    assert problems_of(it.folder(4)) == []
    # The next save finds what has changed meanwhile, in the same host memory.
    assert it.save(5) == ""
    assert bool((weights_in(it.folder(5)) == -1.0).all())
    assert torch.equal(weights_in(it.folder(4)), before)


def test_the_copy_keeps_its_memory_while_shapes_stay_and_makes_new_where_they_do_not() -> None:
    host, source = HostCopy(pin=False), torch.arange(6.0)
    first = host.copy({"f": ({"t": source}, {"note": "x"})})["f"]
    address = first[0]["t"].data_ptr()
    source += 1
    again = host.copy({"f": ({"t": source}, {"note": "y"})})["f"]
    assert first[1] == {"note": "x"}
    assert again[1] == {"note": "y"}
    assert again[0]["t"].data_ptr() == address
    assert torch.equal(again[0]["t"], source)
    longer = host.copy({"f": ({"t": torch.arange(9)}, {})})["f"][0]["t"]
    assert torch.equal(longer, torch.arange(9))


def test_a_second_save_begins_only_behind_the_first(alone: RankInfo, tmp_path: Path) -> None:
    it = parts(alone, tmp_path)
    it.saver.begin(it.state(1), it.engine, probe=PROBE)
    with pytest.raises(AssertionError):
        it.saver.begin(it.state(2), it.engine, probe=PROBE)
    assert it.saver.finish().error == ""
    assert it.save(2) == ""
    assert list_checkpoints(tmp_path) == [it.folder(1), it.folder(2)]


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_file_system_that_fails_leaves_nothing_and_the_next_save_commits(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, asynchronous: bool
) -> None:
    it = parts(alone, tmp_path, asynchronous=asynchronous)
    assert it.save(1) == ""
    before = files_below(tmp_path)

    def write_half(path: Path, *_: Any, **__: Any) -> dict[str, Any]:
        path.write_bytes(b"half")
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr("txl_dist.train.checkpoint.writer.write_tensors", write_half)
        error = it.save(2)
    assert "cannot write" in error
    assert "step_000000002.tmp-nonce/lanes/00000-00003.safetensors" in error
    assert os.strerror(number) in error
    assert files_below(tmp_path) == before
    assert it.save(2) == ""
    assert problems_of(it.folder(2)) == []


def test_a_lack_of_space_is_seen_before_writing_and_names_folder_and_need(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = parts(alone, tmp_path, size=1 << 20)
    usage: Callable[[Path], Any] = lambda path: SimpleNamespace(free=3 << 20)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", usage)
        error = it.save(1)
    assert error.startswith(
        f"no room for a checkpoint in {tmp_path / 'checkpoints'}: the checkpoint needs 8.0 MiB, but 3.0 MiB of disk are"
    )
    assert files_below(tmp_path) == ["checkpoints"]
    assert it.save(1) == ""


def test_a_defect_in_the_writer_is_reported_as_one_and_leaves_nothing(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = parts(alone, tmp_path)
    monkeypatch.setattr("txl_dist.train.checkpoint.writer.write_tensors", lambda *_, **__: {}["no such key"])
    assert "KeyError('no such key'). This is a defect of the program" in it.save(1)
    assert files_below(tmp_path) == ["checkpoints"]


def test_a_damaged_folder_in_the_way_is_moved_aside(alone: RankInfo, tmp_path: Path) -> None:
    it = parts(alone, tmp_path)
    it.folder(3).mkdir(parents=True)
    (it.folder(3) / "state.json").write_text("torn")
    assert it.save(3) == ""
    assert problems_of(it.folder(3)) == []
    assert (it.folder(3).with_name("step_000000003.damaged-1") / "state.json").read_text() == "torn"


def save_with_a_limit(ranks: RankInfo, folder: str) -> tuple[str, list[str], str, list[str], int]:
    """(error of a save in which rank 1 may write no large file, files then; error of the next, problems, lanes)."""
    Path(folder).mkdir(exist_ok=True)
    it = parts(ranks, Path(folder), size=1 << 16)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    error = it.save(1)
    left = gather_objects(files_below(Path(folder)))[0]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    again = it.save(2)
    return error, left, again, problems_of(it.folder(2)), len(list((it.folder(2) / "lanes").iterdir()))


@pytest.mark.dist
def test_one_rank_that_cannot_write_fails_the_save_on_all_and_the_next_one_commits(tmp_path: Path) -> None:
    results = run_ranks(save_with_a_limit, str(tmp_path / "run"), world_size=2, folder=tmp_path / "results")
    error, left, again, problems, num_lane_files = results[0]
    assert results == [results[0]] * 2, "all ranks know the same"
    assert "step_000000001.tmp-nonce" in error
    assert os.strerror(errno.EFBIG) in error
    assert left == ["checkpoints"]
    assert (again, problems, num_lane_files) == ("", [], 2)


def save_twice(ranks: RankInfo, folder: str) -> list[str]:
    """Errors of two saves between which everything changes."""
    Path(folder).mkdir(exist_ok=True)
    it = parts(ranks, Path(folder))
    errors = [it.save(1)]
    it.engine.weight += 1
    return [*errors, it.save(2)]


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with two checkpoints."""
    folder = tmp_path_factory.mktemp("twice")
    assert run_ranks(save_twice, str(folder / "run"), world_size=2, folder=folder / "results") == [["", ""]] * 2
    return folder / "run"


def from_the_save_before(name: str) -> Callable[[Path], None]:
    def take(folder: Path) -> None:
        shutil.copy(folder.with_name("step_000000001") / name, folder / name)

    return take


def edited(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / name).read_text(encoding="utf-8")
        assert text.count(old) == 1
        (folder / name).write_text(text.replace(old, new), encoding="utf-8")

    return edit


def exchange_lanes(folder: Path) -> None:
    first, second = sorted((folder / "lanes").iterdir())
    first.rename(folder / "first")
    second.rename(first)
    (folder / "first").rename(second)


def exchange_two_ids(folder: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    values["symbols"][:2] = reversed(values["symbols"][:2])
    (folder / "tokenizer.json").write_text(json.dumps(values, sort_keys=True, separators=(",", ":")), encoding="utf-8")


CHANGES = [
    ("engine/00000.safetensors", from_the_save_before("engine/00000.safetensors")),
    ("engine/00001.safetensors", from_the_save_before("engine/00001.safetensors")),
    ("lanes/00000-00001.safetensors", from_the_save_before("lanes/00000-00001.safetensors")),
    ("lanes/00002-00003.safetensors", exchange_lanes),
    ("probe.safetensors", from_the_save_before("probe.safetensors")),
    ("state.json", from_the_save_before("state.json")),
    ("config.toml", edited("config.toml", "memory_len = 12", "memory_len = 6")),
    ("config.toml", edited("config.toml", "pre_norm = false", "pre_norm = true")),
    ("tokenizer.json", exchange_two_ids),
]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_a_file_of_another_save_or_another_hand_is_found_though_the_manifest_fits_and_the_one_before_goes_on(
    saved_twice: Path, tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    run = Path(shutil.copytree(saved_twice, tmp_path / "run"))
    before, changed = list_checkpoints(run)
    assert sorted({one for one, _ in CHANGES}) == files_of(changed), "no kind of file is left out"
    assert checkpoint_problems(before) == checkpoint_problems(changed) == []
    change(changed)
    sign(changed)
    assert problems_of(changed) == [], "the manifest alone sees nothing"
    assert any(name in problem for problem in checkpoint_problems(changed))
    found, (remark,) = choose_checkpoint(run, "auto")
    assert found is not None
    assert found.folder == before
    assert remark.startswith("skipped a damaged checkpoint, step_000000002: ")


class Records:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def write(self, kind: str, record: dict[str, Any]) -> None:
        assert kind == "event"
        self.events.append((record["event"], record["step"]))


class Requests:
    """Requests to stop, as many as a test makes."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    @property
    def reason(self) -> str:
        return "SIGTERM" if self.count else ""

    def clear(self) -> None:
        pass


def saving(
    it: Parts,
    monkeypatch: pytest.MonkeyPatch,
    *,
    losses: dict[int, float] | None = None,
    requests: Any = None,
    beat: Callable[[str], None] = lambda phase: None,
    clock_s: Callable[[], float] = time.monotonic,
    unsaved_s: float = 0.0,
    retry_at: int = 0,
) -> tuple[CheckpointManager, Records]:
    monkeypatch.setattr(saving_module, "make_probes", lambda *_, **__: PROBE)
    monkeypatch.setattr(saving_module, "_FIRST_RETRY_S", 0.01)
    records: Any = Records()
    maker: Any = None
    watchdog: Any = SimpleNamespace(beat=beat)
    it.saver.watch = it.saver.watch._replace(stops=requests or Requests(), watchdog=watchdog)
    callbacks = Callbacks(())
    return CheckpointManager(
        it.saver,
        it.engine,
        maker,
        records,
        newest=None,
        evaluated=losses or {},
        callbacks=callbacks,
        unsaved_s=unsaved_s,
        retry_at=retry_at,
        clock_s=clock_s,
    ), records


def test_minutes_count_from_the_beginning_of_the_last_save_and_of_the_run(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=500.0)
    it = parts(alone, tmp_path, every_steps=0, every_minutes=1.5)
    one, _ = saving(it, monkeypatch, clock_s=lambda: clock.now_s)
    seen = []
    for step, clock.now_s in ((1, 589.9), (2, 590.0), (3, 679.0), (4, 681.0)):
        seen.append(one.is_late)
        if one.is_late:
            one.begin(it.state(step))
    one.finish(4)
    assert seen == [False, True, False, True]
    assert not one.is_due(4), "the interval of steps is switched off"


def test_minutes_go_on_after_a_loss_and_a_save_that_it_dropped_is_due_at_once(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=500.0)
    it = parts(alone, tmp_path, every_steps=0, every_minutes=1.5)
    first, _ = saving(it, monkeypatch, clock_s=lambda: clock.now_s)
    clock.now_s = 560.0
    assert first.unsaved_s == 60.0
    clock.now_s = 600.0
    first.begin(it.state(1))
    clock.now_s = 601.0
    assert first.unsaved_s == 101.0  # that save may still be dropped
    second, _ = saving(it, monkeypatch, clock_s=lambda: clock.now_s, unsaved_s=first.unsaved_s)
    assert second.is_late
    first.finish(1)
    assert first.unsaved_s == 1.0


def test_a_failed_save_is_repeated_after_a_loss_too(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = parts(alone, tmp_path, every_steps=100)
    first, _ = saving(it, monkeypatch)
    first._plan_retry(100)
    assert first.is_due(110)
    second, _ = saving(it, monkeypatch, retry_at=first.retry_at)
    assert [step for step in range(101, 120) if second.is_due(step)] == [110]


def test_a_save_that_a_loss_has_dropped_is_lacking_until_it_is_made_or_planned_again(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = saving(parts(alone, tmp_path, every_steps=100), monkeypatch)
    assert [step for step in (99, 100, 104, 199) if one.is_lacking(step, since=0)] == [100, 104, 199]
    assert not one.is_lacking(104, since=100), "the process has begun there"
    one.set_newest(tmp_path / "step_000000100")
    assert [step for step in (104, 199, 200, 201) if one.is_lacking(step, since=0)] == [200, 201]
    one.retry_at = 210
    assert [step for step in (201, 209, 210) if one.is_lacking(step, since=0)] == [210]


def test_without_steps_no_save_is_lacking(alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = saving(parts(alone, tmp_path, every_steps=0, every_minutes=1.0), monkeypatch)
    assert not one.is_lacking(100, since=0)


def test_without_minutes_the_clock_never_asks_for_a_checkpoint(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=0.0)
    one, _ = saving(parts(alone, tmp_path), monkeypatch, clock_s=lambda: clock.now_s)
    clock.now_s = 1e9
    assert not one.is_late


def test_a_save_by_minutes_that_fails_is_tried_again_after_a_tenth_of_the_interval_and_not_in_every_step(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=0.0)
    it = parts(alone, tmp_path, every_steps=0, every_minutes=10.0, asynchronous=False)
    one, records = saving(it, monkeypatch, clock_s=lambda: clock.now_s)
    (tmp_path / "checkpoints").write_text("in the way")
    clock.now_s = 600.0
    assert one.is_late
    one.begin(it.state(5))
    assert records.events == [("save_failed", 5)]
    assert not one.is_late
    assert not one.is_due(6)
    clock.now_s = 661.0
    assert one.is_late
    (tmp_path / "checkpoints").unlink()
    one.begin(it.state(6))
    assert records.events == [("save_failed", 5), ("saved", 6)]
    assert not one.is_late


def test_a_synchronous_save_is_committed_before_training_goes_on(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = parts(alone, tmp_path, asynchronous=False)
    one, records = saving(it, monkeypatch)
    before = it.engine.weight.clone()
    one.begin(it.state(7))
    it.engine.weight.fill_(-1.0)
    assert records.events == [("saved", 7)]
    assert not one.is_written
    assert torch.equal(weights_in(it.folder(7)), before)


def test_the_save_in_flight_is_committed_before_the_next_one_begins_and_none_is_made_twice(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = parts(alone, tmp_path, asynchronous=True)
    one, records = saving(it, monkeypatch)
    one.begin(it.state(1))
    assert list_checkpoints(tmp_path) == []
    one.begin(it.state(2))
    assert records.events == [("saved", 1)]
    one.finish_last(it.state(2), patience_s=0.0)
    assert records.events == [("saved", 1), ("saved", 2)]
    one.begin(it.state(2))
    assert one.finish(2)
    assert records.events == [("saved", 1), ("saved", 2)]
    assert [read_state(folder).step for folder in list_checkpoints(tmp_path)] == [1, 2]


def test_old_checkpoints_leave_behind_a_new_one_but_for_the_best_and_the_milestones(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = parts(alone, tmp_path, keep_last=2, keep_every=4, keep_best=True)
    one, _ = saving(it, monkeypatch, losses={2: math.inf, 3: 1.5, 5: 1.75, 99: 1.0})
    for step in range(1, 9):
        one.begin(it.state(step))
        assert one.finish(step)
    one.finish_last(it.state(8), patience_s=0.0)
    assert [read_state(folder).step for folder in list_checkpoints(tmp_path)] == [3, 4, 7, 8]
    assert files_below(tmp_path / "checkpoints")[0] == "step_000000003"
    assert not list(tmp_path.rglob("*.tmp-*"))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_failed_is_due_again_soon_and_the_last_one_is_tried_until_it_is_refused(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    it = parts(alone, tmp_path, every_steps=50, asynchronous=asynchronous)
    one, records = saving(it, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
        one.begin(it.state(50))
        assert one.finish(52) is not asynchronous
        assert [step for step in range(51, 101) if one.is_due(step)] == [57 if asynchronous else 55, 100]
        with pytest.raises(
            CheckpointError, match=r"step 52 could not be saved in 0\.05 s\. .* then starts from step 0"
        ):
            one.finish_last(it.state(52), patience_s=0.05)
    assert records.events[0] == ("save_failed", 50)
    assert len(records.events) > 2
    assert set(records.events[1:]) == {("save_failed", 52)}
    one.finish_last(it.state(52), patience_s=0.0)
    assert records.events[-1] == ("saved", 52)


@pytest.mark.parametrize("num_before", [0, 1])
def test_who_asks_to_stop_while_the_last_save_is_retried_is_told_how_and_heard_after_one_more_attempt(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_before: int
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger="txl_dist")
    it, requests = parts(alone, tmp_path), Requests(num_before)

    def ask_once(phase: str) -> None:
        requests.count += phase == "wait for the disk"

    one, records = saving(it, monkeypatch, requests=requests, beat=ask_once)
    monkeypatch.setattr(saving_module, "_FIRST_RETRY_S", 1e9)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(CheckpointError, match=r"step 7 could not be saved before SIGTERM ended the attempts"):
        one.finish_last(it.state(7), patience_s=900.0, stopped=num_before > 0)
    assert records.events == [("save_failed", 7)] * 2
    how = "a second SIGTERM or Ctrl-C" if num_before else f"SIGTERM, Ctrl-C or the file {tmp_path / 'STOP'}"
    assert "the run tries again for up to 15 min. " in caplog.text
    assert f"To end the run earlier, use {how}. The run then tries once more." in caplog.text


def test_room_that_is_made_before_the_last_attempt_is_used(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, requests, free = parts(alone, tmp_path), Requests(), [0]

    def make_room(phase: str) -> None:
        requests.count += phase == "wait for the disk"
        free[0] = 1 << 40 if requests.count else 0

    one, records = saving(it, monkeypatch, requests=requests, beat=make_room)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free[0]))
    one.finish_last(it.state(7), patience_s=900.0)
    assert records.events == [("save_failed", 7), ("saved", 7)]


def test_the_end_of_a_run_says_how_long_it_waits_for_the_mirror_and_what_the_mirror_lacks(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving_module, "_NOTICE_S", 0.0)
    one, _ = saving(parts(alone, tmp_path), monkeypatch)
    lacking = "2 checkpoints from step_000000007 to step_000000008"
    mirror = {"url": "s3://b/r", "lacking": lambda: lacking, "finish_records": lambda: None}
    one._mirror = cast(Mirror, SimpleNamespace(is_idle=False, is_given_up=False, **mirror))
    with recorded_log() as lines:
        one.finish_mirror(patience_s=0.3)
    (_, before), (_, after) = lines
    assert before.startswith("mirror: the run waits for up to 0.3 s until its newest checkpoint and records are in")
    assert f"s3://b/r, which lacks {lacking}. To end the run earlier, use SIGTERM" in before
    assert after.startswith(f"mirror: the run ends, and s3://b/r lacks {lacking}. The newest checkpoint is on the disk")


@pytest.mark.parametrize("mirror", [None, SimpleNamespace(is_given_up=True)])
def test_the_end_of_a_run_says_that_uploads_were_given_up(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: Any
) -> None:
    one, _ = saving(parts(alone, tmp_path, mirror="s3://b/r"), monkeypatch)
    one._mirror = mirror
    with recorded_log() as lines:
        one.finish_mirror(patience_s=0.3)
    ((_, line),) = lines
    assert line == "mirror: the run ends without its last uploads, which the next start of the same command makes"


def hear_one_rank(ranks: RankInfo, folder: str) -> tuple[str, list[tuple[str, int]], list[str]]:
    """(how a last save on a full disk ends when rank 1 alone gets a signal, the attempts, what is left of them)."""
    os.makedirs(folder, exist_ok=True)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if ranks.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    it, stops = parts(ranks, Path(folder), size=1 << 16), PreemptionRequests()

    def ask_once(phase: str) -> None:
        if phase == "wait for the disk" and ranks.rank == 1 and not stops.count:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        one, records = saving(it, patch, requests=stops, beat=ask_once)
        patch.setattr(saving_module, "_FIRST_RETRY_S", 1e9)
        with pytest.raises(CheckpointError) as caught:
            one.finish_last(it.state(7), patience_s=1e9)
    gather_objects(None)
    stops.close()
    return str(caught.value), records.events, files_below(Path(folder))


@pytest.mark.dist
def test_a_signal_to_one_rank_ends_the_attempts_on_all(tmp_path: Path) -> None:
    results = run_ranks(hear_one_rank, str(tmp_path / "run"), world_size=2, folder=tmp_path / "results")
    assert results == [results[0]] * 2
    message, attempts, left = results[0]
    assert message.startswith(
        "the checkpoint of step 7 could not be saved before SIGTERM ended the attempts. The log contains the reason"
    )
    assert (attempts, left) == ([("save_failed", 7)] * 2, ["checkpoints"])


def test_who_asks_to_stop_in_the_last_save_waits_for_no_removal_of_older_ones(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, requests, go_on, waits = parts(alone, tmp_path, keep_last=1), Requests(), threading.Event(), 0

    def ask_once(phase: str) -> None:
        nonlocal waits
        waits += phase == "prune"
        assert waits < 10, "it waits for ever"
        requests.count = 1 if waits else 0

    one, records = saving(it, monkeypatch, requests=requests, beat=ask_once)
    monkeypatch.setattr(saving_module, "_remove", lambda *_: go_on.wait())
    one.begin(it.state(1))
    assert one.finish(1)
    one.finish_last(it.state(2), patience_s=900.0)
    go_on.set()
    assert records.events == [("saved", 1), ("saved", 2)]
    assert waits > 0


def test_a_save_rebuilds_no_run_directory_that_is_gone_and_the_last_one_says_so(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = parts(alone, tmp_path / "run")
    (tmp_path / "run").mkdir()
    one, records = saving(it, monkeypatch)
    one.begin(it.state(1))
    assert one.finish(1)
    (tmp_path / "run").rename(tmp_path / "away")
    one.begin(it.state(2))
    assert not one.finish(2)
    with pytest.raises(
        CheckpointError, match=r"the run directory .*run was removed or moved .* does not create it again"
    ):
        one.finish_last(it.state(2), patience_s=900.0)
    assert [path.name for path in tmp_path.iterdir()] == ["away"]
    assert records.events == [("saved", 1), ("save_failed", 2)]


def test_who_lowers_what_is_kept_gets_the_room_also_where_the_next_save_has_none(
    alone: RankInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = saving(parts(alone, tmp_path, keep_last=5), monkeypatch)
    it = parts(alone, tmp_path, keep_last=1)
    for step in range(1, 5):
        one.begin(it.state(step))
        assert one.finish(step)
    again, _ = saving(it, monkeypatch)
    again.set_newest(it.folder(4))
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
        again.begin(it.state(5))
        assert not again.finish(5)
    assert list_checkpoints(tmp_path) == [it.folder(4)]
    one.begin(it.state(57))
    assert one.finish(57)
    assert not one.is_due(57)
    assert json.loads((it.folder(57) / "state.json").read_text())["step"] == 57
