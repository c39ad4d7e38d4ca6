"""The average of the weights with real DeepSpeed: its values, its place in checkpoints, and that reading it changes
nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.test_checkpoint import Job
from tests.e2e.test_bad_input import words
from tests.helpers.jobs import TOKENIZER
from tests.helpers.launch import txl
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config
from txl_dist.artifacts import checkpoint_folder
from txl_dist.cli.main import main
from txl_dist.cli.model import export
from txl_dist.config.load import Config
from txl_dist.convert.export import export_bundle
from txl_dist.distributed.collectives import RankInfo, barrier
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.inference.bundle import load_bundle
from txl_dist.train.checkpoint.engine_probe import make_probe
from txl_dist.train.checkpoint.read import consolidated_weights

pytestmark = pytest.mark.dist

DECAY = 0.75
CaseOfRun = tuple[int, str, dict[str, Any]]
FEW: list[CaseOfRun] = [
    *((stage, "fp32", {}) for stage in (0, 2, 3)),
    (3, "bf16", {}),
    (1, "fp32", {"name": "sgd", "lr": 0.5}),
]
ALL: list[CaseOfRun] = [*FEW, (1, "fp32", {}), (0, "bf16", {}), (0, "fp32", {"name": "lamb", "lr": 0.05})]


def config_of(stage: int, precision: str, optim: dict[str, Any], *, ema: float = DECAY) -> Config:
    return tiny_config(engine={"zero_stage": stage, "precision": precision}, optim={**optim, "ema_decay": ema})


def name_of(stage: int, precision: str, optim: dict[str, Any]) -> str:
    return f"{stage}-{precision}-{optim.get('name', 'adamw')}"


def new_job(ranks: RankInfo, config: Config) -> Job:
    return Job(ranks, config, vocab_size=TOKENIZER.vocab_size)


def values_of(job: Job, kind: str) -> dict[tuple[str, int], Tensor]:
    """By parameter and place in it, of this rank."""
    return {
        (one.parameter, one.start): one.values[kind].double().clone()
        for one in job.engine.fragments()
        if kind in one.values
    }


def averaging_worker(ranks: RankInfo, cases: list[CaseOfRun], folder: str) -> list[tuple[str, bool]]:
    facts = []
    for case in cases:
        name, config = name_of(*case), config_of(*case)
        job, plain = new_job(ranks, config), new_job(ranks, config_of(*case, ema=0.0))
        facts.append((f"{name}: none before the first update", values_of(job, "average") == {}))
        expected: dict[tuple[str, int], Tensor] = {}
        same_losses = True
        for step in range(4):
            if step == 2:  # looking at it
                before = values_of(job, "weight"), [p.detach().clone() for p in job.engine.model.parameters()]
                job.engine.swap_averages()
                swapped = values_of(job, "weight")
                close = all(torch.allclose(swapped[key], expected[key], rtol=1e-5, atol=1e-7) for key in expected)
                facts.append((f"{name}: swapped it is what is computed with", bool(expected) and close))
                job.engine.swap_averages()
                after = values_of(job, "weight"), list(job.engine.model.parameters())
                equal = all(torch.equal(before[0][key], after[0][key]) for key in before[0])
                equal &= all(map(torch.equal, before[1], after[1]))
                facts.append((f"{name}: swapped twice all is as it was", equal))
            same_losses &= job.step(step) == plain.step(step)
            weights = values_of(job, "weight")
            expected = {key: DECAY * expected.get(key, w) + (1 - DECAY) * w for key, w in weights.items()}
        found = values_of(job, "average")
        close = all(torch.allclose(found[key], expected[key], rtol=1e-5, atol=1e-7) for key in expected)
        facts.append((f"{name}: it is the average", found.keys() == expected.keys() and close))
        facts.append((f"{name}: the training is the same", same_losses))
        assert job.save(Path(folder) / name, step=4).error == ""
        again = new_job(ranks, config)
        again.load(checkpoint_folder(Path(folder) / name, 4))
        equal = [job.step(step) for step in (4, 5)] == [again.step(step) for step in (4, 5)]
        first, second = values_of(job, "average"), values_of(again, "average")
        equal &= all(torch.equal(first[key], second[key]) for key in first)
        facts.append((f"{name}: it goes on bit for bit", equal and bool(first)))
    barrier()
    return facts


@pytest.fixture(scope="module", params=[FEW, pytest.param(ALL, marks=pytest.mark.nightly)], ids=["few", "all"])
def averaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each case, of two ranks."""
    cases, folder = request.param, tmp_path_factory.mktemp("averaged")
    for rank in run_ranks(averaging_worker, cases, str(folder), world_size=2, folder=folder / "results"):
        assert len(rank) == 6 * len(cases)
        assert [what for what, holds in rank if not holds] == []
    return folder


def test_it_is_the_exponential_average_at_every_stage_and_changes_no_loss(averaged: Path) -> None:
    assert {path.name for path in averaged.iterdir()} >= {name_of(*case) for case in FEW}


