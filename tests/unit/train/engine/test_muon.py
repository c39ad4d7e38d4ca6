"""Muon's step compared with its equations in fp64, and the division of its work."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from txl_dist.config.schema import ModelSection, OptimSection
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.train.engine import muon
from txl_dist.train.engine.muon import Matrix, MatrixAssignment, Muon, matrices_of, newton_schulz
from txl_dist.train.engine.optimizer import build_optimizer

A, B, C = 3.4445, -4.7750, 2.0315


def naive_x(update: np.ndarray) -> np.ndarray:
    """By the singular values, each of which the iteration changes by itself."""
    u, s, v = np.linalg.svd(update / np.linalg.norm(update), full_matrices=False)
    for _ in range(5):
        s = A * s + B * s**3 + C * s**5
    return u @ np.diag(s) @ v


def test_the_iteration_is_the_polynomial_of_the_singular_values() -> None:
    for rows, columns in ((5, 5), (3, 8), (16, 24)):
        values = torch.randn(4, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        for given, made in zip(values, newton_schulz(values), strict=True):
            np.testing.assert_allclose(made.numpy(), naive_x(given.numpy()), atol=1e-5)


def test_singular_values_become_about_one() -> None:
    made = newton_schulz(torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(made)
    assert 0.6 < float(values.min()) < float(values.max()) < 1.25


def test_a_matrix_of_zeros_has_no_step() -> None:
    assert not newton_schulz(torch.zeros(1, 3, 4)).any()


def test_matrices_are_the_weights_of_the_linear_layers_of_blocks_keys_and_values_apart() -> None:
    model = TransformerXL(ModelSection(num_layers=1, width=8, num_heads=2, head_width=3, ff_width=20), vocab_size=9)
    found = [one for name, p in model.named_parameters() for one in matrices_of(name, p.shape)]
    assert [(one.parameter.removeprefix("blocks.0."), *one[1:]) for one in found] == [
        ("attention.query.weight", 0, 6, 8, 8),
        ("attention.key_value.weight", 0, 6, 8, 8),
        ("attention.key_value.weight", 48, 6, 8, 8),
        ("attention.distance.weight", 0, 6, 8, 8),
        ("attention.output.weight", 0, 8, 6, 8),
        ("ff_in.weight", 0, 20, 8, 20),
        ("ff_out.weight", 0, 8, 20, 20),
    ]


def test_a_table_of_distances_is_no_matrix() -> None:
    section = ModelSection(num_layers=1, positions="learned_relative", num_distances=7)
    model = TransformerXL(section, vocab_size=9)
    names = {one.parameter for name, p in model.named_parameters() for one in matrices_of(name, p.shape)}
    assert not any("distance" in name for name in names)
    assert "blocks.0.attention.query.weight" in names


def weights() -> dict[str, nn.Parameter]:
    """A matrix, two in one, a bias, and a table outside of the blocks."""
    draw = torch.Generator().manual_seed(3)
    shapes = {"query.weight": (6, 4), "key_value.weight": (8, 5), "query.bias": (3,)}
    names = {f"blocks.0.{name}": shape for name, shape in shapes.items()} | {"table": (7, 4)}
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in names.items()}


def alone(optimizer: Muon, values: dict[str, nn.Parameter]) -> None:
    """Settle that one rank does it all."""
    tensors = optimizer.param_groups[0]["params"]
    names = {id(value): name for name, value in values.items()}
    matrices = [one for tensor in tensors for one in matrices_of(names[id(tensor)], tensor.shape)]
    held = [[(names[id(tensor)], 0, 0, tensor.numel())] for tensor in tensors]
    assignment = MatrixAssignment(matrices, [held], rank=0, is_replicated=True)
    optimizer.assign({id(tensors[0]): assignment}, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_step_is_the_equations_and_adamws_for_the_rest(weight_decay: float) -> None:
    values, lr, momentum = weights(), 0.05, 0.9
    optim = OptimSection(name="muon", muon_momentum=momentum, weight_decay=weight_decay, betas=(0.8, 0.9), eps=1e-6)
    names = [name for name in values if name.endswith("weight")]
    optimizer = build_optimizer(values.items(), optim, matrices=names)
    assert isinstance(optimizer, Muon)
    alone(optimizer, values)
    others = {name: nn.Parameter(value.detach().clone()) for name, value in values.items() if name not in names}
    adamw = torch.optim.AdamW(
        [
            {"params": [others["table"]], "weight_decay": weight_decay},
            {"params": [others["blocks.0.query.bias"]], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.8, 0.9),
        eps=1e-6,
        fused=True,
    )
    expected = {name: values[name].detach().double().numpy().copy() for name in names}
    momenta = {name: np.zeros_like(weight) for name, weight in expected.items()}
    for group in optimizer.param_groups:
        group["lr"] = lr
    draw = torch.Generator().manual_seed(5)
    for _ in range(4):
        for name, value in values.items():
            value.grad = torch.randn(value.shape, generator=draw)
            if name in others:
                others[name].grad = value.grad.clone()
                continue
            gradient = value.grad.double().numpy()
            momenta[name] = momentum * momenta[name] + (1 - momentum) * gradient
            update = momentum * momenta[name] + (1 - momentum) * gradient
            parts = np.split(update, 2) if "key_value" in name else [update]
            x = np.concatenate([0.2 * math.sqrt(max(part.shape)) * naive_x(part) for part in parts])
            expected[name] = expected[name] * (1 - lr * weight_decay) - lr * x
        optimizer.step()
        adamw.step()
    for name, weight in expected.items():
        np.testing.assert_allclose(values[name].detach().numpy(), weight, atol=2e-5, err_msg=name)
        assert sorted(optimizer.state[values[name]]) == ["momentum_buffer"]
    for name, other in others.items():
        assert torch.equal(values[name], other), name


def test_it_goes_the_way_of_torchs_own() -> None:
    """Which computes in bf16, so about."""
    name = "blocks.0.query.weight"
    values = {name: nn.Parameter(torch.randn(16, 40, generator=torch.Generator().manual_seed(1)))}
    other = nn.Parameter(values[name].detach().clone())
    optimizer = build_optimizer(values.items(), OptimSection(name="muon", weight_decay=0.1), matrices=[name])
    assert isinstance(optimizer, Muon)
    alone(optimizer, values)
    theirs = torch.optim.Muon([other], lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizer.param_groups[0]["lr"] = 0.02
    draw = torch.Generator().manual_seed(2)
    before = other.detach().clone()
    for _ in range(3):
        values[name].grad = torch.randn(other.shape, generator=draw)
        other.grad = values[name].grad.clone()
        optimizer.step()
        theirs.step()
    moved, theirs_moved = values[name].detach() - before, other.detach() - before
    assert float((moved - theirs_moved).norm() / theirs_moved.norm()) < 0.02


def test_what_has_no_gradient_rests() -> None:
    values = weights()
    names = [name for name in values if name.endswith("weight")]
    optimizer = build_optimizer(values.items(), OptimSection(name="muon"), matrices=names)
    assert isinstance(optimizer, Muon)
    alone(optimizer, values)
    before = {name: value.detach().clone() for name, value in values.items()}
    optimizer.step()
    assert all(torch.equal(values[name], before[name]) for name in values)


def matrices(*shapes: tuple[int, int]) -> list[Matrix]:
    return [Matrix(f"m{index}", 0, *shape, longest=max(shape)) for index, shape in enumerate(shapes)]


def cut(all_matrices: list[Matrix], *, num_ranks: int, length: int) -> list[muon.RankPieces]:
    """As ZeRO does: one behind the other, in slices of `length` that know nothing of matrices."""
    held: list[muon.RankPieces] = [[[]] for _ in range(num_ranks)]
    place = 0
    for one in all_matrices:
        for rank in range(num_ranks):
            begin, end = max(place, rank * length), min(place + one.length, (rank + 1) * length)
            if begin < end:
                held[rank][0].append((one.parameter, begin - place, begin - rank * length, end - begin))
        place += one.length
    return held


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_matrix_has_one_maker_and_each_rank_gets_what_it_holds(num_ranks: int) -> None:
    all_matrices = matrices((4, 6), (6, 4), (4, 4), (4, 4), (2, 10), (8, 8))
    total = sum(one.length for one in all_matrices)
    held = cut(all_matrices, num_ranks=num_ranks, length=-(-total // num_ranks))
    assignments = [MatrixAssignment(all_matrices, held, rank=rank, is_replicated=False) for rank in range(num_ranks)]
    assert sorted(index for assignment in assignments for index in assignment.local_matrices) == list(
        range(len(all_matrices))
    )
    for giver in range(num_ranks):
        for taker in range(num_ranks):
            assert assignments[giver].send_ranges[taker] == assignments[taker].recv_ranges[giver]
            assert assignments[giver].result_send_ranges[taker] == assignments[taker].result_recv_ranges[giver]
    for assignment in assignments:
        got = {index: torch.zeros(all_matrices[index].length) for index in assignment.local_matrices}
        for one in (one for ranges in assignment.recv_ranges for one in ranges):
            got[one.matrix][one.start : one.start + one.length] += 1
        assert all(bool((values == 1).all()) for values in got.values())


def test_the_work_is_spread_evenly() -> None:
    all_matrices = matrices(*[(64, 64)] * 5 * 6, *[(64, 256)] * 2 * 6)  # six blocks
    held = [[[(one.parameter, 0, 0, one.length)] for one in all_matrices]] * 4
    loads = []
    for rank in range(4):
        assignment = MatrixAssignment(all_matrices, held, rank=rank, is_replicated=True)
        loads.append(sum(all_matrices[index].multiplications for index in assignment.local_matrices))
    assert max(loads) <= 1.1 * sum(loads) / 4


def test_before_it_is_divided_only_a_step_of_no_length_is_allowed() -> None:
    values = weights()
    optimizer = build_optimizer(values.items(), OptimSection(name="muon"), matrices=["blocks.0.query.weight"])
    for value in values.values():
        value.grad = torch.zeros_like(value)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(AssertionError):
        optimizer.step()
