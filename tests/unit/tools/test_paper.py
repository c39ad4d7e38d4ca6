"""The paper's tables as commands: what is compared, how it is scored, and that the page shows the records."""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import tiny_corpus
from tests.helpers.launch import python
from tools.experiments.paper import t6, t8, t9, t10, trials
from tools.experiments.paper.trials import (
    PAGE,
    SIZES,
    Job,
    Trial,
    begin_of,
    config_of,
    fitted,
    on_a_cluster,
    scoring,
)
from tools.experiments.recording import ROOT, Rows, table_in
from tools.experiments.trainings import flags_of, side_by_side
from txl_dist.config.load import Config, changed, check_config, load_config, plan_batch
from txl_dist.data.loader.corpus import open_corpus

CORES, PAPER = SIZES["cores"], SIZES["paper"]
PROGRAMS: dict[str, Any] = {"t6": trials, "t8": t8, "t9": t9, "t10": trials}


def differing(trial: Trial) -> dict[str, str]:
    """Of two trials' flags those that tell them apart."""
    words = flags_of(config_of(trial, CORES), base=CORES.recipe)
    base = flags_of(config_of(t6.TRIALS[0], CORES), base=CORES.recipe)
    pairs, known = (dict(zip(one[::2], one[1::2], strict=True)) for one in (words, base))
    return {flag.removeprefix("--"): value for flag, value in pairs.items() if known.get(flag) != value}


def test_each_trial_differs_by_its_own_settings_alone_and_may_be() -> None:
    assert differing(Trial(True, "ours", "half")) == {"train.half_loss": "True"}
    assert differing(Trial(False, "ours", "full")) == {"train.memory_len": "0"}
    shaw = {"model.positions": "learned_relative", "model.num_distances": "128"}
    assert differing(Trial(True, "Shaw", "full")) == shaw
    assert differing(Trial(True, "absolute", "full")) == {
        "model.positions": "absolute",
        "model.absolute_with_memory": "True",
    }
    assert differing(t6.TRIALS[-1]) == {"train.initial_memory": "zeros"}
    for size in SIZES.values():
        for trial in t6.TRIALS:
            check_config(config_of(trial, size))


def test_folders_and_rows_of_trials_are_apart() -> None:
    jobs = t6.jobs_of(argparse.Namespace(seeds=2), CORES)
    assert len({job.name(CORES) for job in jobs}) == len(jobs) == 2 * len(t6.TRIALS)
    slower = CORES._replace(changes=CORES.changes | {"optim.lr": 1e-3})
    assert jobs[0].name(slower) != jobs[0].name(CORES), "another rate is another run"


def test_the_last_scored_token_sees_as_many_as_the_attention_length_says() -> None:
    def flags(trial: Trial, attention: int, segment_len: int = 64) -> list[str]:
        return scoring(trial, CORES, segment_len=segment_len, attention=attention)

    recurrent, alone = Trial(True, "ours", "full"), Trial(False, "absolute", "half")
    assert flags(recurrent, 512) == ["--segment-len", "32", "--memory-len", "480"]
    assert flags(alone, 128) == ["--segment-len", "32", "--overlap-len", "96"]
    assert flags(alone, 128, segment_len=91) == flags(alone, 128), "as much context, whatever it was trained with"
    assert flags(alone, 512) == [], "too much to run again for 32 tokens"
    naive = Trial(True, "absolute", "full")
    assert flags(naive, 128) == ["--segment-len", "64", "--memory-len", "64"]
    assert flags(naive, 127) == [], "without a whole segment behind it places are others than in training"


def test_table_10_compares_in_as_many_steps_and_over_as_much_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(t10, "open_corpus", lambda path: argparse.Namespace(vocab_size=4096))
    monkeypatch.setattr(t10, "longest_segment", lambda size, *, ranks, vocab_size: 91)
    jobs = t10.jobs_of(argparse.Namespace(seeds=1, corpus=None), CORES)
    assert [(job.segment_len, job.steps) for job in jobs] == [(64, 450)] * 2 + [(91, 450)] * 2 + [(91, 316)] * 2
    assert len({job.name(CORES) for job in jobs}) == len(jobs)


def test_a_jobs_steps_are_those_of_its_training() -> None:
    assert Job(t10.ALONE, 1, 91, 316).config(CORES).train.max_steps == 316


