"""Wrong input gives an error with the cause, the place and the remedy, and leaves no lost or incomplete files."""

import os
import shutil
import socket
from pathlib import Path

import pytest

from tests.helpers.corpora import flip_bit
from tests.helpers.job import Job
from tests.helpers.launch import txl
from txl_dist.cli.main import main

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A job of one rank in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder with a run of two checkpoints, for copying."""
    folder = tmp_path_factory.mktemp("trained")
    result = txl("train", *words(Path(os.path.relpath(corpus, folder))), cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder


def words(corpus: Path, **changes: str) -> list[str]:
    settings = {
        "run.dir": "run",
        "data.path": str(corpus),
        "model.num_layers": "1",
        "model.width": "32",
        "model.num_heads": "2",
        "model.head_width": "16",
        "model.ff_width": "32",
        "train.num_lanes": "4",
        "train.segment_len": "8",
        "train.memory_len": "8",
        "train.microbatch_lanes": "2",
        "train.max_steps": "4",
        "checkpoint.every_steps": "2",
        "metrics.tensorboard": "False",
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that must fail as a user's error."""
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "error:" in message
    assert "Traceback" not in message
    return message


def test_a_misspelt_setting_in_the_file_is_named_with_the_near_one(capsys, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train]\nnum_lane = 4\n")
    message = refused(capsys, "train", "bad.toml")
    assert "bad.toml" in message
    assert "train.num_lane" in message
    assert "Did you mean train.num_lanes?" in message


def test_a_port_that_another_job_has_is_named(
    capsys: pytest.CaptureFixture[str], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        message = refused(capsys, "train", *words(corpus))
    assert "is in use" in message
    assert "--master_port" in message


def test_lanes_that_do_not_divide_are_refused_with_the_arithmetic(capsys, corpus: Path) -> None:
    message = refused(capsys, "train", *words(corpus, train__num_lanes="6", train__microbatch_lanes="4"))
    assert "train.num_lanes=6" in message
    assert "microbatch_lanes" in message
    assert not Path("run").exists()


def test_a_corpus_smaller_than_the_lanes_need_is_refused(capsys, corpus: Path) -> None:
    message = refused(capsys, "train", *words(corpus, train__num_lanes="4096", train__segment_len="64"))
    assert "train.num_lanes=4096" in message
    assert "266,240" in message, "what is needed"
    assert not Path("run").exists()


def test_fp16_on_a_cpu_is_refused_with_the_alternatives(capsys, corpus: Path) -> None:
    message = refused(capsys, "train", *words(corpus, engine__precision="fp16"))
    assert "needs a GPU" in message
    assert "fp32" in message
    assert not Path("run").exists()


def test_an_empty_corpus_is_refused_and_leaves_nothing(capsys, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/a.txt").write_text("")
    refused(capsys, "prepare", "empty", "--out", "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_a_file_that_is_not_utf8_is_named_with_the_choices(capsys, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/latin.txt").write_bytes(b"caf\xe9 au lait")
    message = refused(capsys, "prepare", "texts", "--out", "out")
    assert "latin.txt" in message
    assert "--encoding-errors" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts"]


def test_an_output_that_cannot_be_written_is_named(capsys, corpus: Path, tmp_path: Path, trained: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    assert "/file" in refused(capsys, "prepare", "a.txt", "--out", "file/out", "--valid-fraction", "0")
    assert "file/run" in refused(capsys, "train", *words(corpus, run__dir="file/run"))
    assert "file/bundle" in refused(capsys, "export", str(trained / "run"), "file/bundle")
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_missing_and_a_cut_shard_are_named(capsys, corpus: Path) -> None:
    shutil.copytree(corpus, "copy")
    shard = next(Path("copy").glob("train-*.tar"))
    shard.write_bytes(shard.read_bytes()[:-512])
    assert shard.name in refused(capsys, "train", *words(Path("copy")))
    shard.unlink()
    assert shard.name in refused(capsys, "train", *words(Path("copy")))
    assert not Path("run").exists()


def test_a_run_directory_of_another_configuration_is_refused_with_the_difference(
    capsys, corpus: Path, trained: Path
) -> None:
    shutil.copytree(trained / "run", "run")
    before = Path("run/config.toml").read_text()
    message = refused(capsys, "train", *words(corpus, model__width="48"))
    assert "model.width: 32 -> 48" in message
    assert Path("run/config.toml").read_text() == before


def test_a_corpus_of_another_tokenizer_is_refused(capsys, corpus: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", "run")
    texts = corpus.parent / "texts"
    assert main(["prepare", str(texts), "--out", "other", "--vocab-size", "300", "--valid-fraction", "0.1"]) == 0
    message = refused(capsys, "train", *words(Path("other"), train__max_steps="4"))
    assert "another tokenizer" in message
    assert "--tokenizer-file" in message


def test_no_whole_checkpoint_is_an_error_and_a_damaged_one_is_passed_over(
    capsys, corpus: Path, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "run", "run")
    newest = Path("run/checkpoints/step_000000004")
    flip_bit(next((newest / "engine").iterdir()))
    # The job of one rank finishes again from step 2 and moves the damaged folder aside.
    result = txl("train", *words(corpus), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "skipped a damaged checkpoint, step_000000004" in result.stderr
    assert "step_000000002" in result.stderr
    assert Path("run/checkpoints/step_000000004.damaged-1").is_dir()
    assert main(["verify", str(newest)]) == 0
    flip_bit(next((newest / "engine").iterdir()))
    exported = txl("export", "run", "older", cwd=tmp_path)
    assert exported.returncode == 0
    assert "skipped a damaged checkpoint, step_000000004" in exported.stderr
    assert "step_000000002" in exported.stdout, "which checkpoint it came from"
    verified = txl("verify", "run", cwd=tmp_path)
    assert verified.returncode == 1
    assert "step_000000004: " in verified.stdout
    for checkpoint in Path("run/checkpoints").glob("step_?????????"):
        (checkpoint / "state.json").write_text("{}")
    message = refused(capsys, "train", *words(corpus))
    assert "all 2 of its checkpoints are damaged" in message
    message = refused(capsys, "export", "run", "bundle")
    assert "no undamaged checkpoint" in message


def test_a_run_on_a_relative_corpus_is_evaluated_inspected_and_generates_from_elsewhere(
    trained: Path, tmp_path: Path
) -> None:
    run = trained / "run"
    for words in (["evaluate", "--memory-len", "0", "8"], ["inspect", "--lane", "1"], ["generate", "--prompt", "a"]):
        result = txl(words[0], str(run), *words[1:], cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    evaluated = txl("evaluate", str(run / "checkpoints/step_000000002"), cwd=tmp_path)
    assert evaluated.stderr.startswith(f"scoring {run}/checkpoints/step_000000002, a checkpoint ...\n")
    assert "\nmodel " in evaluated.stdout


@pytest.mark.dist
def test_a_rank_that_meets_damage_ends_the_job_and_names_it(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, "copy")
    shard = next(Path("copy").glob("train-*.tar"))
    flip_bit(shard, offset=shard.stat().st_size // 3)
    endless = words(Path("copy"), train__max_steps="2000", checkpoint__every_steps="0")
    with Job("train", *endless, log=tmp_path / "log", cwd=tmp_path) as job:
        assert 0 not in job.wait()
    log = job.text
    assert shard.name in log
    assert "crc32" in log
    assert log.count("error:") == 1, log
