"""One typing error in the name of a setting, in a file or on the command line, is refused with the intended name.

A typing error removes, inserts or replaces a character, or swaps two neighbours, in the key or in the section. It is
drawn with a seed. A draw that gives a valid name is skipped. Other tests check that each setting has an explanation
with a unit.
"""

from __future__ import annotations

import inspect
import random
import re
import string
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from txl_dist.cli.main import COMMANDS, main
from txl_dist.config.load import Config, setting_names
from txl_dist.console.suggest import nearest

LETTERS = string.ascii_lowercase + string.digits + "_"
NUM_DRAWS = 50
ENOUGH = 48
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]


def slip(word: str, draw: random.Random) -> str:
    kind, at = draw.choice(("leave out", "put in", "replace", "swap")), draw.randrange(len(word))
    if kind == "leave out":
        return word[:at] + word[at + 1 :]
    if kind == "put in":
        return word[:at] + draw.choice(LETTERS) + word[at:]
    if kind == "replace":
        return word[:at] + draw.choice(LETTERS) + word[at + 1 :]
    return word[:at] + word[at : at + 2][::-1] + word[at + 2 :]


def typos(seed: int, *, of: str, count: int = NUM_DRAWS) -> list[SimpleNamespace]:
    """So many misspelt settings; `of`: "key" or "section"."""
    draw, known, found = random.Random(seed), set(setting_names()), []
    sections = {name.partition(".")[0] for name in known}
    while len(found) < count:
        meant = draw.choice(sorted(known))
        section, _, key = meant.partition(".")
        if of == "key":
            key = slip(key, draw)
        else:
            section = slip(section, draw)
        if key and section and f"{section}.{key}" not in known and (of == "key" or section not in sections):
            found.append(SimpleNamespace(meant=meant, section=section, key=key))
    return found


