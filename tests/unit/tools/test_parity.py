"""The comparison with the original code: the same ids at every step, correct clocks, and a table with the right
figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.corpora import tiny_corpus
from tools.experiments import parity
from tools.experiments.parity import BEGIN, PAGE, Record, Recorded, Size, Turn, check_batches, spent, table_of
from tools.experiments.recording import ROOT, table_in
from txl_dist.data.loader.corpus import Corpus
from txl_dist.errors import ConfigError, DataError

ORIGINAL = os.environ.get("TXL_ORIGINAL", "")
"""Folder `pytorch` of the authors' code, where one has it."""
SIZE = Size(1, 1, 8, 8, 8, (), 0.0, 0.0, num_lanes=3, segment_len=5, memory_len=5, lr=1e-3, max_steps=20)


def their_batches(corpus: Corpus, *, num_rows: int, length: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """As their LMOrderedIterator cuts: rows of equal length, the rest left out, T tokens of each at a time."""
    ids = torch.from_numpy(corpus.split("train").read_all().astype("int64"))
    data_SB = ids[: len(ids) // num_rows * num_rows].view(num_rows, -1).t()
    for begin in range(0, len(data_SB) - 1, length):
        end = min(begin + length, len(data_SB) - 1)
        yield data_SB[begin:end], data_SB[begin + 1 : end + 1], end - begin


def one_document(folder: Path) -> Corpus:
    return tiny_corpus(folder, texts=["to be or not to be, that is the question: " * 12], valid_fraction=0.0)


def test_their_batches_are_our_lanes_token_for_token(tmp_path: Path) -> None:
    corpus = one_document(tmp_path)
    config = parity.our_config(SIZE, corpus=corpus.folder, seed=3, place=tmp_path)
    check_batches(their_batches(corpus, num_rows=3, length=5), config)


def test_one_other_id_ends_the_run_and_is_named(tmp_path: Path) -> None:
    corpus = one_document(tmp_path)
    config = parity.our_config(SIZE, corpus=corpus.folder, seed=3, place=tmp_path)
    batches = [(one.clone(), two.clone(), length) for one, two, length in their_batches(corpus, num_rows=3, length=5)]
    batches[7][1][2, 1] += 1
    with pytest.raises(DataError, match="step 7, lane 1, position 2: their target"):
        check_batches(batches, config)


def test_more_steps_than_an_epoch_are_refused(tmp_path: Path) -> None:
    corpus = one_document(tmp_path)
    size = SIZE._replace(max_steps=10_000)
    config = parity.our_config(size, corpus=corpus.folder, seed=3, place=tmp_path)
    with pytest.raises(ConfigError, match="more than an epoch"):
        check_batches(their_batches(corpus, num_rows=3, length=5), config)


def test_a_program_is_charged_its_own_turns_alone() -> None:
    turns = [Turn(10.0, 14.0, 1.0, 3.0), Turn(20.0, 22.0, 3.0, 5.0)]
    assert spent(turns, 12.0) == (2.0, 2.0)
    assert spent(turns, 14.0) == spent(turns, 17.0) == (4.0, 3.0)
    assert spent(turns, 21.0) == (5.0, 4.0)
    assert spent(turns, 99.0) == (6.0, 5.0)


def test_each_step_is_noted_with_its_loss_and_weights_are_kept_where_wanted(tmp_path: Path) -> None:
    variables: dict[str, Any] = {"train_loss": 0.0, "model": torch.nn.Linear(1, 1)}
    recorded = Recorded("abcd", place=tmp_path, points=[2], variables=variables)
    for _ in recorded:
        variables["train_loss"] += 1.5
    recorded.note(4)
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(0, 0.0), *((step, 1.5) for step in (1, 2, 3, 4))]
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["step-0.pt", "step-2.pt"]


def test_a_pair_is_trained_anew_when_its_corpus_is_another_one_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def train_pair(folder: Path, size: Size, *, corpus: Path, seed: int, place: Path) -> None:
        place.mkdir(exist_ok=True)
        (place / "job.json").write_text(json.dumps(parity.job_of(size, corpus=corpus)))
        (place / "turns.json").write_text("{}")
        trained.append(parity.open_corpus(corpus).fingerprint)

    monkeypatch.setattr(parity, "train_pair", train_pair)
    monkeypatch.setattr(parity, "score_pair", lambda size, *, corpus, place: iter([("original", 20, 1.0, 1.0, 2.0)]))
    corpora = [one_document(tmp_path).folder]
    (tmp_path / "anew").mkdir()
    corpora.append(tiny_corpus(tmp_path / "anew", texts=["another text " * 40], valid_fraction=0.0).folder)
    rows = [
        parity.measure(tmp_path, SIZE, corpus=corpus, seed=1, out=tmp_path)[0]
        for corpus in (corpora[0], corpora[0], corpora[1])
    ]
    assert corpora[0].name == corpora[1].name
    assert len(trained) == 2, "the second is the first"
    assert [row.data for row in rows] == [trained[0][:12], trained[0][:12], trained[1][:12]]


def curve(program: str, seed: int, points: list[tuple[float, float]]) -> list[Record]:
    """Of (seconds, loss)."""
    common = {"settings": "lr=0.001", "data": "d", "commit": "c", "cpu": "x", "torch": "2", "date": "2026-11-23"}
    return [
        Record("text", seed, program, 10 * (i + 1), seconds=2 * cpu, cpu_seconds=cpu, held_out_nats=loss, **common)
        for i, (cpu, loss) in enumerate(points)
    ]


def pair(seed: int, *, apart: float) -> list[Record]:
    theirs = curve("original", seed, [(10.0, 4.0), (20.0, 3.0)])
    return [*theirs, *curve("txl_dist", seed, [(5.0, 4.0), (10.0, 3.0 + apart)])]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_tells_means_deviations_and_seconds_to_the_same_loss() -> None:
    rows = [row for seed, apart in ((1, -0.01), (2, 0.0), (3, -0.005)) for row in pair(seed, apart=apart)]
    found = dict(zip(parity._HEAD, cells(table_of(rows)[2]), strict=True))
    assert found["difference of the means"] == "-0.0050"
    assert found["deviation of a pair's"] == "0.0050"
    assert found["times as fast"] == "2.00"
    assert found["s to the original's last loss"].startswith("10.0")
    assert found["original behind at equal s, nats"].startswith("1.0050")  # theirs is at 4.0 when ours ends
    assert found["at most 0.01 nats apart"] == "yes"


def test_a_loss_that_is_never_reached_and_too_few_pairs_are_said() -> None:
    found = dict(zip(parity._HEAD, cells(table_of(pair(1, apart=0.1))[2]), strict=True))
    assert found["s to the original's last loss"] == "(1 never)"
    assert found["at most 0.01 nats apart"] == "fewer than 3 pairs"


def test_theirs_planned_for_fewer_steps_stands_beside_ours_of_all_by_the_same_weights() -> None:
    def told(rows: list[Record], steps: int) -> list[Record]:
        return [row._replace(settings=f"lr=0.001 max_steps={steps}") for row in rows]

    longer = [row for seed in (1, 2) for row in told(pair(seed, apart=-0.01 * seed), 20)]
    shorter = [row for seed in (1, 3) for row in told(curve("original", seed, [(7.0, 3.5)]), 10)]
    shorter += [row for seed in (1, 3) for row in told(curve("txl_dist", seed, [(4.0, 3.4)]), 10)]
    lines = parity.equal_seconds_table([*shorter, *longer])
    assert len(lines) == 3
    found = dict(zip(parity._HEAD_EQUAL_SECONDS, cells(lines[2]), strict=True))
    assert found["pairs"] == "1", "of the other seeds one side is missing"
    assert found["original's steps, of"] == "10, 20"
    assert found["its seconds to those of txl_dist"] == "1.000"  # half of 20.0, beside 10.0
    assert found["original behind, nats"] == "+0.5100"  # 3.5, and 2.99
    assert parity.equal_seconds_table(longer) == []
    assert parity.equal_seconds_table([*(row for row in shorter if row.seed == 3), *longer]) == [], "no seed of both"
    other_data = [row._replace(data="e") for row in shorter]
    assert parity.equal_seconds_table([*other_data, *longer]) == []


def test_the_page_shows_the_tables_of_the_records() -> None:
    records = parity.read_records()
    assert table_in(PAGE, BEGIN) == (table_of(records) if records else [])
    assert table_in(PAGE, parity.BEGIN_EQUAL_SECONDS) == parity.equal_seconds_table(records)


@pytest.mark.slow
@pytest.mark.skipif(not ORIGINAL, reason="needs the authors' code: TXL_ORIGINAL=DIR")
@pytest.mark.parametrize("cutoffs", [(), (40, 120)])
def test_without_dropout_both_have_the_same_losses_for_20_steps(
    cutoffs: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tiny_corpus(tmp_path, texts=["to be or not to be: " * 600], valid_fraction=0.0)
    monkeypatch.setitem(parity.SIZES, "corpus", SIZE._replace(cutoffs=cutoffs))
    size = parity.checked_size(parity.SIZES["corpus"])
    assert parity.check(Path(ORIGINAL), size, corpus=corpus.folder, place=tmp_path / "pair") < parity.CHECK_TOLERANCE


@pytest.mark.slow
def test_bad_words_end_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.experiments.parity", str(tmp_path), "--original", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "named none of tinyshakespeare, wikitext-2" in done.stderr
    assert len(done.stderr.splitlines()) == 1
