"""The matrix products of a training step: their share of its time, and their time alone.

    share = share_of_products(step)
    products = Products.of(step)        # then `products()` runs them once

Products are `mm`, `addmm`, `bmm` and `baddbmm`. Alone they run in the same order as in the step, with the same shapes,
strides and output tensors. But each product has its own operands in a pool of memory. The pool is so large that no
cache still contains the operands in the next run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
POOL_NUMBERS = 2**27
"""Number of fp32 values in the pool of operands, and in the pool of results. Each pool has 512 MiB, more than the cache
of a core and than most shared caches."""


def share_of_products(step: Callable[[], object], *, steps: int = 4) -> float:
    """Return the products' share of the self time of all operations, by torch's profiler. It is the largest share of
    `steps` steps."""
    shares: list[float] = []
    for _ in range(steps):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        times = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
        shares.append(sum(times.get(name, 0) for name in NAMES) / sum(times.values()))
    return max(shares)


class Products(TorchDispatchMode):
    """The products of a step, recorded so that they can run again."""

    def __init__(self, *, pool_numbers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operands, self._results = _Pool(pool_numbers), _Pool(pool_numbers)
        self._calls: list[Callable[[], Tensor]] = []

    @classmethod
    def of(cls, step: Callable[[], object], *, pool_numbers: int = POOL_NUMBERS) -> Products:
        """Record the products that `step` makes, forward and backward."""
        recorded = cls(pool_numbers=pool_numbers)
        with recorded:
            step()
        return recorded

    def __call__(self) -> None:
        """Run all recorded products once."""
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
    """Memory that is given out from the beginning to the end, and then from the beginning again."""

    def __init__(self, numbers: int) -> None:
        self._values, self._begin = torch.empty(numbers).normal_(0, 0.02), 0

    def like(self, x: Tensor) -> Tensor:
        """Return a tensor in the pool with the shape and the strides of `x`."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        begin = self._begin if self._begin + span <= self._values.numel() else 0
        self._begin = begin + (span + 15) // 16 * 16  # the same alignment as torch's own tensors
        return self._values.as_strided(x.shape, x.stride(), begin)
