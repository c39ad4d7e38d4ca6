"""Log lines reach every output that can be written. An output that fails does not end the program or print
tracebacks."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from txl_dist.console.logging import GrowingFile, logger, start_logging


@pytest.fixture(autouse=True)
def _handlers_of_others() -> Iterator[None]:
    """The logger belongs to the process: leave it as it was."""
    before, level, propagate = list(logger.handlers), logger.level, logger.propagate
    logger.handlers.clear()
    yield
    start_logging()
    logger.handlers[:] = before
    logger.setLevel(level)
    logger.propagate = propagate


def run(script: str, *, close_stderr: bool = False) -> tuple[int, str]:
    """(exit status, standard error) of a Python program; with `close_stderr` nobody reads it."""
    child = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, stdin=subprocess.PIPE)
    assert child.stderr is not None
    if close_stderr:
        child.stderr.close()
        child.communicate(b"go on\n", timeout=60)
        return child.returncode, ""
    return child.wait(60), child.stderr.read().decode()


def test_lines_go_to_standard_error_and_to_the_file_and_a_rank_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_logging(rank=3, file=tmp_path / "log.txt")
    logger.info("only rank 0 chats")
    logger.warning("half of it is %s", "gone")
    written = (tmp_path / "log.txt").read_text()
    assert capsys.readouterr().err == written
    assert written[8:] == " W [rank 3] half of it is gone\n"


def test_a_broken_pipe_ends_nothing_and_the_file_has_every_line(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    script = f"""
import sys
from pathlib import Path
from txl_dist.console.logging import logger, start_logging
sys.stdin.readline()
start_logging(file=Path({str(path)!r}))
for number in range(2000):
    logger.info("line %d", number)
sys.stderr = None
logger.info("the end")
import os
os._exit(7)
"""
    assert run(script, close_stderr=True)[0] == 7
    lines = path.read_text().splitlines()
    assert len(lines) == 2001
    assert lines[-1].endswith("the end")


def test_a_closed_standard_error_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = (tmp_path / "closed").open("w")
    closed.close()
    start_logging(file=tmp_path / "log.txt")
    monkeypatch.setattr(sys, "stderr", closed)
    logger.info("still here")
    assert "still here" in (tmp_path / "log.txt").read_text()


def test_a_file_that_cannot_be_written_is_named_once_and_goes_on_when_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "away" / "log.txt"
    start_logging(file=path)
    for number in range(5):
        logger.info("line %d", number)
    path.parent.mkdir()
    for number in range(5, 8):
        logger.info("line %d", number)
    shown = capsys.readouterr().err
    assert shown.count(f"{path} cannot be written, and lacks all lines until writing works again: [Errno 2]") == 1
    assert shown.count(f"{path} is written again, but 6 lines could not be written") == 1, (
        "the warning itself is one of them"
    )
    assert "Traceback" not in shown
    written = path.read_text().splitlines()
    assert [line[11:17] for line in written if " I " in line] == ["line 5", "line 6", "line 7"]


def test_a_mistake_in_a_log_line_is_still_shown(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging()
    logging.getLogger("txl_dist").warning("%d", "no number")
    assert "TypeError" in capsys.readouterr().err


def test_a_piece_that_fits_in_part_is_taken_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = GrowingFile(tmp_path / "file", separator=b"\n")
    file.append(b"one")
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:2]))
    with pytest.raises(OSError) as caught:
        file.append(b"two")
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    file.append(b"three")
    assert file.path.read_bytes() == b"one\nthree\n"


def test_a_file_whose_last_piece_was_torn_gets_a_separator_first(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for found, expected in ((b"", b"new\n"), (b"old\n", b"old\nnew\n"), (b"old\nto", b"old\nto\nnew\n")):
        path.write_bytes(found)
        GrowingFile(path, separator=b"\n").append(b"new")
        assert path.read_bytes() == expected
    binary = GrowingFile(tmp_path / "binary")
    binary.append(b"one")
    binary.close()
    binary.append(b"two")
    assert binary.path.read_bytes() == b"onetwo"
