"""The matrix products of a training step: their share of its time, and how long they take alone.

    share = share_of_products(step)
    products = Products.of(step)        # then `products()` runs them once

Products are `mm`, `addmm`, `bmm` and `baddbmm`. Alone they are called as the step calls them, in its order, with its
shapes and strides, and with results written where it wants them; but each on operands of its own, side by side in a
pool so large that no cache still holds them when it begins anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
POOL_NUMBERS = 2**27
"""fp32, for operands and for results each: 512 MiB, more than the cache of one core and than most that are shared."""


def share_of_products(step: Callable[[], object], *, steps: int = 4) -> float:
    """The part of the self time of all operations, by torch's profiler; the best of some steps."""
    shares: list[float] = []
    for _ in range(steps):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        times = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
        shares.append(sum(times.get(name, 0) for name in NAMES) / sum(times.values()))
    return max(shares)


class Products(TorchDispatchMode):
    """The products of a step, ready to be made again."""

    def __init__(self, *, pool_numbers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operands, self._results = _Pool(pool_numbers), _Pool(pool_numbers)
        self._calls: list[Callable[[], Tensor]] = []

    @classmethod
    def of(cls, step: Callable[[], object], *, pool_numbers: int = POOL_NUMBERS) -> Products:
        """Those that `step` makes, forward and backward."""
        recorded = cls(pool_numbers=pool_numbers)
        with recorded:
            step()
        return recorded

    def __call__(self) -> None:
        """Make them all."""
        for call in self._calls:
            call()

    def __len__(self) -> int:
        return len(self._calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in NAMES:
            out = kwargs.get("out")
            mine = {} if out is None else {id(out): self._results.like(out)}
            own_args = [mine.get(id(x), self._operands.like(x)) if isinstance(x, Tensor) else x for x in args]
            own_kwargs = kwargs if out is None else kwargs | {"out": mine[id(out)]}
            self._calls.append(lambda: func(*own_args, **own_kwargs))
        return func(*args, **kwargs)


class _Pool:
    """Memory that is given out from one end to the other, and then again."""

    def __init__(self, numbers: int) -> None:
        self._values, self._begin = torch.empty(numbers).normal_(0, 0.02), 0

    def like(self, x: Tensor) -> Tensor:
        """A tensor of its shape and strides."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        begin = self._begin if self._begin + span <= self._values.numel() else 0
        self._begin = begin + (span + 15) // 16 * 16  # as aligned as torch's own
        return self._values.as_strided(x.shape, x.stride(), begin)
