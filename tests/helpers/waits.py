"""Find operations for which the host would wait for a GPU, because it needs their result. It works on any device."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique",
    "aten::_unique2",
}


class Waits(TorchDispatchMode):
    """A context that counts operations, and records the stack of each operation that waits.

    It does not see `tolist`, and it does not see `numpy` and `cpu` of a tensor that is on the CPU already.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0
        self.places: list[str] = []
        self.longest = 0
        """Number of values of the largest tensor that an operation made, views not counted."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num_operations += 1
        if func._schema.name in WAITING:
            self.places.append("".join(traceback.format_stack(limit=8)[:-1]))
        operation: Callable[..., Any] = func
        result = operation(*args, **(kwargs or {}))
        if not func.is_view:
            made = [value.numel() for value in tree_leaves(result) if isinstance(value, Tensor)]
            self.longest = max([self.longest, *made])
        return result


class Copies(TorchDispatchMode):
    """A context that records the name of each operation that copies from the host to a device and waits.

    Inside torch's `FakeTensorMode` it needs no GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_device: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        moves = any(value.device.type == "cpu" for value in given) and any(value.device.type != "cpu" for value in made)
        if moves and not (kwargs or {}).get("non_blocking", False):
            self.to_device.append(func._schema.name)
        return result
