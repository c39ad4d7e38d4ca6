"""The optimizer state of this rank as pieces of named parameters, in the same form for all ZeRO stages.

ZeRO cuts the fp32 weights and the optimizer's moments into flat tensors, differently for each stage and number of
ranks. A `Partition` is one such tensor, with the places of the pieces of parameters in it. `partition_states` adds
the moments. `fragments` divides both into pieces, each with the name of its parameter and its place in it. So a
checkpoint can be loaded at any stage, on any number of ranks. Partitions contain the padding of widths
(`engine.padding`). Their states and fragments do not.

    stage 0        a partition per parameter, whole, on every rank
    stages 1, 2    a partition per parameter group: this rank's slice of all its parameters, one after the other
    stage 3        a partition per parameter group: this rank's slice of each parameter, one after the other

This module reads attributes of DeepSpeed's optimizers (0.19), but does not import DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from txl_dist.train.engine.flat import Slot, Stored
from txl_dist.train.engine.padding import PaddedAxes

WEIGHT = "weight"
"""Name of the fp32 weights among the values of a fragment."""
AVERAGE = "average"
"""Name of the exponential average of the weights, which is kept and saved like the optimizer's moments."""
SWAPPED_LEN = 2**20
"""Number of values that `swap_averages` exchanges at a time."""


class PartitionPiece(NamedTuple):
    """Consecutive values of one parameter, flattened, and their place in a partition."""

    parameter: str
    start: int
    """Place of the first value in the flattened parameter."""
    offset: int
    """Place of the first value in the partition."""
    length: int


class Partition(NamedTuple):
    """Flat fp32 tensor that the optimizer updates on this rank, and the pieces of parameters that it contains."""

    tensor: Tensor
    """Tensor by which the optimizer looks up its state. It is flat, except at stage 0."""
    pieces: list[PartitionPiece]


class PartitionState(NamedTuple):
    """Values of a partition that a checkpoint stores, without padding. With padded widths each piece is a state of its
    own."""

    pieces: list[PartitionPiece]
    values: dict[str, Tensor]
    """Flat fp32 tensor by kind: `weight`, or a name in the optimizer's state such as `exp_avg`. The tensors are views,
    or copies if the parameter is padded. They have the same length."""
    step: float
    """Number of updates that the optimizer has counted."""


class Fragment(NamedTuple):
    """Piece of a parameter with its weights and optimizer state, as a checkpoint stores it.

    `values` has the same kinds as those of a `PartitionState`.
    """

    parameter: str
    start: int
    values: dict[str, Tensor]
    step: float
    """Number of updates that the optimizer has counted for the parameter."""


def partitions_of(optimizer: Any, stored: list[Stored], *, stage: int) -> list[Partition]:
    """Return this rank's partitions: the flat tensors that the optimizer updates, with the pieces of parameters in
    each.

    `optimizer` is the optimizer that `deepspeed.initialize` made for the parameters `stored`.
    """
    slots = {id(parameter.tensor): parameter.slots for parameter in stored}
    if stage == 0:
        pairs: Iterable[tuple[Tensor, Tensor]]
        if hasattr(optimizer, "fp32_groups"):
            pairs = zip(_flat(optimizer.fp16_groups), _flat(optimizer.fp32_groups), strict=True)
        else:
            pairs = ((p, p) for group in optimizer.param_groups for p in group["params"])
        return [Partition(master, list(_pieces(slots[id(p)], 0, p.numel(), offset=0))) for p, master in pairs]
    if stage == 3:
        groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        return [Partition(flat, list(_slices(group, slots))) for flat, group in groups]
    groups = zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True)
    return [Partition(flat, list(_linked(group, slots))) for flat, group in groups]


def _flat(groups: list[list[Tensor]]) -> list[Tensor]:
    """Return the tensors of all groups in one list."""
    return [tensor for group in groups for tensor in group]


def _pieces(slots: tuple[Slot, ...], start: int, length: int, *, offset: int) -> Iterator[PartitionPiece]:
    """Yield the pieces of parameters in a range of a tensor of the engine.

    The range is [start, start + length) of the flattened tensor. A partition stores the range from `offset` on.
    """
    for slot in slots:
        begin = max(start, slot.start)
        end = min(start + length, slot.stop)
        if begin < end:
            yield PartitionPiece(slot.name, begin - slot.start, offset + begin - start, end - begin)


def _linked(group: list[Any], slots: dict[int, tuple[Slot, ...]]) -> Iterator[PartitionPiece]:
    """Yield the pieces at stages 1 and 2. DeepSpeed stores a link in each parameter, from which the pieces are
    computed.

    A link gives the part of the parameter that is in this rank's flat tensor. A parameter without such a part has no
    link.
    """
    for parameter in group:
        link = parameter._hp_mapping
        if link is not None:
            there = link.lp_fragment_address
            here = link.hp_fragment_address
            yield from _pieces(slots[id(parameter)], there.start, here.numel, offset=here.start)


