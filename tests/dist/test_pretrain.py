"""Callbacks and `txl_dist.pretrain` on real ranks: what callbacks receive, what they can store, and what they cannot
change."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import txl_dist
from tests.helpers import forked
from tests.helpers.corpora import tiny_corpus
from txl_dist.artifacts import list_checkpoints
from txl_dist.distributed.rendezvous import free_port
from txl_dist.errors import TxlError
from txl_dist.train import run_plan
from txl_dist.train.callbacks import Callback, RunResult, SaveEnd, StepEnd, TrainStart, ValidationEnd
from txl_dist.train.checkpoint import validate
from txl_dist.train.checkpoint.callback_states import read_states
from txl_dist.train.checkpoint.validate import checkpoint_problems

pytestmark = pytest.mark.dist


def settings(folder: Path, name: str, *, max_steps: int = 6, **sections: Any) -> dict[str, dict[str, Any]]:
    """Of a tiny run with dropout, which validates and saves every second and third step."""
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / name)},
        "data": {"path": str(folder / "corpus")},
        "model": {"num_layers": 2, "width": 32, "num_heads": 2, "head_width": 16, "ff_width": 48, "dropout": 0.1},
        "train": {"num_lanes": 4, "microbatch_lanes": 2, "segment_len": 8, "memory_len": 8, "max_steps": max_steps},
        "optim": {"schedule": "constant"},
        "eval": {"every_steps": 2},
        "checkpoint": {"every_steps": 2},
        "metrics": {"log_every_steps": 1, "tensorboard": False},
    }
    return {key: {**values.get(key, {}), **sections.get(key, {})} for key in values | sections}


class Recorder:
    """Writes what it is told to a file per rank, and counts its steps. It derives from nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank, self.steps, self.validations = folder, -1, 0, []
        self.total = torch.zeros(2, dtype=torch.float64)

    def write(self, *words: object) -> None:
        rank = os.environ.get("RANK", "0")
        with (self.folder / f"said-{rank}.txt").open("a", encoding="utf-8") as file:
            print(*words, file=file)

    def on_train_start(self, start: TrainStart) -> None:
        self.write("start", start.step, start.rank, start.world_size, start.num_parameters > 1000)

    def on_step_end(self, end: StepEnd) -> None:
        self.steps += 1
        self.total += 1
        self.write("step", end.step, end.loss, end.tokens_BT.shape, end.tokens_seen)

    def on_validation_end(self, end: ValidationEnd) -> None:
        self.validations.append(end.step)
        self.write("validation", end.step, end.loss, end.is_best, sorted(end.losses))

    def on_save(self, end: SaveEnd) -> None:
        self.write("save", end.step, end.path.name)

    def on_train_end(self, result: RunResult) -> None:
        self.write("end", result.steps, result.ended, result.reason, self.steps, self.validations, self.total.tolist())

    def on_exception(self, error: BaseException) -> None:
        self.write("exception", error)

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps, "validations": self.validations, "total": self.total, "best": float("inf")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state["best"] == float("inf")
        self.steps, self.validations = state["steps"], list(state["validations"])
        self.total = state["total"].clone()
        state["total"].fill_(-1)


class Meddler(Callback):
    """Draws random numbers, seeds generators, sets what torch has globally, and writes into all that it gets."""

    def on_step_end(self, end: StepEnd) -> None:
        torch.manual_seed(7)
        torch.rand(1000)
        np.random.seed(7)
        np.random.rand(100)
        random.seed(7)
        random.random()
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        with pytest.raises(ValueError, match="read-only"):
            end.tokens_BT += 1
        copy = torch.from_numpy(end.tokens_BT.copy())
        copy.zero_()

    on_train_start = on_validation_end = on_save = lambda self, _: torch.manual_seed(3) and None  # type: ignore[assignment]


class Raising(Callback):
    """Raises at a hook of one rank."""

    def __init__(self, hook: str, rank: int, error: BaseException, step: int = 3) -> None:
        def fail(value: Any = None) -> Any:
            at = getattr(value, "step", step)
            if os.environ.get("RANK", "0") == str(rank) and at >= step:
                raise error
            return {}

        setattr(self, hook, fail)


