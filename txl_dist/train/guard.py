"""The guard of a run: it reports skipped steps and spikes, compares the ranks' copies of the weights, and stops the run
at a limit.

The module `stability` makes the decisions, by pure functions of the steps' results. This module logs these decisions
and raises errors. All ranks call all methods together, with the same arguments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from torch import Tensor

from txl_dist.console.logging import warn_for_all
from txl_dist.data.loader.stream import documents_at
from txl_dist.distributed.collectives import gather_objects
from txl_dist.distributed.rank_environment import format_ranks
from txl_dist.errors import TrainingError, raised_everywhere
from txl_dist.train import stability as rules
from txl_dist.train.monitoring.silent_corruption import deviating_ranks
from txl_dist.train.report.loggers import MetricReporter
from txl_dist.train.stability import Health
from txl_dist.train.state import RunContext, TrainState
from txl_dist.train.stepper import StepResult


class Guard:
    """Guard of one run: logs skipped steps and spikes, compares the ranks' copies of the weights, and stops the run at
    a limit. The settings are in the section `guard` of the configuration."""

    def __init__(self, context: RunContext, reporter: MetricReporter) -> None:
        self._context = context
        self._reporter = reporter
        self._settings = context.config.guard

    def should_rewind(self, health: Health) -> bool:
        """Return whether the number of consecutive spikes has reached the limit at which the run rewinds to an earlier
        checkpoint."""
        return rules.should_rewind(health, self._settings)

    def judge(self, before: TrainState, decision: StepResult, *, step: int) -> Health:
        """Return the health of the run after a step, and report skipped steps and spikes.

        `before` is the state before the step, and `decision` is the step's result. Raises TrainingError if a limit of
        the section `guard` is reached.
        """
        skipped = not math.isfinite(decision.grad_norm)
        health, spikes = rules.after_step(
            before.health,
            step=step,
            loss=decision.loss,
            grad_norm=decision.grad_norm,
            skipped=skipped,
            guard=self._settings,
        )
        if skipped:
            warn_for_all(
                "step %d is skipped on all ranks: loss %s, gradient norm %s. Weights and memories are unchanged",
                step,
                decision.loss,
                decision.grad_norm,
            )
            self._reporter.write("event", {"event": "skipped", "step": step, "loss": decision.loss})
        for spike in spikes:
            warn_for_all(
                "spike at step %d: %s %.4g after a median of %.4g (%.1f sigma)",
                step,
                spike.what,
                spike.value,
                spike.median,
                spike.sigmas,
            )
            self._reporter.write("event", {"event": "spike", **spike._asdict()})
        reason = rules.reason_to_stop(health, self._settings)
        if reason:
            raise raised_everywhere(
                TrainingError(self._blame(before, reason, is_mine=not math.isfinite(decision.local_loss)))
            )
        return health

    def check_replicas(self, parameters: Iterable[tuple[str, Tensor]], *, step: int) -> None:
        """Compare the weights of all ranks, if this step requires it. Raises TrainingError if they differ.

        Call it before the update. At ZeRO stages 1 and 2 each weight has an owner. The update overwrites the other
        ranks' copies with the owner's weights, so a difference would no longer be visible.
        """
        every = self._settings.check_replicas_every_steps
        if not every or step % every or self._context.config.engine.zero_stage == 3:  # where no weight is replicated
            return
        start_s = time.perf_counter()
        deviation = deviating_ranks(parameters)
        if deviation is not None:
            raise raised_everywhere(
                TrainingError(
                    f"silent corruption found at step {step}: {deviation.sentence()}. The run stops before a "
                    f"checkpoint stores these values. Take the faulty machine out of service, and start "
                    f"the same command again. The run then continues from its last checkpoint."
                )
            )
        seconds = round(time.perf_counter() - start_s, 4)
        self._reporter.write("event", {"event": "replicas_agree", "step": step, "seconds": seconds})

    def _blame(self, before: TrainState, reason: str, *, is_mine: bool) -> str:
        """Return the message that ends the run, including the documents that the failing ranks have read.

        `is_mine` says whether the loss of this rank was not finite.
        """
        parts = gather_objects(
            (is_mine, documents_at(self._context.corpora.train, before.stream, self._context.lanes[:4]))
        )
        guilty = [rank for rank, (is_guilty, _) in enumerate(parts) if is_guilty]
        shown = [parts[rank][1] for rank in guilty[:2]] or [lines for _, lines in parts[:2]]
        documents = "; ".join(line for lines in shown for line in lines)
        if guilty:
            ranks = f" on {format_ranks(guilty[:8])}"
        else:
            ranks = ""
        return (
            f"{reason}. The run stops before a checkpoint stores this state. Step {before.step + 1}{ranks} read "
            f"{documents}. Continue from the last checkpoint with a lower optim.lr, more optim.warmup_steps, or bf16 "
            "instead of fp16."
        )
