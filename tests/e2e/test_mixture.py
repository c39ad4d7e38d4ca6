"""Several corpora, another number of lanes in the middle, and damage, with the launcher and the command line."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import write_texts
from tests.e2e.test_resume import losses
from tests.helpers.corpora import flip_bit
from tests.helpers.job import Job
from tests.helpers.launch import train, txl
from txl_dist.artifacts import list_checkpoints
from txl_dist.data.format import RECORD
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.train.checkpoint.validate import read_state

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Other text, prepared with the tokenizer of the first corpus."""
    folder = tmp_path_factory.mktemp("second")
    texts = write_texts(folder / "texts", seed=8, count=20)
    tokenizer = ["--tokenizer-file", str(corpus / "tokenizer.json")]
    result = txl("prepare", str(texts), "--out", "more", "--valid-fraction", "0.1", *tokenizer, cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "more"


def records(run: Path, kind: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_a_mixture_goes_on_with_more_lanes_and_other_weights(
    tmp_path: Path, config_file: Path, corpus: Path, second: Path
) -> None:
    mixture = [str(config_file), "--data.more_paths", str(second), "--run.dir", "run"]
    train(*mixture, "--data.weights", "6", "2", "--train.max_steps", "10", cwd=tmp_path)
    run = tmp_path / "run"
    before = read_state(list_checkpoints(run)[-1]).values["stream"]
    assert [(one["name"], one["num_lanes"], one["position"]) for one in before["corpora"]] == [
        ("corpus", 6, 10 * 24),
        ("more", 2, 10 * 24),
    ]
    assert {"epoch", "epoch_more"} <= records(run, "train")[-1].keys()
    assert len(records(run, "eval")) == len(records(run, "eval_more")) == 1

    words = ["--data.weights", "3", "1", "--train.num_lanes", "16", "--train.max_steps", "14"]
    train(*mixture, *words, cwd=tmp_path)
    log = (tmp_path / "launcher.log").read_text(encoding="utf-8")
    assert "train.num_lanes changed from 8 to 16" in log
    assert "the lanes (batch rows) get new parts of the text" in log
    checkpoint = list_checkpoints(run)[-1]
    after = read_state(checkpoint).values
    for one, folder, old_lanes in zip(after["stream"]["corpora"], (corpus, second), (6, 2), strict=True):
        assert (one["num_lanes"], one["position"]) == (2 * old_lanes, 4 * 24)
        lengths = [int(step) for step in one["unread"].split()][1::2]
        assert sum(lengths) == open_corpus(folder).split("train").tokens - old_lanes * 10 * 24, "what no lane has read"
    assert after["tokens_seen"] == 10 * 8 * 24 + 4 * 16 * 24
    assert sorted(path.name for path in (checkpoint / "lanes").iterdir()) == [
        "00000-00007.safetensors",
        "00008-00015.safetensors",
    ]
    assert txl("verify", "run", cwd=tmp_path).returncode == 0


def test_weights_by_phase_and_held_out_sets_go_on_bit_for_bit(
    tmp_path: Path, config_file: Path, corpus: Path, second: Path
) -> None:
    words = [str(config_file), "--data.more_paths", str(second), "--optim.schedule", "constant"]
    phases = [*words, "--train.phases", "until=0.5 weights=6,2", "--data.weights", "1", "3", "--train.max_steps", "12"]
    phases += f"--checkpoint.every_steps 4 --eval.every_steps 6 --eval.sets news={second} --eval.max_tokens 500".split()
    for folder, ranks in (("run", 2), ("elastic", 1)):
        words_of_run = (*phases, "--run.dir", folder)
        with Job(
            "train", *words_of_run, log=tmp_path / "log", ranks=ranks, cwd=tmp_path, fault="kill:0:9:boundary"
        ) as job:
            job.wait_for(lambda job=job: bool(job.struck))  # type: ignore[misc]
            job.signal(signal.SIGKILL)
        train(*words_of_run, cwd=tmp_path)
    for weights, steps in (("6 2", "6"), ("1 3", "12")):
        by_hand = ["--run.dir", "by_hand", "--data.weights", *weights.split(), "--train.max_steps", steps]
        train(*words, *by_hand, "--data.eval_split", "", cwd=tmp_path)
    run, hand = tmp_path / "run", tmp_path / "by_hand"
    assert losses(run) == losses(hand)
    assert sorted(losses(run)) == list(range(1, 13))
    folders = (run, hand, tmp_path / "elastic")
    streams = [read_state(list_checkpoints(folder)[-1]).values["stream"] for folder in folders]
    assert streams[0] == streams[1] == streams[2]
    assert losses(tmp_path / "elastic") == pytest.approx(losses(run), rel=1e-4)
    assert [one["num_lanes"] for one in streams[0]["corpora"]] == [2, 6]
    scored = [record["step"] for record in records(run, "eval_news")]
    assert scored == [record["step"] for record in records(run, "eval")]
    assert set(scored) == {6, 12}
    assert txl("report", "run", cwd=tmp_path).returncode == 0
    assert "validation news" in (run / "report.html").read_text(encoding="utf-8")


def test_a_run_may_skip_a_damaged_document_and_says_so(tmp_path: Path, config_file: Path, corpus: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(corpus, damaged)
    shard = open_corpus(damaged).split("train").shards[0].name
    offsets = np.fromfile(damaged / f"{shard}.idx", dtype=RECORD)["offset"]
    for offset in offsets[:6]:
        flip_bit(damaged / shard, offset=int(offset))
    words = ["train", str(config_file), "--data.path", str(damaged), "--train.microbatch_lanes", "8"]
    refused = txl(*words, cwd=tmp_path)
    assert refused.returncode == 2
    assert f"{shard}, document" in refused.stderr
    assert "crc32" in refused.stderr
    skipping = txl(*words, "--data.on_corrupt", "skip", "--run.dir", "other", "--train.max_steps", "40", cwd=tmp_path)
    assert skipping.returncode == 0, skipping.stderr
    assert "damaged documents skipped: 1 of at most 10" in skipping.stderr
    assert 0 < records(tmp_path / "other", "train")[-1]["skipped_documents"] <= 6