def test_a_run_is_scored_at_the_length_of_its_own_segment_too() -> None:
    assert sorted(Job(Trial(False, "ours", "full"), 1, 91, 9).scorings(CORES)) == [64, 91, 128, 256]


def row(**values: Any) -> dict[str, str]:
    told = {"corpus": "c", "recurrence": "yes", "positions": "ours", "loss": "full", "steps": 9, "segment": 64}
    told["settings"] = "0"
    return {name: str(value) for name, value in (told | values).items()}


def test_a_row_is_a_trial_with_mean_and_deviation_over_its_seeds() -> None:
    seeds = [row(seed=seed, attention=64, nats=nats) for seed, nats in ((1, 4.0), (2, 4.2))]
    lines = trials.table_of(
        [*seeds, row(seed=1, attention=128, nats=3.5), row(seed=1, attention=64, nats=5, loss="half")]
    )
    assert [line.split(" | ")[3:] for line in lines[2:]] == [
        ["64", "9", "c", "2", "4.1000 +- 0.1414", "3.5000 |"],
        ["64", "9", "c", "1", "5.0000", " |"],
    ]


def test_what_another_program_measured_of_the_same_runs_is_taken_over_once(tmp_path: Path) -> None:
    corpus = open_corpus(
        tiny_corpus(tmp_path, texts=["abc" * 40 + "d" * i for i in range(40)], valid_fraction=0.2).folder
    )
    job = Job(t6.TRIALS[0], 1, 64, 9)
    words = job.words(CORES, corpus=corpus)
    same = row(**words, attention=64, nats=4.0, train_s=1.0, commit="a", cpu="b", date="c")
    unlike = [
        same | other for other in ({"seed": "2"}, {"loss": "half"}, {"corpus": "c"}, {"steps": "8"}, {"settings": "d"})
    ]
    for _ in range(2):
        rows = Rows(tmp_path / "t10.csv", trials.COLUMNS)
        trials.take_over([*unlike, same], rows, wanted=[words])
        assert rows.rows == [same]


def test_a_failed_run_leaves_those_behind_it() -> None:
    begun = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise RuntimeError("ended with 1")
        time.sleep(0.05)

    with pytest.raises(RuntimeError, match="ended with 1"):
        side_by_side(work, range(50), jobs=1)
    assert len(begun) < 50


def test_runs_side_by_side_say_how_many_are_done(capsys: pytest.CaptureFixture[str]) -> None:
    side_by_side(lambda number: None, range(3), jobs=2)
    assert capsys.readouterr().err.splitlines() == ["1 of 3 done", "2 of 3 done", "3 of 3 done"]


