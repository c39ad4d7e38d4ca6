"""Every variant of a study can be started, tables compare equal seeds, and a prediction is a line through
logarithms."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from tests.helpers.corpora import tiny_corpus
from tools.experiments import prediction, studies
from tools.experiments.recording import append_rows, read_rows
from tools.experiments.studies import STUDIES, Record, config_of, draw, ordered, parameters_outside_tables, table_of
from txl_dist.config.load import plan_batch
from txl_dist.errors import ConfigError

VARIANTS = [(name, variant) for name, study in STUDIES.items() for variant in study.variants]


def row(study: str, variant: str, seed: int, nats: float, *, parameters: int = 1) -> Record:
    return Record(
        study, "text", variant, seed, 9, nats, 1.0, 2.0, 0.5, parameters, "", "", "d", "c", "cpu", "2026-11-23"
    )


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_every_variant_can_be_started_on_its_ranks(name: str, variant: str, tmp_path: Path) -> None:
    study = STUDIES[name]
    config = config_of(study, variant, corpus=tmp_path, vocab_size=4096, seed=3, steps=70, place=tmp_path / "run")
    plan = plan_batch(config.train, world_size=study.ranks)
    assert plan.num_microbatches == 1
    assert (config.run.seed, config.train.max_steps, config.train.num_lanes) == (3, 70, 32)
    assert config.engine.precision == ("bf16" if variant.startswith("bf16") else "fp32")
    assert parameters_outside_tables(config) > 100_000


def test_a_model_is_not_compared_with_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 257 ids, but cutoffs begin at 512: both softmaxes are the same model"):
        config_of(
            STUDIES["softmax"], "adaptive", corpus=tmp_path, vocab_size=257, seed=1, steps=70, place=tmp_path / "run"
        )


def test_variants_stand_beside_the_first_by_seed() -> None:
    losses = {("memory 0", 1): 4.0, ("memory 0", 2): 5.0, ("memory 64", 1): 3.5, ("memory 64", 2): 4.7}
    _, _, first, second = table_of([row("memory", name, seed, nats) for (name, seed), nats in losses.items()])
    assert "| 2 | 4.5000 +- 0.7071 | 1.0000 |  | 2 | 0.50 |" in first
    assert "| 4.1000 +- 0.8485 | 1.0000 | -0.4000 +- 0.1414 |" in second


def test_a_seed_without_the_first_variant_is_beside_nothing() -> None:
    rows = [row("memory", "memory 0", 1, 4.0), *(row("memory", "memory 64", seed, 3.5) for seed in (1, 2))]
    assert "| 3.5000 +- 0.0000 | 1.0000 | -0.5000 (1 in common) |" in table_of(rows)[3]
    assert "| 3.5000 | 1.0000 |  |" in table_of(rows[2:])[2]


def test_runs_of_other_steps_or_data_are_in_rows_of_their_own(tmp_path: Path) -> None:
    base = [row("memory", name, 1, nats) for name, nats in (("memory 0", 4.0), ("memory 64", 3.5))]
    longer = [one._replace(steps=18, nats=one.nats - 1) for one in base]
    others = [one._replace(data="e", nats=2 * one.nats) for one in base]
    rows = ordered([*base, *others, *longer])
    rows = [one._replace(curve="9:4.0" if one.steps == 9 else "9:4.0 18:3.0", by_position="4.0 3.0") for one in rows]
    _, _, *lines = table_of(rows)
    assert [line.split(" | ")[0::3][:2] for line in lines] == [
        ["| text", "4.0000"], ["| text", "3.5000"], ["| text e", "8.0000"],
        ["| text e", "7.0000"], ["| text, 18 steps", "3.0000"], ["| text, 18 steps", "2.5000"],
    ]  # fmt: skip
    assert [line.split(" | ")[5] for line in lines[1::2]] == ["-0.5000", "-1.0000", "-0.5000"]
    draw(rows, out=tmp_path / "study.svg")
    assert "text, 18 steps: validation" in (tmp_path / "study.svg").read_text()


def test_a_run_has_a_folder_of_its_own_and_the_last_record_of_a_step_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []

    def run_txl(command: str, *words: object) -> float:
        if command == "evaluate":
            Path(str(words[-1])).write_text(json.dumps({"model": {"loss": 2.0}}))
            return 0.0
        places.append(Path(str(words[words.index("--run.dir") + 1])))
        places[-1].mkdir(parents=True)
        train = [{"kind": "train", "step": step, "step_ms": 1.0, "peak_gib": 0.5} for step in (1, 2, 1, 2)]
        evals = [{"kind": "eval", "step": 2, "loss": loss, "loss_by_position": [loss]} for loss in (9.0, 3.0)]
        lines = [json.dumps(one) for one in (*train[:2], evals[0])]
        lines += ['{"kind": "ev', *(json.dumps(one) for one in (*train[2:], evals[1]))]
        (places[-1] / "metrics.jsonl").write_text("\n".join([*lines, ""]))
        return 0.0

    monkeypatch.setattr(studies, "run_txl", run_txl)
    corpus = tiny_corpus(tmp_path).folder
    for steps, trial in ((50, True), (50, False), (300, False)):
        one = studies.measure(
            "norm", variant="post-norm", corpus=corpus, seed=1, steps=steps, out=tmp_path / "runs", trial=trial
        )
        assert (one.steps, one.curve, one.by_position) == (steps, "2:3.0000", "3.0000")
    assert len(set(places)) == 3


def test_a_corpus_that_does_not_know_its_bytes_has_an_empty_cell() -> None:
    _, _, line = table_of([row("softmax", "full", 1, 5.4)._replace(bits_per_byte=math.nan)])
    assert "| 5.4000 |  |  |" in line


def test_a_power_law_is_continued_exactly_and_seeds_tell_how_sure_it_is() -> None:
    sizes = {"width 64": 10_000, "width 96": 40_000, "width 128": 90_000}
    rows = [
        row("sizes", name, seed, factor * size**-0.1, parameters=size)
        for seed, factor in ((1, 10.0), (2, 11.0))
        for name, size in sizes.items()
    ]
    (said,) = prediction.predict(rows, parameters=1_000_000)
    assert said.nats == pytest.approx(10.5 * 1_000_000**-0.1, abs=1e-4)
    assert said.deviation == pytest.approx(math.sqrt(0.5) * 1_000_000**-0.1, abs=1e-4)
    assert "not yet trained" in prediction.table_of([said], rows)[2]
    came = row("larger", "width 224", 1, 2.5)
    assert "| 2.5000 |" in prediction.table_of([said], [*rows, came])[2]
    with pytest.raises(ConfigError, match="fewer than two seeds"):
        prediction.predict(rows[:3], parameters=1)


def sizes(nats: float) -> list[Record]:
    """The study of sizes with two seeds."""
    return [
        row("sizes", name, seed, nats, parameters=100 * (place + 1))
        for seed in (1, 2)
        for place, name in enumerate(STUDIES["sizes"].variants)
    ]


def test_a_prediction_is_told_and_came_on_the_same_steps_and_data() -> None:
    longer = [one._replace(steps=18, nats=2.0) for one in sizes(4.0)]
    found = prediction.predict([*sizes(4.0), *longer], parameters=1_000)
    assert [(one.corpus, one.nats) for one in found] == [("text", 4.0), ("text, 18 steps", 2.0)]
    came = row("larger", "width 224", 1, 1.5)._replace(steps=18)
    lines = prediction.table_of(found, [*sizes(4.0), *longer, came])[2:]
    assert ["not yet trained" in line for line in lines] == [True, False]
    assert "| 1.5000 |" in lines[1]


def test_what_is_told_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studied, told = tmp_path / "studies.csv", tmp_path / "prediction.csv"
    monkeypatch.setattr(prediction, "STUDIED", studied)
    monkeypatch.setattr(prediction, "RECORDS", told)
    monkeypatch.setattr(sys, "argv", ["prediction", "--tell"])
    append_rows(studied, Record._fields, sizes(4.0))
    prediction.main()
    append_rows(studied, Record._fields, [one._replace(corpus="other") for one in sizes(3.0)])
    append_rows(studied, Record._fields, [one._replace(steps=18) for one in sizes(3.0)])
    prediction.main()
    append_rows(studied, Record._fields, [one._replace(corpus="late") for one in sizes(3.0)])
    append_rows(studied, Record._fields, [row("larger", "width 224", 1, 1.5)._replace(corpus="late")])
    with pytest.raises(
        ConfigError, match=r"^text: .*prediction\.csv has its prediction already.* late: the larger model is trained"
    ):
        prediction.main()
    assert [one.corpus for one in read_rows(told, prediction.Prediction)] == ["text", "other", "text, 18 steps"]
