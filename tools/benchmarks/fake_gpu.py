"""A fake GPU: inside `with fake_gpu(recorder) as device:` all code for CUDA runs, but no values are computed.

Tensors are torch's fake tensors: they have shapes, types and a device, but no values. All Python code runs as on an
H100, including the choice of kernels and chunks and the engine's work on the gradients. Each operation that torch
dispatches is passed to a `Recorder`, and so is each Triton kernel with its grid.

A build of torch without CUDA has no device guard for CUDA, but autograd needs a guard. So C++ sees the tensors on the
meta device, which every build has, and Python sees them on `cuda`.

Limitations: Code that depends on values does not work (`.item()` returns 1). ZeRO-3 does not work, because it compares
numbers between ranks. C++ code that chooses by device takes the path of the meta device. Of the operations used here
only dropout does so, and it is replaced by the operation that CUDA uses (`native_dropout`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from txl_dist.model.kernels import attention_launch

MULTIPROCESSORS = 132
MEMORY_BYTES = 80 << 30
_CUDA, _META = torch.device("cuda", 0), torch.device("meta")


class HopperDriver:
    """The part of a Triton driver that compilation for compute capability 9.0 needs. No GPU is used."""

    def get_current_target(self) -> Any:
        """Return what Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the number of the device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


class Recorder(Protocol):
    """Interface of an object that gets every operation and every kernel of the fake device."""

    def operation(self, function: Any, arguments: tuple[Any, ...], settings: dict[str, Any], result: Any) -> None:
        """Called after torch has dispatched an operation."""

    def kernel(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
        """Called for each launch of a Triton kernel. `kernel` is Triton's JITFunction."""


@contextmanager
def fake_gpu(recorder: Recorder) -> Iterator[torch.device]:
    """Yield the fake device. All tensors used inside must be made on this device."""
    from triton.runtime.jit import JITFunction

    handlers, device_of = fake_tensor._DISPATCH_META_HANDLERS, torch.ops.prim.device.default

    def launch(kernel: Any, *arguments: Any, grid: Any, warmup: bool = False, **settings: Any) -> None:
        names = dict(zip(kernel.arg_names, arguments, strict=False)) | settings
        recorder.kernel(kernel, tuple(grid(names) if callable(grid) else grid), arguments, settings)

    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=MULTIPROCESSORS,
        total_memory=MEMORY_BYTES,
        L2_cache_size=50 << 20,
    )
    with ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any, **settings: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, **settings))

        stack.enter_context(mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}))
        stack.enter_context(mock.patch.dict(handlers, {device_of: lambda arguments: _META}))
        patch(FakeTensor, "__torch_dispatch__", classmethod(_dispatch))
        patch(FakeTensor, "__new__", staticmethod(_new))
        patch(FakeTensor, "is_cuda", property(lambda self: self.fake_device.type == "cuda"))
        patch(FakeTensor, "to", _to, create=True)
        patch(nn.Module, "_apply", _apply)
        patch(nn.functional, "dropout", _dropout)
        patch(torch.cuda, "get_device_properties", lambda device=None: properties)
        patch(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch(torch.cuda, "get_device_name", lambda device=None: properties.name)
        patch(torch.cuda, "_lazy_init", lambda: None)
        patch(torch.cuda, "device", _current_device)
        patch(fake_tensor, "init_gpu_context", lambda device: None)
        patch(attention_launch, "failed_kernel_reason", lambda device: "")
        patch(JITFunction, "run", launch)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Recording(recorder))
        yield _CUDA


CURRENT = [0]
"""Indices of the fake GPUs that became the current one, one inside the other. The last index is the current GPU."""


@contextmanager
def _current_device(device: torch.device) -> Iterator[None]:
    """Make a fake GPU the current one, in place of the context manager `torch.cuda.device`."""
    CURRENT.append(device.index)
    try:
        yield
    finally:
        CURRENT.pop()


class _Recording(TorchDispatchMode):
    """Dispatch mode that runs every operation on the fake device and then passes it to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), settings: dict[str, Any] | None = None
    ) -> Any:
        settings = dict(settings or {})
        if settings.get("device") == _META:  # C++ used the device of another tensor for a new tensor
            settings["device"] = _CUDA
        if function is torch.ops.aten._local_scalar_dense.default:
            result: Any = 1.0 if arguments[0].is_floating_point() else 1
        elif function is torch.ops.aten.native_dropout.default:  # fake tensors do not implement this operation
            result = torch.empty_like(arguments[0]), torch.empty_like(arguments[0], dtype=torch.bool)
        elif function is torch.ops.aten.native_dropout_backward.default:
            result = torch.empty_like(arguments[0])
        else:
            result = function(*arguments, **settings)
        on_device = any(isinstance(x, Tensor) and x.is_cuda for x in tree_leaves((arguments, settings, result)))
        if on_device and function is not torch.ops.prim.device.default:
            self.recorder.operation(function, arguments, settings, result)
        return result


_true_dispatch: Callable[..., Any] = FakeTensor.__torch_dispatch__
_true_new: Callable[..., Any] = FakeTensor.__new__


def _dispatch(
    cls: type, function: Any, types: Any, arguments: tuple[Any, ...] = (), settings: dict[str, Any] | None = None
) -> Any:
    if function is torch.ops.prim.device.default:
        return _META
    return _true_dispatch(function, types, arguments, settings or {})


def _new(cls: type, mode: Any, element: Tensor, device: torch.device, *more: Any, **settings: Any) -> Any:
    return _true_new(cls, mode, element, _CUDA if device.type == "meta" else device, *more, **settings)


def _to(tensor: FakeTensor, *arguments: Any, **settings: Any) -> Any:
    """Replacement of `Tensor.to`, because torch's own code needs CUDA."""
    copy = settings.pop("copy", False)
    if arguments and isinstance(arguments[0], Tensor):
        device, dtype = arguments[0].device, arguments[0].dtype
    else:
        device, dtype, _, _ = torch._C._nn._parse_to(*arguments, **settings)
    device, dtype = device or tensor.device, dtype or tensor.dtype
    if device.type == tensor.device.type and dtype == tensor.dtype and not copy:
        return tensor
    return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=device)


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replacement of `Module._apply`, which cannot exchange fake parameters that are tied. Parameters stay the same
    objects."""
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is None:
                continue
            with torch.no_grad():
                new = function(parameter)
            if new is not parameter:
                parameter.data = new
                parameter.fake_device = new.device  # type: ignore[attr-defined]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else function(buffer)
    return module


def _dropout(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Compute `F.dropout` as CUDA does, in one kernel."""
    return torch.native_dropout(values, p, True)[0] if training and p else values
