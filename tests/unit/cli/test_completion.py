"""The completion scripts in the installed shells: TAB offers the right words without starting a program."""

from __future__ import annotations

import os
import pty
import shlex
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from txl_dist.cli.main import COMMANDS, main
from txl_dist.config.load import setting_names

SHELLS = ("bash", "zsh", "fish")
CASES = [
    ("txl eva", "evaluate"),
    ("txl --ver", "--version"),
    ("txl help tra", "train"),
    ("txl completion zs", "zsh"),
    ("txl train e.tom", "e.toml"),
    ("txl train e.toml --engine.prec", "--engine.precision"),
    ("txl train e.toml --engine.precision bf", "bf16"),
    ("txl train e.toml --engine.cuda_graph au", "auto"),
    ("txl train e.toml --checkpoint.keep_best T", "True"),
    ("txl train e.toml --dry", "--dry-run"),
    ("txl train e.toml --run.dir fol", "folder/"),
    ("txl train e.toml --model.cutoffs 1 2 --optim.nam", "--optim.name"),
    ("txl launch --num_acc", "--num_accelerators"),
    ("txl launch e.toml --train.max_s", "--train.max_steps"),
    ("txl plan e.toml --interc", "--interconnect"),
    ("txl sweep e.toml --grid optim.lr=1,2 --see", "--seeds"),
    ("txl prepare texts --tokenizer by", "byte"),
    ("txl train e.toml --model.positions abs", "absolute"),
    ("txl launch e.toml --optim.name lam", "lamb"),
    ("txl prepare texts --valid e.tom", "e.toml"),
    ("txl export run out --format on", "onnx"),
    ("txl import weights out --format nv", "nvidia"),
    ("txl generate b --prompt x --temp", "--temperature"),
    ("txl serve fol", "folder/"),
    ("txl evaluate run --protocol orig", "original"),
]
"""A line that is typed, and the one completion of its last word."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script of each shell, in a folder with a file and a folder to complete."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "e.toml").touch()
    (folder / "folder").mkdir()
    paths = {}
    for shell in SHELLS:
        paths[shell] = folder / f"txl.{shell}"
        with paths[shell].open("w", encoding="ascii") as file, pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdout", file)
            assert main(["completion", shell]) == 0
    return paths


def need(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


def offered_by_bash(script: Path, line: str) -> list[str]:
    """What bash offers for the last word. The search path is empty: the script starts no program."""
    words = shlex.join([*line.split(" ")])
    code = f"source {script.name}; PATH=; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _txl; "
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, cwd=script.parent, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def offered_by_fish(script: Path, line: str) -> list[str]:
    """What fish offers for the last word."""
    code = f"source {script.name}; set PATH; complete -C {shlex.quote(line)}"
    home = {**os.environ, "HOME": str(script.parent), "XDG_CONFIG_HOME": str(script.parent)}
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], capture_output=True, text=True, cwd=script.parent, env=home, check=True
    )
    assert done.stderr == ""
    return [each.partition("\t")[0] for each in done.stdout.splitlines()]


def completed_by_zsh(script: Path, lines: list[str]) -> list[str]:
    """The lines after TAB was pressed behind each, in an interactive zsh."""
    out = script.parent / "typed"
    out.touch()
    main_end, shell_end = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"],
        stdin=shell_end,
        stdout=shell_end,
        stderr=shell_end,
        cwd=script.parent,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb", "HOME": str(script.parent)},
    )
    os.close(shell_end)
    threading.Thread(target=drain, args=(main_end,), daemon=True).start()
    setup = (
        f"autoload -Uz compinit; compinit -u -D; source {script.name}; setopt no_beep no_auto_list; "
        f'finish() {{ zle complete-word; print -r -- "$BUFFER" >>{out.name}; BUFFER= }}; zle -N finish; '
        f"bindkey '^I' finish; print ready >>{out.name}\n"
    )
    try:
        os.write(main_end, setup.encode())
        wait_for_lines(out, 1)
        for number, line in enumerate(lines, start=2):
            os.write(main_end, f"{line}\t".encode())
            wait_for_lines(out, number)
    finally:
        shell.kill()
        shell.wait()
        os.close(main_end)
    return out.read_text(encoding="utf-8").splitlines()[1:]


def drain(file: int) -> None:
    """Read what the shell draws, or it would wait for a reader."""
    try:
        while os.read(file, 1 << 16):
            pass
    except OSError:
        pass


def wait_for_lines(path: Path, count: int) -> None:
    until = time.monotonic() + 60
    while len(path.read_text(encoding="utf-8").splitlines()) < count:
        assert time.monotonic() < until, path.read_text(encoding="utf-8")
        time.sleep(0.02)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_valid_names_every_command_and_setting_and_starts_no_program(
    shell: str, scripts: dict[str, Path]
) -> None:
    text = scripts[shell].read_text(encoding="ascii")
    assert [name for name in [*COMMANDS, *setting_names()] if name not in text] == []
    assert "(txl" not in text
    need(shell)
    assert subprocess.run([shell, "-n", str(scripts[shell])], capture_output=True, check=True).stderr == b""


@pytest.mark.parametrize(("line", "word"), CASES)
def test_bash_completes_commands_flags_settings_choices_and_files(
    line: str, word: str, scripts: dict[str, Path]
) -> None:
    need("bash")
    assert [each.rstrip("/") for each in offered_by_bash(scripts["bash"], line)] == [word.rstrip("/")]


def test_bash_completes_the_value_after_an_equals_sign_and_other_spellings(scripts: dict[str, Path]) -> None:
    need("bash")
    choices = ["fp32", "tf32", "bf16", "fp16", "auto"]
    assert offered_by_bash(scripts["bash"], "txl train e.toml --engine.precision =") == choices
    assert offered_by_bash(scripts["bash"], "txl train e.toml --engine.precision = bf") == ["bf16"]
    assert offered_by_bash(scripts["bash"], "txl train e.toml --engine.cuda-graph ") == ["off", "on", "auto"]
    assert offered_by_bash(scripts["bash"], "txl train e.toml --train.num_lanes ") == [""]


@pytest.mark.parametrize(("line", "word"), CASES[::4])
def test_fish_completes_commands_flags_settings_choices_and_files(
    line: str, word: str, scripts: dict[str, Path]
) -> None:
    need("fish")
    assert offered_by_fish(scripts["fish"], line) == [word]


def test_zsh_completes_commands_flags_settings_choices_and_files(scripts: dict[str, Path]) -> None:
    need("zsh")
    lines = completed_by_zsh(scripts["zsh"], [line for line, _ in CASES])
    expected = [f"{line.rpartition(' ')[0]} {word}" for line, word in CASES]
    assert [line.rstrip() for line in lines] == expected


@pytest.mark.parametrize("words", [["completion"], ["completion", "tcsh"], ["completion", "bash", "zsh"]])
def test_a_shell_must_be_named_and_known(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("txl completion: error: ")
