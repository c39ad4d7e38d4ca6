"""When to save, and what to keep: one save in flight, failed ones tried again, old ones removed behind a new one.

`saver` writes; this decides. All methods are called by all ranks together.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from txl_dist.config import Config
from txl_dist.dist import Ranks, gather_objects
from txl_dist.errors import CheckpointError
from txl_dist.faults import fault_point
from txl_dist.log import warn_for_all
from txl_dist.train.batch import BatchMaker
from txl_dist.train.checkpoint import (
    checkpoint_folder,
    list_checkpoints,
    prune_checkpoints,
    retained,
    step_of,
)
from txl_dist.train.engine import Engine
from txl_dist.train.export import make_probe
from txl_dist.train.metrics import Reporter, check_finite
from txl_dist.train.saver import Saver
from txl_dist.train.state import TrainState

_LAST_TRIES = 3
_RETRY_S = 5.0


class Saving:
    """The checkpoints of one run."""

    def __init__(
        self,
        saver: Saver,
        engine: Engine,
        maker: BatchMaker,
        *,
        config: Config,
        ranks: Ranks,
        reporter: Reporter,
        newest: Path | None,
        best_step: Callable[[], int],
        beat: Callable[[str], None],
    ) -> None:
        """`newest` is the checkpoint that the run began with; `best_step` the one with the lowest validation loss so
        far, or -1; `beat` is told what is being done."""
        self._saver, self._engine, self._maker, self._config = saver, engine, maker, config
        self._ranks, self._reporter, self._best_step, self._beat = ranks, reporter, best_step, beat
        self._run_dir = Path(config.run.dir)
        self._newest = newest
        self._retry_at = 0
        self._stall_s = 0.0
        self._removal: threading.Thread | None = None

    @property
    def is_written(self) -> bool:
        """A save is in flight, and this rank has written its part."""
        return self._saver.in_flight and self._saver.is_written

    def is_due(self, step: int) -> bool:
        """By the interval, or because a save has failed."""
        every = self._config.checkpoint.every_steps
        return step == self._retry_at or (every > 0 and step % every == 0)

    def begin(self, state: TrainState) -> None:
        """Begin to save the state, unless it is saved; the save before it is finished first."""
        self.finish(state.step)
        self._retry_at = 0
        if checkpoint_folder(self._run_dir, state.step) == self._newest:
            return
        start_s = time.perf_counter()
        self._beat("save")
        self._wait_for_removal()  # the room that it makes may be needed
        probe = make_probe(self._engine, self._maker, memory_len=self._config.train.memory_len)
        # A last update that went wrong shows here, though its own loss was still finite.
        check_finite(
            gather_objects(float(probe["losses"].sum())), what=f"the loss on the probe after step {state.step}"
        )
        self._saver.begin(state, self._engine, probe=probe)
        self._stall_s = time.perf_counter() - start_s
        if not self._config.checkpoint.asynchronous:
            self.finish(state.step)

    def finish(self, step: int) -> bool:
        """Commit what is in flight, if anything is. Returns False if that failed: it is tried again, behind `step`."""
        if not self._saver.in_flight:
            return True
        self._beat("commit")
        start_s = time.perf_counter()
        result = self._saver.finish()
        if result.error:
            self._retry_at = step + max(1, self._config.checkpoint.every_steps // 10)
            warn_for_all("no checkpoint of step %d: %s It is tried again.", result.step, result.error)
            self._reporter.write("event", {"event": "save_failed", "step": result.step, "error": result.error})
            return False
        self._newest = result.folder
        if self._ranks.is_first:
            self._prune(result.folder)
        fault_point("saved", step=result.step)
        stall_s = self._stall_s + time.perf_counter() - start_s
        record = {"event": "saved", "step": result.step, "path": result.folder.name}
        self._reporter.write("event", {**record, "seconds": round(stall_s, 3), "gib": round(result.gib, 6)})
        return True

    def finish_last(self, state: TrainState) -> None:
        """Before the run ends: the state is saved. Raises CheckpointError if it cannot be, after some tries."""
        for attempt in range(_LAST_TRIES):
            self.begin(state)
            if self.finish(state.step):
                self._wait_for_removal()
                return
            if attempt + 1 < _LAST_TRIES:
                time.sleep(_RETRY_S)
        raise CheckpointError(f"step {state.step} could not be saved; the log says why. Mend that and start again.")

    def forget_newest(self) -> None:
        """After a rewind: the checkpoint of a step that is made again is another one."""
        self._newest = None

    def _wait_for_removal(self) -> None:
        """Of older checkpoints, on rank 0."""
        if self._removal is not None:
            self._removal.join()

    def _prune(self, newest: Path) -> None:
        checkpoint = self._config.checkpoint
        steps = [step_of(path) for path in list_checkpoints(self._run_dir)]
        best = {self._best_step()} if checkpoint.keep_best else ()
        keep = retained(steps, keep_last=checkpoint.keep_last, keep_every=checkpoint.keep_every, best=best)
        leaving = prune_checkpoints(self._run_dir, keep=keep, newest=newest)
        self._wait_for_removal()
        # To free hundreds of gigabytes takes a file system minutes.
        self._removal = threading.Thread(target=_remove, args=(leaving, step_of(newest)), name="prune", daemon=True)
        self._removal.start()


def _remove(folders: list[Path], step: int) -> None:
    for folder in folders:
        fault_point("prune-half", step=step)
        shutil.rmtree(folder, ignore_errors=True)
