"""Parameters are assembled from the pieces in any number of fragment files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import VOCAB_SIZE, tiny_config
from txl_dist.config.load import plan_batch
from txl_dist.distributed.collectives import RankInfo
from txl_dist.errors import CheckpointError
from txl_dist.io.tensor_files import write_tensors
from txl_dist.train.checkpoint.fragments import FragmentFiles, fragment_tensors, reading
from txl_dist.train.engine.partitions import WEIGHT, Fragment
from txl_dist.train.engine.zero import ZeroEngine


def fragment(name: str, start: int, values: list[float], *, step: float = 3.0) -> Fragment:
    return Fragment(name, start, {WEIGHT: torch.tensor(values), "exp_avg": -torch.tensor(values)}, step)


def files(folder: Path, *parts: list[Fragment], near: int = 0) -> FragmentFiles:
    """One file per part."""
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(parts):
        tensors, metadata = fragment_tensors(part)
        write_tensors(folder / f"{number:05d}.safetensors", tensors, metadata=metadata)
    return FragmentFiles(folder, near=near)


@pytest.mark.parametrize("near", [0, 1, 2, 9])
def test_a_parameter_is_put_together_from_the_files_that_hold_its_pieces(tmp_path: Path, near: int) -> None:
    found = files(
        tmp_path / "engine",
        [fragment("a", 0, [0.0, 1.0]), fragment("b", 0, [9.0])],
        [],
        [fragment("a", 5, [5.0])],
        [fragment("a", 2, [2.0, 3.0, 4.0])],
        near=near,
    )
    assert found.kinds == ["exp_avg", WEIGHT]
    for start in range(6):
        for end in range(start + 1, 7):
            expected = torch.arange(float(start), float(end))
            assert torch.equal(found.read(WEIGHT, "a", start=start, length=end - start), expected)
            assert torch.equal(found.read("exp_avg", "a", start=start, length=end - start), -expected)
    assert found.read(WEIGHT, "b", start=0, length=1).tolist() == [9.0]
    assert found.step_of("a") == found.step_of("b") == 3.0


def test_on_fewer_ranks_a_rank_opens_only_the_files_around_its_part(tmp_path: Path) -> None:
    num_files, num_ranks, per_file = 32, 24, 3
    parts = [[fragment("a", per_file * number, [float(number)] * per_file)] for number in range(num_files)]
    share = num_files * per_file // num_ranks
    for rank in range(num_ranks):
        folder = tmp_path / f"{rank}"
        near = rank * num_files // num_ranks
        files(folder, *parts)
        for number in range(num_files):
            if abs(number - near) > 2:
                (folder / f"{number:05d}.safetensors").write_bytes(b"no tensors")
        values = FragmentFiles(folder, near=near).read(WEIGHT, "a", start=rank * share, length=share)
        assert values.tolist() == [float(index // per_file) for index in range(rank * share, (rank + 1) * share)]


def test_what_lies_near_opens_no_other_file(tmp_path: Path) -> None:
    files(tmp_path / "engine", [fragment("a", 0, [0.0])], [fragment("b", 0, [1.0])])
    (tmp_path / "engine" / "00000.safetensors").write_bytes(b"no tensors")
    found = FragmentFiles(tmp_path / "engine", near=1)
    assert found.read(WEIGHT, "b", start=0, length=1).tolist() == [1.0]
    with pytest.raises(CheckpointError, match=r"cannot read the weights in .*00000\.safetensors"):
        found.read(WEIGHT, "a", start=0, length=1)


def test_missing_pieces_and_other_models_are_refused_by_the_name_of_the_parameter(tmp_path: Path) -> None:
    found = files(tmp_path / "engine", [fragment("a", 0, [0.0, 1.0])], [fragment("a", 4, [4.0])])
    with pytest.raises(
        CheckpointError,
        match=r"lacks 3 of 5 values of the parameter a \(weight\)\. The first missing value has index 2\.",
    ):
        found.read(WEIGHT, "a", start=0, length=5)
    with pytest.raises(CheckpointError, match=r"lacks 3 of 3 values of the parameter other \(weight\)"):
        found.read(WEIGHT, "other", start=0, length=3)
    with pytest.raises(
        CheckpointError, match=r"does not contain the parameter other\. The checkpoint belongs to another model"
    ):
        found.step_of("other")
    with pytest.raises(CheckpointError, match="contains the parameter a, but not its momentum"):
        found.read("momentum", "a", start=0, length=1)
    with pytest.raises(CheckpointError, match="holds no weights"):
        FragmentFiles(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no weights"):
        files(tmp_path / "empty", [])


def test_a_piece_that_two_files_hold_hides_no_gap(tmp_path: Path) -> None:
    found = files(tmp_path / "engine", [fragment("a", 0, [0.0, 1.0, 2.0])], [fragment("a", 2, [2.0])])
    with pytest.raises(CheckpointError, match=r"of 4 values of the parameter a \(weight\)"):
        found.read(WEIGHT, "a", start=0, length=4)


def pieces_of_every_stage(ranks: RankInfo) -> dict[int, list[tuple[str, int, int, dict[str, int]]]]:
    """Per stage: (parameter, start, length, lengths of its values) of each fragment of this rank; and the shapes."""
    found = {}
    for stage in range(4):
        config = tiny_config(engine={"zero_stage": stage}, train={"num_lanes": 6, "microbatch_lanes": 1})
        plan = plan_batch(config.train, world_size=ranks.world_size)
        engine = ZeroEngine(config, vocab_size=VOCAB_SIZE, plan=plan, ranks=ranks)
        found[stage] = [
            (one.parameter, one.start, len(one.values[WEIGHT]), {k: v.numel() for k, v in one.values.items()})
            for one in engine.fragments()
        ]
        shapes = {name: torch.Size(shape).numel() for name, shape in engine.shapes.items()}
    return {**found, -1: [(name, 0, length, {}) for name, length in shapes.items()]}


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_fragments_of_all_ranks_cover_every_value_of_every_parameter_exactly_once(
    tmp_path: Path, world_size: int
) -> None:
    results = run_ranks(pieces_of_every_stage, world_size=world_size, folder=tmp_path)
    lengths = {name: length for name, _, length, _ in results[0][-1]}
    assert len(lengths) > 30
    for stage in range(4):
        holders = results[:1] if stage == 0 else results
        if stage == 0:
            assert all(result[0] == results[0][0] for result in results), "all ranks hold the same"
        covered = {name: torch.zeros(length, dtype=torch.int64) for name, length in lengths.items()}
        for result in holders:
            for name, start, length, values in result[stage]:
                covered[name][start : start + length] += 1
                assert set(values.values()) == {length}
                assert start + length <= lengths[name]
        assert all(bool((count == 1).all()) for count in covered.values()), stage


@pytest.mark.parametrize(
    "metadata", [{}, {"starts": "{}"}, {"starts": "[]", "steps": "{}"}, {"starts": "{", "steps": "{}"}]
)
def test_a_file_that_does_not_say_what_it_holds_is_no_checkpoint(tmp_path: Path, metadata: dict[str, str]) -> None:
    write_tensors(tmp_path / "00000.safetensors", {"weight/a": torch.ones(3)}, metadata=metadata)
    with pytest.raises(CheckpointError, match=r"00000\.safetensors has no valid list of the pieces of parameters"):
        FragmentFiles(tmp_path)


@pytest.mark.parametrize("defect", [KeyError("starts"), ValueError("no number")])
def test_a_defect_of_the_program_is_not_told_as_damage_of_the_file(tmp_path: Path, defect: Exception) -> None:
    write_tensors(tmp_path / "a.safetensors", {"hidden": torch.ones(3)})
    with pytest.raises(type(defect)), reading("the memories", tmp_path / "a.safetensors"):
        raise defect
    with pytest.raises(CheckpointError, match="cannot read the memories"), reading("the memories", tmp_path / "b"):
        raise defect
