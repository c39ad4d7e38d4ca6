"""XLNet's objective with each setting of engine, optimizer and model that must work with it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.e2e.conftest import write_config
from tests.e2e.test_permutation import XLNET, records
from tests.e2e.test_resume import assert_same_state, losses
from tests.e2e.test_stages import stream_of, tensors_of
from tests.helpers.job import Job
from tests.helpers.launch import train
from txl_dist.artifacts import list_checkpoints

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SHORT = ["--train.max_steps", "8", "--checkpoint.every_steps", "4", "--checkpoint.keep_last", "3"]
PLAIN_SOFTMAX = ["--model.cutoffs", "--model.tie_projections", "--model.div_value", "1"]
CASES = {
    "bf16": ["--engine.precision", "bf16"],
    "recomputation": ["--engine.activation_checkpointing", "True"],
    "muon": ["--optim.name", "muon", "--optim.lr", "3e-3"],
    "ema": ["--optim.ema_decay", "0.9", "--eval.use_ema", "True"],
    "tied_tables": PLAIN_SOFTMAX,
    "untied_tables": [*PLAIN_SOFTMAX, "--model.tie_weights", "False"],
    "cutoffs": ["--model.cutoffs", "50", "100", "200", "--model.tie_projections", "False", "True", "True", "True"],
    "accumulation": ["--train.microbatch_lanes", "1"],
    "one_half": ["--train.reuse_len", "0"],
    "blocks": ["--train.order_len", "6", "--data.document_mask", "True"],
    "zeros": ["--train.initial_memory", "zeros"],
    "zero_3": ["--engine.zero_stage", "3", "--engine.activation_checkpointing", "True", "--optim.ema_decay", "0.9"],
}

EVERY_RUN = ("bf16", "blocks", "zero_3")
"""Cases that are not only nightly."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in EVERY_RUN else [pytest.mark.nightly]) for case in CASES]
)
def test_a_resumed_run_is_bit_for_bit_the_run_that_was_not_interrupted(
    tmp_path: Path, config_file: Path, case: str
) -> None:
    words = [str(config_file), *XLNET, *SHORT, *CASES[case]]
    whole, branch = tmp_path / "whole", tmp_path / "branch"
    ranks = 2 if case in ("muon", "zero_3") else 1
    train(*words, "--run.dir", str(whole), cwd=tmp_path, ranks=ranks)
    middle = whole / "checkpoints/step_000000004"
    train(*words, "--run.dir", str(branch), "--resume", str(middle), cwd=tmp_path, ranks=ranks)
    every = losses(whole)
    assert sorted(every) == list(range(1, 9))
    assert every[8] < every[1]
    assert losses(branch) == {step: loss for step, loss in every.items() if step > 4}
    expected, found = (list_checkpoints(run)[-1] for run in (whole, branch))
    assert stream_of(found) == stream_of(expected)
    expected_tensors, found_tensors = tensors_of(expected), tensors_of(found)
    assert found_tensors.keys() == expected_tensors.keys()
    assert [name for name in found_tensors if not torch.equal(found_tensors[name], expected_tensors[name])] == []
    assert records(whole, "eval")


def test_recomputation_and_accumulation_do_not_change_the_losses(tmp_path: Path, config_file: Path) -> None:
    """Dropout is a function of the micro-batch, so it is off here."""
    words = [str(config_file), *XLNET, *SHORT, "--model.dropout", "0", "--model.attention_dropout", "0"]
    changes = [
        [],
        ["--engine.activation_checkpointing", "True"],
        ["--train.microbatch_lanes", "8"],
        ["--train.microbatch_lanes", "1", "--engine.attention", "plain"],
    ]
    found = []
    for number, change in enumerate(changes):
        run = tmp_path / str(number)
        train(*words, *change, "--run.dir", str(run), cwd=tmp_path, ranks=1)
        found.append(losses(run))
    assert found[1] == found[0]
    for run_losses in found[2:]:
        assert run_losses == pytest.approx(found[0], rel=1e-5)


def memories_of(checkpoint: Path) -> dict[int, dict[str, Tensor]]:
    """The memory of each lane: its hidden states and its documents."""
    lanes: dict[int, dict[str, Tensor]] = {}
    for path in sorted((checkpoint / "lanes").glob("*.safetensors")):
        first = int(path.name.split("-")[0])
        tensors = load_file(path)
        for row, document in enumerate(tensors["document"]):
            lanes[first + row] = {"document": document, "hidden": tensors["hidden"][:, row]}
    return lanes