@pytest.mark.parametrize("program", [pytest.param("t6", marks=pytest.mark.slow), "t8", "t9", "t10"])
def test_a_try_keeps_out_of_the_records_and_a_wrong_folder_is_a_line(program: str, tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return python("-m", f"tools.experiments.paper.{program}", *words, cwd=ROOT)

    assert "--csv" in run("--size", "tiny").stderr.splitlines()[-1]
    if program != "t9":  # which has no folder to be wrong
        flag = "--runs" if program == "t8" else "--corpus"
        done = run(flag, str(tmp_path / "none"), "--csv", str(tmp_path / "x.csv"))
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert "none" in done.stderr


def test_a_table_of_lengths_tells_range_and_what_still_gained() -> None:
    told = {"corpus": "c", "targets": 5, "contexts": "4 to 12", "r": "0.1"}
    rows = [row(seed=seed, recl=length, or_more=more, **told) for seed, length, more in ((1, 4, 0), (2, 12, 1))]
    assert t8.table_of(rows)[2].endswith("| 2 | 8+ (4 to 12) |")


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_page_shows_the_table_of_the_records(program: str) -> None:
    module, path = PROGRAMS[program], ROOT / f"tools/experiments/paper/{program}.csv"
    assert table_in(PAGE, begin_of(program)) == module.table_of(Rows(path, module.COLUMNS).rows)


def test_rows_are_read_back_as_they_were_added(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "x.csv", ("a", "b"))
    assert not rows.path.exists(), "to look is not to write"
    for values in ({"a": 1, "b": "x, y"}, {"b": 2.5}):
        rows.add(**values)
    assert Rows(rows.path, rows.columns).rows == rows.rows == [{"a": "1", "b": "x, y"}, {"a": "", "b": "2.5"}]
    assert rows.path.read_text().splitlines()[0] == "a,b"


def test_flags_make_the_same_settings(tmp_path: Path) -> None:
    recipe = CORES.recipe
    config = config_of(t6.TRIALS[1], CORES)
    words = flags_of(config, base=recipe)
    values = load_config(recipe).model_dump()
    for flag, value in zip(words[::2], words[1::2], strict=True):
        section, key = flag.removeprefix("--").split(".")
        values[section][key] = value
    assert Config.model_validate(values) == config


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "used"), [(4, 4), (8, 6)])
def test_the_commands_for_a_cluster_are_those_of_the_plan_that_stands_above(gpus: int, used: int) -> None:
    jobs = [Job(t6.TRIALS[0], seed, PAPER.segment_len, PAPER.steps) for seed in (1, 2)]
    lines = list(on_a_cluster(jobs, size=PAPER, gpus=gpus, gpu="h100", vocab_size=267_735, out="runs"))
    (chosen,) = (line.removeprefix("#   choose: ") for line in lines if line.startswith("#   choose: "))
    commands = [line for line in lines if line.startswith("deepspeed")]
    assert commands == [
        f"deepspeed --num_gpus {used} --module txl_dist train configs/wt103_base.toml --train.segment_len 128 "
        f"--train.memory_len 128 {chosen} --run.dir runs/{job.name(PAPER)} --run.seed {job.seed}"
        for job in jobs
    ]
    words = commands[0].partition("wt103_base.toml ")[2].replace("--", "").split()
    config = changed(load_config(PAPER.recipe), dict(zip(words[::2], map(as_value, words[1::2]), strict=True)))
    assert plan_batch(config.train, world_size=used).num_microbatches >= 1
    assert ("does not divide among 8 GPUs" in "".join(lines)) == (used < gpus)
    assert sum(line.startswith("#   step: ") for line in lines) == 1, "once a trial"


def as_value(word: str) -> Any:
    return int(word) if word.isdigit() else word


def test_cutoffs_are_those_that_the_corpus_has() -> None:
    assert fitted(CORES, vocab_size=4096).changes["model.cutoffs"] == (512, 2048)
    assert config_of(t6.TRIALS[0], fitted(CORES, vocab_size=4096)) == config_of(t6.TRIALS[0], CORES), "the recorded"
    assert fitted(CORES, vocab_size=2048).changes["model.cutoffs"] == (512,)
    assert fitted(CORES, vocab_size=257).changes["model.cutoffs"] == ()


def test_a_cluster_that_cannot_be_is_one_line() -> None:
    for words in (("t6", "--gpu", "foo"), ("t10", "--gpus", "8")):
        done = python("-m", f"tools.experiments.paper.{words[0]}", "--size", "paper", *words[1:], cwd=ROOT)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr


@pytest.mark.slow
def test_without_a_memory_longer_segments_need_as_many_bytes() -> None:
    found = t10.longest_segment(CORES, ranks=1, vocab_size=4096)
    assert CORES.segment_len < found < 4 * CORES.segment_len
    facts: dict[str, Any] = {"ranks": 1, "vocab_size": 4096, "on_gpu": False}
    room = t10.needed(config_of(t10.RECURRENT, CORES), **facts)
    least, more = (t10.needed(config_of(t10.ALONE, CORES, segment_len=found + i), **facts) for i in (0, 1))
    assert least <= room < more


@pytest.mark.slow
@pytest.mark.nightly
def test_trials_are_trained_scored_and_told_once(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, texts=["abc" * 40 + "d" * i for i in range(40)], valid_fraction=0.2).folder
    for _ in range(2):  # the second time nothing is trained
        words = ["--size", "tiny", "--corpus", str(corpus), "--seeds", "1", "--csv", str(tmp_path / "t10.csv")]
        done = python(
            "-m", "tools.experiments.paper.t10", *words, "--out", str(tmp_path / "runs"), cwd=ROOT, timeout_s=500
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("| yes | ours |") == 2
        assert done.stdout.count("| no | ours |") == 2, "as much text is as many steps here"
    rows = Rows(tmp_path / "t10.csv", trials.COLUMNS).rows
    assert len(rows) == len(t10.TRIALS) * len(SIZES["tiny"].lengths)