def _slices(group: list[Any], slots: dict[int, tuple[Slot, ...]]) -> Iterator[PartitionPiece]:
    """Yield the pieces at stage 3, where each rank has an equally long slice of each parameter, padded at the end."""
    offset = 0
    rank = torch.distributed.get_rank()
    for parameter in group:
        slice_len = parameter.partition_numel()
        length = min(slice_len, parameter.ds_numel - rank * slice_len)
        if length > 0:
            yield from _pieces(slots[id(parameter)], rank * slice_len, length, offset=offset)
        offset += slice_len


def partition_states(
    partitions: list[Partition], optimizer: torch.optim.Optimizer, *, padded: Mapping[str, PaddedAxes]
) -> Iterator[PartitionState]:
    """Yield the values of the partitions. `optimizer` is the torch optimizer.

    Values of the parameters in `padded` are copies, without padding. All other values are views.
    """
    for tensor, pieces in partitions:
        state = optimizer.state.get(tensor, {})
        values = {WEIGHT: _flattened(tensor)}
        for name, value in state.items():
            if _is_moment(name, value, tensor):
                values[name] = _flattened(value)
        # torch counts updates per tensor, pytorch_optimizer per group.
        step = float(state.get("step", optimizer.param_groups[0].get("step", 0)))
        if not padded:
            yield PartitionState(pieces, values, step)
            continue
        for piece in pieces:
            axes = padded.get(piece.parameter)
            start, length = _saved_place(piece, axes)
            saved = {name: _view(flat, piece) for name, flat in values.items()}
            if axes is not None:
                saved = {name: axes.unpad_range(view, start=piece.start) for name, view in saved.items()}
            yield PartitionState([PartitionPiece(piece.parameter, start, 0, length)], saved, step)


def fragments(states: Iterable[PartitionState]) -> Iterator[Fragment]:
    """Yield the pieces of all parameters with their values, as views of the states."""
    for pieces, values, step in states:
        for piece in pieces:
            if piece.length:  # a piece of a padded parameter may have only padding
                views = {name: _view(flat, piece) for name, flat in values.items()}
                yield Fragment(piece.parameter, piece.start, views, step)


def unkept_state(partitions: list[Partition], optimizer: torch.optim.Optimizer) -> str:
    """Return the name of one value of the optimizer's state that a checkpoint would not store. The text is empty if a
    checkpoint stores all values."""
    for tensor, _ in partitions:
        state = optimizer.state.get(tensor, {})
        for name, value in state.items():
            if name == "step":
                is_kept = isinstance(value, Tensor) and value.numel() == 1 and value.dtype == torch.float32
            elif value is None:
                is_kept = True
            else:
                is_kept = _is_moment(name, value, tensor) and value.dtype == tensor.dtype
            if not is_kept:
                return f"state[{name!r}]"
    return ""


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings in each of the optimizer's parameter groups. The learning rate is not included, because every
    step changes it."""
    plain = (bool, int, float, str, tuple)
    settings = []
    for group in optimizer.param_groups:
        values = {}
        for name, value in group.items():
            if name != "lr" and isinstance(value, plain):
                values[name] = value
        settings.append(values)
    return settings


def _is_moment(name: str, value: Any, tensor: Tensor) -> bool:
    """Return whether a value of the optimizer's state has one number per weight. `tensor` holds the weights."""
    return isinstance(value, Tensor) and name != "step" and value.shape == tensor.shape


def _view(tensor: Tensor, piece: PartitionPiece) -> Tensor:
    """Return the values of a piece as a view. `tensor` is the piece's partition, or an optimizer
    moment of the same shape."""
    return _flattened(tensor).narrow(0, piece.offset, piece.length)


def _flattened(tensor: Tensor) -> Tensor:
    """Return a flat view of the values, without gradients."""
    values = tensor.detach()
    return values if values.dim() == 1 else values.view(-1)


class Source(Protocol):
    """Interface of an object that returns saved values by parameter, for example the files of a checkpoint."""

    def kinds_of(self, parameter: str) -> list[str]:
        """Return the kinds of values that a parameter has. `weight` is one of them."""

    def read(self, kind: str, parameter: str, *, start: int, length: int) -> Tensor:
        """Return `length` fp32 values of the flattened parameter, from the value `start` on, in host memory."""

    def step_of(self, parameter: str) -> float:
        """Return the number of updates that the optimizer had counted for a parameter."""


def fill(
    partitions: list[Partition],
    optimizer: torch.optim.Optimizer,
    source: Source,
    *,
    with_average: bool,
    padded: Mapping[str, PaddedAxes],
) -> None:
    """Copy saved values into the partitions, and create the optimizer's state, which a new optimizer lacks.

    `with_average` says whether the run averages its weights, so that a saved average is loaded too. Saved values have
    no padding. The parameters in `padded` get it here.
    """
    counts_per_tensor = not type(optimizer).__module__.startswith("pytorch_optimizer.")
    unwanted = {WEIGHT}
    if not with_average:
        unwanted.add(AVERAGE)
    for tensor, pieces in partitions:
        saved = [piece for piece in pieces if _saved_place(piece, padded.get(piece.parameter))[1]]
        if not saved:  # nothing, or padding, which is 0
            continue
        moments = [kind for kind in source.kinds_of(saved[0].parameter) if kind not in unwanted]
        step = source.step_of(saved[0].parameter)
        state = {kind: torch.zeros_like(tensor, requires_grad=False) for kind in moments}
        for piece in saved:
            for kind, target in {WEIGHT: tensor, **state}.items():
                _view(target, piece).copy_(_saved_values(source, kind, piece, padded.get(piece.parameter)))
        if moments:
            if counts_per_tensor:
                count = {"step": torch.tensor(step, dtype=torch.float32, device=tensor.device)}
            else:
                count = {}
            optimizer.state[tensor] = count | state
        for group in [] if counts_per_tensor else optimizer.param_groups:
            group["step"] = int(step)


