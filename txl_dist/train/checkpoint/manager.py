"""The decisions about checkpoints: when to save, and which checkpoints to keep. The module `writer` writes the
checkpoints.

One save is in progress at a time. A failed save is tried again. Old checkpoints are removed after a new one is
complete. All ranks call all methods together.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from txl_dist.artifacts import best_step, list_checkpoints, step_of, steps_to_keep
from txl_dist.console.logging import warn_for_all
from txl_dist.distributed.collectives import StepFlags, all_reduce_flags, gather_objects, run_on_all_ranks, run_on_rank0
from txl_dist.errors import CheckpointError, TrainingError, raised_everywhere
from txl_dist.fault_injection import failpoint
from txl_dist.io.files import was_removed
from txl_dist.train.batch import BatchMaker
from txl_dist.train.callbacks import Callbacks, SaveEnd
from txl_dist.train.checkpoint.callback_states import CallbackStates, packed_states
from txl_dist.train.checkpoint.engine_probe import make_probes
from txl_dist.train.checkpoint.mirror.mirror import Mirror
from txl_dist.train.checkpoint.writer import AsyncWriter
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.report.loggers import MetricReporter
from txl_dist.train.report.metrics import check_finite
from txl_dist.train.state import TrainState

_FIRST_RETRY_S, _LONGEST_RETRY_S = 5.0, 60.0
_POLL_S = 0.2
_NOTICE_S = 5.0
"""Seconds after which the wait for the mirror at the end of the run is announced."""


class CheckpointManager:
    """Manager of the checkpoints of one run. The training loop uses it.

    It decides after which steps to save, retries a failed save, and removes old checkpoints. All ranks call its methods
    together.
    """

    def __init__(
        self,
        saver: AsyncWriter,
        engine: Engine,
        maker: BatchMaker,
        reporter: MetricReporter,
        *,
        newest: Path | None,
        evaluated: Mapping[int, float],
        callbacks: Callbacks,
        mirror: Mirror | None = None,
        unsaved_s: float = 0.0,
        retry_at: int = 0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the parts of the run that a save needs.

        `newest` is the checkpoint that the run resumed, or None. `evaluated` maps each evaluated step to its validation
        loss, and the run adds later evaluations to it. `mirror` uploads the checkpoints, or is None. `unsaved_s` is the
        number of seconds since the last save before, and `clock_s` returns the time in seconds, for
        `checkpoint.every_minutes`. `retry_at` is the value of another process that this one continues.
        """
        self._saver = saver
        self._engine = engine
        self._maker = maker
        self._reporter = reporter
        self._context = saver.context
        self._watch = saver.watch
        self._run_dir = saver.context.run_dir
        self._newest = newest
        self._evaluated = evaluated
        self._callbacks = callbacks
        self._mirror = mirror
        self._buffers = {name: buffer.clone() for name, buffer in _buffers_of(engine)}
        self.retry_at = retry_at
        """Step after which a failed save is repeated, or 0."""
        self._clock_s = clock_s
        self._counts_from_s = self._counted_from_s = clock_s() - unsaved_s
        self._stall_s = self._waited_s = 0.0
        self._removal: threading.Thread | None = None
        self._obeyed_stops: int | None = None

    @property
    def newest(self) -> Path | None:
        """The newest complete checkpoint of the run, or None."""
        return self._newest

    @property
    def is_written(self) -> bool:
        """Whether a save is in progress and this rank has finished writing its part."""
        return self._saver.in_flight and self._saver.is_written

    def seconds(self) -> dict[str, float]:
        """Return {"save_s": seconds that training steps have waited for checkpoints}, as fields of a record.

        Only checkpoints that were committed since the last call count. The result is empty if there is no such
        checkpoint.
        """
        waited_s = self._waited_s
        self._waited_s = 0.0
        if waited_s:
            return {"save_s": waited_s}
        return {}

    def is_due(self, step: int) -> bool:
        """Return whether the state must be saved after this step, because the interval has passed or the last save
        failed."""
        every = self._context.config.checkpoint.every_steps
        return step == self.retry_at or (every > 0 and step % every == 0)

    def is_lacking(self, step: int, *, since: int) -> bool:
        """Return whether a save is due after this step, or was due after an earlier step, later than `since`, and is
        neither on the disk nor planned again. The loss of a rank has dropped that save."""
        every = self._context.config.checkpoint.every_steps
        last_due = step - step % every if every > 0 else 0
        is_dropped = last_due > since and not self._has(last_due) and not self.retry_at
        return is_dropped or self.is_due(step)

    @property
    def is_late(self) -> bool:
        """Whether the time `checkpoint.every_minutes` has passed since the last save began.

        It is always False on ranks other than 0.
        """
        interval_s = 60 * self._context.config.checkpoint.every_minutes
        return self._context.ranks.is_rank0 and interval_s > 0 and self._clock_s() - self._counts_from_s >= interval_s

    @property
    def unsaved_s(self) -> float:
        """Seconds since the last save began that is not in progress any more."""
        return self._clock_s() - (self._counted_from_s if self._saver.in_flight else self._counts_from_s)

    def begin(self, state: TrainState) -> None:
        """Begin to save the state, unless this or a later state is already saved. The previous save is finished first.

        After the loss of a rank the copies may be older than the newest checkpoint, which then is of the same run.
        """
        self.finish(state.step)
        self._counted_from_s = self._counts_from_s
        self.retry_at, self._counts_from_s = 0, self._clock_s()
        if self._has(state.step):
            return
        start_s = time.perf_counter()
        self._watch.beat("save")
        self._wait_for_removal()  # the space that it frees may be needed
        config = self._context.saved_settings.config
        memory_lens = config.train.memory_per_layer(config.model.num_layers)
        with_average = config.optim.ema_decay > 0
        probe = make_probes(self._engine, self._maker, memory_lens=memory_lens, with_average=with_average)
        # This finds an update that spoiled the weights: the loss of its step was computed before it.
        probe_losses = gather_objects(float(probe["losses"].sum()))
        check_finite(probe_losses, what=f"the loss on the probe after step {state.step}")
        run_on_all_ranks(self._check_buffers)
        states = self._callbacks.states(step=state.step)
        packed = run_on_all_ranks(lambda: packed_states(CallbackStates(states, self._callbacks.validated_step)))
        self._saver.begin(state, self._engine, probe=probe, callbacks=packed)
        self._stall_s = time.perf_counter() - start_s
        if not self._context.config.checkpoint.asynchronous:
            self.finish(state.step)

    def _check_buffers(self) -> None:
        """Check that training has changed no buffer of the model, because a checkpoint stores parameters only.

        Raises TrainingError if a buffer has changed.
        """
        for name, buffer in _buffers_of(self._engine):
            if not torch.equal(buffer, self._buffers[name]):
                raise TrainingError(
                    f"training has changed the buffer {name} of the model. A checkpoint does not store buffers, so a "
                    f"resume or an export would lose the change. Make the buffer a parameter, or compute it in forward."
                )

    def finish(self, step: int) -> bool:
        """Commit the save in progress, if there is one. Returns False if the save failed.

        A failed save is logged, and another save is planned for a step after `step`.
        """
        if not self._saver.in_flight:
            return True
        self._watch.beat("commit")
        start_s = time.perf_counter()
        result = self._saver.finish()
        if result.error:
            self._plan_retry(step)
            warn_for_all(
                "the checkpoint of step %d could not be saved: %s The run will try again.", result.step, result.error
            )
            self._reporter.write("event", {"event": "save_failed", "step": result.step})
            if self._leads_disk and self._newest is not None:
                self._prune(self._newest)  # the user may have lowered checkpoint.keep_last to free space
            return False
        self._newest = result.folder
        if self._mirror is not None:
            self._mirror.save(result.folder, result.names, losses=self._losses_to_keep())
        if self._leads_disk:
            self._prune(result.folder)
        failpoint("saved", step=result.step)
        stall_s = self._stall_s + time.perf_counter() - start_s
        self._waited_s += stall_s
        record = {"event": "saved", "step": result.step, "path": result.folder.name}
        self._reporter.write("event", {**record, "seconds": round(stall_s, 3), "gib": round(result.gib, 6)})
        self._callbacks.end_save(SaveEnd(result.step, result.folder))
        return True

    def report_newest(self) -> None:
        """Write the `saved` event of the newest checkpoint. The rank that committed it was lost before it did so."""
        assert self._newest is not None
        files = self._newest.rglob("*") if self._leads_disk else ()
        size = sum(path.stat().st_size for path in files if path.is_file())
        record = {"event": "saved", "step": step_of(self._newest), "path": self._newest.name}
        self._reporter.write("event", {**record, "seconds": 0.0, "gib": round(size / 2**30, 6)})

    def abandon(self) -> None:
        """End a save that is in progress without committing it. This rank then leaves the job or its generation."""
        self._saver.abandon()

    def _plan_retry(self, step: int) -> None:
        """Plan another save after a tenth of the save interval. The interval is in steps, or in minutes if only minutes
        are set."""
        checkpoint = self._context.config.checkpoint
        if checkpoint.every_minutes and not checkpoint.every_steps:
            self._counts_from_s = self._clock_s() - 0.9 * 60 * checkpoint.every_minutes
        else:
            self.retry_at = step + max(1, checkpoint.every_steps // 10)

    def finish_last(self, state: TrainState, *, patience_s: float, stopped: bool = False) -> None:
        """Save the state before the run ends, and retry a failed save for `patience_s` seconds.

        A stop request during these retries ends the waiting, and the state is saved one last time. If a stop request
        already ends the run (`stopped`), only a second request ends the waiting. Raises CheckpointError on every rank
        if the state cannot be saved, or if the run directory no longer exists.
        """
        self._obeyed_stops = None if stopped else 0
        is_saved = self._save(state)
        is_asked = False
        # These requests have led here, or the launcher has repeated them; only further ones count.
        self._obeyed_stops = self._watch.stops.count if stopped else 0
        for number, delay_s in enumerate(_retry_delays(patience_s)):
            if is_saved or is_asked:
                break
            if number == 0:
                self._announce(state.step, patience_s=patience_s, stopped=stopped)
            is_asked = self._wait(delay_s)
            is_saved = self._save(state)
        if is_saved:
            self._wait_for_removal()
            return
        reasons = dict.fromkeys(reason for reason in gather_objects(self._watch.stops.reason) if reason)
        when = f"before {', '.join(reasons)} ended the attempts" if is_asked else f"in {patience_s:g} s"
        if self._context.ranks.is_rank0:
            with suppress(OSError):
                self._watch.stops.clear()  # the request was obeyed
        raise raised_everywhere(
            CheckpointError(
                f"the checkpoint of step {state.step} could not be saved {when}. The log contains the reason. Remove "
                f"the cause, and start the same command again. The run then {self._resume_hint()}."
            )
        )

    def _save(self, state: TrainState) -> bool:
        """Save the state and wait until the save ends. Returns whether the state is saved."""
        run_on_rank0(lambda: _check_is_there(self._run_dir))
        self.begin(state)
        self.finish(state.step)
        return self._has(state.step)

    def _has(self, step: int) -> bool:
        """Return whether the state after this step or a later step is saved."""
        return self._newest is not None and step_of(self._newest) >= step

    def _announce(self, step: int, *, patience_s: float, stopped: bool) -> None:
        """Log that the final save has failed, how long it is retried, and how to end the run earlier."""
        warn_for_all(
            "the last step, %d, is not saved yet: the run tries again for up to %s. To end the run earlier, use "
            "%s. The run then tries once more. If the last attempt fails, the same command %s.",
            step,
            _limit(patience_s),
            self._way_out(stopped=stopped),
            self._resume_hint(),
        )

    def _way_out(self, *, stopped: bool) -> str:
        """Return how to end a wait at the end of the run. If a stop request led to the end (`stopped`), only a second
        request counts."""
        if stopped:
            return "a second SIGTERM or Ctrl-C"
        return f"SIGTERM, Ctrl-C or the file {self._run_dir / 'STOP'}"

    def _resume_hint(self) -> str:
        """Return the end of a sentence about the next start of the run, for example `continues from step_000001200` or
        `starts from step 0`."""
        if self._newest is not None:
            return f"continues from {self._newest.name}"
        return "starts from step 0"

    def _wait(self, seconds: float) -> bool:
        """Wait `seconds` on all ranks, or until a rank is asked to stop (`_is_asked_to_leave`). Returns whether any
        rank was asked to stop."""
        end_s = time.monotonic() + seconds
        is_over = is_asked = False
        while not is_over and not is_asked:
            self._watch.beat("wait for the disk")
            time.sleep(min(_POLL_S, seconds))
            local = StepFlags(stop=self._is_asked_to_leave(), written=time.monotonic() >= end_s)
            is_asked, is_over, _ = all_reduce_flags(local, world_size=self._context.ranks.world_size)
        return is_asked

    def finish_mirror(self, *, patience_s: float, stopped: bool = False) -> None:
        """Wait at the end of the run until the mirror has the last checkpoint and all records, at most `patience_s`
        seconds.

        A stop request that arrives after `finish_last` began ends the wait. The state is saved on the disk in any case.
        """
        if self._mirror is None or self._mirror.is_given_up:
            if self._context.config.checkpoint.mirror:
                warn_for_all(
                    "mirror: the run ends without its last uploads, which the next start of the same command makes"
                )
            return
        self._mirror.finish_records()
        end_s = time.monotonic() + patience_s
        notice_s = time.monotonic() + _NOTICE_S
        is_over = is_asked = False
        while not is_over and not is_asked:
            self._watch.beat("wait for the mirror")
            is_done = self._mirror.is_idle or time.monotonic() >= end_s
            if not is_done and time.monotonic() >= notice_s:
                notice_s = end_s
                warn_for_all(
                    "mirror: the run waits for up to %s until its newest checkpoint and records are in %s, which lacks "
                    "%s. To end the run earlier, use %s",
                    _limit(patience_s),
                    self._mirror.url,
                    self._mirror.lacking(),
                    self._way_out(stopped=stopped),
                )
            local = StepFlags(stop=self._is_asked_to_leave(), written=is_done)
            is_asked, is_over, _ = all_reduce_flags(local, world_size=self._context.ranks.world_size)
            if not is_over and not is_asked:
                time.sleep(_POLL_S)
        if not self._mirror.is_idle:
            warn_for_all(
                "mirror: the run ends, and %s lacks %s. The newest checkpoint is on the disk, and the next start of "
                "the same command uploads it",
                self._mirror.url,
                self._mirror.lacking(),
            )

    def set_newest(self, folder: Path) -> None:
        """Set the newest checkpoint after a rewind, a return of the run to an earlier checkpoint. Steps that are
        repeated after the rewind are saved again."""
        self._newest = folder
        if self._mirror is not None:
            self._mirror.forget(step_of(folder))

    def _is_asked_to_leave(self) -> bool:
        """Return whether this rank received a stop request during the last save. The request that caused the save does
        not count."""
        return self._obeyed_stops is not None and self._watch.stops.count > self._obeyed_stops

    def _wait_for_removal(self) -> bool:
        """Wait on rank 0 until older checkpoints are removed. Returns whether their removal is finished.

        A stop request during the last save ends the wait. The next start then removes the remaining folders.
        """
        while self._removal is not None and self._removal.is_alive():
            self._watch.beat("prune")
            if self._is_asked_to_leave():
                return False
            self._removal.join(_POLL_S)
        return True

    @property
    def _leads_disk(self) -> bool:
        return self._watch.leads_disk(self._context.ranks.rank)

    def _prune(self, newest: Path) -> None:
        """Remove older checkpoints, on one rank per run directory. An error of the file system is logged and does not
        end the run."""
        checkpoint = self._context.config.checkpoint
        if not self._wait_for_removal():
            return
        try:
            steps = [step_of(path) for path in list_checkpoints(self._run_dir)]
            best = best_step(steps, self._losses_to_keep())
            keep = steps_to_keep(steps, keep_last=checkpoint.keep_last, keep_every=checkpoint.keep_every, best=best)
            if self._mirror is not None:
                keep |= self._mirror.steps_in_use()
            leaving = prune_checkpoints(self._run_dir, keep=keep, newest=newest)
        except OSError as error:
            warn_for_all("older checkpoints cannot be removed: %s", error)
            return
        # A file system takes minutes to free hundreds of gigabytes.
        self._removal = threading.Thread(target=_remove, args=(leaving, step_of(newest)), name="prune", daemon=True)
        self._removal.start()

    def _losses_to_keep(self) -> Mapping[int, float]:
        """Return the validation losses by which the best checkpoint is kept. They are empty without
        `checkpoint.keep_best`."""
        if self._context.config.checkpoint.keep_best:
            return self._evaluated
        return {}


def _buffers_of(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the network by name. Layers of this package have no buffers, but layers of plugins may."""
    return engine.model.named_buffers()


def prune_checkpoints(run_dir: Path, *, keep: set[int], newest: Path) -> list[Path]:
    """Rename the checkpoints whose steps are not in `keep`, except `newest`, which was just committed. Only rank 0
    calls it.

    Returns the renamed folders, which the caller removes. A renamed folder is no longer a checkpoint, so the next start
    removes the folders that remain after a crash. A checkpoint that a process is reading stays until the next call.
    """
    leaving = []
    for path in list_checkpoints(run_dir):
        if path == newest or step_of(path) in keep:
            continue
        failpoint("prune", step=step_of(newest))
        renamed = path.with_name(f"{path.name}.tmp-pruned")
        shutil.rmtree(renamed, ignore_errors=True)
        with suppress(OSError):  # it then stays until the next call, which is not a reason to stop
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if _may_be_taken(descriptor):
                    path.rename(renamed)
                    leaving.append(renamed)
            finally:
                os.close(descriptor)
    return leaving


def _may_be_taken(descriptor: int) -> bool:
    """Return whether a checkpoint's folder can be removed. It cannot be removed while a process reads it, because the
    process holds a lock on the folder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without such locks
        pass
    return True


def _remove(folders: list[Path], step: int) -> None:
    """Delete folders, in a thread."""
    for folder in folders:
        failpoint("prune-half", step=step)
        shutil.rmtree(folder, ignore_errors=True)


def _limit(seconds: float) -> str:
    """Format the time limit of a wait: 15 s, 15 min."""
    if seconds >= 60:
        return f"{seconds / 60:g} min"
    return f"{seconds:g} s"


def _retry_delays(patience_s: float) -> Iterator[float]:
    """Yield the seconds between attempts. The delays grow, and their sum is `patience_s`."""
    delay_s = _FIRST_RETRY_S
    while patience_s > 0:
        yield min(delay_s, patience_s)
        delay_s, patience_s = min(2 * delay_s, _LONGEST_RETRY_S), patience_s - delay_s


def _check_is_there(run_dir: Path) -> None:
    """Check that the run directory still exists. Raises CheckpointError if it does not."""
    if was_removed(run_dir):
        raise CheckpointError(
            f"the run directory {run_dir} was removed or moved during the run. The run does not create it again. "
            f"Therefore no more checkpoints can be saved. Restore the directory and start the same command again, or "
            f"start the command with --run.dir and the directory's new path. The run then continues from its newest "
            f"complete checkpoint."
        )
