"""Arguments for other machines arrive unchanged through DeepSpeed's runner, pdsh and a shell, or are refused."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txl_dist.cli.launch import run_launch
from txl_dist.cli.main import main
from txl_dist.cli.remote_words import ENCODED, check_remote, decode_words, encode_words
from txl_dist.config.load import Config
from txl_dist.errors import ConfigError

ODD = [
    "two  blanks",
    "",
    'it\'s "quoted"',
    "$HOME `id` $(id)",
    "a\\b",
    "%h %n 100%",
    "line\nbreak",
    "\u00e9 \u5b57",
    "*;&|#!~",
    "\udcff",
]


def through_a_remote_shell(words: list[str]) -> list[str]:
    """What a remote program gets: DeepSpeed's quoting for pdsh, pdsh's own marks, a shell."""
    from deepspeed.launcher.multinode_runner import PDSHRunner

    runner = PDSHRunner.__new__(PDSHRunner)
    runner.args = argparse.Namespace(user_args=words)
    sent = " ".join(runner.parse_user_args()).replace("%n", "0").replace("%h", "node1").replace("%%", "%")
    done = subprocess.run(["sh", "-c", f"printf '%s\\0' {sent}"], capture_output=True, check=False, timeout=20)
    return done.stdout.decode(errors="surrogateescape").split("\0")[:-1]


@pytest.mark.parametrize("word", ODD)
def test_an_odd_word_arrives_as_it_was_typed(word: str) -> None:
    words = ["c.toml", "--run.dir", word]
    assert decode_words(through_a_remote_shell(encode_words(words))) == words


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(alphabet=st.characters(exclude_characters="\0"), max_size=8), min_size=1, max_size=3))
def test_any_words_arrive_as_they_were_typed(words: list[str]) -> None:
    assert decode_words(encode_words(words)) == words
    assert all(word.isascii() and not set(word) & set(" $`\"'\\%\n") for word in encode_words(words))


def test_plain_words_stay_readable() -> None:
    words = ["configs/a_b.toml", "--optim.lr=1e-3", "--run.dir", "runs/x-1"]
    assert encode_words(words) == words


def test_what_was_damaged_on_its_way_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for word in (ENCODED + "%%%", ENCODED + "bm90IGpzb24=", ENCODED + "MTI=", ENCODED):
        assert main(["train", word]) == 2
        assert "Only `txl launch` may write this flag" in capsys.readouterr().err


def test_a_launch_on_several_machines_encodes_and_one_on_this_machine_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[str]] = []
    monkeypatch.setattr("txl_dist.launcher.launch.launch_ranks", lambda flags, words, **rest: sent.append(words) or 0)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("a slots=1\nb slots=1\n")
    for flags in ([], ["--hostfile", "hosts"]):
        run_launch([*flags, "c.toml", "--run.dir", "a b"], read_settings=lambda *_: Config())
    assert sent[0] == decode_words(sent[1]) == ["c.toml", "--run.dir", "a b"]
    assert sent[1] != sent[0]


def test_a_folder_or_a_variable_that_would_change_on_its_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my $HOME"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("hosts").write_text("a slots=1\nb slots=1\n")
    Path("c.toml").touch()
    assert main(["launch", "--hostfile", "hosts", "c.toml"]) == 2
    assert "this folder" in capsys.readouterr().err
    for name, value in (("PYTHONPATH", "/a/$b"), ("NCCL_DEBUG_FILE", "/log/%h"), ("PYTHONSTARTUP", 'a"b')):
        with pytest.raises(ConfigError, match=f"the variable {name} contains"):
            check_remote({}, environment={name: value})
    check_remote({"this folder": "/a/b-c"}, environment={"HOME": "$x", "PYTHONPATH": "/a b:/c"})
    with pytest.raises(ConfigError, match="--venv_script 'a b'"):
        check_remote({"--venv_script": "a b"}, environment={})


def test_a_launcher_flag_that_would_be_lost_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").touch()
    assert main(["launch", "--include", "a:0", "--include=b", "c.toml"]) == 2
    assert (
        "--include is given 2 times, but the launcher accepts the flag only once. Join the names of machines with @"
        in capsys.readouterr().err
    )
