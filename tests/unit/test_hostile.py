"""Files left by other programs, crashes and mistakes give one line or are ignored, without tracebacks or hangs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.helpers.launch import python
from txl_dist.config.load import config_from_dict, load_config
from txl_dist.config.schema import ModelSection
from txl_dist.distributed.processes import ProcessId, process_id, process_of
from txl_dist.errors import CheckpointError, ConfigError, DataError
from txl_dist.inference.bundle import network_of
from txl_dist.report.records import read_history
from txl_dist.train.monitoring.preemption import PreemptionRequests, parse_duration
from txl_dist.train.monitoring.run_lock import RunLock
from txl_dist.train.run_dir import read_run_history

ROOT = Path(__file__).parents[2]
ELSEWHERE = ProcessId("elsewhere", "", 7, 7)


@pytest.mark.slow
def test_three_hundred_damaged_files_give_no_traceback_and_no_hang() -> None:
    """In a process of its own: its watchdog needs the alarm that pytest's own limit uses."""
    result = python("-m", "tools.checks.fuzz", "--cases", "300", "--seed", "3", cwd=ROOT, timeout_s=580)
    assert result.returncode == 0, result.stdout + result.stderr
    total = next(line for line in result.stdout.splitlines() if line.startswith("all "))
    assert total.split()[1] == "300"
    assert total.split()[-2:] == ["0", "0"]


def write_lock(path: Path, *, nonce: str) -> None:
    path.write_text(json.dumps({"process": ELSEWHERE, "nonce": nonce, "started": "then"}), encoding="utf-8")


@pytest.mark.parametrize("nonces", [["a"], ["a", "b"], ["a", "a"]])
def test_a_lock_that_leads_back_to_itself_is_taken_over(tmp_path: Path, nonces: list[str]) -> None:
    write_lock(tmp_path / "RUN.lock", nonce="a")
    for nonce, after in zip(nonces, [*nonces[1:], "a"], strict=True):
        write_lock(tmp_path / f"RUN.lock.{nonce}", nonce=after)
    lock = RunLock.acquire(tmp_path, stale_after_s=0.01)
    lock.beat()
    assert not lock.is_lost
    lock.release()
    assert not (tmp_path / "RUN.lock").exists()


@pytest.mark.parametrize(
    "content", ["", "[", "[" * 100_000, "{}", '{"nonce": "\u0661", "process": 1}', '{"nonce": "' + "a" * 300 + '"}']
)
def test_a_lock_that_cannot_be_understood_is_taken_over_once_it_is_stale(tmp_path: Path, content: str) -> None:
    (tmp_path / "RUN.lock").write_text(content, encoding="utf-8")
    lock = RunLock.acquire(tmp_path, stale_after_s=0.01)
    assert lock.nonce in (tmp_path / "RUN.lock").read_text(encoding="utf-8")
    lock.release()


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
def test_a_lock_that_is_no_file_is_one_line(tmp_path: Path, kind: str) -> None:
    put(tmp_path / "RUN.lock", kind)
    with pytest.raises(ConfigError, match="cannot lock the run directory") as error:
        RunLock.acquire(tmp_path, stale_after_s=0.01)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["RUN.lock", "RUN.lock.a"])
def test_a_link_to_nothing_in_the_place_of_a_lock_is_taken_over(tmp_path: Path, name: str) -> None:
    write_lock(tmp_path / "RUN.lock", nonce="a")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("nowhere")
    RunLock.acquire(tmp_path, stale_after_s=0.01).release()
    assert not (tmp_path / "nowhere").exists()


def put(path: Path, kind: str) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("values", [None, 3, [], ["a"], ["a", "b", "c", 1], ["a", "b", 1, 2, 3], ["a", "b", -1, 2]])
def test_what_is_no_process_is_a_value_error(values: object) -> None:
    with pytest.raises(ValueError, match=r".+"):
        process_of(values)
    assert process_of(list(process_id())) == process_id()


@pytest.mark.parametrize("content", [b"", b"file", None])
def test_a_stop_that_is_a_file_or_a_folder_is_obeyed_and_cleared(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "STOP"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    requests = PreemptionRequests(stop_file=path)
    try:
        assert "STOP" in requests.reason
        requests.clear()
    finally:
        requests.close()
    assert not path.exists()


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
def test_records_that_cannot_be_read_are_one_line_or_none(tmp_path: Path, kind: str) -> None:
    put(tmp_path / "metrics.jsonl", kind)
    assert read_run_history(tmp_path, up_to=10).evaluated == {}
    with pytest.raises(DataError, match=r"not a run with records: metrics\.jsonl"):
        read_history(tmp_path)


def test_records_with_other_types_are_passed_over(tmp_path: Path) -> None:
    good = {"kind": "eval", "step": 3, "loss": 1.5}
    lines = [json.dumps(good | change) for change in ({"step": "3"}, {"loss": "a"}, {"loss": None}, {"step": None})]
    lines += ['{"kind": "eval", "step": ' + "[" * 100_000, '["eval"]', '"eval"', json.dumps(good)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read_run_history(tmp_path, up_to=10).evaluated == {3: 1.5}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.width", 10**12),
        ("model.num_layers", 10**6),
        ("model.num_heads", 2**63),
        ("engine.num_threads", 10**6),
        ("engine.timeout_s", 10**18),
        ("engine.start_timeout_s", 10**18),
        ("train.num_lanes", 10**12),
        ("train.segment_len", 10**12),
        ("train.memory_len", 10**30),
        ("eval.memory_len", 10**12),
        ("data.retries", 2000),
        ("data.cache_gib", 1e300),
        ("guard.spike_window", 10**12),
    ],
)
def test_an_absurd_size_is_one_line_that_names_the_limit(name: str, value: float) -> None:
    section, _, key = name.partition(".")
    with pytest.raises(ConfigError, match=rf"{name} = .* at most") as error:
        config_from_dict({section: {key: value}}, source="here")
    assert "\n" not in str(error.value)


def test_a_number_of_more_digits_than_python_prints_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[run]\nseed = 0x" + "f" * 10_000, encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "c.toml")


def test_a_duration_of_thousands_of_digits_is_one_line() -> None:
    with pytest.raises(ConfigError, match="not a duration"):
        parse_duration("9" * 5000 + "s")


def test_weights_are_held_against_the_settings_before_memory_is_spent_on_a_model() -> None:
    section = ModelSection(width=1 << 20, ff_width=1 << 20, num_layers=1)
    for vocab_size in (1 << 32, 1 << 62):
        with pytest.raises(CheckpointError, match=r"do not fit the model|belong to another model"):
            network_of(section, vocab_size=vocab_size, weights={"a": None}, dtype="fp32", where="x")  # type: ignore[dict-item]
