"""Checkpoints of every stage and precision resume exactly, export exactly, and contain the memory of each lane."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import golden_at, sign
from tests.helpers.jobs import TOKENIZER, in_folder, job_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config
from txl_dist.artifacts import steps_to_keep
from txl_dist.config.load import Config, plan_batch
from txl_dist.convert.export import export_bundle
from txl_dist.data.loader.lanes import lanes_of_rank
from txl_dist.data.loader.stream import plain_segment
from txl_dist.data.loader.stream_state import CorpusState, StreamState
from txl_dist.data.loader.target_sampler import TargetSampler, TargetSettings
from txl_dist.distributed.collectives import RankInfo, barrier, gather_objects
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.io.manifest import problems_of
from txl_dist.model.memory import Memory
from txl_dist.train.batch import batch_maker
from txl_dist.train.checkpoint.engine_probe import check_probe, make_probes
from txl_dist.train.checkpoint.fragments import FragmentFiles
from txl_dist.train.checkpoint.manager import prune_checkpoints
from txl_dist.train.checkpoint.memories import load_lane_memory, memory_tensors, resized
from txl_dist.train.checkpoint.read import (
    check_checkpoint,
    choose_checkpoint,
    consolidated_weights,
    load_checkpoint,
    newest_checkpoint,
)
from txl_dist.train.checkpoint.validate import checkpoint_problems, read_state
from txl_dist.train.checkpoint.writer import AsyncWriter, SaveResult
from txl_dist.train.engine.zero import ZeroEngine
from txl_dist.train.monitoring.watch import Watch
from txl_dist.train.stability import Health
from txl_dist.train.state import TrainState

pytestmark = pytest.mark.dist

CASES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
FEW_CASES = [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32")]
BY_CASES = pytest.mark.parametrize(
    "cases", [FEW_CASES, pytest.param(CASES, marks=pytest.mark.nightly)], ids=["few", "all"]
)
"""Each stage once, and, nightly, all stages in both precisions."""


Results = list[tuple[str, list[list[float]], list[list[float]], float]]


class Job:
    """An engine of one rank with its memories; `step` trains on a segment that depends on the step alone."""

    def __init__(self, ranks: RankInfo, config: Config, *, vocab_size: int) -> None:
        self.ranks, self.config, self.vocab_size = ranks, config, vocab_size
        self.plan = plan_batch(config.train, world_size=ranks.world_size)
        self.engine = ZeroEngine(config, vocab_size=vocab_size, plan=self.plan, ranks=ranks)
        self.maker = batch_maker(self.engine.model, mask_documents=False)
        self.sampler = None
        if config.train.is_permutation:
            words_V = np.ones(vocab_size, dtype=bool)
            self.sampler = TargetSampler(TargetSettings.of(config.train), seed=1, begins_word_V=words_V)
        self.lanes = lanes_of_rank(config.train.num_lanes, rank=ranks.rank, world_size=ranks.world_size)
        empty = self.engine.empty_memory(num_lanes=config.train.microbatch_lanes, memory_len=config.train.memory_len)
        self.memories: tuple[Memory, ...] = (empty,) * self.plan.num_microbatches

    def step(self, step: int) -> list[float]:
        shape = (self.config.train.num_lanes, self.config.train.segment_len + 1)
        ids = np.random.default_rng(step).integers(0, self.vocab_size, shape)[self.lanes.start : self.lanes.stop]
        segment, targets = plain_segment(ids), None
        if self.sampler is not None:
            positions = [step * self.config.train.step_len] * len(self.lanes)
            targets = self.sampler.draw(segment, lanes=self.lanes, positions=positions)
        batches = self.maker.microbatches(segment, lanes=self.plan.microbatch_lanes, targets=targets)
        losses, memories = [], []
        for index, (batch, memory) in enumerate(zip(batches, self.memories, strict=True)):
            torch.manual_seed(1000 * step + 10 * self.ranks.rank + index)
            loss, memory = self.engine.forward(batch, memory, normalizer=16.0)
            self.engine.backward(loss)
            losses.append(loss.item())
            memories.append(memory)
        self.engine.step(lr=1e-2, grad_norm=float(self.engine.grad_norm()))
        self.memories = tuple(memories)
        return losses

    def save(self, run: Path, *, step: int) -> SaveResult:
        """The checkpoint after `step` steps, as the loop saves it."""
        stream = StreamState(seed=1, corpora=(CorpusState("text", "data", "train", num_lanes=4, position=8 * step),))
        state = TrainState(step=step, tokens_seen=32 * step, health=Health(), stream=stream, memories=self.memories)
        run.mkdir(exist_ok=True)
        silent: Any = SimpleNamespace(beat=lambda phase: None)
        saver = AsyncWriter(
            job_of(in_folder(self.config, run), self.ranks), Watch(silent, silent, lock=None, nonce="test")
        )
        memory_lens = self.config.train.memory_per_layer(self.config.model.num_layers)
        with_average = self.config.optim.ema_decay > 0
        probe = make_probes(self.engine, self.maker, memory_lens=memory_lens, with_average=with_average)
        saver.begin(state, self.engine, probe=probe)
        return saver.finish()

    def load(self, checkpoint: Path) -> TrainState:
        """Continue from a checkpoint."""
        saved = read_state(checkpoint)
        state = load_checkpoint(saved, self.engine, job_of(self.config, self.ranks), stream=saved.stream)
        self.memories = state.memories
        check_probe(self.engine, self.maker, checkpoint, precision=self.config.engine.precision)
        return state


def save_and_continue(ranks: RankInfo, folder: str) -> Results:
    results = []
    for stage, precision in CASES:
        config = tiny_config(
            model={"dropout": 0.1, "cutoffs": [50, 150]},
            train={"memory_lens": [5, 12] if stage == 2 else []},
            engine={"zero_stage": stage, "precision": precision},
        )
        run = Path(folder) / f"{stage}-{precision}"
        job = Job(ranks, config, vocab_size=TOKENIZER.vocab_size)
        for step in range(3):
            job.step(step)
        assert job.save(run, step=3).error == ""
        going_on = [job.step(step) for step in (3, 4, 5)]

        resumed = Job(ranks, config, vocab_size=TOKENIZER.vocab_size)
        checkpoint, _, rejected = newest_checkpoint(run)
        assert checkpoint is not None
        assert not rejected
        loaded = resumed.load(checkpoint)
        assert (loaded.step, loaded.tokens_seen, loaded.stream.corpora[0].position) == (3, 96, 24)
        again = [resumed.step(step) for step in (3, 4, 5)]
        error = export_bundle(run, run / "bundle").error if ranks.is_rank0 else 0.0
        barrier()
        results.append((f"{stage} {precision}", going_on, again, error))
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Results]]:
    """A folder with a checkpoint of every case, and what each rank saw."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(save_and_continue, str(folder), world_size=2, folder=folder / "results")


