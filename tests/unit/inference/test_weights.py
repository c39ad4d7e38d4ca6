"""Rounded weights: the size of the error, which weights are not rounded, and that rounding again changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.models import tiny_model
from txl_dist.errors import CheckpointError
from txl_dist.inference import weights
from txl_dist.inference.weights import copy_in_pieces, is_quantized, pieces, quantized, stored_weights, write_weights


def weights_of(**changes: object) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in tiny_model(**changes).named_parameters()}


def test_int8_is_off_by_half_a_step_of_its_row_at_most(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = torch.randn(500, 33) * torch.logspace(-30, 30, 500)[:, None]
    rows[3] = 0.0
    codes, scale = quantized(rows)
    back = codes.float() * scale.float()[:, None]
    largest = rows.abs().amax(1)
    step = largest / 127 * (1 + 2.0**-7)  # a scale is rounded to bf16: by that much at most, up or down
    assert bool(((back - rows).abs().amax(1) <= step / 2 + 1e-45).all())
    assert int(codes.abs().max()) == 127
    assert not codes[3].any()


@pytest.mark.parametrize("positions", ["relative", "learned_relative"])
def test_int8_rounds_matrices_and_tables_and_nothing_else(tmp_path: Path, positions: str) -> None:
    changes = {"positions": positions, "num_distances": 9} if positions == "learned_relative" else {}
    held = weights_of(value_bias=True, output_bias=True, cutoffs=(5, 20), div_value=2, tie_weights=False, **changes)
    write_weights(tmp_path / "f", held, dtype="int8")
    found = stored_weights(tmp_path / "f")
    assert found.keys() == held.keys()
    rounded = {name for name in held if not torch.equal(found[name][:], held[name])}
    assert rounded == {name for name, tensor in held.items() if is_quantized(name, tensor.shape)}
    assert not [name for name in rounded if "bias" in name or "norm" in name]
    assert {name.rpartition(".")[2] for name in rounded} >= {"weight", "weight_0", "projection_1", "cluster_weight"}


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_what_was_rounded_is_rounded_to_the_same_again(tmp_path: Path, dtype: str) -> None:
    write_weights(tmp_path / "once", weights_of(), dtype=dtype)
    write_weights(tmp_path / "twice", stored_weights(tmp_path / "once"), dtype=dtype)
    once, twice = load_file(tmp_path / "once"), load_file(tmp_path / "twice")
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_the_size_of_a_piece_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = weights_of()
    write_weights(tmp_path / "whole", held, dtype="int8")
    monkeypatch.setattr(weights, "_PIECE_VALUES", 30)
    write_weights(tmp_path / "pieces", held, dtype="int8")
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()
    for name, rows in stored_weights(tmp_path / "pieces").items():
        assert torch.equal(copy_in_pieces(torch.empty(rows.shape), rows), rows[:]), name


@pytest.mark.parametrize("shape", [(1,), (7, 3), (0, 4), (5, 2, 3), (3, 1000)])
def test_pieces_are_all_rows_once_in_order(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr(weights, "_PIECE_VALUES", 6)
    rows = [row for piece in pieces(torch.Size(shape)) for row in range(shape[0])[piece]]
    assert rows == list(range(shape[0]))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named(tmp_path: Path, dtype: str, value: float) -> None:
    held = weights_of()
    held["blocks.1.ff_in.weight"][2, 3] = value
    with pytest.raises(CheckpointError, match=r"blocks\.1\.ff_in\.weight holds numbers that are not finite"):
        write_weights(tmp_path / "f", held, dtype=dtype)
