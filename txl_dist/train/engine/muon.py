"""Muon: steps of orthogonalized momentum for the matrices of the blocks, AdamW's for everything else.

With G the clipped gradient of a matrix [m, n] and B its momentum (Jordan et al. 2024, github.com/KellerJordan/Muon):

    B = mu B + (1 - mu) G            U = mu B + (1 - mu) G            Nesterov's
    X = U / (|U| + 1e-7), five times                                  Newton-Schulz: singular values become about 1
    X = a X + (b A + c A A) X with A = X X^T
    W = W - lr decay W - 0.2 sqrt(max(m, n)) lr X                     as large as AdamW's step (arXiv 2502.16982)

The momentum is a moment like Adam's: each rank keeps it for the values that ZeRO gives it, which know nothing of
matrices. But X is made of whole ones. So each matrix has one rank that makes its X: the others send it what they have
of U, and get back what they need of X. That is two exchanges per update at any ZeRO stage; what is sent is fixed when
the engine is built. Keys and values are two matrices, although one tensor holds both.

What it gives up: a matrix is never cut, so no more ranks share the work than there are matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c above: they raise small singular values fast, and leave all of them between 0.7 and 1.2."""
STACKED = {"key_value": 2}
"""Layers whose weight is more than one matrix, one below the other."""