def test_every_stage_and_precision_continues_bit_for_bit_and_exports_what_it_trained(
    saved: tuple[Path, list[Results]],
) -> None:
    for rank in saved[1]:
        assert len(rank) == len(CASES)
        for name, going_on, again, error in rank:
            assert going_on == again, name
            # A bf16 engine rounds what it computes; its export is the fp32 master copy.
            assert error <= (1e-4 if "fp32" in name else 0.1), name


def test_any_rank_finds_the_memory_of_any_lane(saved: tuple[Path, list[Results]]) -> None:
    checkpoint = newest_checkpoint(saved[0] / "1-fp32")[0]
    assert checkpoint is not None
    whole = load_lane_memory(checkpoint, lanes=range(4))
    assert torch.stack(whole.hidden).shape == (2, 4, 12, 32)
    assert len({float(torch.stack(whole.hidden)[:, lane].sum()) for lane in range(4)}) == 4, "each lane has its own"
    for lanes in (range(0, 1), range(1, 3), range(3, 4), range(0, 2)):
        part = load_lane_memory(checkpoint, lanes=lanes)
        assert torch.equal(torch.stack(part.hidden), torch.stack(whole.hidden)[:, lanes.start : lanes.stop])
        assert torch.equal(part.document_BM, whole.document_BM[lanes.start : lanes.stop])


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