NO_DROPOUT = ["--model.dropout", "0", "--model.attention_dropout", "0"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of 8 steps on two ranks without dropout."""
    folder = tmp_path_factory.mktemp("whole")
    words = [*XLNET, *SHORT, *NO_DROPOUT, "--run.dir", "run"]
    train(str(write_config(folder, corpus)), *words, cwd=folder, ranks=2)
    return folder / "run"


@pytest.mark.parametrize(("ranks", "microbatch_lanes"), [(1, 8), (1, 2), (4, 2)])
def test_lanes_keep_their_memories_on_another_number_of_ranks(
    tmp_path: Path, config_file: Path, whole: Path, ranks: int, microbatch_lanes: int
) -> None:
    words = [str(config_file), *XLNET, *SHORT, *NO_DROPOUT]
    branch = tmp_path / "branch"
    middle = whole / "checkpoints/step_000000004"
    words += ["--train.microbatch_lanes", str(microbatch_lanes), "--run.dir", str(branch), "--resume", str(middle)]
    train(*words, cwd=tmp_path, ranks=ranks)
    assert losses(branch) == pytest.approx({s: loss for s, loss in losses(whole).items() if s > 4}, rel=1e-5)
    expected, found = (memories_of(list_checkpoints(run)[-1]) for run in (whole, branch))
    assert expected.keys() == found.keys() == set(range(8))
    for lane, memory in expected.items():
        assert torch.equal(memory["document"], found[lane]["document"])
        assert torch.allclose(memory["hidden"], found[lane]["hidden"], rtol=1e-4, atol=1e-5)


def test_a_run_continues_with_another_number_of_lanes(tmp_path: Path, config_file: Path, whole: Path) -> None:
    """Three lanes per rank instead of four."""
    words = [str(config_file), *XLNET, *SHORT, *NO_DROPOUT]
    branch = tmp_path / "branch"
    middle = whole / "checkpoints/step_000000004"
    words += ["--train.num_lanes", "6", "--train.microbatch_lanes", "3", "--run.dir", str(branch)]
    train(*words, "--resume", str(middle), cwd=tmp_path, ranks=2)
    assert sorted(losses(branch)) == [5, 6, 7, 8]
    assert set(memories_of(list_checkpoints(branch)[-1])) == set(range(6))
    state = json.loads((list_checkpoints(branch)[-1] / "state.json").read_text())
    assert state["tokens_seen"] == 4 * 8 * 12 + 4 * 6 * 12


@pytest.mark.parametrize(
    "faults",  # the phases end at 4, 7 and 10
    [["kill:0:6:boundary"], pytest.param(["kill:0:4:saved", "kill:0:7:load"], marks=pytest.mark.nightly)],
    ids=["within", "between"],
)
def test_phases_with_other_segment_lengths_continue_bit_for_bit_after_each_kill(
    tmp_path: Path, config_file: Path, faults: list[str]
) -> None:
    phases = ["until=0.4 num_lanes=16 segment_len=12 memory_len=20", "until=0.7 segment_len=24 memory_len=30"]
    words = [str(config_file), *XLNET, "--train.predicted_len", "6", "--train.phases", *phases]
    words += ["--train.max_steps", "10", "--checkpoint.every_steps", "2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(*words, "--run.dir", "whole", cwd=tmp_path)
    for fault in faults:
        with Job("train", *words, "--run.dir", "killed", log=tmp_path / "log", cwd=tmp_path, fault=fault) as job:
            job.wait_for(lambda job=job: bool(job.struck))  # type: ignore[misc]
            job.signal(signal.SIGKILL)
    train(*words, "--run.dir", "killed", cwd=tmp_path)
    assert losses(killed) == losses(whole)
    assert sorted(losses(whole)) == list(range(1, 11))
    assert_same_state(list_checkpoints(killed)[-1], list_checkpoints(whole)[-1])
    state = json.loads((list_checkpoints(whole)[-1] / "state.json").read_text())
    assert state["tokens_seen"] == 10 * 8 * 12, "steps of all phases advance by equally many tokens"
