"""Traces of some steps of a run by torch's profiler: `txl train CONFIG --profile 20:22`.

Rank 0 writes `RUN_DIR/profile/steps_20_22_rank0.pt.trace.json.gz`, a torch profiler trace for chrome://tracing,
Perfetto, or TensorBoard's PyTorch profiler plugin (`--logdir RUN_DIR`, which looks for that ending):
operations on host and device, their shapes, the memory allocated, and a range around each part of a step:

    data        waiting for the reader thread
    forward     of one micro-batch
    backward    of one micro-batch; collectives that overlap with it are in it
    exchange    the norm of the gradients, which needs those of all ranks
    update      the optimizer and what gathers the weights

The ranges are `record_function`s of the loop and of the step. They cost microseconds while nothing is traced.

On a GPU it also writes `..._memory.pickle`, with every allocation and its stack, for
https://docs.pytorch.org/memory_viz. A trace begins when its first step asks for data, and ends when the step after its
last one does. So it includes logging, saving and evaluating between two steps. It changes no number of a training, only
the speed of the traced steps.
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
"""Newest allocations and releases that a memory snapshot keeps."""


def parse_steps(text: str, *, max_steps: int) -> range:
    """Return the steps of "a:b", both included and counted from 1.

    Raises ConfigError for another form, or for steps that the run does not have.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match:
        first, last = (int(number) for number in match.groups())
    else:
        first, last = (0, 0)
    if not 1 <= first <= last <= max_steps:
        raise ConfigError(
            f"--profile {text} names no steps of this run. Write FIRST:LAST, both included, with "
            f"1 <= FIRST <= LAST <= train.max_steps = {max_steps}; for instance --profile {min(20, max_steps)}:"
            f"{min(22, max_steps)}."
        )
    return range(first, last + 1)


class StepProfile:
    """Tracer of some steps, once, on the rank that makes it."""

    def __init__(self, steps: range, *, folder: Path) -> None:
        """`folder` is created when the trace is written. With an empty range nothing is traced, at no cost."""
        self._steps = steps
        self._folder = folder
        self._profiler: profile | None = None

    def on_step(self, step: int) -> None:
        """Begin or end the trace if that is due. Called before a step asks for its data."""
        if self._profiler is not None:
            if step not in self._steps:
                self.close()
        elif step in self._steps:
            self._begin()
        elif step >= self._steps.stop > 0:
            logger.warning("profile: the run is already past steps %d to %d", self._steps[0], self._steps[-1])
            self._steps = range(0)

    def close(self) -> None:
        """Write the trace, if one has begun. No further trace begins afterwards."""
        if self._profiler is None:
            return
        name = f"steps_{self._steps[0]}_{self._steps[-1]}_rank0"
        trace = self._folder / f"{name}.pt.trace.json.gz"
        snapshot = self._folder / f"{name}_memory.pickle"
        self._profiler.stop()
        written = f"{trace}; it has memory as a counter, a memory snapshot needs a GPU"
        try:
            self._folder.mkdir(exist_ok=True)
            self._profiler.export_chrome_trace(str(trace))
            if uses_gpu():
                torch.cuda.memory._dump_snapshot(str(snapshot))
                written = f"{trace} and {snapshot}"
            logger.info("profile: wrote %s", written)
        except OSError as error:  # no reason to end a run
            logger.warning("profile: the trace is lost, %s cannot be written: %s", self._folder, error)
        finally:
            if uses_gpu():
                torch.cuda.memory._record_memory_history(enabled=None)
            self._profiler = None
            self._steps = range(0)

    def _begin(self) -> None:
        """Start the profiler, and on a GPU the recording of allocations."""
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * uses_gpu()
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
        if uses_gpu():
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        self._profiler.start()