def poison(checkpoint: Path, mark: Path) -> None:
    """Put a payload into every file of tensors, and sign the folder anew: only the loader can refuse it."""
    for path in checkpoint.rglob("*.safetensors"):
        torch.save({"module": Payload(str(mark)), "optimizer_state_dict": Payload(str(mark))}, path)
    sign(checkpoint)


def load_poisoned(ranks: RankInfo, folder: str, stage: int) -> str:
    job = Job(ranks, tiny_config(engine={"zero_stage": stage}), vocab_size=257)
    try:
        job.load(Path(folder))
    except Exception as error:  # noqa: BLE001  any kind is reported
        return str(error)
    return "loaded"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_pickle_that_would_run_code_is_refused_when_resuming_and_exporting(
    saved: tuple[Path, list[Results]], tmp_path: Path, stage: int
) -> None:
    original = newest_checkpoint(saved[0] / f"{stage}-fp32")[0]
    assert original is not None
    checkpoint, mark = tmp_path / original.name, tmp_path / "executed"
    shutil.copytree(original, checkpoint)
    poison(checkpoint, mark)
    assert problems_of(checkpoint) == []
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        [rows[:] for rows in consolidated_weights(checkpoint).values()]
    with pytest.raises(CheckpointError, match="cannot read the memories"):
        load_lane_memory(checkpoint, lanes=range(4))
    for message in run_ranks(load_poisoned, str(checkpoint), stage, world_size=2, folder=tmp_path / "results"):
        assert "cannot read the weights" in message
    assert not mark.exists()


def grow(checkpoint: Path) -> None:
    """Weights that are one percent larger than those that were saved, signed anew: as of another step or run."""
    for path in (checkpoint / "engine").iterdir():
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = {name: 1.01 * tensor if "weight/" in name else tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata=metadata)
    sign(checkpoint)


@pytest.mark.parametrize("source", ["1-fp32", "3-fp32"])
def test_weights_of_another_save_are_refused_on_all_ranks_by_the_probe_that_lies_beside_them(
    saved: tuple[Path, list[Results]], tmp_path: Path, source: str
) -> None:
    original = newest_checkpoint(saved[0] / source)[0]
    assert original is not None
    checkpoint, stage = tmp_path / original.name, int(source[0])
    shutil.copytree(original, checkpoint)
    grow(checkpoint)
    assert checkpoint_problems(checkpoint) == [], "its form is that of a checkpoint"
    for message in run_ranks(load_poisoned, str(checkpoint), stage, world_size=2, folder=tmp_path / "results"):
        assert message.startswith(
            f"{checkpoint} does not reproduce its probe: a loss on the probe's tokens differs by "
        )


def test_an_older_checkpoint_of_the_same_run_is_no_place_to_resume_and_pruning_spares_the_newest(
    tmp_path: Path,
) -> None:
    folders = [golden_at(tmp_path / "run", step) for step in (3, 5, 7)]
    with pytest.raises(CheckpointError, match=r"has a newer checkpoint, step_000000007\. .* choose another --run\.dir"):
        choose_checkpoint(tmp_path / "run", str(folders[0]))
    assert choose_checkpoint(tmp_path / "other", str(folders[0])) == (read_state(folders[0]), [])
    assert choose_checkpoint(tmp_path / "run", "auto") == (read_state(folders[2]), [])
    elsewhere = golden_at(tmp_path / "other", 3)
    chosen, remarks = choose_checkpoint(tmp_path / "run", str(elsewhere))
    assert chosen is not None
    assert chosen.folder == folders[2], "the same command continues with what it has made"
    assert len(remarks) == 1
    assert "has checkpoints of its own" in remarks[0]
    shutil.rmtree(elsewhere)
    with pytest.raises(CheckpointError, match="--resume=never needs a run directory without checkpoints"):
        choose_checkpoint(tmp_path / "run", "never")
    with pytest.raises(CheckpointError, match="the run has no checkpoint"):
        choose_checkpoint(tmp_path / "other", "must")
    prune_checkpoints(tmp_path / "run", keep=steps_to_keep([3, 5, 7], keep_last=1, keep_every=0), newest=folders[0])
    assert [folder.exists() for folder in folders] == [True, False, True]


