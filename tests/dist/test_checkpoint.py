"""Checkpoints of every stage and precision continue exactly, export exactly, and know each lane's memory."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config
from txl_dist.config import Config, plan_batch
from txl_dist.data.lanes import lanes_of_rank
from txl_dist.data.stream import CorpusState, StreamState, plain_segment
from txl_dist.dist import Ranks, barrier
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.manifest import MANIFEST, describe_file, files_of, problems_of, write_manifest
from txl_dist.model.memory import Memory
from txl_dist.text.training import train_tokenizer
from txl_dist.train.batch import batch_maker
from txl_dist.train.checkpoint import (
    CorpusFacts,
    check_checkpoint,
    choose_checkpoint,
    consolidated_weights,
    load_checkpoint,
    load_memory,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from txl_dist.train.engine import ZeroEngine
from txl_dist.train.export import export_bundle, make_probe
from txl_dist.train.state import TrainState

pytestmark = pytest.mark.dist

CASES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (1, "bf16"), (2, "bf16"), (3, "bf16")]


Results = list[tuple[str, list[list[float]], list[list[float]], float]]


class Job:
    """An engine of one rank with its memories; `step` trains on a segment that depends on the step alone."""

    def __init__(self, ranks: Ranks, config: Config, *, vocab_size: int) -> None:
        self.ranks, self.config, self.vocab_size = ranks, config, vocab_size
        self.plan = plan_batch(config.train, world_size=ranks.world_size)
        self.engine = ZeroEngine(config, vocab_size=vocab_size, plan=self.plan, ranks=ranks)
        self.maker = batch_maker(self.engine.model, mask_documents=False)
        self.lanes = lanes_of_rank(config.train.num_lanes, rank=ranks.rank, world_size=ranks.world_size)
        empty = self.engine.empty_memory(num_lanes=config.train.microbatch_lanes, memory_len=config.train.memory_len)
        self.memories: tuple[Memory, ...] = (empty,) * self.plan.num_microbatches

    def step(self, step: int) -> list[float]:
        shape = (self.config.train.num_lanes, self.config.train.segment_len + 1)
        ids = np.random.default_rng(step).integers(0, self.vocab_size, shape)[self.lanes.start : self.lanes.stop]
        batches = self.maker.microbatches(plain_segment(ids), lanes=self.plan.microbatch_lanes)
        losses, memories = [], []
        for index, (batch, memory) in enumerate(zip(batches, self.memories, strict=True)):
            torch.manual_seed(1000 * step + 10 * self.ranks.rank + index)
            loss, memory = self.engine.micro_step(batch, memory, normalizer=16.0)
            losses.append(loss.item())
            memories.append(memory)
        self.engine.step(lr=1e-2)
        self.memories = tuple(memories)
        return losses


def save_and_continue(ranks: Ranks, folder: str) -> Results:
    tokenizer = train_tokenizer("byte", lambda: ["some text"])
    facts = CorpusFacts(tokenizer.to_json(), tokenizer.fingerprint, tokenizer.vocab_size)
    results = []
    for stage, precision in CASES:
        config = tiny_config(
            model={"dropout": 0.1, "cutoffs": [50, 150]}, engine={"zero_stage": stage, "precision": precision}
        )
        run = Path(folder) / f"{stage}-{precision}"
        job = Job(ranks, config, vocab_size=tokenizer.vocab_size)
        for step in range(3):
            job.step(step)
        stream = StreamState(seed=1, corpora=(CorpusState("text", "data", "train", num_lanes=4, position=24),))
        state = TrainState(step=3, tokens_seen=96, skipped_steps=0, stream=stream, memories=job.memories)
        probe = make_probe(job.engine, job.maker, memory_len=12)
        save_checkpoint(run, state, job.engine, config=config, corpus=facts, probe=probe, lanes=job.lanes, ranks=ranks)
        going_on = [job.step(step) for step in (3, 4, 5)]

        resumed = Job(ranks, config, vocab_size=tokenizer.vocab_size)
        checkpoint, rejected = newest_checkpoint(run)
        assert checkpoint is not None
        assert not rejected
        loaded = load_checkpoint(
            checkpoint,
            resumed.engine,
            stream=stream,
            lanes=resumed.lanes,
            microbatch_lanes=2,
            memory_len=config.train.memory_len,
            device=ranks.device,
        )
        assert (loaded.step, loaded.tokens_seen, loaded.stream) == (3, 96, stream)
        resumed.memories = loaded.memories
        again = [resumed.step(step) for step in (3, 4, 5)]
        error = export_bundle(run, run / "bundle")[1] if ranks.is_first else 0.0
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
    whole = load_memory(checkpoint, lanes=range(4))
    assert whole.hidden_LBMD.shape == (2, 4, 12, 32)
    assert len({float(whole.hidden_LBMD[:, lane].sum()) for lane in range(4)}) == 4, "each lane has its own"
    for lanes in (range(0, 1), range(1, 3), range(3, 4), range(0, 2)):
        part = load_memory(checkpoint, lanes=lanes)
        assert torch.equal(part.hidden_LBMD, whole.hidden_LBMD[:, lanes.start : lanes.stop])
        assert torch.equal(part.document_BM, whole.document_BM[lanes.start : lanes.stop])


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


def poison(checkpoint: Path, mark: Path) -> None:
    """Put a payload into every DeepSpeed file, and sign the folder anew: only the loader can refuse it."""
    for path in (checkpoint / "engine").iterdir():
        torch.save({"module": Payload(str(mark)), "optimizer_state_dict": Payload(str(mark))}, path)
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, {name: describe_file(checkpoint / name) for name in files_of(checkpoint)})


def load_poisoned(ranks: Ranks, folder: str, stage: int) -> str:
    job = Job(ranks, tiny_config(engine={"zero_stage": stage}), vocab_size=257)
    try:
        job.engine.load(Path(folder) / "engine")
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
        consolidated_weights(checkpoint)
    for message in run_ranks(load_poisoned, str(checkpoint), stage, world_size=2, folder=tmp_path / "results"):
        assert "Weights only load failed" in message
    assert not mark.exists()


def test_an_older_checkpoint_of_the_same_run_is_no_place_to_resume_and_pruning_spares_the_newest(
    saved: tuple[Path, list[Results]], tmp_path: Path
) -> None:
    original = newest_checkpoint(saved[0] / "1-fp32")[0]
    assert original is not None
    folders = [tmp_path / "run" / "checkpoints" / f"step_{step:09d}" for step in (3, 5, 7)]
    for folder in folders:
        shutil.copytree(original, folder)
    with pytest.raises(CheckpointError, match=r"goes on to step_000000007\. .* choose another --run\.dir"):
        choose_checkpoint(tmp_path / "run", str(folders[0]))
    assert choose_checkpoint(tmp_path / "other", str(folders[0])) == (folders[0], [])
    assert choose_checkpoint(tmp_path / "run", "auto") == (folders[2], [])
    with pytest.raises(CheckpointError, match="--resume is never"):
        choose_checkpoint(tmp_path / "run", "never")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        choose_checkpoint(tmp_path / "other", "must")
    prune_checkpoints(tmp_path / "run", keep_last=1, newest=folders[0])
    assert [folder.exists() for folder in folders] == [True, False, True]


def test_a_checkpoint_of_other_settings_is_refused_before_anything_is_built(saved: tuple[Path, list[Results]]) -> None:
    checkpoint = newest_checkpoint(saved[0] / "1-fp32")[0]
    assert checkpoint is not None
    tokenizer = train_tokenizer("byte", lambda: ["some text"])
    facts = CorpusFacts(tokenizer.to_json(), tokenizer.fingerprint, tokenizer.vocab_size)

    def check(**sections: Any) -> list[str]:
        model = {"dropout": 0.1, **sections.pop("model", {})}
        config = tiny_config(model=model, **({"engine": {"zero_stage": 1}} | sections))
        return check_checkpoint(checkpoint, config=config, corpus=facts, world_size=2)

    assert check() == []
    assert check(optim={"lr": 0.5}) == ["optim.lr changed from 0.002 to 0.5"]
    with pytest.raises(ConfigError, match=r"model\.same_length: off -> memory"):
        check(model={"same_length": "memory"})
    with pytest.raises(CheckpointError, match="zero_stage 1 -> 3"):
        check(engine={"zero_stage": 3})
