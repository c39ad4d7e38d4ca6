"""The parameters that an engine sees: many of the model's parameters in one flat tensor, or each as its own tensor.

DeepSpeed runs Python code for every parameter tensor and step: hooks, copies into buckets, norms. A Transformer-XL has
a dozen small tensors per layer, so the host would be slower than the device. `FlatModule` puts the matrices of each
block into one flat parameter, and all parameters without weight decay into another flat parameter. That makes 16
tensors for 12 layers instead of 150. The model computes with views. When the last gradient of a block's views is
complete, the gradients of all these views are joined in one copy. So the exchange of gradients still overlaps with the
backward pass.

`Stored` maps parameters of the engine to parameters of the model, for the optimizer and for checkpoints.

Limitations: flat parameters cost a copy of the gradients per micro-batch. They are not used with ZeRO-3, because a view
would keep the gathered tensor of its layer alive. They are not used with an optimizer whose steps need whole tensors of
the model, such as lamb, which takes their norms.

    flat   | query.weight | key_value.weight .. | distance.weight |    each begins at a multiple of ALIGNMENT values
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from txl_dist.train.engine.optimizer import is_decayed

ALIGNMENT = 128
"""Alignment of each parameter in a flat parameter, in values.

Half-precision products need operands at multiples of 16 bytes, and caches work best with multiples of 128 bytes.
"""


class Slot(NamedTuple):
    """Place of one parameter of the model inside a flat parameter of the engine."""

    name: str
    """Name of the model's parameter."""
    start: int
    """Place of the parameter's first value in the flat parameter."""
    shape: torch.Size

    @property
    def stop(self) -> int:
        """Place after the last value of the parameter."""
        return self.start + math.prod(self.shape)


class Stored(NamedTuple):
    """Tensor that the engine trains, and the parameters of the model that it contains."""

    tensor: nn.Parameter
    slots: tuple[Slot, ...]
    """Places of the model's parameters in the tensor, in order."""


class Owner(NamedTuple):
    """Module that uses a parameter, and the parameter's name in this module. A tied parameter has several owners."""

    module: nn.Module
    leaf: str
    """Name of the parameter in the module."""


class FlatModule(nn.Module):
    """Wrapper that stores a module's small parameters in flat parameters. Calls are passed on to the module."""

    gap: Tensor
    """Zeros for the gradients of places between parameters, [ALIGNMENT]."""

    def __init__(self, module: nn.Module, *, prefix: str, matrices: Collection[str] = ()) -> None:
        """Move the module's parameters into flat parameters, in place.

        `prefix` is removed from the names of parameters. `matrices` contains the names, without the prefix, of
        parameters that the optimizer updates in another way than the other parameters. The parameters in `matrices` get
        a flat parameter of their own in each block.
        """
        super().__init__()
        self.module = module
        parameters = dict(module.named_parameters())
        owners = _owners(module)
        # On a GPU each backward pass would launch a kernel for these zeros.
        self.register_buffer("gap", next(module.parameters()).detach().new_zeros(ALIGNMENT), persistent=False)
        self.stored: list[Stored] = []
        self._owners: list[list[list[Owner]]] = []
        for key, names in _groups(parameters, prefix=prefix, matrices=matrices).items():
            members = [parameters[name] for name in names]
            flat, slots = _flattened(members, [name.removeprefix(prefix) for name in names])
            self.register_parameter(f"flat_{key}", flat)
            self.stored.append(Stored(flat, slots))
            self._owners.append([owners[id(member)] for member in members])
            for owner in (owner for places in self._owners[-1] for owner in places):
                del owner.module._parameters[owner.leaf]
        self.stored += stored_whole(module, prefix=prefix)

    def forward(self, *arguments: Any) -> Any:
        """Call the module with the same arguments and return the module's result."""
        self._install()
        return self.module(*arguments)

    def _install(self) -> None:
        """Replace the parameters in all submodules by views of the flat tensors. `forward` calls this method each
        time."""
        self.gap = self.gap.to(self.stored[0].tensor)
        for stored, owners in zip(self.stored, self._owners, strict=False):
            num_owners = [len(places) for places in owners]
            views = _Unflatten.apply(stored.tensor, self.gap, stored.slots, num_owners)  # type: ignore[no-untyped-call]
            for view, owner in zip(views, (owner for places in owners for owner in places), strict=True):
                owner.module.__dict__[owner.leaf] = view  # nn.Module accepts leaf tensors only