def refusal(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one message of a command that must fail as a user's error."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


def suggested(message: str) -> list[str]:
    return re.findall(r"[a-z0-9_.]+", message.rpartition("Did you mean ")[2])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("of", ["key", "section"])
def test_a_slip_in_the_file_is_refused_with_the_right_suggestion(
    seed: int, of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, path = 0, tmp_path / "my.toml"
    for typo in typos(seed, of=of):
        path.write_text(f"[{typo.section}]\n{typo.key} = 1\n", encoding="utf-8")
        message = refusal("train", str(path), capsys=capsys)
        assert str(path) in message
        right += (typo.meant if of == "key" else typo.meant.partition(".")[0]) in suggested(message)
    assert right >= ENOUGH


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("of", ["key", "section"])
def test_a_slip_on_the_command_line_is_refused_with_the_right_suggestion(
    seed: int, of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, path = 0, tmp_path / "my.toml"
    path.touch()
    for number, typo in enumerate(typos(100 + seed, of=of)):
        flag = f"--{typo.section}.{typo.key}"
        if number % 3 == 0:
            flag = flag.replace("_", "-")  # both spellings are accepted
        words = [f"{flag}=1"] if number % 2 else [flag, "1"]
        message = refusal("train", str(path), *words, capsys=capsys)
        right += typo.meant in suggested(message)
    assert right >= ENOUGH


@pytest.mark.slow
@pytest.mark.parametrize("of", ["key", "section"])
def test_over_hundreds_of_slips_at_most_one_in_a_hundred_is_not_understood(of: str) -> None:
    draws = typos(7, of=of, count=200)
    answers = [nearest(f"{typo.section}.{typo.key}", setting_names()) for typo in draws]
    wrong = [typo for typo, answer in zip(draws, answers, strict=True) if typo.meant not in answer]
    assert len(wrong) <= 2, wrong[:5]
    assert sum(len(answer) > 1 for answer in answers) <= 4


def test_every_mistake_on_the_command_line_gets_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.toml"
    path.touch()
    words = ["--train.num_lanse", "3", "--model.widht=4", "--optim.name", "adm", "--rseume", "auto", "--dry_rn"]
    assert main(["train", str(path), *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    meant = ["--train.num-lanes (train.num_lanes)?", "--model.width?", "adam?", "--resume?", "--dry-run?"]
    assert len(lines) == len(meant)
    assert all(line.endswith(end) for line, end in zip(lines, meant, strict=True)), lines


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--lr", "1"], "--optim.lr?"),
        (["--train.lr", "1"], "--optim.lr?"),
        (["--num-lanes", "8"], "--train.num-lanes (train.num_lanes)?"),
        (["--modelnum_layers", "3"], "--model.num-layers (model.num_layers)?"),
        (["--model.pre_norm", "true"], "True?"),
        (["--model.pre_norm", "Flase"], "False?"),
        (["--engine.precision=bf61"], "bf16?"),
        (["--engine.precision", "float64"], "fp32, tf32, bf16, fp16, auto."),
        (["--zzzzzzzzz", "1"], "See txl train --help."),
    ],
)
def test_slips_of_other_kinds_on_the_command_line(
    words: list[str], meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.toml"
    path.touch()
    assert refusal("train", str(path), *words, capsys=capsys).rstrip("\n").endswith(meant)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("[modle]\nnum_layers = 3\nwidth = 4\nnum_heads = 2\n", "unknown setting modle. Did you mean model?"),
        ("model.num_layrs = 3", "unknown setting model.num_layrs. Did you mean model.num_layers?"),
        ("modle.num_layers = 3", "unknown setting modle. Did you mean model?"),
        ("num_layers = 3", "unknown setting num_layers. Did you mean model.num_layers?"),
        ("[model]\nnum-layers = 3", "unknown setting model.num-layers. Did you mean model.num_layers?"),
        ("[Model]\nwidth = 3", "unknown setting Model. Did you mean model?"),
        ('"model.width" = 3', "Write model.width without quotes, or width under [model]."),
        ("[optim]\nname = 'adm'", "Did you mean adam?"),
        ("[model]\npre_norm = 'ture'", "Did you mean true?"),
        ("[model]\npre_norm = 1", "Write true or false, without quotes."),
        ("[model]\npre_norm = True", "In TOML, write true and false in lower case."),
    ],
)
def test_slips_of_other_kinds_in_the_file(
    text: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    assert refusal("train", str(path), capsys=capsys).rstrip("\n").endswith(meant)


def test_a_misspelt_command_is_answered_with_the_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "unknown command 'trian'. Did you mean train?" in capsys.readouterr().err


def sections() -> dict[str, type[BaseModel]]:
    return {name: type(info.default) for name, info in Config.model_fields.items()}


UNITS = (
    r"tokens?|steps?|seconds?|gib|size|layers|blocks|lanes|rows?|stripes|width|heads|ids?|distances|decay|share|"
    r"dropout|block|norm|rate|deviations?|variance|moment|momentum|seed|threads|shards?|documents?|often|checkpoints|spikes|"
    r"rewinds|nodes|operations per second|shards optimizer state|largest|cluster"
)
"""What a number counts, or what kind of pure number it is."""


def test_every_setting_says_what_it_means_and_every_number_what_it_counts() -> None:
    texts = {
        f"{section}.{key}": (info.annotation, info.description or "")
        for section, kind in sections().items()
        for key, info in kind.model_fields.items()
    }
    assert sorted(texts) == sorted(setting_names())
    assert [name for name, (_, text) in texts.items() if len(text.split()) < 2 or not text.endswith((".", ")"))] == []
    assert len({text for _, text in texts.values()}) == len(texts), "two settings share a text"
    numbers = {name: text for name, (kind, text) in texts.items() if kind in (int, float) or "int" in str(kind)}
    assert len(numbers) > 50
    assert [name for name, text in numbers.items() if not re.search(rf"\b({UNITS})\b", text, re.IGNORECASE)] == []


UNIT_OF_ENDING = {"_s": r"seconds|same", "_gib": r"size|GiB", "_len": r"tokens?", "_steps": r"steps", "_tflops": "1e12"}


def test_a_name_that_ends_in_a_unit_has_it_in_its_text() -> None:
    seen = 0
    for kind in sections().values():
        for key, info in kind.model_fields.items():
            for ending, words in UNIT_OF_ENDING.items():
                if key.endswith(ending):
                    seen += 1
                    assert re.search(rf"\b({words})\b", info.description or "", re.IGNORECASE), key
    assert seen >= 12


def test_sections_say_what_they_are() -> None:
    assert all(inspect.getdoc(kind) != inspect.getdoc(BaseModel) for kind in sections().values())


def explained(help_text: str) -> dict[str, str]:
    """Per flag or positional argument of a --help: what it says, without the default. In a frame or not."""
    found: dict[str, str] = {}
    name = ""
    for line in help_text.replace("\u2502", " ").splitlines():
        if re.match(r" {1,2}(--?[a-z]|[A-Z]{3,}\b|\{)", line):
            name, _, text = line.strip().partition("  ")
            found[name] = text
        elif name and line.startswith("     "):
            found[name] += " " + line.strip()
        else:
            name = ""
    return {name: re.sub(r"\((default|required|repeatable).*", "", text).strip() for name, text in found.items()}


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command != "launch"]
)  # whose usage is a page of prose
def test_every_flag_of_every_command_says_what_it_does(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # wider ones have columns side by side
    with pytest.raises(SystemExit):
        main([command, "--help"])
    texts = explained(capsys.readouterr().out)
    assert len(texts) >= (len(setting_names()) if command == "train" else 2)
    assert [name for name, text in texts.items() if len(text.split()) < 2] == []
