"""A byte order mark shows the encoding of a user's file and is never part of its text. All files are read this way."""

from __future__ import annotations

import ast
import codecs
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models

import txl_dist
from txl_dist.cli.launch import _slots, run_launch
from txl_dist.cli.prompts import prompts_in_lines, read_lines
from txl_dist.config.load import Config, load_config
from txl_dist.convert.import_checks import read_peer_settings
from txl_dist.convert.vocabulary import read_vocabulary
from txl_dist.errors import ConfigError, DataError
from txl_dist.io.files import decode_text, open_text, parse_object, read_bytes, read_text
from txl_dist.serve.options import Serving
from txl_dist.tokenizers.characters import CharTokenizer
from txl_dist.tokenizers.importing import open_tokenizer
from txl_dist.tokenizers.listed import read_names
from txl_dist.tokenizers.tokenizer import load_tokenizer

MARKS = {
    "no mark": (b"", "utf-8"),
    "UTF-8": (codecs.BOM_UTF8, "utf-8"),
    "UTF-16, as PowerShell writes it": (codecs.BOM_UTF16_LE, "utf-16-le"),
    "UTF-16 big-endian": (codecs.BOM_UTF16_BE, "utf-16-be"),
    "UTF-32": (codecs.BOM_UTF32_LE, "utf-32-le"),
    "UTF-32 big-endian": (codecs.BOM_UTF32_BE, "utf-32-be"),
}
OURS = CharTokenizer(["a", "b", "\u00e9", "<|endoftext|>", "<unk>"], end_of_text=3).to_json()
THEIRS = Library(models.WordLevel({"a": 0, "\u00e9": 1, "<unk>": 2}, unk_token="<unk>")).to_str()


def prompts_of(path: Path) -> Any:
    return [one.text for one in prompts_in_lines(read_lines(path), where="here")]


def prompts_of_stdin(path: Path) -> Any:
    stdin, sys.stdin = sys.stdin, io.TextIOWrapper(path.open("rb"), encoding="ascii")
    try:
        return prompts_of(Path("-"))
    finally:
        sys.stdin.close()
        sys.stdin = stdin


FILES: dict[str, tuple[str, str, Callable[[Path], Any]]] = {  # kind: (name, text, what is read of it)
    "a configuration": ("c.toml", '[run]\r\ndir = "caf\u00e9"\r\n', load_config),
    "our tokenizer": ("tokenizer.json", OURS, lambda path: load_tokenizer(path).fingerprint),
    "a tokenizer of Hugging Face": ("tokenizer.json", THEIRS, lambda path: open_tokenizer(path).symbols),
    "a vocabulary of lines": (
        "vocab.txt",
        "a 7\n<eos> 3\n\u00e9 1\n",
        lambda p: read_vocabulary(p, vocab_size=3).symbols,
    ),
    "a vocabulary in JSON": ("v.json", '{"a": 0, "\u00e9": 1}', lambda p: read_vocabulary(p, vocab_size=2).symbols),
    "names of token ids": ("names.txt", "a\r\n\u00e9\r\nb\r\n", read_names),
    "settings of a model": ("s.json", '{"n_layer": 3, "name": "\u00e9"}', read_peer_settings),
    "a prompt": ("p.txt", "caf\u00e9 the\r\n", lambda path: "".join(read_lines(path))),
    "prompts in JSON lines": ("p.jsonl", '{"prompt": "caf\u00e9"}\n\n{"tokens": [3]}\n', prompts_of),
    "prompts from standard input": ("p.jsonl", '{"prompt": "caf\u00e9"}\n{"tokens": [3]}\n', prompts_of_stdin),
    "an API key": ("key", "secret\r\n", lambda path: Serving(api_key_file=path).key()),
    "a hostfile": ("hosts", "node1 slots=2\r\nnode2 slots=3\r\n", lambda path: _slots(str(path))),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_with_a_mark_is_read_as_the_one_without(tmp_path: Path, kind: str) -> None:
    name, text, read = FILES[kind]
    found = []
    for number, (mark, encoding) in enumerate(MARKS.values()):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        path.write_bytes(mark + text.encode(encoding))
        found.append(read(path))
    assert found[0]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("mark", MARKS)
def test_only_the_mark_is_dropped(tmp_path: Path, mark: str) -> None:
    start, encoding = MARKS[mark]
    path = tmp_path / "a.txt"
    for text in ("", "x", "a\r\nb\n", "mid\ufeffdle \U0001f600", *(["\ufeffsecond"] if start else [])):
        path.write_bytes(start + text.encode(encoding))
        assert read_text(path) == decode_text(path.read_bytes()) == text
        with open_text(path) as stream:
            assert stream.read() == text


def test_a_pipe_is_read_too(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, "\ufeffsecret\n".encode("utf-16-le"))
    os.close(writer)
    assert Serving(api_key_file=Path(f"/dev/fd/{reader}")).key() == "secret"
    os.close(reader)


@pytest.mark.parametrize("content", [b"\xff\xfe[", b"\xfe\xff\xd8\x00", b"\xff\xfe\0\0abc", b"\xff"])
def test_what_is_no_text_by_its_mark_or_without_one_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    for read in (load_config, read_names, load_tokenizer, lambda path: list(read_lines(path))):
        with pytest.raises((ConfigError, DataError), match=r"file\.json"):
            read(path)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"decode|holds no"):
        parse_object(read_bytes(path))


