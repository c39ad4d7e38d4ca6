"""Every list flag accepts its values in one occurrence, in several occurrences, and in mixtures of both."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import tyro

from txl_dist.cli.data import PrepareArguments
from txl_dist.cli.generate import generate
from txl_dist.cli.main import _train_arguments, main
from txl_dist.cli.parsing import parse
from txl_dist.cli.recl import recl
from txl_dist.cli.repeated_flags import join_repeated
from txl_dist.cli.sweep import SweepArguments
from txl_dist.errors import ConfigError


@pytest.mark.parametrize(
    "words",
    [
        "--valid a b c",
        "--valid a --valid b --valid c",
        "--valid a b --valid=c",
        "--valid=a --valid b c",
        "--valid a --seed 1 --valid b --valid=c",
    ],
)
def test_a_repeated_flag_appends_in_the_order_of_the_words(words: str) -> None:
    bound = functools.partial(PrepareArguments)
    arguments: PrepareArguments = parse(bound.func, ["in", "--out", "o", *words.split()], prog="txl prepare")
    assert arguments.valid_inputs == ("a", "b", "c")
    assert arguments.inputs == ("in",)


def test_values_that_look_like_flags_are_kept_as_they_were_typed() -> None:
    @functools.wraps(generate)
    def bound(*values: Any, **named: Any) -> dict[str, Any]:
        return named

    words = ["RUN", "--prompt=--out", "--prompt", "it's", "--prompt=-x=1", "--tokens", "1", "--tokens", "2"]
    named = parse(bound, words, prog="txl generate")
    assert named["prompt"] == ("--out", "it's", "-x=1")
    assert named["tokens"] == (1, 2)


@pytest.mark.parametrize("words", [["--r", "0.1", "--r", "0.5"], ["--r", "0.1", "0.5"], ["--r=0.1", "--r=0.5"]])
def test_lists_of_numbers_and_a_command_with_many_targets(words: list[str]) -> None:
    @functools.wraps(recl)
    def bound(*values: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
        return values, named

    values, named = parse(bound, ["a", "b", *words], prog="txl recl")
    assert values == ((Path("a"), Path("b")),)
    assert named["settings"].r == (0.1, 0.5)


def test_settings_of_a_run_append_in_either_spelling(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[data]\nmore_paths = ["of the file"]\n')
    words = [
        "--data.more_paths",
        "a",
        "--train.max_steps",
        "3",
        "--data.more-paths",
        "b",
        "--optim.lr",
        "1",
        "--optim.lr",
        "2",
    ]
    settings = _train_arguments([str(file), *words]).settings
    assert settings.data.more_paths == ("a", "b"), "the flags replace the file's list"
    assert settings.optim.lr == 2, "the last of a single value holds"


def test_axes_of_a_sweep_come_in_either_form() -> None:
    for words in (["--grid", "a=1", "b=2"], ["--grid", "a=1", "--grid", "b=2"]):
        arguments, rest = parse(
            SweepArguments, ["c.toml", *words, "--data.more_paths", "x"], prog="txl sweep", return_unknown_args=True
        )
        assert arguments.grid == ("a=1", "b=2")
        assert rest == ["--data.more_paths", "x"]


def test_what_is_given_once_and_what_stands_after_two_dashes_is_left_alone() -> None:
    words = ["RUN", "--prompt", "a", "--max-tokens", "3", "--", "--prompt", "b"]
    assert join_repeated(words, generate, default=tyro.MISSING_NONPROP) == words


def test_a_repeated_flag_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="--valid is given several times, and once without a value"):
        join_repeated(["in", "--valid", "--valid", "b"], PrepareArguments, default=tyro.MISSING_NONPROP)


@pytest.mark.parametrize("flag", ["--ranks 2", "--ranks=2"])
def test_ranks_without_a_dry_run_are_refused_with_the_command_that_starts_them(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").touch()
    for command in ("train", "launch"):
        words = [command, "c.toml", "--run.dir", "a b", *flag.split(), "--train.max_steps", "4"]
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "txl launch --num_accelerators 2 c.toml --run.dir 'a b' --train.max_steps 4\n" in said
    assert main(["train", "c.toml", "--ranks", "-3"]) == 2
    assert "--ranks -3: it must be 1 or more" in capsys.readouterr().err
