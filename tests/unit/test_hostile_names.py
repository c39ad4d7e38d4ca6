"""Names with line breaks and other control characters: every message about them is one line that shows these
characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from txl_dist.cli.main import main
from txl_dist.errors import CheckpointError, ConfigError, DataError, translate_errors

NAME = "new\nline\ttab\x1b[2J\u2028end\rof"
SHOWN = r"new\nline\ttab\x1b[2J\u2028end\rof"


@pytest.mark.parametrize("kind", [ConfigError, DataError, CheckpointError])
def test_a_control_character_in_a_message_is_written_out(kind: type[ConfigError]) -> None:
    assert str(kind(f"{NAME} does not exist.")) == f"{SHOWN} does not exist."
    assert str(kind(f"{kind(NAME)} again")) == f"{SHOWN} again", "it is written out once"


def test_a_message_has_a_line_for_each_argument_of_its_error() -> None:
    assert str(ConfigError("one", NAME, "three")) == f"one\n{SHOWN}\nthree"
    assert str(ConfigError()) == str(ConfigError("")) == ""


def test_the_reason_of_another_program_in_several_lines_is_one_line() -> None:
    with (
        pytest.raises(DataError, match=r"^x: two words\. Mend it$"),
        translate_errors(DataError, "x", "Mend it", of=(ValueError,)),
    ):
        raise ValueError("two\n   words")


@pytest.mark.parametrize(
    "words",
    [
        ["prepare", "NAME", "--out", "OUT"],
        ["prepare", "FILE", "--out", "OUT"],
        ["prepare", "FILE", "--out", "OUT", "--tokenizer", "NAME"],
        ["train", "NAME.toml"],
        ["train", "--data.path", "NAME"],
        ["train", "--model.num-layers", "NAME"],
        ["train", "--NAME", "1"],
        ["evaluate", "NAME"],
        ["export", "NAME", "OUT"],
        ["generate", "NAME", "--prompt", "x"],
        ["import", "NAME", "OUT", "--format", "original"],
        ["inspect", "NAME"],
        ["verify", "NAME"],
        ["report", "NAME"],
        ["compare", "NAME", "NAME"],
        ["serve", "NAME"],
        ["NAME"],
    ],
)
def test_a_command_refuses_a_name_with_control_characters_in_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some\nfile.jsonl").write_text('{"text": null}\n', encoding="utf-8")
    given = [word.replace("NAME", NAME).replace("FILE", "some\nfile.jsonl").replace("OUT", "out") for word in words]
    assert main(given) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.endswith(("...", "the defaults"))]
    assert len(lines) == 1, lines
    assert r"new\nline" in lines[0] or r"some\nfile" in lines[0]