def test_the_launcher_gets_its_files_without_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], str, str]] = []

    def start(flags: list[str], words: list[str], **settings: Any) -> int:
        given = Path(os.environ["DS_ENV_FILE"]).read_text(encoding="utf-8") if "DS_ENV_FILE" in os.environ else ""
        seen.append((flags, Path(flags[-1]).read_text(encoding="utf-8"), given))
        return 0

    monkeypatch.setattr("txl_dist.launcher.launch.launch_ranks", start)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DS_ENV_FILE", "")
    monkeypatch.delenv("DS_ENV_FILE")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    Path("hosts").write_text("a slots=1\n")
    run_launch(["--hostfile", "hosts", "c.toml"], read_settings=lambda *_: Config())
    Path("hosts").write_text("a slots=1\n", encoding="utf-8-sig")
    Path("home/.deepspeed_env").write_text("A=1", encoding="utf-8-sig")
    Path(".deepspeed_env").write_text("B=2\n", encoding="utf-16")
    run_launch(["--hostfile", "hosts", "c.toml"], read_settings=lambda *_: Config())
    assert seen[0] == (["--hostfile", "hosts"], "a slots=1\n", "")
    flags, hosts, variables = seen[1]
    assert flags[:3] == ["--hostfile", "hosts", "--hostfile"]  # the last one counts
    assert (hosts, variables) == ("a slots=1\n", "A=1\nB=2\n")
    assert not Path(flags[-1]).exists()


NOT_A_USERS = {
    "distributed/malloc.py": "a switch of Linux",
    "planning/doctor/machine.py": "files of Linux",
    "data/prepare/workdir.py": "ours: the process that prepares",
    "launcher/sweep.py": "ours: the end of a run's log",
    "distributed/processes.py": "/proc",
    "serve/listening.py": "/proc",
    "distributed/rendezvous.py": "/proc",
    "train/footprint/room.py": "/proc and control groups",
    "train/report/metrics.py": "/proc",
    "data/prepare/datasets.py": "text of a corpus of known content",
}


def is_read_of_text(call: ast.Call) -> bool:
    """Whether a call opens a text file to read it, or decodes a file's bytes, by itself."""
    spelt = ast.unparse(call)
    if not isinstance(call.func, ast.Attribute):
        return spelt.startswith("open(") and not re.search(r"'[rwabx+]*[wabx][rwabx+]*'", spelt)
    if call.func.attr == "open":
        is_text = "encoding=" in spelt or not (call.args or call.keywords)
        return is_text and not re.search(r"open\('[wax]", spelt)
    if call.func.attr == "decode":
        return "read_bytes(" in ast.unparse(call.func.value)
    return call.func.attr == "read_text"


def test_no_file_of_a_user_is_read_as_text_but_through_files_py() -> None:
    package = Path(txl_dist.__file__).parent
    found = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name == "io/files.py" or name in NOT_A_USERS:
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        found += [f"{name}:{call.lineno}: {ast.unparse(call)}" for call in calls if is_read_of_text(call)]
    assert found == []


@pytest.mark.parametrize("code", ["open(p)", "open(p, encoding='utf-8')", "p.open(encoding='ascii')", "p.read_text()"])
def test_reading_a_text_in_another_way_is_noticed(code: str) -> None:
    (call,) = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert is_read_of_text(call)
