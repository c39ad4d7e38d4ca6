"""The output of commands on a narrow terminal, in an ASCII locale, and where no file can be written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.bundles import make
from txl_dist.cli.main import COMMANDS, main
from txl_dist.cli.typed_text import decode_texts
from txl_dist.config.load import config_from_dict
from txl_dist.console.echo import fitted
from txl_dist.errors import ConfigError
from txl_dist.io.files import why_unwritable


@pytest.mark.parametrize("command", COMMANDS)
def test_help_on_60_columns_keeps_every_flag_whole(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    narrow = capsys.readouterr().out
    flags = {word.strip(",") for word in wide.split() if word.startswith("--") and len(word) < 50}
    assert [flag for flag in flags if flag not in narrow] == []
    assert [line for line in narrow.splitlines() if len(line) > 60] == []


def test_the_usage_fits_60_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 60
    assert [command for command in COMMANDS if f"\n  {command}" not in shown] == []


def test_a_wrapped_line_begins_where_its_words_do_and_colours_take_no_column() -> None:
    assert (
        fitted("usage: txl command [--one] [--two]", width=20) == "usage: txl command\n       [--one]\n       [--two]"
    )
    assert fitted("  75    it was stopped and saved", width=20) == "  75    it was\n        stopped and\n        saved"
    assert fitted("one two three", width=7) == "one two\nthree"
    assert fitted("\x1b[1mone\x1b[0m two\x1b[m three", width=7) == "\x1b[1mone\x1b[0m two\x1b[m\nthree"
    assert fitted("a-word-longer-than-it\n\nb", width=5) == "a-word-longer-than-it\n\nb"


def test_every_help_is_ascii_in_a_locale_of_ascii() -> None:
    code = """
import contextlib
from txl_dist.cli.main import COMMANDS, main
for command in ["", *COMMANDS]:
    with contextlib.suppress(SystemExit):
        main([command, "--help"] if command else [])
"""
    locale = {"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=locale, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    assert done.stdout.isascii()
    assert b"\\u" not in done.stdout
    assert b"?" * 3 not in done.stdout


def in_a_locale_of_ascii(*words: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    locale = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "txl_dist", *words]
    return subprocess.run(command, capture_output=True, env=locale, cwd=cwd, check=False)


def test_evaluate_in_a_locale_of_ascii_scores_the_same_and_prints_ascii(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(tmp_path, texts=["caf\u00e9 \u5c71 \U0001f600 " * 30 + "d" * i for i in range(12)])
    words = ["evaluate", str(made.bundle), "--data", str(made.corpus.location), "--split", "train", "--json"]
    done = in_a_locale_of_ascii(*words, str(tmp_path / "ascii.json"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).isascii()
    assert b"Traceback" not in done.stderr
    assert main([*words, str(tmp_path / "utf8.json")]) == 0
    ours, theirs = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("ascii", "utf8"))
    assert [row["loss"] for row in ours.values()] == [row["loss"] for row in theirs.values()]
    escaped = capsys.readouterr().out.encode("ascii", "backslashreplace")
    assert len(done.stdout.splitlines()) == len(escaped.splitlines())


@pytest.mark.slow
def test_a_path_that_no_settings_can_hold_is_one_line_that_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "caf\u00e9"
    made = make(folder)
    done = in_a_locale_of_ascii(
        "evaluate", str(made.bundle), "--data", str(made.corpus.location), "--split", "train", cwd=tmp_path
    )
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert b"data.path=" in line
    assert line.endswith(
        b"is not UTF-8. Give a value in UTF-8. If the locale is ASCII, set the environment variable PYTHONUTF8=1."
    )


def test_a_setting_that_is_not_utf_8_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"file: data\.more_paths=a\\udcff is not UTF-8"):
        config_from_dict({"data": {"more_paths": ["fine", "a\udcff"]}}, source="file")


@pytest.mark.slow
def test_a_prompt_in_utf_8_is_taken_in_a_locale_of_ascii(tmp_path: Path) -> None:
    bundle = make(tmp_path).bundle
    words = ["generate", str(bundle), "--max-tokens", "3", "--out", "-", "--prompt"]
    done = in_a_locale_of_ascii(*words, "caf\u00e9 \u5c71", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"] == "caf\u00e9 \u5c71"


def test_texts_are_decoded_and_paths_and_other_bytes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python gives the bytes of words in a locale of ASCII."""
    given = [word.encode().decode("ascii", "surrogateescape") for word in ("caf\u00e9", "\u5c71")]
    monkeypatch.setattr("os.fsencode", lambda word: word.encode("ascii", "surrogateescape"))
    words = [given[0], "--prompt", *given, f"--name={given[1]}", "--out", given[0], "--stop", "\udcff", "plain"]
    expected = [given[0], "--prompt", "caf\u00e9", "\u5c71", "--name=\u5c71", "--out", given[0], "--stop", "\udcff"]
    assert decode_texts(words) == [*expected, "plain"]


@pytest.mark.parametrize(
    ("place", "number", "reason"),
    [
        ("/proc/x", errno.ENOENT, "no folder can be made in /proc"),
        ("/proc/x/y/z", errno.ENOENT, "no folder can be made in /proc"),
        ("/dev/null/x", errno.ENOTDIR, "/dev/null is not a folder"),
        ("/x", errno.EACCES, "this user may not write in /"),
        ("/x", errno.EROFS, "/ is read-only"),
        ("/x", errno.ENOSPC, "the disk of / is full"),
    ],
)
def test_a_place_that_cannot_be_written_is_explained_by_the_folder_above_it(
    place: str, number: int, reason: str
) -> None:
    assert why_unwritable(Path(place), OSError(number, os.strerror(number))) == reason


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x", "n" * 300])
def test_prepare_says_why_its_output_cannot_be_written(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text("some text\n" * 100)
    words = ["prepare", str(tmp_path / "t.txt"), "--out", place, "--tokenizer", "byte", "--valid-fraction", "0"]
    assert main(words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("txl prepare: error: cannot write ")
    assert line.endswith("another output folder.")
    assert "No such file" not in line
