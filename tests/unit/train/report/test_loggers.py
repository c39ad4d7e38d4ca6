"""Sinks of records: what TensorBoard and Weights & Biases get, and that a removed folder affects only its own sink."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.jobs import job_of
from tests.helpers.logs import format_record, recorded_log
from tests.helpers.tiny import tiny_config
from tests.unit.train.report.test_metrics import EVAL_RECORD, RANK, TRAIN_RECORD, reporter, scalars
from txl_dist.errors import ConfigError
from txl_dist.train.report.loggers import MetricReporter, check_sinks

SAMPLE: dict[str, Any] = {"step": 40, "prompt": "The ", "text": "end <b>of</b>\n  it"}
LOOK: dict[str, Any] = {
    "step": 40,
    "seconds": 0.1,
    "tokens": 100,
    "memory_gain": 0.05,
    "memory_norm_0": 1.5,
    "memory_norm_1": 2.5,
    "memory_attention_pct_0": 25.25,
    "memory_attention_pct_1": 75.5,
    "loss_by_position": [3.0, 2.5, 2.0],
    "loss_by_position_without_memory": [4.0, 3.0, 2.0],
}


def accumulated(folder: Path) -> Any:
    """All that TensorBoard reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_a_memory_record_and_a_sample_have_lines_for_people() -> None:
    assert format_record("memory", LOOK, max_steps=99) == (
        "step 40/99  memory  memory lowers the loss by 0.0500 nats per token  attention to the memory by layer 25% 76%"
    )
    assert format_record("sample", SAMPLE, max_steps=99) == "step 40/99  sample\n  | The end <b>of</b>\n  |   it"
    saved = format_record("train", {**TRAIN_RECORD, "save_s": 0.254}, max_steps=1000)
    assert "wait 1.3%  saved in 0.25 s  eta" in saved


def test_a_sample_cannot_steer_a_terminal() -> None:
    text = "a\x1b]0;title\x07\x1b[2J\tb\x0bc\u2028d\u202ee\r\nf\n"
    line = format_record("sample", {"step": 1, "prompt": "\x9b", "text": text}, max_steps=9)
    assert line == ("step 1/9  sample\n  | \\x9ba\\x1b]0;title\\x07\\x1b[2J\tb\\x0bc\\u2028d\\u202ee\\r\n  | f")


def test_tensorboard_gets_lists_as_curves_positions_as_one_picture_and_words_as_text(
    tmp_path: Path,
) -> None:
    from tensorboard.util.tensor_util import make_ndarray

    report = reporter(tmp_path, tensorboard=True)
    report.write("train", TRAIN_RECORD | {"rank_ms": [10.0, 12.5]})
    report.write("memory", LOOK)
    report.write("sample", SAMPLE)
    report.write("event", {"event": "start", "step": 40, "ranks": 2, "device": "x86_64"})
    report.close()
    folder = tmp_path / "tensorboard"
    assert scalars(folder, "train/rank_ms/01") == [(40, 12.5)]
    assert scalars(folder, "memory/memory_attention_pct_1") == [(40, 75.5)]
    found = accumulated(folder)
    assert not [tag for tag in found.Tags()["scalars"] if "loss_by_position" in tag]
    (curve,) = found.Tensors("memory/loss_by_position_without_memory")
    heights = make_ndarray(curve.tensor_proto)
    assert heights == pytest.approx(np.array([[0, 100 / 3, 4], [100 / 3, 200 / 3, 3], [200 / 3, 100, 2]]))
    (text,) = found.Tensors("sample/text")
    # Indented, so that it is shown as it is and not as Markdown.
    assert text.tensor_proto.string_val[0].decode() == "    The end <b>of</b>\n      it\n"
    (start,) = found.Tensors("event/start")
    assert start.tensor_proto.string_val[0].decode() == "    ranks: 2\n    device: x86_64\n"
    assert not [tag for tag in found.Tags()["scalars"] if tag.startswith("event/")]


def test_tensorboard_shows_a_recovery_as_text_and_its_costs_as_curves(tmp_path: Path) -> None:
    report = reporter(tmp_path, tensorboard=True)
    costs = {"repeated_steps": 12, "notice_s": 0.25, "regroup_s": 0.5, "restore_s": 0.125, "redo_s": 1.5}
    report.write("event", {"event": "recovered", "step": 40, "ranks": [1], "why": "rank 1 was lost", **costs})
    report.close()
    folder = tmp_path / "tensorboard"
    for name, value in costs.items():
        assert scalars(folder, f"recovery/{name}") == [(40, value)]
    (text,) = accumulated(folder).Tensors("event/recovered")
    assert "why: rank 1 was lost" in text.tensor_proto.string_val[0].decode()