def stored_whole(module: nn.Module, *, prefix: str) -> list[Stored]:
    """Return the parameters of a module unchanged, one in each `Stored`. `prefix` is removed from their names."""
    return [
        Stored(parameter, (Slot(name.removeprefix(prefix), 0, parameter.shape),))
        for name, parameter in module.named_parameters()
    ]


def named_values(stored: list[Stored]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of every parameter of the model, as views. At ZeRO stage 3 the values are empty."""
    for tensor, slots in stored:
        if not tensor.numel():  # ZeRO-3 has partitioned it
            yield from ((slot.name, tensor.detach()) for slot in slots)
            continue
        for slot in slots:
            yield slot.name, tensor.detach().view(-1)[slot.start : slot.stop].view(slot.shape)


def _groups(names: Iterable[str], *, prefix: str, matrices: Collection[str]) -> dict[str, list[str]]:
    """Return the names of the parameters that share a flat tensor, by the name of their group.

    The matrices of each block are a group, and all parameters without weight decay are a group. Other parameters, such
    as embeddings, are in no group.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        short_name = name.removeprefix(prefix)
        block = re.match(r"blocks\.(\d+)\.", short_name)
        if not is_decayed(name):
            groups.setdefault("kept", []).append(name)
        elif block is not None:
            if short_name in matrices:
                kind = "_matrices"
            else:
                kind = ""
            groups.setdefault(f"block_{block[1]}{kind}", []).append(name)
    return groups


def _owners(module: nn.Module) -> dict[int, list[Owner]]:
    """Return the modules that use each parameter. The key is the parameter's `id`."""
    owners: dict[int, list[Owner]] = {}
    for part in module.modules():
        for leaf, parameter in part._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(Owner(part, leaf))
    return owners


def _flattened(members: list[nn.Parameter], names: list[str]) -> tuple[nn.Parameter, tuple[Slot, ...]]:
    """Copy parameters into a new flat parameter. Returns the flat parameter and the place of each parameter in it."""
    slots = []
    size = 0
    for name, member in zip(names, members, strict=True):
        slots.append(Slot(name, size, member.shape))
        size = -(-slots[-1].stop // ALIGNMENT) * ALIGNMENT
    flat = members[0].new_zeros(size)
    for slot, member in zip(slots, members, strict=True):
        flat[slot.start : slot.stop] = member.detach().view(-1)
    return nn.Parameter(flat), tuple(slots)


class _Unflatten(torch.autograd.Function):
    """Autograd function that returns views of a flat tensor. Its backward pass joins the views' gradients in one flat
    gradient.

    A parameter has a view for each module that uses it. So the gradients of biases that all layers share are summed at
    once, where autograd would add them layer by layer. `gap` holds zeros for the places between parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, gap: Tensor, slots: tuple[Slot, ...], num_owners: list[int]
    ) -> tuple[Tensor, ...]:
        ctx.gap = gap
        ctx.slots = slots
        ctx.num_owners = num_owners
        ctx.size = flat.numel()
        views = []
        for slot, count in zip(slots, num_owners, strict=True):
            views += [flat[slot.start : slot.stop].view(slot.shape) for _ in range(count)]
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gap = ctx.gap
        pieces = []
        end = 0
        first = 0
        for slot, count in zip(ctx.slots, ctx.num_owners, strict=True):
            total = _summed(gradients[first : first + count])
            pieces += [gap[: slot.start - end], total.reshape(-1)]
            end = slot.stop
            first += count
        return torch.cat([*pieces, gap[: ctx.size - end]]), None, None, None


def _summed(gradients: tuple[Tensor, ...]) -> Tensor:
    """Sum the gradients of a parameter that several modules use.

    On a CPU they are added from the last module to the first, as autograd does. On a GPU the order is another one.
    """
    if len(gradients) == 1:
        return gradients[0]
    if gradients[0].is_cuda:
        return torch.stack(gradients).sum(0)
    return functools.reduce(torch.add, reversed(gradients))