def test_a_bundle_of_it_has_the_losses_that_the_engine_had_with_it(averaged: Path, tmp_path: Path) -> None:
    for run in sorted(averaged.glob("?-*")):
        last, mean = (tmp_path / run.name / word for word in ("last", "mean"))
        tolerance = 1e-4 if "fp32" in run.name else 0.1
        for out, average in ((last, False), (mean, True)):
            assert export_bundle(run, out, use_ema=average).error <= tolerance  # proven on the engine's own losses
        kept = consolidated_weights(checkpoint_folder(run, 4), use_ema=True)
        weights = load_bundle(mean).model.state_dict()
        assert all(torch.equal(weights[name], rows[:]) for name, rows in kept.items() if name in weights)
        probes = [load_bundle(out).probe["losses"] for out in (last, mean)]
        assert not torch.equal(*probes)
        assert load_bundle(mean).source["average"] is True


def elastic_worker(ranks: RankInfo, folder: str) -> tuple[dict[str, Tensor], bool, bool]:
    run = Path(folder) / name_of(3, "fp32", {})
    job = new_job(ranks, config_of(0, "fp32", {}))
    job.load(checkpoint_folder(run, 4))
    averages = {one.parameter: one.values["average"].clone() for one in job.engine.fragments()}
    without = new_job(ranks, config_of(0, "fp32", {}, ema=0.0))
    without.load(checkpoint_folder(run, 4))
    dropped = values_of(without, "average") == {}
    without.step(4)
    assert without.save(run.parent / "without", step=5).error == ""
    late = new_job(ranks, config_of(1, "fp32", {}))
    late.load(checkpoint_folder(run.parent / "without", 5))
    late.step(5)
    weights, begun = values_of(late, "weight"), values_of(late, "average")
    return averages, dropped, all(torch.equal(weights[key], begun[key]) for key in weights)


def test_it_loads_on_other_ranks_and_stages_and_may_be_switched_off_and_on(averaged: Path, tmp_path: Path) -> None:
    ((averages, dropped, begins_anew),) = run_ranks(elastic_worker, str(averaged), world_size=1, folder=tmp_path)
    kept = consolidated_weights(checkpoint_folder(averaged / name_of(3, "fp32", {}), 4), use_ema=True)
    assert averages.keys() == kept.keys()
    assert all(torch.equal(averages[name], rows[:].flatten()) for name, rows in kept.items())
    assert dropped
    assert begins_anew
    without = averaged / "without"
    with pytest.raises(
        CheckpointError, match=r"holds no average of its weights, because it was trained with optim\.ema_decay=0"
    ):
        export_bundle(without, tmp_path / "bundle", use_ema=True)


def skipping_worker(ranks: RankInfo) -> bool:
    job = new_job(ranks, config_of(1, "fp32", {}))
    job.step(0)
    before = values_of(job, "average")
    losses = make_probe(job.engine, job.maker, memory_lens=[12, 12])["losses"]
    job.engine.step(lr=1e-2, grad_norm=math.inf)
    after = values_of(job, "average")
    assert torch.equal(losses, make_probe(job.engine, job.maker, memory_lens=[12, 12])["losses"])
    return all(torch.equal(before[key], after[key]) for key in before)


def test_a_step_that_is_left_out_leaves_it_alone(tmp_path: Path) -> None:
    assert run_ranks(skipping_worker, world_size=1, folder=tmp_path) == [True]


def records_of(run: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["kind"] == kind]


@pytest.mark.slow
def test_a_run_tells_the_loss_of_the_average_and_trains_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("a small text that is read again and again\n" * 60, encoding="utf-8")
    assert main(["prepare", "my.txt", "--out", "data", "--tokenizer", "byte", "--valid-fraction", "0.2"]) == 0
    often = ["--eval.every_steps", "2", "--metrics.log_every_steps", "1"]
    for name, more in (("plain", ["--eval.use_ema", "False"]), ("mean", ["--eval.use_ema", "True"])):
        run = words(Path("data"), run__dir=name)
        trained = txl("train", *run, *often, "--optim.ema_decay", "0.5", *more, cwd=tmp_path)
        assert trained.returncode == 0, trained.stderr
    losses = [[record["loss"] for record in records_of(Path(name), "train")] for name in ("plain", "mean")]
    assert losses[0] == losses[1]
    told = [record["loss"] for record in records_of(Path("mean"), "eval")]
    assert told != [record["loss"] for record in records_of(Path("plain"), "eval")]
    for source, flags in (("plain", ["--ema"]), ("mean", ["--ema"])):
        assert main(["export", source, f"bundles/{source}", *flags]) == 0
        capsys.readouterr()
        assert main(["evaluate", f"bundles/{source}", "--data", "data", "--json", "facts.json"]) == 0
        facts = json.loads(Path("facts.json").read_text(encoding="utf-8"))
        assert facts["model"]["loss"] == pytest.approx(told[-1], abs=1e-5)


def test_other_formats_are_made_of_a_bundle_of_it(averaged: Path, tmp_path: Path) -> None:
    run = averaged / name_of(0, "fp32", {})
    with pytest.raises(ConfigError, match="First export the run or the checkpoint to a bundle with --ema"):
        export(run, tmp_path / "folder", format="huggingface-code", ema=True)
    assert not (tmp_path / "folder").exists()
