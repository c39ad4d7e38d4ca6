"""XLNet's objective in a whole run: kills, numbers of ranks, ZeRO stages and the validation loss."""

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import write_config
from tests.e2e.test_resume import assert_same_state, last_step, losses
from tests.helpers.job import Job
from tests.helpers.launch import train, txl
from tests.helpers.xlnet_folder import TEXTS, xlnet_folder
from txl_dist.artifacts import list_checkpoints

pytestmark = [pytest.mark.dist, pytest.mark.slow]

XLNET = ["--model.any_order", "True", "--train.objective", "permutation", "--train.reuse_len", "12"]
XLNET += ["--train.predicted_len", "5", "--model.share_biases", "False"]


def records(run: Path, kind: str) -> list[dict[str, object]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.nightly  # test_permutation_settings.py resumes smaller runs
def test_a_killed_run_continues_bit_for_bit_with_its_memories(tmp_path: Path, config_file: Path) -> None:
    words = [str(config_file), *XLNET]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(*words, "--run.dir", str(whole), cwd=tmp_path)
    with Job("train", *words, "--run.dir", str(killed), log=tmp_path / "killed.log") as job:
        job.wait_for(lambda: last_step(killed) >= 17 and list_checkpoints(killed))
        job.signal(signal.SIGKILL)
    assert not (killed / "DONE").exists()
    train(*words, "--run.dir", str(killed), cwd=tmp_path)
    assert losses(killed) == losses(whole)
    assert_same_state(list_checkpoints(killed)[-1], list_checkpoints(whole)[-1])


FEW_STAGES = ((1, 1), (2, 2), (4, 3))
ALL_STAGES = ((1, 1), (2, 0), (2, 1), (2, 2), (2, 3), (4, 3))
"""Numbers of ranks, each with a ZeRO stage."""


@pytest.mark.parametrize(
    ("words", "places"),
    [
        (["--data.document_mask", "True"], FEW_STAGES),
        pytest.param(["--data.document_mask", "True"], ALL_STAGES, marks=pytest.mark.nightly),
        pytest.param(["--data.document_mask", "False"], ALL_STAGES, marks=pytest.mark.nightly),
    ],
)
def test_every_zero_stage_and_number_of_ranks_gives_the_same_losses(
    tmp_path: Path, config_file: Path, words: list[str], places: tuple[tuple[int, int], ...]
) -> None:
    words = [*words, "--train.microbatch_lanes", "2", "--train.max_steps", "6"]
    found = {}
    for ranks, stage in places:
        run = tmp_path / f"{ranks}_{stage}"
        flags = ["--engine.zero_stage", str(stage), "--run.dir", str(run)]
        train(str(config_file), *XLNET, *words, *flags, cwd=tmp_path, ranks=ranks)
        found[ranks, stage] = losses(run)
    expected = found[1, 1]
    assert len(expected) == 6
    for run_losses in found.values():
        assert run_losses == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run on one rank, which is validated in two orders."""
    folder = tmp_path_factory.mktemp("trained")
    words = [*XLNET, "--eval.orders", "2", "--train.span_context", "4", "--run.dir", "run"]
    train(str(write_config(folder, corpus)), *words, cwd=folder, ranks=1)
    return folder / "run"


def test_the_validation_loss_has_a_value_for_each_rank_of_prediction_and_no_bits_per_byte(trained: Path) -> None:
    run = trained
    (evaluation,) = records(run, "eval")[-1:]
    assert len(evaluation["loss_by_position"]) == 5  # type: ignore[arg-type]
    assert len(evaluation["accuracy_by_position"]) == 5  # type: ignore[arg-type]
    assert "bits_per_byte" not in evaluation
    assert "accuracy_pct" in evaluation
    assert "bits_per_byte" not in records(run, "train")[-1]


def test_an_imported_model_is_trained_on_a_corpus_of_its_own_tokenizer(tmp_path: Path) -> None:
    """Import, prepare, train, export: with the ids of XLNet's own vocabulary all the way."""
    folder = xlnet_folder(tmp_path, "tokenizer.json")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    commands = [
        ["import", str(folder), "bundle", "--format", "xlnet"],
        ["prepare", "texts.jsonl", "--out", "corpus", "--tokenizer-file", "bundle/tokenizer.json"],
    ]
    for words in commands:
        done = txl(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    words = ["--data.path", "corpus", "--run.init", "bundle", "--run.dir", "run"]
    words += ["--train.num_lanes", "4", "--train.microbatch_lanes", "4", "--train.max_steps", "8"]
    train("bundle/train.toml", *words, cwd=tmp_path, ranks=1)
    assert max(losses(tmp_path / "run")) == 8
    done = txl("export", "run", "out", "--format", "xlnet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before, after = (json.loads((path / "tokenizer.json").read_text()) for path in (folder, tmp_path / "out"))
    pieces = [[symbol for symbol, _ in content["model"]["vocab"]] for content in (before, after)]
    assert pieces[0] == pieces[1]
    assert before["post_processor"] == after["post_processor"]


def test_txl_evaluate_finds_the_validation_loss_of_the_run_on_any_number_of_ranks(
    tmp_path: Path, trained: Path
) -> None:
    run = trained
    (recorded,) = records(run, "eval")[-1:]
    results = {}
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.json"
        flags = ["--json", str(out), "--prediction", "random_order", "left_to_right", "pseudo_likelihood"]
        with Job("evaluate", str(run), *flags, log=tmp_path / "evaluate.log", ranks=ranks, cwd=tmp_path) as job:
            assert job.wait(limit_s=300) == [0] * ranks, job.text[-4000:]
        results[ranks] = json.loads(out.read_text(encoding="utf-8"))
    alone = results[1]
    assert alone["random orders"]["tokens"] == recorded["tokens"]
    assert alone["random orders"]["loss"] == pytest.approx(recorded["loss"], rel=1e-5)
    assert set(alone) == {"random orders", "left to right", "pseudo-likelihood"} == set(results[2])
    for name, result in alone.items():
        assert results[2][name]["tokens"] == result["tokens"]
        assert results[2][name]["loss"] == pytest.approx(result["loss"], rel=1e-5)


def test_a_run_and_its_bundle_have_the_same_figures(tmp_path: Path, trained: Path, corpus: Path) -> None:
    done = txl("export", str(trained), "bundle", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = []
    for words in ([str(trained)], ["bundle", "--data", str(corpus)]):
        done = txl("evaluate", *words, "--orders", "2", "--json", "result.json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        result = json.loads((tmp_path / "result.json").read_text())["random orders"]
        figures.append([result["tokens"], result["loss"], result["by_rank"]])
    assert figures[0] == figures[1]
