"""Padded widths with real DeepSpeed: the padding stays 0, results are equal to rounding, checkpoints interchange."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.dist.test_checkpoint import Job
from tests.helpers.jobs import TOKENIZER
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config
from txl_dist.artifacts import checkpoint_folder
from txl_dist.config.load import Config
from txl_dist.convert.export import export_bundle
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo, barrier
from txl_dist.io.tensor_files import TensorFile
from txl_dist.train.checkpoint.fragments import FragmentFiles
from txl_dist.train.checkpoint.memories import load_lane_memory
from txl_dist.train.checkpoint.validate import checkpoint_problems, read_state
from txl_dist.train.footprint.rank import fragment_copy_bytes
from txl_dist.train.report.layer_stats import measure_layer_stats

pytestmark = pytest.mark.dist

ODD = {"width": 20, "num_heads": 2, "head_width": 5, "ff_width": 18, "cutoffs": [50, 150], "div_value": 2}
MODERN = {"pre_norm": True, "norm": "rms", "query_key_norm": True, "value_residual": True, "activation": "swiglu"}
CASES: list[tuple[str, int, str]] = [
    ("adam", 1, "fp32"),
    ("adamw", 2, "bf16"),
    ("lamb", 0, "fp32"),
    ("muon", 0, "bf16"),
    ("muon", 3, "fp32"),
    ("sgd", 1, "bf16"),
]
"""Optimizer, ZeRO stage and precision."""
INTERCHANGES = [(0, True), (1, True), (1, False), (2, False), (3, True)]
"""ZeRO stage, and whether the run that saves first is the one with padding."""


def config_of(name: str, stage: int, precision: str, *, pads: bool) -> Config:
    """The model has features that change its parameters: modern ones for muon, XLNet's for sgd, else biases."""
    model, train = {"value_bias": True, "output_bias": True}, {"microbatch_lanes": 1}
    if name == "muon":
        model = MODERN
    if name == "sgd":
        model = {"any_order": True, "share_biases": False}
        train |= {"objective": "permutation", "reuse_len": 5, "predicted_len": 3}
    if stage == 2:
        train |= {"memory_lens": [5, 12]}
    optim = {"name": name, "weight_decay": 0.01, "clip_norm": 0.5, "ema_decay": 0.9, "momentum": 0.9}
    engine = {"zero_stage": stage, "precision": precision, "pad_widths": "on" if pads else "off"}
    return tiny_config(model=ODD | model, optim=optim, engine=engine, train=train)


def in_padding(engine: Any, tensors: list[list[Tensor]]) -> float:
    """Return the largest absolute value in the padding of all parameters. `tensors` has the flat tensors of each
    partition, joined in its order."""
    largest, num_padded = 0.0, 0
    for (_, pieces), parts in zip(engine._partitions, tensors, strict=True):
        if not parts:
            continue
        values = torch.cat([part.detach().reshape(-1) for part in parts])
        for piece in pieces:
            axes = engine._padded.get(piece.parameter)
            if axes is not None:
                is_value = axes.pad(torch.ones(axes.shape)).view(-1)[piece.start : piece.start + piece.length] > 0
                padding = values[piece.offset : piece.offset + piece.length][~is_value]
                num_padded += len(padding)
                largest = max(largest, float(padding.abs().max()) if len(padding) else 0.0)
    assert num_padded or engine._stage == 3  # at stage 3 a rank may have a part without padding
    return largest


def padding_worker(ranks: RankInfo, cases: list[tuple[str, int, str]], num_steps: int) -> list[dict[str, Any]]:
    """Losses and values in the padding of each case."""
    found = []
    for case in cases:
        job, plain = (Job(ranks, config_of(*case, pads=pads), vocab_size=300) for pads in (True, False))
        engine: Any = job.engine
        assert plain.engine.shapes == engine.shapes
        gradients = []
        update = engine.step

        def checked_step(engine: Any = engine, update: Any = update, seen: Any = gradients, **given: Any) -> None:
            if len(seen) % 5 == 0:
                parts = [engine._gradients(index) for index in range(len(engine._partitions))]
                seen.append(in_padding(engine, parts))
            else:
                seen.append(0.0)
            update(**given)

        engine.step = checked_step
        losses = [(job.step(step), plain.step(step) if step < 10 else None) for step in range(num_steps)]
        found.append({"gradients": max(gradients), "losses": losses[:10], "last": losses[-1][0]})
        moments = [engine._base_optimizer.state[tensor] for tensor, _ in engine._partitions]
        found[-1]["weights"] = in_padding(engine, [[tensor] for tensor, _ in engine._partitions])
        names = {name for fragment in engine.fragments() for name in fragment.values} - {"weight"}
        for kind in names:
            found[-1][kind] = in_padding(engine, [[state[kind]] if kind in state else [] for state in moments])
        found[-1]["memories"] = max(float(hidden[..., 20:].abs().max()) for hidden in job.memories[0].hidden)
    return found


@pytest.mark.parametrize(
    ("cases", "num_steps"),
    [(CASES[2:5:2], 10), pytest.param(CASES, 100, marks=pytest.mark.nightly)],
    ids=["two_optimizers", "every_optimizer"],
)
def test_padding_stays_0_and_losses_are_equal(
    tmp_path: Path, cases: list[tuple[str, int, str]], num_steps: int
) -> None:
    for results in run_ranks(padding_worker, cases, num_steps, world_size=2, folder=tmp_path):
        for case, found in zip(cases, results, strict=True):
            losses, last = found.pop("losses"), found.pop("last")
            assert set(found.values()) == {0.0}, (case, found)
            assert {"average", "weights", "gradients", "memories"} < found.keys()
            assert all(map(math.isfinite, last))
            rtol = 2e-5 if case[2] == "fp32" else 2e-2
            padded, plain = zip(*losses, strict=True)
            np.testing.assert_allclose(padded, plain, rtol=rtol, atol=0, err_msg=str(case))


