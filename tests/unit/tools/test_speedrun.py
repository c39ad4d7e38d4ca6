"""The rules of the speedrun: which rows form an entry, what is judged, and that the page shows the records."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import forked
from tests.helpers.corpora import tiny_corpus
from tools.experiments.recording import table_in
from tools.experiments.speedrun import BEGIN, PAGE, Record, entries_of, original_entry, read_records, table_of
from txl_dist.config.load import Config
from txl_dist.errors import ConfigError


def row(entry: str, seed: int, seconds: float, loss: float, **others: Any) -> Record:
    values: dict[str, Any] = {"settings": "aa", "corpus": "cc", "starts": 1, "bits_per_byte": 1.9, "others": 0.01}
    values |= {"commit": "0", "cpu": "x", "torch": "2", "date": "2026-11-23"}
    return Record(entry=entry, seed=seed, seconds=seconds, held_out_nats=loss, **(values | others))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_an_entry_is_its_mean_over_all_seeds_beside_the_original() -> None:
    theirs = [row("original", seed, 300.0, 4.2) for seed in range(3)]
    ours = [
        row("mine", seed, seconds, loss) for seed, (seconds, loss) in enumerate([(90, 4.0), (100, 4.1), (110, 4.2)])
    ]
    _, _, first, second = map(cells, table_of([*theirs, *ours]))
    assert first == ["original", "3", "4.2000 +- 0.0000, worst 4.2000", "300.0 +- 0.0", "1.00", "no"]
    assert second == ["mine", "3", "4.1000 +- 0.1000, worst 4.2000", "100.0 +- 10.0", "3.00", "yes"]


@pytest.mark.parametrize("seeds", [(0, 1), (0, 1, 3), (1, 2, 3), (0, 0, 1)])
def test_chosen_or_too_few_seeds_are_not_judged(seeds: tuple[int, ...]) -> None:
    line = table_of([row("mine", seed, 100.0, 4.0) for seed in seeds])[2]
    assert cells(line)[-1].startswith("not judged")


def test_other_settings_or_another_corpus_are_another_entry() -> None:
    lines = table_of([row("mine", 0, 1.0, 4.0), row("mine", 0, 2.0, 4.0, settings="bb")])
    assert [cells(line)[0] for line in lines[2:]] == ["mine (aa)", "mine (bb)"]
    assert len(table_of([row("mine", 0, 1.0, 4.0), row("mine", 0, 2.0, 4.0, corpus="dd")])) == 4


def test_an_entry_is_known_by_all_settings_but_its_place_and_seed(tmp_path: Path) -> None:
    texts = {"a": "", "b": '[run]\ndir = "elsewhere"\nseed = 7\n', "c": "[optim]\nlr = 0.1\n"}
    texts["auto"] = '[engine]\nprecision = "auto"\n'
    for name, text in texts.items():
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    a, b, c, auto = (entries_of([tmp_path / f"{name}.toml"], [], corpus=tmp_path / name)[0].settings for name in texts)
    assert a == b == auto != c, "auto is measured in fp32 on every processor"


def test_each_further_entry_has_the_changes_of_those_before_it_and_other_recipes_have_none(tmp_path: Path) -> None:
    for name in ("plain", "other"):
        (tmp_path / f"{name}.toml").write_text("[train]\nmax_steps = 9\n", encoding="utf-8")
    steps = [("a rate", "--optim.lr 4e-3"), ("a past", "--train.memory_len 32 --optim.betas 0.9 0.95")]
    entries = entries_of([tmp_path / "plain.toml", tmp_path / "other.toml"], steps, corpus=tmp_path)
    assert [entry.name for entry in entries] == ["plain", "a rate", "a past", "other"]
    settings = [entry.config for entry in entries if entry.config]
    assert [config.optim.lr for config in settings] == [Config().optim.lr, 4e-3, 4e-3, Config().optim.lr]
    assert (settings[2].train.memory_len, settings[2].optim.betas, settings[2].train.max_steps) == (32, (0.9, 0.95), 9)
    with pytest.raises(ConfigError, match="does not begin with a setting"):
        entries_of([tmp_path / "plain.toml"], [("a rate", "4e-3")], corpus=tmp_path)
    with pytest.raises(ConfigError, match=r"optim\.rate"):
        entries_of([tmp_path / "plain.toml"], [("a rate", "--optim.rate 4e-3")], corpus=tmp_path)


def test_the_original_trains_as_the_recipe_does_unless_flags_say_else() -> None:
    like = Config.model_validate({"train": {"max_steps": 30}, "optim": {"lr": 0.5}})
    plain = original_entry(Path("x"), like, more=[])
    words = dict(zip(plain.words, plain.words[1:], strict=False))
    assert (words["--lr"], words["--max_step"], words["--eval-interval"]) == ("0.5", "30", "30")
    longer = original_entry(Path("x"), like, more=["--max_step", "50"])
    assert longer.words[-2:] == ("--eval-interval", "50")
    assert longer.settings != plain.settings


def test_the_page_shows_the_table_of_the_records() -> None:
    assert table_in(PAGE, BEGIN) == (table_of(read_records()) if read_records() else [])


@pytest.mark.slow
@pytest.mark.nightly
def test_a_recipe_is_trained_scored_and_told(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path).folder
    model = "[model]\nnum_layers = 1\nwidth = 16\nnum_heads = 1\nhead_width = 16\nff_width = 16\ncutoffs = []\n"
    train = "[train]\nnum_lanes = 4\nsegment_len = 8\nmemory_len = 8\nmicrobatch_lanes = 2\nmax_steps = 2\n"
    (tmp_path / "tiny.toml").write_text(model + train, encoding="utf-8")
    words = ["tiny.toml", "--corpus", str(corpus), "--out", "out", "--seeds", "1", "--trial"]
    command = [sys.executable, "-m", "tools.experiments.speedrun", *words]
    for _ in range(2):  # the second time nothing is trained
        done = subprocess.run(
            command, cwd=tmp_path, env=forked.environment(), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "entry='tiny'" in done.stdout
        assert "starts=1" in done.stdout
    assert (tmp_path / "out").is_dir()
