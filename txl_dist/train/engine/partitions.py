"""What an optimizer of DeepSpeed keeps on this rank, as pieces of named parameters: the same for every ZeRO stage.

ZeRO cuts the weights in fp32 and the optimizer's moments into flat tensors, one way per stage and number of ranks. A
`Partition` is one such tensor and where pieces of parameters lie in it. `fragments` gives them as views, by the name of
the parameter and the place in it: all that a checkpoint needs to be loaded into any stage on any number of ranks.

    stage 0        a partition per parameter, whole, on every rank
    stages 1, 2    a partition per parameter group: this rank's slice of all its parameters, one behind the other
    stage 3        the same, of this rank's slice of each parameter

This module reads attributes of DeepSpeed's optimizers (0.19) and imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from txl_dist.train.engine.flat import Slot, Stored

WEIGHT = "weight"
AVERAGE = "average"
"""The exponential average of the weights; it lies with the optimizer's moments, and so goes wherever they go."""
SWAPPED_LEN = 2**20
"""Values that are exchanged at a time."""


class PartitionPiece(NamedTuple):
    """Consecutive values of one parameter, flattened."""

    parameter: str
    start: int
    """First value, counted in the whole parameter."""
    offset: int
    """Where it lies in its partition."""
    length: int


class Partition(NamedTuple):
    """An fp32 tensor that the optimizer updates."""

    tensor: Tensor
    """The optimizer's key; flat but at stage 0."""
    pieces: list[PartitionPiece]


class Fragment(NamedTuple):
    """One piece with its values: 1-D fp32 views into live storage, `weight` and the optimizer's, as `exp_avg`."""

    parameter: str
    start: int
    values: dict[str, Tensor]
    step: float
    """Updates that the optimizer has counted for it."""


def partitions_of(optimizer: Any, stored: list[Stored], *, stage: int) -> list[Partition]:
    """The partitions of this rank. `optimizer` is what `deepspeed.initialize` gave for the tensors of `stored`."""
    slots = {id(one.tensor): one.slots for one in stored}
    if stage == 0:
        pairs = (
            zip(_flat(optimizer.fp16_groups), _flat(optimizer.fp32_groups), strict=True)
            if hasattr(optimizer, "fp32_groups")
            else ((p, p) for group in optimizer.param_groups for p in group["params"])
        )
        return [Partition(master, list(_pieces(slots[id(p)], 0, p.numel(), offset=0))) for p, master in pairs]
    if stage == 3:
        groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        return [Partition(flat, list(_slices(group, slots))) for flat, group in groups]
    groups = zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True)
    return [Partition(flat, list(_linked(group, slots))) for flat, group in groups]


def _flat(groups: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for group in groups for tensor in group]


def _pieces(slots: tuple[Slot, ...], start: int, length: int, *, offset: int) -> Iterator[PartitionPiece]:
    """What lies in the values [start, start + length) of a tensor, which begin at `offset` of a partition."""
    for slot in slots:
        begin, end = max(start, slot.start), min(start + length, slot.stop)
        if begin < end:
            yield PartitionPiece(slot.name, begin - slot.start, offset + begin - start, end - begin)


def _linked(group: list[Any], slots: dict[int, tuple[Slot, ...]]) -> Iterator[PartitionPiece]:
    """Stages 1 and 2 link each parameter to its part of the flat tensor, if this rank has one."""
    for parameter in group:
        link = parameter._hp_mapping
        if link is not None:
            there, here = link.lp_fragment_address, link.hp_fragment_address
            yield from _pieces(slots[id(parameter)], there.start, here.numel, offset=here.start)


def _slices(group: list[Any], slots: dict[int, tuple[Slot, ...]]) -> Iterator[PartitionPiece]:
    """Stage 3 gives each rank an equally long slice of each parameter; the last ones are padded."""
    offset, rank = 0, torch.distributed.get_rank()
    for parameter in group:
        slice_len = parameter.partition_numel()
        length = min(slice_len, parameter.ds_numel - rank * slice_len)
        if length > 0:
            yield from _pieces(slots[id(parameter)], rank * slice_len, length, offset=offset)
        offset += slice_len


def fragments(partitions: list[Partition], optimizer: torch.optim.Optimizer) -> Iterator[Fragment]:
    """Views of what is there; `optimizer` is torch's."""
    for tensor, pieces in partitions:
        state = optimizer.state.get(tensor, {})
        values = {WEIGHT: tensor} | {name: value for name, value in state.items() if _is_moment(name, value, tensor)}
        # torch counts per tensor, pytorch_optimizer per group.
        step = float(state.get("step", optimizer.param_groups[0].get("step", 0)))
        for piece in pieces:
            views = {name: _view(value, piece) for name, value in values.items()}
            yield Fragment(piece.parameter, piece.start, views, step)


