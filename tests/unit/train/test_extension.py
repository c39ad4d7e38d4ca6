"""A lock that a killed compilation left is removed; one behind which somebody compiles is not."""

import os
from pathlib import Path

import pytest

from tests.helpers.logs import recorded_log
from txl_dist.train.extension import LONGEST_S, NAME, prepare_compilation


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / NAME).mkdir()
    path = tmp_path / NAME / "lock"
    path.touch()
    return path


def age(path: Path, seconds: float) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_an_old_lock_that_nobody_holds_is_removed(lock: Path) -> None:
    age(lock, LONGEST_S + 1)
    with recorded_log() as lines:
        prepare_compilation()
    assert not lock.exists()
    assert any(str(lock) in message for _, message in lines)


def test_a_lock_that_somebody_holds_is_left(lock: Path) -> None:
    age(lock, LONGEST_S + 1)
    with lock.open(), recorded_log() as lines:
        prepare_compilation()
    assert lock.exists()
    assert any("waiting" in message for _, message in lines)


def test_a_young_lock_is_left(lock: Path) -> None:
    prepare_compilation()
    assert lock.exists()


def test_a_compilation_is_announced_once(lock: Path) -> None:
    lock.unlink()
    with recorded_log() as lines:
        prepare_compilation()
    assert any("compiles" in message for _, message in lines)
    (lock.parent / f"{NAME}.so").touch()
    with recorded_log() as lines:
        prepare_compilation()
    assert lines == []