def pretrain(out: Path, config: Mapping[str, Mapping[str, Any]], make: Callable[[], list[object]], resume: str) -> None:
    """A rank: what `pretrain` returns, or raises, goes to a file of its own."""
    rank = os.environ.get("RANK", "0")
    started_s = time.monotonic()
    try:
        result = txl_dist.pretrain(config, callbacks=make(), resume=resume)
        found = {"steps": result.steps, "loss": result.loss, "ended": result.ended, "code": result.exit_code}
        found |= {"checkpoint": result.checkpoint.name if result.checkpoint else "", "reason": result.reason}
    except TxlError as error:
        found = {"error": f"{type(error).__name__}: {error}", "code": 2}
    found["seconds"] = time.monotonic() - started_s
    (out / f"result-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # see cli.run: the interpreter's teardown sometimes aborts in native threads


def run(
    folder: Path,
    name: str,
    make: Callable[..., list[object]],
    *arguments: Any,
    ranks: int = 1,
    resume: str = "auto",
    meanwhile: Callable[[list[int]], None] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Start `pretrain` on so many ranks, and return what each wrote."""
    out = folder / f"out-{name}"
    out.mkdir(exist_ok=True)
    port = free_port()
    processes = [
        forked.start(
            pretrain,
            *(out, settings(folder, name, **options), Made(make, arguments), resume),
            variables=forked.environment(**forked.place(rank, ranks, port)),
            cwd=folder,
            out=out / "log.txt",
        )
        for rank in range(ranks)
    ]
    if meanwhile is not None:
        meanwhile([process.pid or 0 for process in processes])
    for process in processes:
        process.join(120)
        process.kill()
    said = (out / "log.txt").read_text(encoding="utf-8", errors="replace")
    files = [out / f"result-{rank}.json" for rank in range(ranks)]
    assert all(file.is_file() for file in files), said[-3000:]
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for file in files:
        file.unlink()
    return results


class Made:
    """A function with its arguments, which can be sent to a process."""

    def __init__(self, make: Callable[..., list[object]], arguments: tuple[Any, ...]) -> None:
        self.make, self.arguments = make, arguments

    def __call__(self) -> list[object]:
        return self.make(*self.arguments)


def nothing() -> list[object]:
    return []


def idle() -> list[object]:
    return [Callback()]


def meddling() -> list[object]:
    return [Meddler()]


def recording(folder: Path) -> list[object]:
    return [Recorder(folder)]


def counting(folder: Path) -> list[object]:
    """Note each read of a state.json and each count of parameters in the process that calls this."""
    read_bytes, count_parameters = validate.read_bytes, run_plan.count_parameters

    def note(what: str) -> None:
        with (folder / "noted.txt").open("a", encoding="utf-8") as file:
            print(what, file=file)

    def read(path: Path) -> bytes:
        note(path.name)
        return read_bytes(path)

    def count(*arguments: Any, **options: Any) -> int:
        note("count")
        return count_parameters(*arguments, **options)

    validate.read_bytes, run_plan.count_parameters = read, count
    return []


def raising(folder: Path, hook: str, rank: int, error: BaseException) -> list[object]:
    return [Raising(hook, rank, error), Recorder(folder)]


def losses(folder: Path, name: str) -> list[tuple[str, int, float]]:
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(row["kind"], row["step"], row["loss"]) for row in rows if row["kind"] in ("train", "eval")]


def said(folder: Path, rank: int = 0) -> list[str]:
    return (folder / f"said-{rank}.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("callbacks")
    tiny_corpus(folder)
    run(folder, "plain", nothing)
    return folder


def test_a_call_returns_how_the_run_ended(place: Path) -> None:
    (result,) = run(place, "plain", nothing)  # a second call: the run is finished already
    assert (result["steps"], result["loss"], result["ended"], result["code"]) == (6, None, "done", 0)
    (result,) = run(place, "plain", nothing, max_steps=8)
    train = [loss for kind, step, loss in losses(place, "plain") if (kind, step) == ("train", 8)]
    assert (result["steps"], result["loss"], result["reason"]) == (8, train[-1], "train.max_steps")
    assert result["checkpoint"] == "step_000000008"


def test_a_start_reads_the_state_of_its_checkpoint_once_and_counts_parameters_once(place: Path, tmp_path: Path) -> None:
    run(place, "counted", nothing, max_steps=2)
    (result,) = run(place, "counted", counting, tmp_path, max_steps=4)
    assert result.get("steps") == 4, result
    noted = (tmp_path / "noted.txt").read_text(encoding="utf-8").split()
    assert (noted.count("state.json"), noted.count("count")) == (1, 1)


@pytest.mark.parametrize("make", [idle, meddling])
def test_a_callback_cannot_change_a_loss(make: Callable[[], list[object]], place: Path) -> None:
    run(place, make.__name__, make)
    plain = [row for row in losses(place, "plain") if row[1] <= 6]
    assert losses(place, make.__name__) == plain
    assert len(plain) == 9


def test_every_rank_is_told_of_every_event_with_equal_numbers(place: Path, tmp_path: Path) -> None:
    results = run(place, "told", recording, tmp_path, ranks=2)
    assert [result["code"] for result in results] == [0, 0]
    first, second = said(tmp_path, 0), said(tmp_path, 1)
    assert first[0] == "start 0 0 2 True"
    assert second[0] == "start 0 1 2 True"
    assert first[1:] == second[1:], "all but the rank is the same"
    assert [line.split()[1] for line in first if line.startswith("step")] == ["1", "2", "3", "4", "5", "6"]
    assert [line.split()[1] for line in first if line.startswith("validation")] == ["2", "4", "6"]
    assert [line.split()[1] for line in first if line.startswith("save")] == ["2", "4", "6"]
    assert first[-1] == "end 6 done train.max_steps 6 [2, 4, 6] [6.0, 6.0]"
    assert "(2, 8)" in first[1], "the lanes of this rank"


def test_a_state_survives_a_kill_and_a_resume_on_another_number_of_ranks(place: Path, tmp_path: Path) -> None:
    run(place, "kept", recording, tmp_path, max_steps=4)
    (tmp_path / "said-0.txt").unlink()
    newest = list_checkpoints(place / "kept")[-1]
    assert checkpoint_problems(newest) == []
    assert read_states(newest).states["Recorder"]["total"].tolist() == [4.0, 4.0]
    run(place, "kept", recording, tmp_path, max_steps=6, ranks=2)
    for rank in (0, 1):
        lines = said(tmp_path, rank)
        assert lines[0].startswith("start 4")
        assert lines[1].startswith("validation 4"), "the checkpoint is from before the validation of its step"
        assert lines[-1] == "end 6 done train.max_steps 6 [2, 4, 6] [6.0, 6.0]", "as if it had not been interrupted"


def test_a_callback_that_is_missing_or_new_at_a_resume_is_one_line(place: Path, tmp_path: Path) -> None:
    run(place, "swapped", recording, tmp_path, max_steps=2)
    run(place, "swapped", nothing, max_steps=4)
    run(place, "swapped", recording, tmp_path, max_steps=6)
    log = (place / "swapped/log.txt").read_text(encoding="utf-8").splitlines()
    left = [line for line in log if "callback Recorder" in line]
    assert len(left) == 2
    assert "the checkpoint of step 2 has a state of this callback, but the run does not use the callback" in left[0]
    assert (
        "the checkpoint of step 4 has no state of this callback. The callback starts without a saved state" in left[1]
    )
    assert said(tmp_path)[-1].startswith("end 6 done train.max_steps 2 ")


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("on_step_end", ZeroDivisionError("division by zero")),
        ("on_validation_end", KeyError("a")),
        ("on_save", SystemExit(3)),
        ("on_train_start", RuntimeError("two\nlines")),
    ],
)
def test_a_callback_that_raises_on_one_rank_ends_all_by_its_name(
    hook: str, error: BaseException, place: Path, tmp_path: Path
) -> None:
    step = 0 if hook == "on_train_start" else 3
    begun_s = time.monotonic()
    results = run(place, f"bad-{hook}", raising_at, tmp_path, hook, 1, error, step, ranks=2)
    assert time.monotonic() - begun_s < 60
    for result in results:
        assert f"callback Raising: {hook} failed on rank 1 at step" in result["error"]
        assert type(error).__name__ in result["error"]
        assert "\n" not in result["error"]
    for rank in (0, 1):
        assert said(tmp_path, rank)[-1].startswith(f"exception callback Raising: {hook} failed on rank 1")


def raising_at(folder: Path, hook: str, rank: int, error: BaseException, step: int) -> list[object]:
    return [Raising(hook, rank, error, step), Recorder(folder)]


def test_a_state_that_a_checkpoint_cannot_keep_ends_all_ranks_by_name(place: Path) -> None:
    results = run(place, "unfit", unfit, ranks=2)
    assert {result["error"] for result in results} == {
        "TrainingError: callback Unfit: a checkpoint cannot store the set that state_dict() returned at seen. Use "
        "None, bool, int, float, str, lists, dictionaries, or a tensor."
    }


class Unfit(Callback):
    def state_dict(self) -> Mapping[str, Any]:
        return {"seen": {1, 2}}


def unfit() -> list[object]:
    return [Unfit()]


def on_rank_0_only() -> list[object]:
    return [Meddler()] if os.environ["RANK"] == "0" else []


def test_different_callbacks_on_ranks_are_refused(place: Path) -> None:
    results = run(place, "unlike", on_rank_0_only, ranks=2)
    assert {result["error"] for result in results} == {
        "ConfigError: callbacks differ between ranks: rank 0 has ['Meddler'], but rank 1 has []. Pass the same "
        "callbacks on every rank."
    }
    assert not (place / "unlike").exists()


def test_a_stop_request_ends_the_call_with_code_75(place: Path, tmp_path: Path) -> None:
    def stop(pids: list[int]) -> None:
        end_s = time.monotonic() + 60
        while not (tmp_path / "said-0.txt").is_file() or "step" not in "".join(said(tmp_path)):
            assert time.monotonic() < end_s
            time.sleep(0.05)
        os.kill(pids[0], signal.SIGTERM)

    (result,) = run(place, "stopped", recording, tmp_path, max_steps=100_000, meanwhile=stop)
    assert (result["ended"], result["reason"], result["code"]) == ("stopped", "SIGTERM", 75)
    assert said(tmp_path)[-1].startswith(f"end {result['steps']} stopped SIGTERM")
    assert result["checkpoint"] == f"step_{result['steps']:09d}"
