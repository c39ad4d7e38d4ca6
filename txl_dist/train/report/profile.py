"""Traces of some steps of a run by torch's profiler: `txl train CONFIG --profile 20:22`.

Rank 0 writes `RUN_DIR/profile/steps_20_22_rank0.pt.trace.json.gz`. Chrome (chrome://tracing), Perfetto and
TensorBoard's PyTorch profiler plugin (`--logdir RUN_DIR`) can show this file. The file contains the operations on host
and device, their shapes, the allocated memory, and a range around each part of a step:

    data        waiting for the reader thread
    forward     the forward pass of one micro-batch
    backward    the backward pass of one micro-batch, with the collectives that overlap with it
    exchange    the norm of the gradients, which needs the gradients of all ranks
    update      the optimizer, and the collectives that gather the weights

The training loop and the stepper mark these ranges with `record_function`. Without a trace a range costs microseconds.

On a GPU, rank 0 also writes `..._memory.pickle`, with every allocation and its stack, for
https://docs.pytorch.org/memory_viz. A trace begins before its first step reads data. It ends after its last step,
before the next step reads data. So it includes logging, saving and evaluating between two steps. A trace changes the
speed of the traced steps, but no result of training.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from txl_dist.console.logging import logger
from txl_dist.distributed.collectives import uses_gpu
from txl_dist.errors import ConfigError

_MAX_ALLOCATIONS = 1_000_000
"""Maximum number of allocations and releases in a memory snapshot. If there are more, a snapshot has the newest of
them."""


def parse_steps(text: str, *, max_steps: int) -> range:
    """Return the steps that a text "FIRST:LAST" names, including the first and the last step. Steps are
    counted from 1.

    Raises ConfigError for text of another form, and for steps that a run of `max_steps` steps does not have.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match:
        first, last = (int(number) for number in match.groups())
    else:
        first, last = (0, 0)
    if not 1 <= first <= last <= max_steps:
        raise ConfigError(
            f"--profile {text} is not a range of steps of this run. Write FIRST:LAST, the first and the last step to "
            f"trace, with 1 <= FIRST <= LAST <= train.max_steps = {max_steps}, for instance --profile "
            f"{min(20, max_steps)}:{min(22, max_steps)}."
        )
    return range(first, last + 1)


class StepProfile:
    """Tracer of a range of steps on this rank. Each object writes at most one trace."""

    def __init__(self, steps: range, *, folder: Path) -> None:
        """Store the steps to trace. An empty range traces nothing, at no cost. `folder` is created when the trace is
        written."""
        self._steps = steps
        self._folder = folder
        self._profiler: profile | None = None

    def on_step(self, step: int) -> None:
        """Begin the trace at the first step to trace, and write the trace after the last step to trace.

        Call this method before each step reads its data.
        """
        if self._profiler is not None:
            if step not in self._steps:
                self.close()
        elif step in self._steps:
            self._begin()
        elif step >= self._steps.stop > 0:
            logger.warning(
                "profile: no trace, because the run is already past steps %d to %d", self._steps[0], self._steps[-1]
            )
            self._steps = range(0)

    def close(self) -> None:
        """Write the trace, if it has begun. Afterwards this object traces nothing more."""
        if self._profiler is None:
            return
        name = f"steps_{self._steps[0]}_{self._steps[-1]}_rank0"
        trace = self._folder / f"{name}.pt.trace.json.gz"
        snapshot = self._folder / f"{name}_memory.pickle"
        self._profiler.stop()
        written = f"{trace}, with the allocated memory as a counter. A memory snapshot needs a GPU"
        try:
            self._folder.mkdir(exist_ok=True)
            self._profiler.export_chrome_trace(str(trace))
            if uses_gpu():
                torch.cuda.memory._dump_snapshot(str(snapshot))
                written = f"{trace} and {snapshot}"
            logger.info("profile: wrote %s", written)
        except OSError as error:  # no reason to end a run
            logger.warning("profile: the trace is lost, because %s cannot be written: %s", self._folder, error)
        finally:
            if uses_gpu():
                torch.cuda.memory._record_memory_history(enabled=None)
            self._profiler = None
            self._steps = range(0)

    def _begin(self) -> None:
        """Start the profiler and, on a GPU, the recording of allocations."""
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * uses_gpu()
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
        if uses_gpu():
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        self._profiler.start()
