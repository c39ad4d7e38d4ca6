"""The path of a new user: prepare, train on two ranks, evaluate, export and generate, each with its command."""

import json
from pathlib import Path

import pytest
import webdataset

from tests.helpers.launch import start_training, train, txl

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.smoke
def test_prepare_train_evaluate_export_generate(tmp_path: Path, config_file: Path, corpus: Path) -> None:
    words = [str(config_file), "--train.max_steps", "60", "--eval.every_steps", "30"]
    launcher = start_training(*words, cwd=tmp_path)
    assert launcher.wait(timeout=300) == 0, (tmp_path / "launcher.log").read_text(encoding="utf-8")[-4000:]
    run = tmp_path / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in trained] == list(range(1, 61))
    wanted = {"loss", "ppl", "bits_per_byte", "bits_per_character", "lr", "grad_norm", "tokens_per_s", "data_wait_pct"}
    assert wanted | {"eta_s", "skipped_steps"} <= trained[0].keys()
    assert trained[-1]["loss"] < trained[0]["loss"] - 1.0
    assert [record["step"] for record in records if record["kind"] == "eval"] == [30, 60]
    assert list((run / "tensorboard").iterdir())
    for name in ("config.toml", "log.txt", "DONE"):
        assert (run / name).is_file()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        f"step_{step:09d}" for step in (30, 45, 60)
    ], "the last three are kept, and nothing else"
    lanes = [path.name for path in sorted((run / "checkpoints/step_000000060/lanes").iterdir())]
    assert lanes == ["00000-00003.safetensors", "00004-00007.safetensors"]

    words = ["--without-memory", "--baselines", "--json", "scores.json"]
    evaluated = txl("evaluate", "run", *words, cwd=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    scores = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    in_training = [record for record in records if record["kind"] == "eval"][-1]
    assert scores["model"]["loss"] == pytest.approx(in_training["loss"], rel=1e-6), "one rank scores as two did"
    assert scores["model"]["tokens"] == scores["order 0"]["tokens"] == in_training["tokens"]
    assert scores["model"]["loss"] < scores["order 0"]["loss"]

    exported = txl("export", "run", "bundle", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    error = float(exported.stdout.split("on the probe")[1].split()[0])
    assert error < 1e-4
    from_bundle = txl("evaluate", "bundle", "--data", str(corpus), "--json", "bundle.json", cwd=tmp_path)
    assert from_bundle.returncode == 0, from_bundle.stderr
    bundle_scores = json.loads((tmp_path / "bundle.json").read_text(encoding="utf-8"))
    assert bundle_scores["model"]["loss"] == pytest.approx(scores["model"]["loss"], rel=1e-6)

    words = ["--prompt", "the small", "--max-tokens", "20", "--seed", "5"]
    texts = [txl("generate", "bundle", *words, cwd=tmp_path) for _ in range(2)]
    assert texts[0].returncode == 0, texts[0].stderr
    assert texts[0].stdout.startswith("the small")
    assert len(texts[0].stdout) > len("the small\n")
    assert texts[0].stdout == texts[1].stdout, "a seed makes a text"

    for path in (corpus, "bundle", "run/checkpoints/step_000000060"):
        verified = txl("verify", str(path), cwd=tmp_path)
        assert verified.returncode == 0, verified.stdout


def test_a_plain_webdataset_reads_every_shard(corpus: Path) -> None:
    index = json.loads((corpus / "index.json").read_text(encoding="utf-8"))
    for split in index["splits"].values():
        for shard in split["shards"]:
            samples = list(webdataset.WebDataset(str(corpus / shard["name"]), shardshuffle=False).decode())
            assert sum(len(sample["npy"]) for sample in samples) == shard["tokens"]


def test_the_loss_with_document_masks_does_not_depend_on_the_number_of_ranks(tmp_path: Path, config_file: Path) -> None:
    """Masks score different numbers of tokens on different ranks; the mean is over all of them."""
    losses = []
    for ranks in (1, 2):
        words = ["--data.document_mask", "True", "--model.dropout", "0", "--model.attention_dropout", "0"]
        words += ["--run.dir", f"run{ranks}", "--train.max_steps", "10", "--eval.every_steps", "5"]
        train(str(config_file), *words, cwd=tmp_path, ranks=ranks)
        lines = (tmp_path / f"run{ranks}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses.append([record["loss"] for record in map(json.loads, lines) if "loss" in record])
    assert len(losses[0]) == 12, "ten steps and two evaluations"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