def test_a_list_of_hundreds_of_ranks_makes_no_hundreds_of_curves(tmp_path: Path) -> None:
    report = reporter(tmp_path, tensorboard=True)
    report.write("train", TRAIN_RECORD | {"rank_ms": [10.0] * 500})
    report.close()
    assert not [tag for tag in accumulated(tmp_path / "tensorboard").Tags()["scalars"] if "rank_ms" in tag]
    assert len(json.loads((tmp_path / "metrics.jsonl").read_text())["rank_ms"]) == 500


def test_tensorboard_shows_the_settings_beside_the_final_metrics(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    report = reporter(tmp_path, tensorboard=True)
    report.write("eval", EVAL_RECORD)
    report.close()
    content = accumulated(tmp_path / "tensorboard").PluginTagToContent("hparams")
    session = HParamsPluginData.FromString(content[metadata.SESSION_START_INFO_TAG]).session_start_info
    assert session.hparams["optim.lr"].number_value == pytest.approx(2e-3)
    assert session.hparams["model.pre_norm"].bool_value is False
    assert session.hparams["model.cutoffs"].string_value == "[50, 150]"
    experiment = HParamsPluginData.FromString(content[metadata.EXPERIMENT_TAG]).experiment
    assert "eval/loss" in {info.name.tag for info in experiment.metric_infos}


def test_a_number_that_is_none_is_null_in_lists_too(tmp_path: Path) -> None:
    report = reporter(tmp_path)
    report.write("eval", EVAL_RECORD | {"loss_by_position": [1.0, math.nan, math.inf]})
    report.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in line
    assert json.loads(line)["loss_by_position"] == [1.0, None, None]


def test_a_folder_of_tensorboard_that_is_removed_is_made_again(tmp_path: Path) -> None:
    report, folder = reporter(tmp_path, tensorboard=True), tmp_path / "tensorboard"
    for step in (10, 20):
        report.write("train", {**TRAIN_RECORD, "step": step})
        if step == 10:
            shutil.rmtree(folder)
    report.close()
    assert scalars(folder) == [(20, 2.0)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_folder_of_tensorboard_that_becomes_a_file_is_said_once_and_costs_nothing_else(tmp_path: Path) -> None:
    report, folder = reporter(tmp_path, tensorboard=True), tmp_path / "tensorboard"
    with recorded_log() as lines:
        for step in (10, 20, 30, 40):
            if step == 20:
                shutil.rmtree(folder)
                folder.write_text("in the way")
            report.write("train", {**TRAIN_RECORD, "step": step})
        folder.unlink()
        report.write("train", {**TRAIN_RECORD, "step": 50})
        report.close()
    warnings = [message for level, message in lines if level == "WARNING"]
    assert len(warnings) == 2
    assert "TensorBoard cannot write" in warnings[0]
    assert "TensorBoard can write again. It has lost 3 records" in warnings[1]
    assert scalars(folder) == [(50, 2.0)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


class FakeWandb:
    """Stands for the library: notes what it is told, and fails on demand."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails = False

    def init(self, **settings: Any) -> FakeWandb:
        self._note("init", settings)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self._note("define_metric", (name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self._note("log", values)

    def finish(self) -> None:
        self._note("finish", None)

    def _note(self, name: str, value: Any) -> None:
        if self.fails:
            raise RuntimeError("the server is away")
        self.calls.append((name, value))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=fake.init))  # type: ignore[arg-type]
    return fake


def wandb_reporter(run_dir: Path) -> MetricReporter:
    config = tiny_config(run={"dir": str(run_dir)}, metrics={"wandb": "papers", "tensorboard": False})
    return MetricReporter(job_of(config, RANK), start_step=0)


def test_weights_and_biases_gets_every_record_in_one_run_that_goes_on(tmp_path: Path, wandb: FakeWandb) -> None:
    for step in (10, 20):
        report = wandb_reporter(tmp_path / "run")
        report.write("train", {**TRAIN_RECORD, "step": step})
        report.close()
    names = [name for name, _ in wandb.calls]
    assert names == ["init", "define_metric", "log", "finish"] * 2
    first, second = (value for name, value in wandb.calls if name == "init")
    assert first == second
    assert (first["project"], first["name"], first["resume"]) == ("papers", "run", "allow")
    assert first["config"]["optim"]["lr"] == 2e-3
    logged = [value for name, value in wandb.calls if name == "log"]
    assert [value["step"] for value in logged] == [10, 20]
    assert logged[0]["train/loss"] == 2.0
    assert ("define_metric", ("*", "step")) in wandb.calls


def test_weights_and_biases_gets_the_names_that_the_settings_give(tmp_path: Path, wandb: FakeWandb) -> None:
    given = {
        "entity": "team",
        "name": "first try",
        "group": "sweep 3",
        "tags": ["a", "b c"],
        "id": "x-1",
        "resume": "must",
    }
    settings = {f"wandb_{name}": value for name, value in given.items()}
    config = tiny_config(
        run={"dir": str(tmp_path / "run")}, metrics={"wandb": "papers", "tensorboard": False, **settings}
    )
    report = MetricReporter(job_of(config, RANK), start_step=0)
    report.write("train", TRAIN_RECORD)
    report.close()
    (told,) = (value for name, value in wandb.calls if name == "init")
    assert {name: told[name] for name in given} == given | {"tags": ("a", "b c")}
    assert told["project"] == "papers"


@pytest.mark.parametrize(("continues", "resume"), [(False, "never"), (True, "allow")])
def test_a_training_that_continues_may_find_its_run_at_weights_and_biases(
    continues: bool, resume: str, tmp_path: Path, wandb: FakeWandb
) -> None:
    metrics = {"wandb": "papers", "wandb_resume": "never", "tensorboard": False}
    config = tiny_config(run={"dir": str(tmp_path)}, metrics=metrics)
    report = MetricReporter(job_of(config, RANK), start_step=0, continues=continues)
    report.write("train", TRAIN_RECORD)
    report.close()
    (told,) = (value for name, value in wandb.calls if name == "init")
    assert told["resume"] == resume


def test_weights_and_biases_gets_nothing_for_names_that_are_not_given(tmp_path: Path, wandb: FakeWandb) -> None:
    report = wandb_reporter(tmp_path / "run")
    report.write("train", TRAIN_RECORD)
    report.close()
    (told,) = (value for name, value in wandb.calls if name == "init")
    assert (told["entity"], told["group"], told["tags"]) == (None, None, None)
    assert len(told["id"]) == 12


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({"wandb_id": bad}, r"metrics\.wandb_id") for bad in ("team/project/x", "a:b", "a?b", "#1", " x", "50%")),
        *(({"wandb_tags": [bad]}, r"metrics\.wandb_tags: .* 1 to 64") for bad in ("", "x" * 65)),
    ],
)
def test_what_weights_and_biases_would_refuse_is_refused_at_the_door(
    settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=words):
        check_sinks(tiny_config(metrics={"wandb": "papers", **settings}).metrics)
    check_sinks(tiny_config(metrics={"wandb": "papers", "wandb_id": "a-b_1.c", "wandb_tags": ["x" * 64]}).metrics)


def test_weights_and_biases_that_fails_never_ends_a_run(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = wandb_reporter(tmp_path)
    clock = SimpleNamespace(now_s=1000.0)
    clock.monotonic = clock.time = lambda: clock.now_s
    monkeypatch.setattr("txl_dist.train.report.loggers.time", clock)
    with recorded_log() as lines:
        # It is not asked again at once: each time a step might wait for its answer.
        for step, fails, clock.now_s in (
            (10, True, 1000.0),
            (20, False, 1001.0),
            (30, False, 1301.0),
            (40, True, 1302.0),
        ):
            wandb.fails = fails
            report.write("train", {**TRAIN_RECORD, "step": step})
        report.close()
    warnings = [message for level, message in lines if level == "WARNING"]
    assert "WeightsAndBiases cannot write" in warnings[0]
    assert "the server is away" in warnings[0]
    assert "It has lost 2 records" in warnings[1]
    assert [value["step"] for name, value in wandb.calls if name == "log"] == [30]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_weights_and_biases_without_its_library_is_refused_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"metrics\.wandb='papers'.*pip install"):
        check_sinks(tiny_config(metrics={"wandb": "papers"}).metrics)
    check_sinks(tiny_config().metrics)
