"""The parameters that an engine sees: many of the model's in one flat tensor, or each as it is.

DeepSpeed works in Python for every parameter tensor and step: hooks, copies into buckets, norms. A Transformer-XL has a
dozen small tensors per layer, so that the host falls behind the device. `FlatModule` lays the matrices of each block
into one flat parameter, and everything that is not decayed into another one: 16 tensors for 12 layers instead of 150.
Within a step the model computes with views, whose gradients are put together in one copy when the last has come, block
by block, so that the exchange of gradients still overlaps with the backward pass.

`Stored` says which parameters of the model lie in which of the engine: all that optimizer and checkpoint need to know.

What it gives up: a copy of the gradients per micro-batch. Not for ZeRO-3, where a view would keep the gathered tensor
of its layer alive, nor for optimizers that look at whole matrices.

    flat   | query.weight | key_value.weight .. | distance.weight |    each begins at a multiple of ALIGNMENT values
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from txl_dist.train.engine.optimizer import is_decayed

ALIGNMENT = 128
"""Values: the products of half precision want operands at multiples of 16 bytes, caches at 128."""


class Slot(NamedTuple):
    """Where a parameter of the model lies in a flat one."""

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """The value behind its last one."""
        return self.start + math.prod(self.shape)


class Stored(NamedTuple):
    """A parameter of the engine and what lies in it, in order of place."""

    tensor: nn.Parameter
    slots: tuple[Slot, ...]


class Owner(NamedTuple):
    """A module that uses a parameter, and the name it has there; a tied one has several owners."""

    module: nn.Module
    leaf: str


class FlatModule(nn.Module):
    """A module whose small parameters lie in flat ones. What is called is `module`, with the same arguments."""

    def __init__(self, module: nn.Module, *, prefix: str, matrices: Collection[str] = ()) -> None:
        """`prefix` is left out of the names of the parameters. `matrices` are those, by such names, that the optimizer
        treats apart from everything else in a block."""
        super().__init__()
        self.module = module
        parameters = dict(module.named_parameters())
        owners = _owners(module)
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
        """What the module gives."""
        self._install()
        return self.module(*arguments)

    def _install(self) -> None:
        """Give the modules views of the flat tensors as they are now."""
        for stored, owners in zip(self.stored, self._owners, strict=False):
            views = _Unflatten.apply(stored.tensor, stored.slots)  # type: ignore[no-untyped-call]
            for view, places in zip(views, owners, strict=True):
                for owner in places:
                    owner.module.__dict__[owner.leaf] = view  # nn.Module would take a leaf only


def stored_whole(module: nn.Module, *, prefix: str) -> list[Stored]:
    """Each parameter as it is."""
    return [
        Stored(parameter, (Slot(name.removeprefix(prefix), 0, parameter.shape),))
        for name, parameter in module.named_parameters()
    ]


def named_values(stored: list[Stored]) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of every parameter of the model, as views."""
    for tensor, slots in stored:
        if not tensor.numel():  # ZeRO-3 has taken it away
            yield from ((slot.name, tensor.detach()) for slot in slots)
            continue
        for slot in slots:
            yield slot.name, tensor.detach().view(-1)[slot.start : slot.stop].view(slot.shape)


def _groups(names: Iterable[str], *, prefix: str, matrices: Collection[str]) -> dict[str, list[str]]:
    """Names that share a flat tensor: the matrices of each block, and all that is not decayed."""
    groups: dict[str, list[str]] = {}
    for name in names:
        own = name.removeprefix(prefix)
        block = re.match(r"blocks\.(\d+)\.", own)
        if not is_decayed(name):
            groups.setdefault("kept", []).append(name)
        elif block is not None:
            kind = "_matrices" if own in matrices else ""
            groups.setdefault(f"block_{block[1]}{kind}", []).append(name)
    return groups


def _owners(module: nn.Module) -> dict[int, list[Owner]]:
    owners: dict[int, list[Owner]] = {}
    for part in module.modules():
        for leaf, parameter in part._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(Owner(part, leaf))
    return owners


def _flattened(members: list[nn.Parameter], names: list[str]) -> tuple[nn.Parameter, tuple[Slot, ...]]:
    slots, size = [], 0
    for name, member in zip(names, members, strict=True):
        slots.append(Slot(name, size, member.shape))
        size = -(-slots[-1].stop // ALIGNMENT) * ALIGNMENT
    flat = members[0].new_zeros(size)
    for slot, member in zip(slots, members, strict=True):
        flat[slot.start : slot.stop] = member.detach().view(-1)
    return nn.Parameter(flat), tuple(slots)


class _Unflatten(torch.autograd.Function):
    """A flat tensor to views, and the gradients of the views to one flat gradient."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, slots: tuple[Slot, ...]) -> tuple[Tensor, ...]:
        ctx.slots, ctx.size = slots, flat.numel()
        return tuple(flat[slot.start : slot.stop].view(slot.shape) for slot in slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        pieces, end, gap = [], 0, gradients[0].new_zeros(ALIGNMENT)
        for slot, gradient in zip(ctx.slots, gradients, strict=True):
            pieces += [gap[: slot.start - end], gradient.reshape(-1)]
            end = slot.stop
        return torch.cat([*pieces, gap[: ctx.size - end]]), None
