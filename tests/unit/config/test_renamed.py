"""Renamed settings: all spellings have the same meaning, and an old name gives one warning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from txl_dist.cli.main import COMMANDS, main
from txl_dist.cli.tyro_events import list_arguments
from txl_dist.config import renamed
from txl_dist.config.load import Config, config_fingerprint, config_from_dict, configure, load_config, setting_names
from txl_dist.config.renamed import (
    RENAMED,
    RENAMED_FLAGS,
    Renamed,
    flat_in_old_names,
    rename_variables,
    words_in_new_names,
)
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.errors import ConfigError
from txl_dist.tokenizers.learning import Learning

OLD_VALUES: dict[str, Any] = {
    "data.document_border": "mask",
    "data.on_damage": "skip",
    "optim.ema": 0.5,
    "train.stages": ["until=0.5 num_lanes=128 segment_len=16"],
    "train.first_memory": "zeros",
    "eval.average": True,
    "guard.max_skipped_in_row": 3,
    "guard.check_replicas_every": 7,
}
NEW_VALUES = {"data.document_border": True}
"""New values that are not the old ones."""


@pytest.fixture(autouse=True)
def _no_warning_was_printed() -> None:
    renamed._warn.cache_clear()


def sections_of(name: str, value: Any) -> dict[str, Any]:
    section, key = name.split(".")
    return {section: {key: value}}


def value_of(config: Config, name: str) -> Any:
    section, key = name.split(".")
    return config.model_dump(mode="json")[section][key]


def test_every_old_name_is_gone_and_every_new_one_is_a_setting() -> None:
    assert {row.old for row in RENAMED} == OLD_VALUES.keys()
    assert not {row.old for row in RENAMED} & set(setting_names())
    assert {row.new for row in RENAMED} <= set(setting_names())


@pytest.mark.parametrize("row", RENAMED, ids=lambda row: row.old)
def test_an_old_name_means_what_the_new_one_means(row: Renamed) -> None:
    old = OLD_VALUES[row.old]
    new = NEW_VALUES.get(row.old, old)
    from_old = config_from_dict(sections_of(row.old, old), source="a test")
    assert from_old == config_from_dict(sections_of(row.new, new), source="a test")
    assert value_of(from_old, row.new) == new != value_of(Config(), row.new)


@pytest.mark.parametrize("row", RENAMED, ids=lambda row: row.old)
def test_the_fingerprint_is_that_of_the_old_name(row: Renamed) -> None:
    old = OLD_VALUES[row.old]
    new = NEW_VALUES.get(row.old, old)
    assert flat_in_old_names({row.new: new, "run.seed": 3}) == {row.old: old, "run.seed": 3}
    default = value_of(Config(), row.new)
    assert flat_in_old_names({row.new: default})[row.old] == {
        "data.document_border": "carry",
        "data.on_damage": "fail",
    }.get(row.old, default)


def test_a_config_of_another_border_has_the_fingerprint_that_0_2_gave_it() -> None:
    """Computed by the code of 0.2 for data.document_border = "mask"."""
    config = config_from_dict({"data": {"document_border": "mask"}}, source="a test")
    assert config_fingerprint(config) == MASKED_FINGERPRINT


MASKED_FINGERPRINT = "0221fb8d84c5c417984143d8877099cd775dc24f397c7fc97f49498edfdaf9a2"


def test_a_file_with_old_names_gets_one_warning_each_with_the_line_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[data]\ndocument_border = "mask"\n[train]\nstages = ["until=0.5"]\n')
    for _ in range(2):
        assert load_config(file, imports_plugins=True).data.document_mask
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"txl: warning: {file}: data.document_border is named data.document_mask since version 0.3.0. "
        "Under [data] write: document_mask = true",
        f"txl: warning: {file}: train.stages is named train.phases since version 0.3.0. "
        'Under [train] write: phases = ["until=0.5"]',
    ]


def test_a_saved_config_with_old_names_is_read_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[data]\non_damage = "fail"\n')
    assert load_config(file).data.on_corrupt == "raise"
    assert capsys.readouterr().err == ""


def test_only_rank_0_warns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    assert words_in_new_names(["--optim.ema", "0.5"]) == ["--optim.ema-decay", "0.5"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["c.toml", "--data.document_border", "mask", "--run.seed", "3"],
         ["c.toml", "--data.document-mask", "True", "--run.seed", "3"]),
        (["--data.document-border=carry"], ["--data.document-mask=False"]),
        (["--train.stages", "until=0.5 num_lanes=2", "until=0.7", "--dry-run"],
         ["--train.phases", "until=0.5 num_lanes=2", "until=0.7", "--dry-run"]),
        (["--data.on_damage", "fail"], ["--data.on-corrupt", "raise"]),
        (["--data.document_mask", "mask"], ["--data.document_mask", "mask"]),
    ],
)  # fmt: skip
def test_flags_are_read_in_either_spelling(words: list[str], expected: list[str]) -> None:
    assert words_in_new_names(words) == expected


def test_both_spellings_in_one_file_or_command_are_refused_naming_both() -> None:
    both = r"optim\.ema is the old name of optim\.ema_decay, and both are given\. Leave out optim\.ema\."
    with pytest.raises(ConfigError, match=f"a test: {both}"):
        config_from_dict({"optim": {"ema": 0.5, "ema_decay": 0.5}}, source="a test")
    with pytest.raises(ConfigError, match=f"configure.*: {both}"):
        configure(optim={"ema": 0.5, "ema_decay": 0.5})
    with pytest.raises(ConfigError, match=f"the command line: {both}"):
        words_in_new_names(["--optim.ema", "0.5", "--optim.ema_decay=0.5"])


def test_configure_takes_an_old_name_over_a_file_with_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[optim]\nema_decay = 0.25\n")
    assert configure(file, optim={"ema": 0.5}).optim.ema_decay == 0.5


def test_a_wrong_value_of_an_old_name_is_refused_by_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"data\.document_mask = 'both'"):
        config_from_dict({"data": {"document_border": "both"}}, source="a test")


def test_a_dry_run_takes_old_flags(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", "configs/quickstart.toml", "--dry-run", "--optim.ema", "0.5", "--data.path", "nowhere"])
    assert code == 2  # there is no corpus
    shown = capsys.readouterr().err
    assert "optim.ema is named optim.ema_decay since version 0.3.0. Write: --optim.ema-decay" in shown
    assert "unknown" not in shown


FLAGS = [(command, row) for command, rows in RENAMED_FLAGS.items() for row in rows]
"""Every renamed flag with its command."""


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize(("command", "row"), FLAGS, ids=lambda value: getattr(value, "old", value))
def test_an_old_flag_of_a_command_gets_one_warning_with_the_flag_to_write(
    command: str, row: Renamed, capsys: pytest.CaptureFixture[str]
) -> None:
    for old in (flag(row.old), f"--{row.old}"):
        assert words_in_new_names(["x", f"{old}=3", "y"], command=command) == ["x", f"{flag(row.new)}=3", "y"]
        assert words_in_new_names(["x", old, "3"], command=command) == ["x", flag(row.new), "3"]
    lines = set(capsys.readouterr().err.splitlines())
    remedy = f"{row.old} is named {row.new} since version 0.3.0. Write: {flag(row.new)}"
    expected = f"txl: warning: {flag(row.old)}: {remedy}"
    assert expected in lines
    assert len(lines) == len({flag(row.old), f"--{row.old}"})


@pytest.mark.parametrize(("command", "row"), FLAGS, ids=lambda value: getattr(value, "old", value))
def test_both_spellings_of_a_flag_are_refused_naming_both(command: str, row: Renamed) -> None:
    with pytest.raises(ConfigError, match=f"{row.old} is the old name of {row.new}, and both are given"):
        words_in_new_names([flag(row.old), "3", flag(row.new), "4"], command=command)


@pytest.mark.parametrize(("command", "row"), FLAGS, ids=lambda value: getattr(value, "old", value))
def test_a_command_has_the_new_flag_and_not_the_old_one(command: str, row: Renamed) -> None:
    names = [name for argument in list_arguments(COMMANDS[command]) for name in argument.names]
    assert flag(row.new) in names
    assert flag(row.old) not in names


def test_a_switch_may_be_switched_off_by_its_old_name() -> None:
    words = words_in_new_names(["--no-only-seen", "--no-all-splits"], command="prepare")
    assert words == ["--no-observed-symbols", "--no-tokenizer-all-splits"]


def test_a_flag_of_another_command_is_not_renamed() -> None:
    assert words_in_new_names(["--rows", "3"], command="generate") == ["--rows", "3"]


@pytest.mark.parametrize(
    ("words", "new"),
    [
        ("serve bundles/x --memory-agee 4", "--memory-ttl"),
        ("prepare texts --out data/x --only_seem", "--observed-symbols"),
        ("prepare texts --out data/x --sentence-mark", "--double-eos"),
        ("train configs/quickstart.toml --guard.max_skiped_in_row 3", "--guard.max-consecutive-skips"),
    ],
)
def test_a_misspelt_old_flag_is_refused_with_the_new_one(
    words: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert f"Did you mean {new}" in capsys.readouterr().err


def test_a_command_takes_an_old_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one two three\n" * 50, encoding="utf-8")
    words = ["prepare", str(text), "--out", str(tmp_path / "out"), "--tokenizer", "char"]
    assert main([*words, "--valid-fraction", "0", "--only-seen"]) == 0
    assert "Write: --observed-symbols" in capsys.readouterr().err
    assert '"unknown":null' in (tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("settings", "golden"),
    [
        ({}, "6e66c341ee1ffccfad8e76901ca7bbaf806a1c1a6a25ca590e468bf9ae87f230"),
        (
            {"kind": "char", "observed_symbols": True, "tokenizer_all_splits": True, "block_bytes": 77, "seed": 3},
            "519be14f26ad3374a6338f676509385c76ef7f3ac65848528e507806507fc82b",
        ),
        (
            {"kind": "word", "double_eos": True, "vocab_size": 50},
            "1d3141b8f0376e63054d1f31bfd01882e81bfdec6a829b9e367a9efcf7be44f4",
        ),
    ],
)
def test_a_preparation_has_the_hash_that_0_2_gave_it(settings: dict[str, Any], golden: str) -> None:
    """Hashes computed by the code of 0.2, with its names."""
    prepared = PrepareSettings(("x",), **settings)
    assert (prepared if settings else prepared.completed()).content_hash() == golden


def test_a_plugin_may_use_an_option_of_tokenizers_by_its_old_name() -> None:
    learning = Learning(observed_symbols=True)
    old_names: Any = learning
    assert old_names.only_seen
    assert not old_names.sentence_marks
    with pytest.raises(AttributeError, match="no option 'nothing'"):
        _ = old_names.nothing


def test_an_old_environment_variable_is_read_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TXL_FAULT", "kill:0:3")
    monkeypatch.delenv("TXL_FAILPOINTS", raising=False)
    rename_variables()
    assert os.environ["TXL_FAILPOINTS"] == "kill:0:3"
    expected = "TXL_FAULT is named TXL_FAILPOINTS since version 0.3.0. Set: TXL_FAILPOINTS=kill:0:3"
    assert expected in capsys.readouterr().err
    monkeypatch.setenv("TXL_FAILPOINTS", "kill:0:4")
    with pytest.raises(ConfigError, match="the environment: TXL_FAULT is the old name of TXL_FAILPOINTS"):
        rename_variables()