class Matrix(NamedTuple):
    """Consecutive rows of a parameter."""

    parameter: str
    start: int
    """First value, counted in the whole parameter."""
    rows: int
    columns: int

    @property
    def length(self) -> int:
        """Values."""
        return self.rows * self.columns

    @property
    def multiplications(self) -> int:
        """Of one Newton-Schulz iteration."""
        short, long = sorted((self.rows, self.columns))
        return 2 * short * short * long + short**3


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter of the model is orthogonalized: the weights of the linear layers of its blocks."""
    return name.startswith("blocks.") and name.endswith(".weight") and "norm." not in name and len(shape) == 2


def matrices_of(name: str, shape: Sequence[int]) -> list[Matrix]:
    """What is orthogonalized of a parameter, each by itself."""
    if not is_matrix(name, shape):
        return []
    count = STACKED.get(name.split(".")[-2], 1)
    rows, columns = shape[0] // count, shape[1]
    return [Matrix(name, index * rows * columns, rows, columns) for index in range(count)]


class Range(NamedTuple):
    """Values of a matrix where a rank holds them."""

    matrix: int
    start: int
    """Counted in the matrix."""
    length: int
    tensor: int
    """Which of the tensors that are updated together."""
    offset: int
    """In that tensor."""


Held = list[list[tuple[str, int, int, int]]]
"""Of a rank: per tensor, the `partitions.Piece`s in it."""


class MatrixAssignment:
    """Of the matrices of tensors that are updated together: which rank makes which, of what, and for whom."""

    def __init__(self, matrices: list[Matrix], held: list[Held], *, rank: int, is_replicated: bool) -> None:
        """`held` is of every rank; where all hold the same (`is_replicated`) nothing needs to be sent before."""
        found = [list(_ranges(matrices, own)) for own in held]
        present = sorted({one.matrix for own in found for one in own})
        owners = _owners({index: matrices[index].multiplications for index in present}, num_ranks=len(held))
        self.matrices = matrices
        self.own = [index for index in present if owners[index] == rank]
        """Of `matrices`, what this rank makes."""
        sources = {index: [owners[index]] if is_replicated else range(len(held)) for index in present}
        self.sent = [
            [one for one in found[rank] if owners[one.matrix] == other and rank in sources[one.matrix]]
            for other in range(len(held))
        ]
        """By rank: what it needs of this rank."""
        self.received = [
            [one for one in found[other] if one.matrix in self.own and other in sources[one.matrix]]
            for other in range(len(held))
        ]
        """By rank: what it sends this one."""
        self.wanted = [[one for one in found[rank] if owners[one.matrix] == other] for other in range(len(held))]
        """By rank: what it makes for this one."""
        self.made = [[one for one in own if one.matrix in self.own] for own in found]
        """By rank: what this one makes for it."""

    def orthogonalized(self, updates: list[Tensor], *, dtype: torch.dtype) -> list[tuple[Range, Tensor]]:
        """Where in the tensors of this rank which values of X belong, of the U in `updates`; computed in `dtype`."""
        values = _exchanged(
            [[_part(updates[one.tensor], one.offset, one) for one in ranges] for ranges in self.sent],
            [[one.length for one in ranges] for ranges in self.received],
            like=updates[0],
        )
        pieces: dict[int, list[tuple[int, Tensor]]] = {index: [] for index in self.own}
        for one, value in zip((one for ranges in self.received for one in ranges), values, strict=True):
            pieces[one.matrix].append((one.start, value))
        made = self._made({index: _joined(parts) for index, parts in pieces.items()}, dtype=dtype)
        values = _exchanged(
            [[_part(made[one.matrix], one.start, one) for one in ranges] for ranges in self.made],
            [[one.length for one in ranges] for ranges in self.wanted],
            like=updates[0],
        )
        return list(zip((one for ranges in self.wanted for one in ranges), values, strict=True))

    def _made(self, updates: dict[int, Tensor], *, dtype: torch.dtype) -> dict[int, Tensor]:
        """X, flat, of each matrix of this rank; those of one shape at once."""
        shapes: dict[tuple[int, int], list[int]] = {}
        for index in updates:
            rows, columns = self.matrices[index][2:]
            shapes.setdefault((min(rows, columns), max(rows, columns)), []).append(index)
        made = {}
        for indices in shapes.values():
            turned = [self.matrices[index].rows > self.matrices[index].columns for index in indices]
            wide = [
                matrix.t() if turn else matrix
                for index, turn in zip(indices, turned, strict=True)
                for matrix in [updates.pop(index).view(self.matrices[index][2:])]
            ]
            results = newton_schulz(torch.stack(wide).to(dtype)).to(wide[0].dtype)
            for index, turn, result in zip(indices, turned, results, strict=True):
                made[index] = (result.t() if turn else result).reshape(-1)
        return made


def newton_schulz(update_BMN: Tensor) -> Tensor:
    """The nearest matrices with orthonormal rows, about, of matrices with no more rows than columns."""
    a, b, c = COEFFICIENTS
    x: Tensor = update_BMN / (torch.linalg.matrix_norm(update_BMN, keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Groups with `is_orthogonal` get Muon's step, the others AdamW's."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr})
        self._divisions: dict[int, MatrixAssignment] | None = None
        self._dtype, self._device = torch.float32, torch.device("cpu")

    def divide(self, divisions: dict[int, MatrixAssignment], *, dtype: torch.dtype, device: torch.device) -> None:
        """Settle who makes what, by the id of the first of tensors that are updated together, and in which type and
        where that is computed. Before any update."""
        self._divisions, self._dtype, self._device = divisions, dtype, device

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update. With matrices all ranks call it together."""
        del closure
        for group in self.param_groups:
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            if tensors and group.get("is_orthogonal"):
                self._step_matrices(tensors, group)
            elif tensors:
                self._step_others(tensors, group)

    def _step_matrices(self, tensors: list[Tensor], group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["muon_momentum"]
        if self._divisions is None:  # DeepSpeed takes a step of zeros when it wraps half precision at stage 0
            assert lr == 0.0
            return
        updates = []
        for tensor in tensors:
            state = self.state[tensor]
            assert tensor.grad is not None
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(tensor)
            state["momentum_buffer"].lerp_(tensor.grad, 1 - momentum)
            update = tensor.grad.lerp_(state["momentum_buffer"], momentum)
            updates.append(update.view(-1).to(self._device))  # with offload it is on the host
        division = self._divisions[id(tensors[0])]
        if group["weight_decay"]:
            torch._foreach_mul_(tensors, 1 - lr * group["weight_decay"])
        for one, x in division.orthogonalized(updates, dtype=self._dtype):
            matrix = division.matrices[one.matrix]
            rate = 0.2 * math.sqrt(max(matrix.rows, matrix.columns)) * lr
            weight = tensors[one.tensor].view(-1)
            _part(weight, one.offset, one).add_(x.to(weight.device), alpha=-rate)

    def _step_others(self, tensors: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[tensor] for tensor in tensors]
        for tensor, state in zip(tensors, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
        adamw(
            tensors,
            [tensor.grad for tensor in tensors],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _ranges(matrices: list[Matrix], held: Held) -> Iterable[Range]:
    """What a rank holds of matrices."""
    by_parameter: dict[str, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_parameter.setdefault(matrix.parameter, []).append(index)
    for tensor, pieces in enumerate(held):
        for parameter, start, offset, length in pieces:
            for index in by_parameter.get(parameter, []):
                matrix = matrices[index]
                begin, end = max(start, matrix.start), min(start + length, matrix.start + matrix.length)
                if begin < end:
                    yield Range(index, begin - matrix.start, end - begin, tensor, offset + begin - start)


def _owners(costs: dict[int, int], *, num_ranks: int) -> dict[int, int]:
    """The rank of each matrix: the dearest first, each to the rank that has the least to do."""
    loads, owners = [0] * num_ranks, {}
    for index in sorted(costs, key=lambda index: (-costs[index], index)):
        owners[index] = min(range(num_ranks), key=loads.__getitem__)
        loads[owners[index]] += costs[index]
    return owners


def _part(flat: Tensor, start: int, one: Range) -> Tensor:
    return flat[start : start + one.length]


def _joined(parts: list[tuple[int, Tensor]]) -> Tensor:
    """The pieces of a matrix, in order."""
    ordered = [values for _, values in sorted(parts, key=lambda part: part[0])]
    return ordered[0] if len(ordered) == 1 else torch.cat(ordered)


def _exchanged(sent: list[list[Tensor]], received: list[list[int]], *, like: Tensor) -> list[Tensor]:
    """Give every rank its values, flat and of the type of `like`. Returns what this one is given, of these lengths, in
    order of ranks."""
    if len(sent) == 1:
        return sent[0]
    given = torch.cat([like[:0], *(values for parts in sent for values in parts)])
    got = torch.empty(sum(map(sum, received)), dtype=like.dtype, device=like.device)
    send_lens = [sum(values.numel() for values in parts) for parts in sent]
    dist.all_to_all_single(got, given, [sum(lengths) for lengths in received], send_lens)
    return list(got.split([length for lengths in received for length in lengths]))