def unkept_state(partitions: list[Partition], optimizer: torch.optim.Optimizer) -> str:
    """The name of a value that an optimizer keeps for a tensor and a checkpoint would lose; empty if there is none."""
    for tensor, _ in partitions:
        for name, value in optimizer.state.get(tensor, {}).items():
            if name == "step":
                is_kept = isinstance(value, Tensor) and value.numel() == 1 and value.dtype == torch.float32
            else:
                is_kept = value is None or (_is_moment(name, value, tensor) and value.dtype == tensor.dtype)
            if not is_kept:
                return f"state[{name!r}]"
    return ""


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Numbers and texts of the parameter groups, without the learning rate, which changes with every step."""
    plain = (bool, int, float, str, tuple)
    return [
        {name: value for name, value in group.items() if name != "lr" and isinstance(value, plain)}
        for group in optimizer.param_groups
    ]


def _is_moment(name: str, value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and name != "step" and value.shape == tensor.shape


def _view(tensor: Tensor, piece: PartitionPiece) -> Tensor:
    return tensor.detach().view(-1).narrow(0, piece.offset, piece.length)


class Source(Protocol):
    """Saved values, by parameter."""

    def kinds_of(self, parameter: str) -> list[str]:
        """Kinds of values that a parameter has, `weight` among them."""

    def read(self, kind: str, parameter: str, *, start: int, length: int) -> Tensor:
        """[length] fp32 values on the host, from the flattened parameter."""

    def step_of(self, parameter: str) -> float:
        """Updates that the optimizer had counted for it."""


def fill(partitions: list[Partition], optimizer: torch.optim.Optimizer, source: Source, *, with_average: bool) -> None:
    """Copy saved values into the partitions and make the optimizer's state, which a new one lacks."""
    counts_per_tensor = not type(optimizer).__module__.startswith("pytorch_optimizer.")
    unwanted = (WEIGHT,) if with_average else (WEIGHT, AVERAGE)
    for tensor, pieces in partitions:
        if not pieces:
            continue
        moments = [kind for kind in source.kinds_of(pieces[0].parameter) if kind not in unwanted]
        step = source.step_of(pieces[0].parameter)
        state = {kind: torch.zeros_like(tensor, requires_grad=False) for kind in moments}
        for piece in pieces:
            for kind, target in {WEIGHT: tensor, **state}.items():
                values = source.read(kind, piece.parameter, start=piece.start, length=piece.length)
                _view(target, piece).copy_(values)
        if moments:
            count = {"step": torch.tensor(step, dtype=torch.float32, device=tensor.device)} if counts_per_tensor else {}
            optimizer.state[tensor] = count | state
        for group in [] if counts_per_tensor else optimizer.param_groups:
            group["step"] = int(step)


def squared_norms(partitions: list[Partition], gradients: list[list[Tensor]], names: Iterable[str]) -> Tensor:
    """Sums of squares of what this rank has of each parameter's gradient, and of its weight, in fp64: [2, names].

    `gradients` has per partition flat tensors that together lie like it. Nothing of the size of a gradient is made.
    """
    index = {name: i for i, name in enumerate(names)}
    sums = torch.zeros(2, len(index), dtype=torch.float64, device=partitions[0].tensor.device)
    for (tensor, pieces), parts in zip(partitions, gradients, strict=True):
        for row, values in enumerate((parts, [tensor.detach().view(-1)])):
            found = list(_overlaps(pieces, values))
            if found:
                norms = norms_of([view for _, view in found]).double()
                places = torch.tensor([index[name] for name, _ in found], device=norms.device)
                sums[row].index_add_(0, places, norms.square())
    return sums


def norms_of(tensors: list[Tensor]) -> Tensor:
    """The norm of each, in fp32, of other types too (squares of scaled fp16 gradients overflow): [tensors].

    On a CPU torch adds the squares of a tensor in one row in fp32: the norm of 20 million values is 1e-3 to 7e-3 too
    small. In rows of rows it is right to 1e-6, at the same speed.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, 2, torch.float32))
    return torch.stack([_norm_in_rows(tensor.reshape(-1)) for tensor in tensors])


_ROW = 1_024
"""Values that are added one behind the other."""


def _norm_in_rows(values: Tensor) -> Tensor:
    while values.numel() > _ROW:
        whole = values.numel() // _ROW * _ROW
        norms = torch.linalg.vector_norm(values[:whole].view(-1, _ROW), dim=1, dtype=torch.float32)
        values = torch.cat([norms, values[whole:].float()])
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32)
    return norm


def _overlaps(pieces: list[PartitionPiece], parts: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(parameter, some of its values) in flat tensors that lie one behind the other in a partition."""
    begin = 0
    for part in parts:
        end = begin + part.numel()
        for piece in pieces:
            first, stop = max(begin, piece.offset), min(end, piece.offset + piece.length)
            if first < stop:
                yield piece.parameter, part[first - begin : stop - begin]
        begin = end


def update_averages(partitions: list[Partition], optimizer: torch.optim.Optimizer, *, decay: float) -> None:
    """average <- decay average + (1 - decay) weight, behind an update; the first time it is the weight."""
    for tensor, _ in partitions:
        weight, state = tensor.detach(), optimizer.state[tensor]
        if AVERAGE in state:
            state[AVERAGE].lerp_(weight, 1 - decay)
        else:
            state[AVERAGE] = weight.clone()


def swap_averages(partitions: list[Partition], optimizer: torch.optim.Optimizer) -> None:
    """Exchange weights and averages, in place; where there is none yet nothing happens."""
    for tensor, _ in partitions:
        average = optimizer.state.get(tensor, {}).get(AVERAGE)
        if average is None:
            continue
        pairs = zip(*(x.view(-1).split(SWAPPED_LEN) for x in (tensor.detach(), average)), strict=True)
        for weight_n, average_n in pairs:
            kept = weight_n.clone()
            weight_n.copy_(average_n)
            average_n.copy_(kept)
