"""Rewind of a run after a spike of its loss or gradient norm: the checkpoint to return to, and the text to skip."""

from __future__ import annotations

import json
from typing import NamedTuple

from txl_dist.artifacts import SETTINGS, list_checkpoints, step_of
from txl_dist.config.load import load_config
from txl_dist.config.phases import at_step
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.distributed.collectives import run_on_rank0
from txl_dist.train.checkpoint.read import examine_together
from txl_dist.train.checkpoint.validate import SavedState, read_state
from txl_dist.train.state import RunContext, TrainState


class Rewind(NamedTuple):
    """Checkpoint and position in the text from which a run continues after a spike of its loss or gradient norm."""

    saved: SavedState
    stream: StreamState
    """Position in the training text at the checkpoint. Training then skips the text of the spike."""


def find_rewind(
    context: RunContext, state: TrainState, *, first_bad: int, began: tuple[int, StreamState]
) -> Rewind | None:
    """Find the newest complete checkpoint of this phase, of a step before `first_bad`, the first step of a spike. All
    ranks call it together.

    The stream of the result skips the text that was read from step `first_bad` until now. `began` contains the step and
    the stream with which this process began. Returns None if there is no such checkpoint.
    """
    # A step of an earlier phase would be made with the settings of this phase, but after a resume with its own.
    steps = range(context.steps.start, first_bad)
    before = run_on_rank0(lambda: [path for path in list_checkpoints(context.run_dir) if step_of(path) in steps])
    whole = (path for path in reversed(before) if not examine_together(path, context.ranks).problems)
    target = next(whole, None)
    if target is None:
        return None
    saved = run_on_rank0(lambda: read_state(target))
    base = run_on_rank0(lambda: stream_of(saved, context, began=began, now=state.stream))
    if base is None:
        return None
    begin = base.advanced((first_bad - 1 - saved.step) * context.config.train.step_len)
    return Rewind(saved, base.with_skip(begin, state.stream))


def began_text(step: int, stream: StreamState) -> str:
    """Return the step and the stream with which a process or phase began, as JSON for a copy of the state."""
    return json.dumps([step, stream.to_dict()])


def began_in(text: str) -> tuple[int, StreamState]:
    """Return the step and the stream in a text of `began_text`."""
    step, stream = json.loads(text)
    return step, StreamState.from_dict(stream)


def stream_of(
    saved: SavedState, context: RunContext, *, began: tuple[int, StreamState], now: StreamState
) -> StreamState | None:
    """Return the stream (position in the text) of a checkpoint to rewind to. It leaves out the text that earlier
    rewinds skipped.

    Returns None if the checkpoint divided the text among lanes, or cut it into segments, in another way than the run
    does now. Raises CheckpointError if the checkpoint cannot be read.
    """
    step, stream = began
    if saved.step != step:
        stream = saved.stream
    saved_len = at_step(load_config(saved.folder / SETTINGS), saved.step).train.step_len
    if saved.step < step and saved_len != context.config.train.step_len:
        return None  # its steps cannot be counted in segments of the present length
    if [corpus.cut() for corpus in stream.corpora] != [corpus.cut() for corpus in now.corpora]:
        return None
    return stream.with_skip(now, now)