def test_a_checkpoint_of_other_settings_is_refused_before_anything_is_built(saved: tuple[Path, list[Results]]) -> None:
    checkpoint = newest_checkpoint(saved[0] / "1-fp32")[0]
    assert checkpoint is not None

    def check(world_size: int = 2, **sections: Any) -> list[str]:
        model = {"dropout": 0.1, **sections.pop("model", {})}
        config = tiny_config(model=model, **({"engine": {"zero_stage": 1}} | sections))
        ranks = RankInfo(0, 2, 0, torch.device("cpu"), num_threads=1)
        job = replace(job_of(config, ranks), ranks=replace(ranks, world_size=world_size))
        return check_checkpoint(read_state(checkpoint), job)

    assert check() == []
    assert check(optim={"lr": 0.5}) == ["optim.lr changed from 0.002 to 0.5"]
    with pytest.raises(ConfigError, match=r"model\.same_length: off -> memory"):
        check(model={"same_length": "memory"})
    assert check(4, engine={"zero_stage": 3}) == [
        "engine.zero_stage changed from 1 to 3",
        "resuming a checkpoint of 2 ranks on 4 ranks: results are equal to those on 2 ranks up to rounding",
    ]


def go_on_elsewhere(ranks: RankInfo, folder: str, stage: int, precision: str) -> list[Any]:
    """Load another stage's checkpoint; (mean loss, losses of every lane's memory, the weights saved again)."""
    results = []
    for source in ("0-fp32", "1-fp32", "2-bf16", "3-fp32"):
        config = tiny_config(
            model={"cutoffs": [50, 150]},
            train={"microbatch_lanes": 1, "memory_lens": [5, 12] if source == "2-bf16" else []},
            engine={"zero_stage": stage, "precision": precision},
        )
        job = Job(ranks, config, vocab_size=TOKENIZER.vocab_size)
        checkpoint = newest_checkpoint(Path(folder) / source)[0]
        assert checkpoint is not None
        job.load(checkpoint)
        again = Path(folder) / f"again-{source}-{stage}-{precision}-{ranks.world_size}"
        assert job.save(again, step=3).error == ""
        losses = gather_objects([job.step(step) for step in (3, 4)])
        results.append((source, again, np.mean([loss for rank in losses for loss in rank[1]])))
    return results


@pytest.mark.parametrize(
    ("world_size", "stage"),
    [(1, 0), (4, 3), *(pytest.param(*one, marks=pytest.mark.nightly) for one in ((1, 3), (2, 2), (4, 1)))],
)
def test_a_checkpoint_of_any_stage_loads_into_any_other_on_any_number_of_ranks(
    saved: tuple[Path, list[Results]], tmp_path: Path, world_size: int, stage: int
) -> None:
    config_lanes = 4
    results = run_ranks(
        go_on_elsewhere, str(saved[0]), stage, "fp32", world_size=world_size, folder=tmp_path / "results"
    )[0]
    for source, again, loss in results:
        original, copy = (newest_checkpoint(run)[0] for run in (saved[0] / source, again))
        assert original is not None
        assert copy is not None
        assert_same_values(original, copy)
        ours, theirs = (load_lane_memory(folder, lanes=range(config_lanes)) for folder in (copy, original))
        for one, other in zip(ours.hidden, theirs.hidden, strict=True):
            assert torch.equal(one, other.float())
        assert torch.equal(ours.document_BM, theirs.document_BM)
        assert np.isfinite(loss)


def permutation_job(ranks: RankInfo) -> Job:
    config = tiny_config(
        model={"any_order": True, "share_biases": False, "dropout": 0.1},
        train={"objective": "permutation", "reuse_len": 5, "predicted_len": 3, "microbatch_lanes": 1},
    )
    return Job(ranks, config, vocab_size=TOKENIZER.vocab_size)


def save_permutation(ranks: RankInfo, run: str) -> dict[str, torch.Tensor]:
    job = permutation_job(ranks)
    for step in range(4):
        job.step(step)
    assert job.save(Path(run), step=4).error == ""
    return memory_tensors(job.memories, width=32)


def load_permutation(ranks: RankInfo, checkpoint: str) -> dict[str, torch.Tensor]:
    job = permutation_job(ranks)
    job.load(Path(checkpoint))
    return memory_tensors(job.memories, width=32)