def saving_worker(ranks: RankInfo, folder: str) -> list[tuple[str, list[list[float]]]]:
    """A run at each stage is saved and continued, and another run with the other storage loads and saves it again."""
    found = []
    for stage, pads in INTERCHANGES:
        case, name = (("adamw", "muon", "adamw", "adam")[stage], stage, "fp32"), f"{stage}-{pads}"
        configs = [config_of(*case, pads=is_padded) for is_padded in (pads, not pads)]
        job, other = (Job(ranks, config, vocab_size=TOKENIZER.vocab_size) for config in configs)
        for step in range(3):
            job.step(step)
        assert job.save(Path(folder, name), step=3).error == ""
        other.load(checkpoint_folder(Path(folder, name), 3))
        assert other.save(Path(folder, f"{name}-other"), step=3).error == ""
        found.append((name, [job.step(3), other.step(3)]))
        barrier()
    return found


def test_checkpoints_interchange_bit_for_bit_with_those_of_unpadded_widths(tmp_path: Path) -> None:
    for name, (ours, others) in run_ranks(saving_worker, str(tmp_path), world_size=2, folder=tmp_path / "results")[0]:
        np.testing.assert_allclose(others, ours, rtol=2e-5, atol=0, err_msg=name)
        folders = [checkpoint_folder(tmp_path / run, 3) for run in (name, f"{name}-other")]
        assert [checkpoint_problems(folder) for folder in folders] == [[], []]
        files = [FragmentFiles(folder / "engine") for folder in folders]
        shapes = shapes_of(folders[0])
        assert shapes_of(folders[1]) == shapes
        assert shapes["blocks.0.attention.query.weight"] == [10, 20]
        for parameter, shape in shapes.items():
            kinds = files[0].kinds_of(parameter)
            assert kinds == files[1].kinds_of(parameter)
            for kind in kinds:
                parts = [one.read(kind, parameter, start=0, length=math.prod(shape)) for one in files]
                assert torch.equal(*parts), (name, kind, parameter)
        memories = [load_lane_memory(folder, lanes=range(4)) for folder in folders]
        assert all(map(torch.equal, memories[0].hidden, memories[1].hidden))
        assert {hidden.shape[-1] for hidden in memories[0].hidden} == {20}
        if name.startswith("1"):
            bundles = []
            for run in (name, f"{name}-other"):
                export_bundle(tmp_path / run, tmp_path / "bundles" / run)
                bundles.append(TensorFile(tmp_path / "bundles" / run / "model.safetensors"))
            assert bundles[0].shapes == bundles[1].shapes
            for tensor, shape in bundles[0].shapes.items():
                values = [bundle.read(tensor, 0, shape.numel()) for bundle in bundles]
                assert torch.equal(*values), (name, tensor)


def shapes_of(folder: Path) -> dict[str, list[int]]:
    parameters: dict[str, list[int]] = read_state(folder).values["parameters"]
    return parameters


def copies_worker(ranks: RankInfo) -> list[tuple[float, float]]:
    """Return the bytes of fragments that share no memory with the engine, and their prediction, at stages 1 and 3."""
    found = []
    for name, stage in (("muon", 1), ("adamw", 3)):
        config = config_of(name, stage, "fp32", pads=True)
        job = Job(ranks, config, vocab_size=300)
        job.step(0)
        engine: Any = job.engine
        own: set[int] = set()
        for tensor, _ in engine._partitions:
            values = (tensor, *engine._base_optimizer.state[tensor].values())
            own |= {value.untyped_storage().data_ptr() for value in values}
        copied = 0
        for fragment in engine.fragments():
            for values in fragment.values.values():
                copied += 0 if values.untyped_storage().data_ptr() in own else values.nbytes
        found.append((float(copied), fragment_copy_bytes(engine._padded, config=config)))
    return found


def test_the_footprint_counts_the_copies_that_a_save_makes(tmp_path: Path) -> None:
    for copied, predicted in run_ranks(copies_worker, world_size=1, folder=tmp_path)[0]:
        assert copied == predicted > 0


def outside_worker(ranks: RankInfo) -> list[Any]:
    """Return the first weights, the gradient norm and the norms of layers, with and without padding."""
    found = []
    for pads in (True, False):
        job = Job(ranks, config_of("adamw", 1, "fp32", pads=pads), vocab_size=300)
        values = {name: value.clone() for name, value in job.engine.named_values()}
        ids = np.random.default_rng(1).integers(0, 300, (4, 9))
        batches = job.maker.microbatches(plain_segment(ids), lanes=1)
        memories = []
        for batch, memory in zip(batches, job.memories, strict=True):
            loss, memory = job.engine.forward(batch, memory, normalizer=16.0)
            job.engine.backward(loss)
            memories.append(memory)
        norm = float(job.engine.grad_norm())
        stats = measure_layer_stats(
            job.engine, batches, memories, step=1, accuracy_every=0, norms_every=1, device=ranks.device
        )
        found.append((values, norm, stats.layers))
    return found


def test_weights_and_norms_are_those_of_the_logical_widths(tmp_path: Path) -> None:
    (padded, plain) = run_ranks(outside_worker, world_size=1, folder=tmp_path)[0]
    assert padded[0].keys() == plain[0].keys()
    assert all(torch.equal(padded[0][name], value) for name, value in plain[0].items())
    assert padded[1] == pytest.approx(plain[1], rel=1e-5)
    assert padded[2].keys() == plain[2].keys()
    for key, value in plain[2].items():
        assert padded[2][key] == pytest.approx(value, rel=1e-5), key
