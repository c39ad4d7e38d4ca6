"""When to save, and what to keep: one save in flight, failed ones tried again, old ones removed behind a new one.

`saver` writes; this decides. All methods are called by all ranks together.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from txl_dist.config import Config
from txl_dist.dist import Ranks, gather_objects
from txl_dist.errors import CheckpointError, of_all
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

_FIRST_RETRY_S, _LONGEST_RETRY_S = 5.0, 60.0


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
        evaluated: Callable[[], Mapping[int, float]],
        beat: Callable[[str], None],
    ) -> None:
        """`newest` is the checkpoint that the run began with; `evaluated` knows the validation loss of steps
        so far; `beat` is told what is being done."""
        self._saver, self._engine, self._maker, self._config = saver, engine, maker, config
        self._ranks, self._reporter, self._evaluated, self._beat = ranks, reporter, evaluated, beat
        self._run_dir = Path(config.run.dir)
        self._newest = newest
        self._retry_at = 0
        self._stall_s = self._waited_s = 0.0
        self._removal: threading.Thread | None = None

    @property
    def is_written(self) -> bool:
        """A save is in flight, and this rank has written its part."""
        return self._saver.in_flight and self._saver.is_written

    def seconds(self) -> dict[str, float]:
        """`save_s`, what steps waited for the checkpoints that were committed since the last call, if any were."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return {"save_s": waited_s} if waited_s else {}

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
            self._reporter.write("event", {"event": "save_failed", "step": result.step})
            if self._ranks.is_first and self._newest is not None:
                self._prune(self._newest)  # who has lowered what is kept wants the room now
            return False
        self._newest = result.folder
        if self._ranks.is_first:
            self._prune(result.folder)
        fault_point("saved", step=result.step)
        stall_s = self._stall_s + time.perf_counter() - start_s
        self._waited_s += stall_s
        record = {"event": "saved", "step": result.step, "path": result.folder.name}
        self._reporter.write("event", {**record, "seconds": round(stall_s, 3), "gib": round(result.gib, 6)})
        return True

    def finish_last(self, state: TrainState, *, patience_s: float) -> None:
        """Before the run ends: the state is saved. Raises CheckpointError if it cannot be for so long."""
        retry_s, left_s = _FIRST_RETRY_S, patience_s
        while True:
            self.begin(state)
            self.finish(state.step)
            if self._newest == checkpoint_folder(self._run_dir, state.step):
                return self._wait_for_removal()
            if left_s <= 0:
                break
            self._rest(min(retry_s, left_s))
            retry_s, left_s = min(2 * retry_s, _LONGEST_RETRY_S), left_s - retry_s
        kept = f"goes on from {self._newest.name}" if self._newest is not None else "begins anew"
        raise of_all(
            CheckpointError(
                f"step {state.step} could not be saved in {patience_s:g} s; the log says why. Mend that; the same "
                f"command then {kept}."
            )
        )

    def _rest(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._beat("wait for the disk")
            time.sleep(min(1.0, seconds))

    def newest_is(self, folder: Path) -> None:
        """After a rewind: that one is saved, and steps that are made again have to be."""
        self._newest = folder

    def _wait_for_removal(self) -> None:
        """Of older checkpoints, on rank 0."""
        while self._removal is not None and self._removal.is_alive():
            self._beat("prune")
            self._removal.join(1.0)

    def _prune(self, newest: Path) -> None:
        """On rank 0. A file system that cannot is no reason to stop."""
        checkpoint = self._config.checkpoint
        self._wait_for_removal()
        try:
            steps = [step_of(path) for path in list_checkpoints(self._run_dir)]
            losses = {step: loss for step, loss in self._evaluated().items() if step in steps and checkpoint.keep_best}
            best = {min(losses, key=losses.__getitem__)} if losses else ()
            keep = retained(steps, keep_last=checkpoint.keep_last, keep_every=checkpoint.keep_every, best=best)
            leaving = prune_checkpoints(self._run_dir, keep=keep, newest=newest)
        except OSError as error:
            warn_for_all("older checkpoints cannot be removed: %s", error)
            return
        # To free hundreds of gigabytes takes a file system minutes.
        self._removal = threading.Thread(target=_remove, args=(leaving, step_of(newest)), name="prune", daemon=True)
        self._removal.start()


def _remove(folders: list[Path], step: int) -> None:
    for folder in folders:
        fault_point("prune-half", step=step)
        shutil.rmtree(folder, ignore_errors=True)
