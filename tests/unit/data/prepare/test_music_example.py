"""The example of music refuses, in one line, what MidiTok cannot read or write. A stand-in replaces MidiTok."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import txl_dist
from examples import music
from txl_dist.errors import ConfigError, DataError
from txl_dist.tokenizers.base import END_OF_TEXT

NAMES = ["PAD_None", "Bar_None", "Pitch_60", "Pitch_61"]


class StandIn:
    """Reads a file of one digit per id, and writes what it is given."""

    def __init__(self, _: Any) -> None:
        self.vocab = {name: i for i, name in reversed([*enumerate(NAMES)])}

    def __call__(self, path: Path) -> Any:
        if not path.read_text().isdigit():
            raise RuntimeError("MiniMidi:\nno header")
        return SimpleNamespace(ids=[*map(int, path.read_text())])

    def decode(self, ids: list[int]) -> Any:
        return SimpleNamespace(dump_midi=lambda path: path.write_text("".join(map(str, ids))))


@pytest.fixture(autouse=True)
def miditok(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("miditok")
    module.REMI, module.TokenizerConfig = StandIn, lambda **_: None
    monkeypatch.setitem(sys.modules, "miditok", module)


def pretend_model(monkeypatch: pytest.MonkeyPatch, symbols: list[str], *, end_of_text: int | None) -> None:
    made = SimpleNamespace(text=" Pitch_60", ids=[2])
    tokenizer = SimpleNamespace(symbols=tuple(symbols), end_of_text=end_of_text)
    monkeypatch.setattr(
        txl_dist, "load", lambda _: SimpleNamespace(tokenizer=tokenizer, generate=lambda *_, **__: made), raising=False
    )


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.mid").write_text("12")
    (tmp_path / "b.MIDI").write_text("broken")
    with pytest.raises(DataError, match=r"b\.MIDI: MidiTok gives up \(RuntimeError: MiniMidi: no header\)\. Mend or"):
        music.main(["ids", str(tmp_path), "--out", str(tmp_path / "out")])


def test_files_become_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.mid").write_text("12")
    (tmp_path / "b.mid").write_text("1")
    music.main(["ids", str(tmp_path), "--out", str(tmp_path / "out")])
    assert [json.loads(line) for line in (tmp_path / "out" / "ids.jsonl").read_text().splitlines()] == [[1, 2], [1]]
    assert (tmp_path / "out" / "names.txt").read_text().splitlines() == NAMES
    assert "2 pieces, 4 names" in capsys.readouterr().out


@pytest.mark.parametrize("out", [[], ["--out", "a.mid"]])
def test_a_run_that_is_no_music_is_refused(monkeypatch: pytest.MonkeyPatch, out: list[str]) -> None:
    pretend_model(monkeypatch, ["the", END_OF_TEXT], end_of_text=1)
    with pytest.raises(ConfigError, match=r"^runs/books writes no music: .*\.$"):
        music.main(["write", "runs/books", *out])


@pytest.mark.parametrize("ends", [[END_OF_TEXT], []])
def test_midi_is_written_of_the_names_of_miditok_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[str]
) -> None:
    out = tmp_path / "a.mid"
    pretend_model(monkeypatch, [*NAMES, *ends], end_of_text=len(NAMES) if ends else None)
    music.main(["write", "runs/midi", "--out", str(out)])
    assert out.read_text() == "12"
    with pytest.raises(DataError, match=r"none/a\.mid: MidiTok gives up \(FileNotFoundError: [^\n]*\. Name another"):
        music.main(["write", "runs/midi", "--out", str(tmp_path / "none" / "a.mid")])
    pretend_model(monkeypatch, [*NAMES[:-1], *ends], end_of_text=len(NAMES) - 1 if ends else None)
    with pytest.raises(ConfigError, match="was not trained on this MidiTok's names"):
        music.main(["write", "runs/midi", "--out", str(out)])


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["music.py", "made", "--out", str(tmp_path / "file" / "music")])
    with pytest.raises(SystemExit, match=r"^music\.py: error: .*file/music'$"):
        runpy.run_path(music.__file__, run_name="__main__")
