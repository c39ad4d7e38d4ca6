"""The Muon optimizer: orthogonalized momentum for the matrices of the blocks, and AdamW for all other parameters.

With G the clipped gradient of a matrix [m, n] and B its momentum (Jordan et al. 2024, github.com/KellerJordan/Muon):

    B = mu B + (1 - mu) G            U = mu B + (1 - mu) G            Nesterov momentum
    X = U / (|U| + 1e-7), five times                                  Newton-Schulz: singular values become about 1
    X = a X + (b A + c A A) X with A = X X^T
    W = W - lr decay W - 0.2 sqrt(max(m, n)) lr X                     as large as AdamW's step (arXiv 2502.16982)

Each rank keeps the momentum of the values that ZeRO assigns to it. These values may be any part of a matrix. But X is
computed from a whole matrix. So each matrix has an owner, the rank that computes its X. The other ranks send the owner
their values of U and receive the values of X that they need. So each update has two exchanges, at any ZeRO stage. Which
values to exchange is fixed when the engine is built. Keys and values are two matrices, although one tensor contains
both matrices.

Limitations: a matrix is never cut, so no more ranks share the work than there are matrices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

NUM_ITERATIONS = 5
"""Number of Newton-Schulz iterations in an update."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of the formula for X in the module's docstring. They raise small singular values fast, and leave
all singular values between 0.7 and 1.2."""
STACKED = {"key_value": 2}
"""Layers whose weight stacks several matrices: the number of matrices, by the name of the layer. The weight of any
other layer is one matrix."""


class Matrix(NamedTuple):
    """Matrix that Muon orthogonalizes by itself: consecutive rows of a parameter."""

    parameter: str
    """Name of the parameter that contains the matrix."""
    start: int
    """Place of the matrix's first value in the flattened parameter."""
    rows: int
    columns: int
    longest: int
    """Number of rows or columns, whichever is larger, without padding. The size of an update depends on it."""

    @property
    def length(self) -> int:
        """Number of values in the matrix."""
        return self.rows * self.columns

    @property
    def multiplications(self) -> int:
        """Number of multiplications in one Newton-Schulz iteration on this matrix."""
        short, long = sorted((self.rows, self.columns))
        return 2 * short * short * long + short**3


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon orthogonalizes the parameter with this name and shape. It does so for the weights of linear
    layers in blocks."""
    return name.startswith("blocks.") and name.endswith(".weight") and "norm." not in name and len(shape) == 2


def matrices_of(name: str, shape: Sequence[int], *, stored: Sequence[int] | None = None) -> list[Matrix]:
    """Return the matrices in a parameter of this shape. Muon orthogonalizes each matrix by itself. The list is empty
    for a parameter that Muon does not orthogonalize.

    `stored` is the shape in storage, if the engine pads the parameter by zeros. Muon orthogonalizes the padded
    matrices. Products with zeros are 0, so the padding of the results is 0.
    """
    if not is_matrix(name, shape):
        return []
    layer = name.split(".")[-2]
    count = STACKED.get(layer, 1)
    longest = max(shape[0] // count, shape[1])
    stored = stored or shape
    rows = stored[0] // count
    columns = stored[1]
    return [Matrix(name, index * rows * columns, rows, columns, longest) for index in range(count)]


class Range(NamedTuple):
    """Consecutive values of a matrix that one rank stores, and their place in the tensors of that rank. Ranks exchange
    values by such ranges."""

    matrix: int
    """Index of the matrix in `MatrixAssignment.matrices`."""
    start: int
    """Place of the first value in the flattened matrix."""
    length: int
    """Number of values in the range."""
    tensor: int
    """Index of the tensor that stores the values, among the tensors that are updated together."""
    offset: int
    """Place of the first value in that tensor."""


RankPieces = list[list[tuple[str, int, int, int]]]
"""Pieces of parameters that one rank holds, per tensor. Each piece has the fields of `partitions.PartitionPiece`."""


class MatrixAssignment:
    """Assignment of matrices to ranks, and the values that ranks exchange because of it. `Muon` uses it.

    One assignment covers the tensors that the optimizer updates together. The owner of a matrix is the rank that
    orthogonalizes it. Each of the lists `send_ranges`, `recv_ranges`, `result_send_ranges` and `result_recv_ranges` has
    one entry per rank.
    """

    def __init__(
        self, matrices: list[Matrix], rank_pieces: list[RankPieces], *, rank: int, is_replicated: bool
    ) -> None:
        """Assign each matrix to a rank.

        `rank_pieces` has one entry per rank, and `rank` is the rank of this process. If `is_replicated`, all ranks hold
        the same values, so the owner of a matrix needs no values of other ranks.
        """
        num_ranks = len(rank_pieces)
        ranges_by_rank = [list(_ranges(matrices, pieces)) for pieces in rank_pieces]
        present = {part.matrix for ranges in ranges_by_rank for part in ranges}
        costs = {index: matrices[index].multiplications for index in sorted(present)}
        owners = _owners(costs, num_ranks=num_ranks)
        local_ranges = ranges_by_rank[rank]
        self.matrices = matrices
        self.local_matrices = [index for index in sorted(present) if owners[index] == rank]
        """Indices of the matrices that this rank owns."""
        self.send_ranges: list[list[Range]] = []
        """Values of the momentum update U that this rank sends to each owner."""
        self.recv_ranges: list[list[Range]] = []
        """Values of the momentum update U that this rank, as an owner, receives from each rank."""
        self.result_send_ranges: list[list[Range]] = []
        """Values of the orthogonalized update X that this rank, as an owner, sends to each rank."""
        self.result_recv_ranges: list[list[Range]] = []
        """Values of the orthogonalized update X that this rank receives from each owner."""
        for other in range(num_ranks):
            for_other = [part for part in local_ranges if owners[part.matrix] == other]
            from_other = [part for part in ranges_by_rank[other] if owners[part.matrix] == rank]
            # Replicated values are the owner's already: it sends them to itself alone.
            has_to_send = other == rank or not is_replicated
            self.send_ranges.append(for_other if has_to_send else [])
            self.recv_ranges.append(from_other if has_to_send else [])
            self.result_send_ranges.append(from_other)
            self.result_recv_ranges.append(for_other)

    def orthogonalize(self, updates: list[Tensor], *, dtype: torch.dtype) -> list[tuple[Range, Tensor]]:
        """Send the momentum updates U to the owners of the matrices, orthogonalize them there, and return the results X
        for this rank.

        All ranks call this method together. `updates` are the flat tensors of U on this rank, and `dtype` is the type
        of the computation. The result has one pair for each part of a matrix that this rank stores: the range of the
        part, and its values of X.
        """
        values = _exchange(_values_of_updates(updates, self.send_ranges), self.recv_ranges, like=updates[0])
        parts: dict[int, list[tuple[int, Tensor]]] = {index: [] for index in self.local_matrices}
        for part, value in zip(_flat(self.recv_ranges), values, strict=True):
            parts[part.matrix].append((part.start, value))
        whole_updates = {index: _joined(matrix_parts) for index, matrix_parts in parts.items()}
        results = self._orthogonalize_local(whole_updates, dtype=dtype)
        result_values = _values_of_results(results, self.result_send_ranges)
        values = _exchange(result_values, self.result_recv_ranges, like=updates[0])
        return list(zip(_flat(self.result_recv_ranges), values, strict=True))

    def _orthogonalize_local(self, updates: dict[int, Tensor], *, dtype: torch.dtype) -> dict[int, Tensor]:
        """Return the orthogonalized update X, flat, of each matrix that this rank owns, by index of the matrix.

        Matrices of the same shape are computed at once.
        """
        shapes: dict[tuple[int, int], list[int]] = {}
        for index in updates:
            matrix = self.matrices[index]
            short, long = sorted((matrix.rows, matrix.columns))
            shapes.setdefault((short, long), []).append(index)
        results = {}
        for indices in shapes.values():
            wide_updates = []
            for index in indices:
                matrix = self.matrices[index]
                update = updates.pop(index).view(matrix.rows, matrix.columns)
                wide_updates.append(update.t() if matrix.rows > matrix.columns else update)
            wide_results = newton_schulz(torch.stack(wide_updates).to(dtype)).to(wide_updates[0].dtype)
            for index, wide_result in zip(indices, wide_results, strict=True):
                matrix = self.matrices[index]
                if matrix.rows > matrix.columns:
                    result = wide_result.t()
                else:
                    result = wide_result
                results[index] = result.reshape(-1)
        return results


def newton_schulz(update_BMN: Tensor) -> Tensor:
    """Return approximately the nearest matrix with orthonormal rows, for each matrix [M, N] of the batch. M must not
    exceed N."""
    a, b, c = COEFFICIENTS
    x: Tensor = update_BMN / (torch.linalg.matrix_norm(update_BMN, keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Optimizer that makes Muon's step for parameter groups with `is_orthogonal`, and AdamW's step for other groups."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr})
        self._assignments: dict[int, MatrixAssignment] | None = None
        self._dtype = torch.float32
        self._device = torch.device("cpu")

    def assign(self, assignments: dict[int, MatrixAssignment], *, dtype: torch.dtype, device: torch.device) -> None:
        """Set which rank computes which matrix, before the first update.

        Matrices are orthogonalized in the type `dtype` on `device`. `assignments` has one entry for each set of tensors
        that are updated together. The entry's key is the `id` of the first tensor of the set.
        """
        self._assignments = assignments
        self._dtype = dtype
        self._device = device

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters. If Muon orthogonalizes any parameter, all ranks call this method together."""
        del closure
        for group in self.param_groups:
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            if tensors and group.get("is_orthogonal"):
                self._step_matrices(tensors, group)
            elif tensors:
                self._step_others(tensors, group)

    def _step_matrices(self, tensors: list[Tensor], group: dict[str, Any]) -> None:
        """Update tensors that hold matrices by Muon's step."""
        lr = group["lr"]
        momentum = group["muon_momentum"]
        if self._assignments is None:  # DeepSpeed makes a step of zeros when it wraps half precision at stage 0
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
        assignment = self._assignments[id(tensors[0])]
        if group["weight_decay"]:
            torch._foreach_mul_(tensors, 1 - lr * group["weight_decay"])
        for part, x in assignment.orthogonalize(updates, dtype=self._dtype):
            matrix = assignment.matrices[part.matrix]
            rate = 0.2 * math.sqrt(matrix.longest) * lr
            weight = tensors[part.tensor].view(-1)
            weight[part.offset : part.offset + part.length].add_(x.to(weight.device), alpha=-rate)

    def _step_others(self, tensors: list[Tensor], group: dict[str, Any]) -> None:
        """Update all other parameters by AdamW's step, with torch's fused kernel."""
        states = [self.state[tensor] for tensor in tensors]
        for tensor, state in zip(tensors, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                state["exp_avg"] = torch.zeros_like(tensor)
                state["exp_avg_sq"] = torch.zeros_like(tensor)
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


def _ranges(matrices: list[Matrix], pieces_by_tensor: RankPieces) -> Iterator[Range]:
    """Yield the parts of matrices that one rank holds. `pieces_by_tensor` are the pieces of parameters on that rank."""
    by_parameter: dict[str, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_parameter.setdefault(matrix.parameter, []).append(index)
    for tensor, pieces in enumerate(pieces_by_tensor):
        for parameter, start, offset, length in pieces:
            for index in by_parameter.get(parameter, []):
                matrix = matrices[index]
                begin = max(start, matrix.start)
                end = min(start + length, matrix.start + matrix.length)
                if begin < end:
                    yield Range(index, begin - matrix.start, end - begin, tensor, offset + begin - start)


def _owners(costs: dict[int, int], *, num_ranks: int) -> dict[int, int]:
    """Assign each matrix to a rank, and return the rank of each matrix.

    The matrices are assigned in order of their costs, the costliest first. Each matrix goes to the rank with the
    smallest sum of costs so far.
    """
    loads = [0] * num_ranks
    owners = {}
    for index in sorted(costs, key=lambda index: (-costs[index], index)):
        owner = min(range(num_ranks), key=loads.__getitem__)
        owners[index] = owner
        loads[owner] += costs[index]
    return owners


def _flat(ranges_by_rank: list[list[Range]]) -> list[Range]:
    """Return the ranges of all ranks in one list, in order of ranks."""
    return [part for ranges in ranges_by_rank for part in ranges]


def _values_of_updates(updates: list[Tensor], ranges_by_rank: list[list[Range]]) -> list[list[Tensor]]:
    """Return, for each rank, the values of its ranges as views of `updates`, which are the tensors of the momentum
    updates."""
    views: list[list[Tensor]] = []
    for ranges in ranges_by_rank:
        views.append([updates[part.tensor][part.offset : part.offset + part.length] for part in ranges])
    return views


def _values_of_results(results: dict[int, Tensor], ranges_by_rank: list[list[Range]]) -> list[list[Tensor]]:
    """Return, for each rank, the values of its ranges as views of `results`, which are the whole orthogonalized
    matrices."""
    views: list[list[Tensor]] = []
    for ranges in ranges_by_rank:
        views.append([results[part.matrix][part.start : part.start + part.length] for part in ranges])
    return views


def _joined(parts: list[tuple[int, Tensor]]) -> Tensor:
    """Join the parts of a matrix to one flat tensor. `parts` are pairs (place of the part's first value in the matrix,
    values), in any order."""
    ordered = [values for _, values in sorted(parts, key=lambda part: part[0])]
    if len(ordered) == 1:
        return ordered[0]
    return torch.cat(ordered)


def _exchange(send_values: list[list[Tensor]], recv_ranges: list[list[Range]], *, like: Tensor) -> list[Tensor]:
    """Send values to every rank, and return the received values. All ranks call this function together.

    `send_values` has one list per rank. Values are sent flat, in the type of `like`. The result has one tensor per
    range of `recv_ranges`, in order of ranks.
    """
    if len(send_values) == 1:
        return send_values[0]
    send_lens = []
    for parts in send_values:
        send_lens.append(sum(values.numel() for values in parts))
    recv_lens = []
    for ranges in recv_ranges:
        recv_lens.append(sum(part.length for part in ranges))
    send_buffer = torch.cat([like[:0], *itertools.chain.from_iterable(send_values)])
    recv_buffer = torch.empty(sum(recv_lens), dtype=like.dtype, device=like.device)
    dist.all_to_all_single(recv_buffer, send_buffer, recv_lens, send_lens)
    return list(recv_buffer.split([part.length for part in _flat(recv_ranges)]))
