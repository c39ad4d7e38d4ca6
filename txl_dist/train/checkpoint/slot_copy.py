"""Copies of a rank's state into a slot: a plain copy on a CPU, a side stream into pinned host memory on a GPU.

    main thread     mark: all work that makes the values is in the queue of the device
    thread          copy: wait for the mark on a side stream, copy, wait for the copy

On a GPU the copy overlaps with the next forward and backward pass. The weights do not change before the next update,
and `StateSlots.wait` comes before that. A CUDA graph overwrites the memory (hidden states) earlier, so the memory is
first copied on the device.

An aborted collective leaves undefined values. So a copy that ended after a newer plan arrived is refused. The
plan arrives before the abort, so a copy that passed this check holds values of finished collectives only.

`PinnedSlotCopy` has not been run on a GPU. Its tests run on a CPU, with fakes for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from txl_dist.errors import LostRankError
from txl_dist.model.memory import Memory


class SlotCopy:
    """Plain copy between tensors of the host."""

    device = torch.device("cpu")
    """Device that holds the values."""

    def unchanging(self, memories: Sequence[Memory]) -> Sequence[Memory]:
        """Return the memories in tensors that no later step overwrites. Called in the main thread, before `mark`."""
        return memories

    def mark(self) -> Any:
        """Return a mark (a CUDA event) after the work that makes the values, or None on a CPU. Called in the main
        thread, before `copy`."""
        return None

    def pin(self, content: Tensor) -> None:
        """Prepare the memory of a slot, a tensor of bytes, for fast copies. Raises OSError if that fails."""

    def unpin(self, content: Tensor) -> None:
        """Undo `pin`, before the memory is unmapped."""

    def copy(self, targets: Sequence[Tensor], values: Sequence[Tensor], mark: Any) -> None:
        """Copy the values, and return when they are in the slot. Called in a thread, with the result of `mark`."""
        torch._foreach_copy_(list(targets), list(values))


class PinnedSlotCopy(SlotCopy):
    """Copy from a GPU into pinned host memory, on a stream of its own. Not run on a GPU so far."""

    def __init__(self, device: torch.device, *, is_void: Callable[[], bool]) -> None:
        """Keep the device. `is_void` returns whether collectives may have been aborted."""
        self.device = device
        self._is_void = is_void
        self._stream: Any = None

    @override
    def unchanging(self, memories: Sequence[Memory]) -> Sequence[Memory]:
        copies = []
        for hidden, document_BM in memories:
            copies.append(Memory(tuple(map(torch.clone, hidden)), document_BM.clone()))
        return copies

    @override
    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record()
        return event

    @override
    def pin(self, content: Tensor) -> None:
        with torch.cuda.device(self.device):  # another thread would open a context on the first GPU
            _check_cuda(torch.cuda.cudart().cudaHostRegister(content.data_ptr(), content.numel(), 0))

    @override
    def unpin(self, content: Tensor) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(content.data_ptr())

    @override
    def copy(self, targets: Sequence[Tensor], values: Sequence[Tensor], mark: Any) -> None:
        with torch.cuda.device(self.device):  # each thread has a device of its own
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(mark)
                for target, value in zip(targets, values, strict=True):
                    target.copy_(value, non_blocking=True)
            self._stream.synchronize()
        if self._is_void():
            raise LostRankError("a rank was lost while the state was copied")


def _check_cuda(code: Any) -> None:
    """Raise OSError for an error code of CUDA."""
    if int(code) != 0:
        raise OSError(f"CUDA cannot pin the memory (error {int(code)})")
