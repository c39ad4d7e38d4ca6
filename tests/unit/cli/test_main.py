"""The command line: help appears at once, mistakes give one line and exit code 2, and flags have their documented
effect."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers.corpora import tiny_corpus
from txl_dist import __version__
from txl_dist.cli.main import COMMANDS, main, train
from txl_dist.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model on a tiny prepared corpus."""
    folder = tmp_path_factory.mktemp("cli")
    corpus = tiny_corpus(folder)
    path = folder / "tiny.toml"
    path.write_text(
        f"""
        [run]
        dir = '{folder / "run"}'
        [data]
        path = '{corpus.folder}'
        [model]
        num_layers = 2
        width = 16
        head_width = 4
        ff_width = 32
        pre_norm = true
        [train]
        num_lanes = 8
        microbatch_lanes = 2
        segment_len = 8
        memory_len = 16
        """
    )
    return path


def exit_code_of(*arguments: str) -> int:
    """What the process would end with."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def dry_run(config_file: Path, *flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, dict], str]:
    """(resolved settings, the lines after them)."""
    assert exit_code_of("train", str(config_file), "--dry-run", "--all", *flags) == 0
    settings, _, rest = capsys.readouterr().out.partition("\nbatch: ")
    return tomllib.loads(settings), "batch: " + rest


def test_a_dry_run_shows_the_settings_that_differ_from_the_defaults_before_what_they_make(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of("train", str(config_file), "--dry-run", "--optim.lr", "1e-3", "--checkpoint.keep_best") == 0
    settings, _, rest = capsys.readouterr().out.partition("\nbatch: ")
    assert tomllib.loads(settings) == {
        **tomllib.loads(config_file.read_text()),
        "optim": {"lr": 1e-3},
        "checkpoint": {"keep_best": True},
    }
    assert settings.startswith("# settings that differ from the defaults; --all shows all settings\n")
    assert len(settings.splitlines()) < 30
    assert "memory per rank" in rest


@pytest.mark.parametrize(
    ("words", "keep_best"),
    [
        (["--checkpoint.keep_best"], True),
        (["--checkpoint.keep-best", "--optim.lr", "1"], True),
        (["--checkpoint.keep_best", "True"], True),
        (["--checkpoint.keep_best", "False"], False),
        (["--checkpoint.keep_best=False"], False),
        ([], False),
    ],
)
def test_a_switch_among_the_settings_is_true_where_no_value_follows(
    words: list[str], keep_best: bool, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, _ = dry_run(config_file, *words, capsys=capsys)
    assert settings["checkpoint"]["keep_best"] is keep_best


def test_every_help_is_answered_without_importing_a_heavy_library() -> None:
    code = """