def of_all_lanes(results: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The memories of all ranks: hidden [layers, lanes, M, D] and document [lanes, M]."""
    hidden = torch.cat([result["hidden"] for result in results], dim=1)
    return {"hidden": hidden, "document": torch.cat([result["document"] for result in results])}


def test_memories_of_a_permutation_run_load_bit_for_bit_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved = of_all_lanes(run_ranks(save_permutation, str(run), world_size=2, folder=tmp_path / "saved"))
    assert saved["hidden"].shape == (2, 4, 12, 32)
    assert (saved["document"] >= 0).all(), "4 steps of 5 tokens fill the 12 tokens of memory"
    assert len({float(lane.sum()) for lane in saved["hidden"].unbind(1)}) == 4, "each lane has its own"
    checkpoint = newest_checkpoint(run)[0]
    for world_size in (1, 4):
        folder = tmp_path / f"loaded-{world_size}"
        loaded = of_all_lanes(run_ranks(load_permutation, str(checkpoint), world_size=world_size, folder=folder))
        assert torch.equal(loaded["hidden"], saved["hidden"])
        assert torch.equal(loaded["document"], saved["document"])


def assert_same_values(one: Path, other: Path) -> None:
    """Weights, moments and counts are bit for bit the same, however they are cut."""
    ours, theirs = FragmentFiles(one / "engine"), FragmentFiles(other / "engine")
    assert ours.kinds == theirs.kinds == ["exp_avg", "exp_avg_sq", "weight"]
    for name, shape in read_state(one).values["parameters"].items():
        length = torch.Size(shape).numel()
        assert ours.step_of(name) == theirs.step_of(name)
        for kind in ours.kinds:
            a, b = (files.read(kind, name, start=0, length=length) for files in (ours, theirs))
            assert torch.equal(a, b), (name, kind)


def test_a_memory_of_another_length_keeps_its_newest_positions() -> None:
    memory = Memory((torch.arange(24.0).view(2, 4, 3),), torch.arange(8).view(2, 4))
    shorter, longer = resized(memory, [3]), resized(memory, [6])
    assert torch.equal(torch.stack(shorter.hidden), torch.stack(memory.hidden)[:, :, 1:])
    assert torch.equal(shorter.document_BM, memory.document_BM[:, 1:])
    assert torch.equal(torch.stack(longer.hidden)[:, :, 2:], torch.stack(memory.hidden))
    assert longer.document_BM.tolist() == [[-1, -1, 0, 1, 2, 3], [-1, -1, 4, 5, 6, 7]]
    assert torch.stack(resized(memory, [0]).hidden).shape == (1, 2, 0, 3)


def test_a_position_that_one_layer_lacks_is_empty_in_all() -> None:
    hidden = torch.arange(1.0, 25.0).view(2, 4, 3)
    memory = Memory((hidden, hidden[:, 2:]), torch.arange(8).view(2, 4))
    same = resized(memory, [4, 2])
    assert all(torch.equal(one, other) for one, other in zip(same.hidden, memory.hidden, strict=True))
    assert torch.equal(same.document_BM, memory.document_BM)
    shorter = resized(memory, [3, 1])
    assert [one.shape[1] for one in shorter.hidden] == [3, 1]
    assert torch.equal(shorter.document_BM, memory.document_BM[:, 1:]), "none lacks what it has to have"
    longer = resized(memory, [5, 3])
    assert [one.shape[1] for one in longer.hidden] == [5, 3]
    assert longer.document_BM.tolist() == [[-1, -1, -1, 2, 3], [-1, -1, -1, 6, 7]]
    assert torch.equal(longer.hidden[0][:, -4:], memory.hidden[0])


def test_the_last_ones_milestones_and_the_best_are_kept() -> None:
    steps = [10, 20, 25, 30, 40, 50]
    assert steps_to_keep(steps, keep_last=2, keep_every=0) == {40, 50}
    assert steps_to_keep(steps, keep_last=1, keep_every=20) == {20, 40, 50}
    assert steps_to_keep(steps, keep_last=1, keep_every=0, best={25, 99}) == {25, 50}
