"""What the loop does when numbers go wrong: report, count, stop.

`health` decides, as pure functions of what the decisions of the steps said; here it is said to people and acted on. All
methods are called by all ranks together, with the same arguments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from txl_dist.config import Config, load_config
from txl_dist.data.read.corpus import Split
from txl_dist.data.read.position import StreamState
from txl_dist.data.read.stream import documents_at
from txl_dist.dist import gather_objects
from txl_dist.errors import TrainingError, of_all
from txl_dist.log import warn_for_all
from txl_dist.run_files import step_of
from txl_dist.train import health as rules
from txl_dist.train.checkpoint.soundness import read_state
from txl_dist.train.health import Health
from txl_dist.train.report.sinks import Reporter
from txl_dist.train.state import TrainState
from txl_dist.train.step import Decision
from txl_dist.train.watch.replicas import deviating_ranks


class Guard:
    """Watches over one run, by `guard` of its settings."""

    def __init__(self, config: Config, *, splits: Sequence[Split], lanes: range, reporter: Reporter) -> None:
        self._config, self._splits, self._lanes, self._reporter = config, splits, lanes, reporter

    def wants_rewind(self, health: Health) -> bool:
        """Whether the last steps call for one."""
        return rules.wants_rewind(health, self._config.guard)

    def judge(self, before: TrainState, decision: Decision, *, step: int) -> Health:
        """The health after a step from the state before it. Raises TrainingError if a limit is reached."""
        skipped = not math.isfinite(decision.grad_norm)
        health, spikes = rules.after_step(
            before.health,
            step=step,
            loss=decision.loss,
            grad_norm=decision.grad_norm,
            skipped=skipped,
            guard=self._config.guard,
        )
        if skipped:
            warn_for_all(
                "step %d is skipped on all ranks: loss %s, gradient norm %s; weights and memories stay as they were",
                step,
                decision.loss,
                decision.grad_norm,
            )
            self._reporter.write("event", {"event": "skipped", "step": step, "loss": decision.loss})
        for spike in spikes:
            warn_for_all(
                "spike at step %d: %s %.4g, the median before it %.4g (%.1f sigma)",
                step,
                spike.what,
                spike.value,
                spike.median,
                spike.sigmas,
            )
            self._reporter.write("event", {"event": "spike", **spike._asdict()})
        if reason := rules.reason_to_stop(health, self._config.guard):
            raise of_all(TrainingError(self._blame(before, reason, is_mine=not math.isfinite(decision.own_loss))))
        return health

    def check_replicas(self, parameters: Iterable[tuple[str, Tensor]], *, step: int) -> None:
        """At its interval, before the update: at stages 1 and 2 that gives every rank the weights of their owners, so
        only what this very step was computed with can be seen. Raises TrainingError if a rank has other weights than
        the rest."""
        every = self._config.guard.check_replicas_every
        if not every or step % every or self._config.engine.zero_stage == 3:  # there each holds its own part
            return
        start_s = time.perf_counter()
        deviation = deviating_ranks(parameters)
        if deviation is not None:
            raise of_all(
                TrainingError(
                    f"silent corruption found at step {step}: {deviation.sentence()}. The run stops before saving it; "
                    "take the machine of that rank out of service, and start again from the last checkpoint."
                )
            )
        seconds = round(time.perf_counter() - start_s, 4)
        self._reporter.write("event", {"event": "replicas_agree", "step": step, "seconds": seconds})

    def _blame(self, before: TrainState, reason: str, *, is_mine: bool) -> str:
        lanes = range(self._lanes.start, min(self._lanes.stop, self._lanes.start + 4))
        parts = gather_objects((is_mine, documents_at(self._splits, before.stream, lanes)))
        guilty = [rank for rank, (is_guilty, _) in enumerate(parts) if is_guilty]
        shown = [parts[rank][1] for rank in guilty[:2]] or [lines for _, lines in parts[:2]]
        documents = "; ".join(line for lines in shown for line in lines)
        ranks = f" on rank(s) {', '.join(map(str, guilty[:8]))}" if guilty else ""
        return (
            f"{reason}. The run stops before saving it; step {before.step + 1}{ranks} read {documents}. Continue from "
            "the last checkpoint with a lower optim.lr, more optim.warmup_steps, or bf16 instead of fp16."
        )


def stream_of(
    checkpoint: Path, *, config: Config, start: tuple[int, StreamState], now: StreamState
) -> StreamState | None:
    """The stream of a checkpoint to rewind to, leaving out what earlier rewinds did; None if its lanes were others.

    `start`: step and stream that this process began with. Raises CheckpointError.
    """
    step, stream = start
    if step_of(checkpoint) != step:
        stream = StreamState.from_dict(read_state(checkpoint)["stream"])
    saved_len = load_config(checkpoint / "config.toml").train.segment_len
    if step_of(checkpoint) < step and saved_len != config.train.segment_len:
        return None  # its steps are not to be counted in segments of today
    if [one.cut() for one in stream.corpora] != [one.cut() for one in now.corpora]:
        return None
    return stream.skipping(now, now)