def _saved_place(piece: PartitionPiece, axes: PaddedAxes | None) -> tuple[int, int]:
    """Return (first value, number of values) of a piece in the flattened parameter without padding. `axes` are those of
    a padded parameter."""
    if axes is None:
        return piece.start, piece.length
    start = axes.num_before(piece.start)
    return start, axes.num_before(piece.start + piece.length) - start


def _saved_values(source: Source, kind: str, piece: PartitionPiece, axes: PaddedAxes | None) -> Tensor:
    """Return the saved values of a piece as they are stored, in host memory. `axes` are those of a padded parameter."""
    start, length = _saved_place(piece, axes)
    values = source.read(kind, piece.parameter, start=start, length=length)
    if axes is None:
        return values
    return axes.pad_range(values, start=piece.start, length=piece.length)


def squared_norms(partitions: list[Partition], gradients: list[list[Tensor]], names: Iterable[str]) -> Tensor:
    """Return the sums of squares of each parameter's gradient and weights on this rank, [2, number of names] in fp64.

    The first row is for gradients, the second for weights. `gradients` has one list of flat tensors per partition.
    Joined in order, these tensors have the same layout as the partition. The function allocates nothing of the size of
    a gradient.
    """
    index = {name: i for i, name in enumerate(names)}
    sums = torch.zeros(2, len(index), dtype=torch.float64, device=partitions[0].tensor.device)
    for (tensor, pieces), parts in zip(partitions, gradients, strict=True):
        for row, values in enumerate((parts, [tensor.detach().view(-1)])):
            overlaps = list(_overlaps(pieces, values))
            if overlaps:
                norms = norms_of([view for _, view in overlaps]).double()
                places = torch.tensor([index[name] for name, _ in overlaps], device=norms.device)
                sums[row].index_add_(0, places, norms.square())
    return sums


def norms_of(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor in fp32, [tensors]. The tensors may have any type.

    Squares of fp16 gradients would overflow in fp16. On a CPU torch adds all squares of a tensor one after the other in
    fp32. The norm of 20 million values is then 1e-3 to 7e-3 too small. Here the squares are added in rows, which gives
    an error of 1e-6 at the same speed.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, 2, torch.float32))
    return torch.stack([_norm_in_rows(tensor.reshape(-1)) for tensor in tensors])


_ROW = 1_024
"""Length of the rows into which a tensor is cut to compute its norm. The squares of a row are summed first, then the
sums of the rows, so that rounding errors stay small."""


def _norm_in_rows(values: Tensor) -> Tensor:
    """Return the norm of a flat tensor. Rows of `_ROW` values are replaced by their norms until one row remains."""
    while values.numel() > _ROW:
        whole = values.numel() // _ROW * _ROW
        norms = torch.linalg.vector_norm(values[:whole].view(-1, _ROW), dim=1, dtype=torch.float32)
        values = torch.cat([norms, values[whole:].float()])
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32)
    return norm


def _overlaps(pieces: list[PartitionPiece], parts: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name of the parameter, values) for each overlap of a piece with a tensor of `parts`.

    `parts` are flat tensors. Joined in order, they have the same layout as the partition that contains the pieces.
    """
    begin = 0
    for part in parts:
        end = begin + part.numel()
        for piece in pieces:
            first = max(begin, piece.offset)
            stop = min(end, piece.offset + piece.length)
            if first < stop:
                yield piece.parameter, part[first - begin : stop - begin]
        begin = end


def update_averages(partitions: list[Partition], optimizer: torch.optim.Optimizer, *, decay: float) -> None:
    """Set each average to decay * average + (1 - decay) * weight, after an update.

    After the first update the average is the weight itself.
    """
    for tensor, _ in partitions:
        weight = tensor.detach()
        state = optimizer.state[tensor]
        if AVERAGE in state:
            state[AVERAGE].lerp_(weight, 1 - decay)
        else:
            state[AVERAGE] = weight.clone()


def swap_averages(partitions: list[Partition], optimizer: torch.optim.Optimizer) -> None:
    """Exchange weights and averages, in place. A partition without an average is not changed."""
    for tensor, _ in partitions:
        average = optimizer.state.get(tensor, {}).get(AVERAGE)
        if average is None:
            continue
        pairs = zip(*(x.view(-1).split(SWAPPED_LEN) for x in (tensor.detach(), average)), strict=True)
        for weight_n, average_n in pairs:
            kept = weight_n.clone()
            weight_n.copy_(average_n)
            average_n.copy_(kept)