import contextlib, io, sys
from txl_dist.cli.main import COMMANDS, main, train
from txl_dist.errors import ConfigError
for arguments in [[], ["--help"], ["-h"], ["--version"], *([command, "--help"] for command in COMMANDS)]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code or 0
    print(arguments, code, len(out.getvalue()) > 3, *{"torch", "numpy", "deepspeed"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert len(lines) == 4 + len(COMMANDS)
    assert [line for line in lines if not line.endswith("] 0 True")] == []


def test_the_usage_names_every_command_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("--help") == 0
    usage = capsys.readouterr().out
    in_one_line = " ".join(usage.split())  # the help is wrapped at the width of the terminal
    for command, function in COMMANDS.items():
        assert (function.__doc__ or "").splitlines()[0] in in_one_line
        assert f"\n  {command}" in usage
    assert exit_code_of() == 0
    assert capsys.readouterr().out == usage
    assert exit_code_of("--version") == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_explains_all_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(command, "--help") == 0
    out = capsys.readouterr().out
    assert f"usage: txl {command}" in out
    assert "Args:" not in out, "the docstring was taken apart"


@pytest.mark.parametrize("flag", ["--local_rank=0", "--local-rank=3"])
def test_the_flag_that_the_launcher_puts_before_the_command_is_dropped(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(flag, "--version") == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert exit_code_of(flag, "train", "--help") == 0


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("trian", "x.toml") == 2
    captured = capsys.readouterr()
    assert captured.err == "txl: error: unknown command 'trian'. Did you mean train?\n"
    assert captured.out == ""


def test_a_mistake_of_the_user_is_one_message_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "txl_dist", "train", str(tmp_path / "missing.toml")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "RANK": "0", "LOCAL_RANK": "0"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("txl train: error: cannot read the config file ")
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_input_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing")
    for arguments in [
        ("prepare", missing, "--out", str(tmp_path / "out")),
        ("train", missing),
        ("evaluate", missing),
        ("export", missing, str(tmp_path / "out")),
        ("generate", missing),
    ]:
        code = exit_code_of(*arguments)
        captured = capsys.readouterr()
        assert code == 2, arguments
        assert captured.err.startswith(f"txl {arguments[0]}: error: "), captured.err
        assert missing in captured.err
        assert "Traceback" not in captured.err


def test_only_the_first_process_of_a_node_prints_what_all_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert exit_code_of("train", str(tmp_path / "missing.toml")) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--train.segmnt-len", "--train.segment-len"),
        ("--model.num_layer", "--model.num-layers"),
        ("--optim.learning_rate", "--optim.lr"),
        ("--dry-rum", "--dry-run"),
    ],
)
def test_a_misspelt_flag_is_refused_and_the_near_one_suggested(
    flag: str, meant: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of("train", str(config_file), flag, "5") == 2
    captured = capsys.readouterr()
    message = captured.out + captured.err
    assert flag in message
    if flag != "--optim.learning_rate":  # too far from what it means
        assert meant in message


@pytest.mark.parametrize(
    "flags",
    [
        ("--train.num_lanes", "many"),
        ("--train.num_lanes", "0"),
        ("--model.dropout", "1.5"),
        ("--engine.precision", "fp8"),
        ("--model.pre_norm", "perhaps"),
        ("--model.final_norm", "True", "--model.pre_norm", "False"),
        ("--train.microbatch_lanes", "3"),
        ("--ranks", "3"),
        ("--model.cutoffs", "100", "5000"),
    ],
    ids=" ".join,
)
def test_a_bad_value_is_refused_with_exit_code_2(
    flags: tuple[str, ...], config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of("train", str(config_file), "--dry-run", *flags) == 2
    captured = capsys.readouterr()
    message = captured.out + captured.err
    assert "Traceback" not in message
    assert flags[0].rpartition(".")[2].strip("-").replace("_", "-") in message.replace("_", "-")


def test_a_misspelt_key_in_the_file_is_refused_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.toml").write_text("[train]\nsegmnt_len = 3\n")
    assert exit_code_of("train", str(tmp_path / "my.toml")) == 2
    assert "unknown setting train.segmnt_len. Did you mean train.segment_len?" in capsys.readouterr().err


def test_a_dry_run_prints_what_would_run_and_starts_nothing(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, rest = dry_run(config_file, capsys=capsys)
    assert settings["model"]["width"] == 16
    assert settings["train"]["max_steps"] == 1000, "defaults are resolved too"
    assert "batch: 8 lanes x 8 tokens = 64 tokens per step; 1 rank x 4 micro-batches x 2 lanes" in rest
    assert "parameters, vocabulary 257" in rest
    assert "FLOP per token" in rest
    assert "memory per rank, estimated" in rest
    assert "2 ranks x 2 micro-batches x 2 lanes" in dry_run(config_file, "--ranks", "2", capsys=capsys)[1]
    assert not (config_file.parent / "run").exists()


def test_a_dry_run_counts_the_copies_of_recovery(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def copies(*flags: str) -> float:
        rest = dry_run(config_file, "--ranks", "2", "--recover.spares", "1", *flags, capsys=capsys)[1]
        counted = re.search(r"^memory per rank, .* MiB .*recovery copies ([\d.,]+)\)$", rest, re.MULTILINE)
        said = re.search(r"^recover\.spares: (\S+) MiB of host .* 400 MB per node for the spare$", rest, re.MULTILINE)
        assert counted is not None
        assert said is not None
        assert counted[1] == said[1]
        return float(said[1].replace(",", ""))

    wide = ("--model.width", "512", "--model.head_width", "128")
    found = re.search(r"model: ([\d,]+) parameters", dry_run(config_file, *wide, capsys=capsys)[1])
    assert found is not None
    memories = 8 * (2 * 16 * 512 * 4 + 16 * 8)  # lanes * (layers * positions * width * fp32, and document ids)
    version = (12 * int(found[1].replace(",", "")) + memories) / 2 / 2**20
    assert copies(*wide) == pytest.approx(2 * version, abs=0.051)
    partner = ("--recover.copies", "partner")
    assert copies(*wide, *partner) == pytest.approx(4 * version, abs=0.051)
    assert copies(*wide, *partner, "--recover.partner_every", "3") == pytest.approx(5 * version, abs=0.051)
    assert "recover" not in dry_run(config_file, capsys=capsys)[1]


def test_flags_win_over_the_file_and_the_file_over_defaults(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--model.pre_norm False --model.cutoffs 10 20 --model.tie_projections False True True --optim.lr 1e-3"
    more = "--train.num_lanes 4 --optim.betas 0.5 0.25 --run.dir elsewhere --metrics.tensorboard False"
    settings, _ = dry_run(config_file, *flags.split(), *more.split(), capsys=capsys)
    assert settings["model"]["pre_norm"] is False
    assert settings["model"]["cutoffs"] == [10, 20]
    assert settings["model"]["tie_projections"] == [False, True, True]
    assert settings["model"]["width"] == 16
    assert settings["optim"] | {"lr": 1e-3, "betas": [0.5, 0.25]} == settings["optim"]
    assert settings["train"]["num_lanes"] == 4
    assert settings["run"]["dir"] == "elsewhere"
    assert settings["metrics"]["tensorboard"] is False
    assert settings["engine"]["zero_stage"] == 1


def test_flags_may_be_spelt_with_hyphens(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, _ = dry_run(config_file, "--model.pre-norm", "False", "--train.num-lanes", "2", capsys=capsys)
    assert (settings["model"]["pre_norm"], settings["train"]["num_lanes"]) == (False, 2)


def test_a_config_file_behind_the_flags_is_refused_and_never_ignored(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of("train", "--dry-run", str(config_file)) == 2
    assert "the configuration file must come first" in capsys.readouterr().err


def test_verify_lists_what_is_damaged_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tiny_corpus(tmp_path)
    assert exit_code_of("verify", str(corpus.folder)) == 0
    assert capsys.readouterr().out == f"{corpus.folder}: whole\n"
    shard = corpus.folder / corpus.split("train").shards[0].name
    shard.write_bytes(shard.read_bytes()[:-512])
    assert exit_code_of("verify", str(corpus.folder)) == 1
    assert shard.name in capsys.readouterr().out
    assert exit_code_of("verify", str(tmp_path / "missing")) == 2
    assert str(tmp_path / "missing") in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["prepare", "", "--out", "corpus"],
        ["prepare", "text.txt", "--out", ""],
        ["train", "run.toml", "--run.dir", ""],
        ["train", "run.toml", "--data.path="],
        ["evaluate", "run", "--data", ""],
        ["generate", ""],
    ],
)
def test_an_unset_variable_of_the_shell_is_not_taken_for_the_folder_that_one_is_in(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("a text " * 1000)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert "Is a shell variable unset?" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("out", [".", "../here"])
def test_a_corpus_is_never_written_over_the_folder_that_one_is_in(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("a text " * 1000)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert main(["prepare", "../text.txt", "--out", out]) == 2
    assert "is the current folder" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_help_with_a_command_behind_it_is_that_commands_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["help", "verify"])
    assert not stop.value.code
    assert "usage: txl verify" in capsys.readouterr().out


@pytest.mark.parametrize("is_rank", [False, True])
def test_spare_nodes_are_counted_only_before_the_agents_start(
    config_file: Path, is_rank: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StartedError(Exception):
        pass

    def supervise(*_: object) -> None:
        raise StartedError

    monkeypatch.setattr("txl_dist.distributed.recovery.spare.supervise", supervise)
    monkeypatch.setattr("txl_dist.distributed.recovery.seat.read_seat", lambda _: object() if is_rank else None)
    # Two nodes of ranks and two spare ones, with a process each: ranks are told of two processes, and agents of four.
    place = {"RANK": 1, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "node1", "MASTER_PORT": 29500}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    words = [str(config_file), "--recover.spares", "1", "--recover.spare_nodes", "2", "--recover.copies", "partner"]
    with pytest.raises(StartedError if is_rank else ConfigError, match=None if is_rank else "leaves no rank of 2"):
        train(words)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(StartedError):
        train(words)
