"""A full disk under standard output gives one line and exit code 2. Under standard error it changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.corpora import tiny_corpus

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def run(*words: str, out: str, err: str = "pipe", folder: Path) -> tuple[int, str, str]:
    """(exit code, standard output, standard error); each goes to a pipe, to a full disk or is closed."""
    redirections = {"pipe": "", "full": ">/dev/full", "closed": ">&-"}
    done = run_shell(
        f'exec "$@" {redirections[out]} {redirections[err] and "2" + redirections[err]}', *words, folder=folder
    )
    return done.returncode, done.stdout, done.stderr


def run_shell(script: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of the shell whose "$@" is `python -m txl_dist words`."""
    return subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-m", "txl_dist", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lost")
    tiny_corpus(folder)
    (folder / "text.txt").write_text("some words\n\n" * 200)
    return folder


@pytest.mark.parametrize(
    "words",
    ["--help", "--version", "train --help", "inspect corpus", "train", "verify corpus", "prepare text.txt --out made"],
)
def test_a_full_standard_output_is_one_line(words: str, folder: Path) -> None:
    code, _, err = run(*words.split(), out="full", folder=folder)
    assert "Traceback" not in err
    if words != "train":  # its usage goes to standard error
        assert code == 2
        assert err.splitlines()[-1].startswith("txl: error: standard output cannot be written: No space left on device")


def test_what_was_written_to_files_is_there(folder: Path) -> None:
    code, _, _ = run("prepare", "text.txt", "--out", "whole", "--tokenizer", "byte", out="full", folder=folder)
    assert code == 2
    assert run("verify", "whole", out="pipe", folder=folder)[:2] == (0, "whole: whole\n")


@pytest.mark.parametrize("err", ["full", "closed"])
def test_a_lost_standard_error_changes_nothing(err: str, folder: Path) -> None:
    code, out, _ = run("verify", "corpus", out="pipe", err=err, folder=folder)
    assert (code, out) == (0, "corpus: whole\n")
    code, out, _ = run("nonsense", out="pipe", err=err, folder=folder)
    assert (code, out) == (2, "")


def test_a_closed_standard_output_is_no_error(folder: Path) -> None:
    for words in ("--help", "verify corpus"):
        code, _, err = run(*words.split(), out="closed", folder=folder)
        assert (code, "Traceback" in err) == (0, False)


def test_a_reader_that_ends_early_is_told_nothing(folder: Path) -> None:
    done = run_shell('"$@" | head -n 1', "train", "--help", folder=folder)
    assert done.stdout.startswith("usage: txl train")
    assert done.stderr == ""
