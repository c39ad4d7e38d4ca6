"""The training loop, which reads like the procedure it is; `start` puts a run together.

    for each segment: step, decide together, report, save, evaluate; until the end, or somebody asks to stop

Whatever touches clock or disk is decided on rank 0 and broadcast; whatever one rank notices (a signal, a loss that is
not finite, a checkpoint that is written) all ranks learn in the one reduction of a step. Dropout is seeded per
micro-batch from (seed, step, first lane), so a resumed run continues bit for bit without any generator state.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch.profiler import record_function

from txl_dist.config.phases import end_of_phase, whole
from txl_dist.console.logging import logger, warn_for_all
from txl_dist.data.loader.corruption import CorruptionPolicy
from txl_dist.data.loader.prefetch import prefetch
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.distributed.collectives import StepFlags, all_reduce_flags, run_on_all_ranks, run_on_rank0, set_timeout
from txl_dist.errors import TrainingError
from txl_dist.fault_injection import failpoint
from txl_dist.train.batch import StepInput, batch_maker, read_inputs
from txl_dist.train.callbacks import Callbacks, StepEnd, TrainStart, ValidationEnd
from txl_dist.train.checkpoint.callback_states import read_states
from txl_dist.train.checkpoint.manager import CheckpointManager
from txl_dist.train.checkpoint.memories import first_memories
from txl_dist.train.checkpoint.probe import check_probe
from txl_dist.train.checkpoint.read import load_checkpoint
from txl_dist.train.checkpoint.validate import SavedState
from txl_dist.train.checkpoint.writer import AsyncWriter
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.guard import Guard
from txl_dist.train.monitoring.stragglers import StepClock, StragglerWatch
from txl_dist.train.monitoring.watch import Watch
from txl_dist.train.report.layer_stats import signals
from txl_dist.train.report.loggers import MetricReporter
from txl_dist.train.report.metrics import Clipping, Interval, start_facts, train_record
from txl_dist.train.report.profile import StepProfile
from txl_dist.train.report.validation import StopAskedError, Validator, text_facts
from txl_dist.train.rewind import find_rewind
from txl_dist.train.run_dir import quarantine
from txl_dist.train.schedule import learning_rate
from txl_dist.train.stability import Health, after_rewind
from txl_dist.train.state import RunContext, TrainState
from txl_dist.train.step import Stepper

_PATIENCE_S = {"stopped": 15.0, "stage": 900.0, "done": 900.0}
"""How long the last save is tried: who asked to stop will not wait, but who finds a full disk in the morning may."""
_GROUP_GRACE_S = 30
"""Collectives give up after the watchdog, which knows more."""


class Start(NamedTuple):
    """What was decided before anything was built; the same on every rank."""

    saved: SavedState | None
    """The checkpoint to go on from."""
    stream: StreamState
    """Where the lanes begin, or go on."""
    tokenizer_json: str
    evaluated: dict[int, float]
    """Loss of each evaluation that the run directory knows, by step."""
    warnings: list[str]

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.saved.step if self.saved else 0


class TrainingRun:
    """One training run on one rank: its parts, and the loop that uses them."""

    def __init__(
        self,
        context: RunContext,
        start: Start,
        engine: Engine,
        watch: Watch,
        profile: StepProfile,
        callbacks: Callbacks,
    ) -> None:
        config = context.config
        self.context, self.start, self.engine, self.watch, self.profile = context, start, engine, watch, profile
        self.callbacks = callbacks
        self.loss: float | None = None
        """Training loss of the last step that was made here, in nats per token."""
        self.max_steps = config.train.max_steps
        self.last_step = max(start.step, end_of_phase(config, start.step))
        self.stopped = False
        on_gpu = context.ranks.device.type == "cuda"
        self.maker = batch_maker(
            engine.model, mask_documents=context.masks_documents, for_graphs=config.engine.replays(on_gpu=on_gpu)
        )
        self.damage = CorruptionPolicy(skip=config.data.on_corrupt == "skip", max_skipped=config.data.max_skipped)
        self.clock = StepClock(context.ranks.device, sees_forward=config.engine.zero_stage < 3)
        self.stepper = Stepper(engine, context, self.clock)
        self.clipping = Clipping(config.optim)
        self.reporter = MetricReporter(context, start_step=start.step)
        self.stragglers = StragglerWatch(self.reporter)
        self.guard = Guard(context, self.reporter)
        self.evaluated = dict(start.evaluated)
        self.observer = Validator(
            context, engine, self.maker, self.reporter, evaluated=self.evaluated, before_segment=self._before_segment
        )
        self.saving = CheckpointManager(
            AsyncWriter(context, watch),
            engine,
            self.maker,
            self.reporter,
            newest=start.saved.folder if start.saved else None,
            evaluated=self.evaluated,
            callbacks=self.callbacks,
        )

    def go(self) -> TrainState:
        """Train from a checkpoint, or from the beginning, to the end of the stage or until `stopped`. The last state is
        saved."""
        try:
            state = self._first_state()
            self._report_start(state)
            if state.step > self.max_steps:
                warn_for_all("the run is at step %d already, past train.max_steps=%d", state.step, self.max_steps)
            self._start_callbacks(state)
            if state.step and self.observer.should_evaluate(state.step) and state.step not in self.evaluated:
                self._observe(state)  # a process before this one ended before it was done
            self._repeat_validation(state)
            while not self.stopped and state.step < self.last_step:
                state = self._train_from(state)
            how = "stopped" if self.stopped else "done" if state.step >= self.max_steps else "stage"
            if state.step > 0:
                self.saving.finish_last(state, patience_s=_PATIENCE_S[how], stopped=self.stopped)
            self._report_clipping(step=state.step)
            self.reporter.write("event", {"event": how, "step": state.step})
        finally:
            self.reporter.close()
        return state

    def _first_state(self) -> TrainState:
        start = self.start
        self.watch.watchdog.beat("load", step=start.step)
        if start.saved is not None:
            return self._load(start.saved, start.stream)
        memories = first_memories(self.engine, self.context)
        return TrainState(step=0, tokens_seen=0, health=Health(), stream=start.stream, memories=memories)

    def _load(self, saved: SavedState, stream: StreamState) -> TrainState:
        state = load_checkpoint(saved, self.engine, self.context, stream=stream)
        shown = check_probe(self.engine, self.maker, saved.folder, precision=self.context.config.engine.dtype)
        logger.info("%s: %s", saved.folder.name, shown)
        kept = run_on_all_ranks(lambda: read_states(saved.folder))
        self.callbacks.load(kept.states, step=saved.step, validated_step=kept.validated_step)
        return state

    def _start_callbacks(self, state: TrainState) -> None:
        context, ranks = self.context, self.context.ranks
        if not self.callbacks.handles("on_train_start"):
            return
        self.watch.beat("callbacks")
        num_parameters = sum(math.prod(shape) for shape in self.engine.shapes.values())
        self.callbacks.start(
            TrainStart(
                config=whole(context.config),
                step=state.step,
                rank=ranks.rank,
                world_size=ranks.world_size,
                device=str(ranks.device),
                num_parameters=num_parameters,
                vocab_size=context.vocab_size,
            )
        )

    def _repeat_validation(self, state: TrainState) -> None:
        """Where a checkpoint is from before the validation of its step, so are the states of its callbacks: give them
        the result, which the run directory knows."""
        if state.step in self.evaluated and self.callbacks.validated_step != state.step:
            self._tell_validation(state.step, {"eval": self.evaluated[state.step]})

    def _tell_validation(self, step: int, losses: dict[str, float]) -> None:
        """`losses` by name of the record, that of the first corpus among them."""
        loss = losses["eval"]
        earlier = [known for at, known in self.evaluated.items() if at < step]
        self.watch.beat("callbacks")
        is_best = loss < min(earlier, default=math.inf)
        self.callbacks.end_validation(ValidationEnd(step, loss, MappingProxyType(losses), is_best))

    def _train_from(self, state: TrainState) -> TrainState:
        """Steps until the end, a stop or a rewind."""
        config = self.context.config
        interval = Interval(clip_norm=config.optim.clip_norm)
        inputs = prefetch(
            read_inputs(self.context, state.stream, maker=self.maker, damage=self.damage),
            depth=config.data.prefetch_depth,
        )
        try:
            while not self.stopped and state.step < self.last_step:
                step = state.step + 1
                self.watch.watchdog.beat("data", step=step)
                self.profile.on_step(step)
                self.clock.begin()
                with record_function("data"):
                    step_input = next(inputs)
                interval.wait(self.clock.elapsed_s())
                state, votes = self._step(state, step_input, interval)
                failpoint("boundary", step=step)
                self.stopped = votes.stop
                if votes.written:
                    with interval.paused():
                        self.saving.finish(step)
                if self.guard.should_rewind(state.health) and (rewound := self._rewound(state)) is not None:
                    return rewound
                is_last = step == self.last_step
                # A sign of life, and how long the rest will take.
                is_first = step == self.start.step + 1 and interval.has_valid_steps()
                if is_first or is_last or step % config.metrics.log_every_steps == 0:
                    self._report(state, interval)
                    interval = Interval(clip_norm=config.optim.clip_norm)
                with interval.paused():
                    if is_last or votes.save or self.saving.is_due(step):
                        self.saving.begin(state)
                    if not self.stopped:
                        self._observe(state)
        finally:
            self.profile.close()
            inputs.close()
        return state

    def _step(self, state: TrainState, step_input: StepInput, interval: Interval) -> tuple[TrainState, StepFlags]:
        """Returns (the next state, what all ranks have to say)."""
        self.watch.check_lock()
        step, config = state.step + 1, self.context.config
        self.watch.beat("step")
        lr = learning_rate(state.step, config.optim, max_steps=self.max_steps)
        memories, decision = self.stepper(step_input, state.memories, step=step, votes=self._votes())
        self.guard.check_replicas(self.engine.named_values(), step=step)
        with interval.paused():
            seen = signals(self.engine, self.context, step_input.batches, state.memories, step=step)
        if seen.layers is not None:
            self.reporter.write("layers", seen.layers)
        with record_function("update"):
            self.engine.step(lr=lr, grad_norm=decision.grad_norm)
        if step == self.start.step + 1:  # no step will take as long as the first
            set_timeout(timeout_s=config.engine.timeout_s + _GROUP_GRACE_S)
            self.watch.watchdog.limit(config.engine.timeout_s)
        skipped = not math.isfinite(decision.grad_norm)
        try:
            health = self.guard.judge(state, decision, step=step)
        except TrainingError:
            self.saving.finish(step)  # what is in flight is from before the trouble
            raise
        interval.add(
            loss=decision.loss,
            grad_norm=decision.grad_norm,
            lr=lr,
            num_scored=step_input.num_scored,
            skipped=skipped,
            own_ms=self.clock.local_ms(),
            accuracy=seen.accuracy,
        )
        self.loss = decision.loss
        self.clipping.add(decision.grad_norm)
        after = TrainState(
            step=step,
            tokens_seen=state.tokens_seen + (0 if skipped else self.context.plan.tokens_per_step),
            health=health,
            stream=step_input.stream,
            memories=memories,
        )
        if self.callbacks.handles("on_step_end"):
            self.watch.beat("callbacks")
            self.callbacks.end_step(
                StepEnd(
                    step=step,
                    loss=decision.loss,
                    grad_norm=decision.grad_norm,
                    lr=lr,
                    skipped=skipped,
                    tokens_seen=after.tokens_seen,
                    tokens_BT=_input_ids(step_input),
                )
            )
        return after, decision.votes

    def _votes(self) -> StepFlags:
        """Of this rank."""
        return StepFlags(stop=bool(self.watch.stops.reason), written=self.saving.is_written, save=self.saving.is_late)

    def _rewound(self, state: TrainState) -> TrainState | None:
        """Back to the last checkpoint before the spike, whose text is left out from now on; None if there is none."""
        self.saving.finish(state.step)
        first_bad = state.step - state.health.spikes_in_row + 1
        target = find_rewind(self.context, state, first_bad=first_bad, began=(self.start.step, self.start.stream))
        if target is None:
            warn_for_all("no checkpoint to go back to from the spike at step %d: the run goes on", first_bad)
            return None
        saved, stream = target
        run_on_rank0(lambda: quarantine(self.context.run_dir, newer_than=saved.folder, word="rewound"))
        self.saving.set_newest(saved.folder)
        self.observer.forget(after=saved.step)
        loaded = self._load(saved, stream)
        self._repeat_validation(loaded)
        warn_for_all("rewound to %s: the text of steps %d to %d is left out", saved.folder.name, first_bad, state.step)
        self.reporter.write("event", {"event": "rewound", "step": loaded.step, "from": state.step})
        return replace(loaded, health=after_rewind(state.health, to=loaded.health))

    def _report_start(self, state: TrainState) -> None:
        context, corpora, config = self.context, self.context.corpora, self.context.config
        facts = run_on_all_ranks(
            lambda: text_facts(
                corpora.train,
                corpora.eval,
                mask_documents=context.masks_documents,
                max_tokens=config.eval.max_tokens,
                half_loss=config.train.half_loss,
            )
        )
        for kind, problem in facts["no_bits"].items():
            logger.info("%s: no bits per byte, as %s", kind, problem)
        facts = start_facts(self.engine, context.ranks) | facts
        self.reporter.write("event", {"event": "start", "step": state.step, **facts})

    def _report(self, state: TrainState, interval: Interval) -> None:
        num_skipped, tokens_per_step = self.damage.num_skipped, self.context.plan.tokens_per_step
        values = interval.report(step=state.step, tokens_per_step=tokens_per_step, num_skipped=num_skipped)
        values |= self.stragglers(values["rank_ms"], step=state.step)
        self.reporter.write("train", train_record(self.context, state, values, waited=self.saving.seconds()))

    def _report_clipping(self, *, step: int) -> None:
        """Say that nearly all steps were clipped, by a norm that the settings do not name."""
        found = self.clipping.record()
        if found is None:
            return
        if self.context.ranks.is_rank0:
            logger.warning(
                "%.0f %% of %d steps were clipped: optim.clip_norm=%g is the default, the gradients' norm was %.3g on "
                "average. Such steps all have one length; set optim.clip_norm (1.0 suits most models, 0 switches it "
                "off), or write %g into the file to keep it",
                *(found["clipped_pct"], found["steps"], found["clip_norm"], found["grad_norm"], found["clip_norm"]),
            )
        self.reporter.write("event", {"event": "clipped", "step": step, **found})

    def _observe(self, state: TrainState) -> None:
        """Evaluate and sample where that is due, until asked to stop; the best is saved where that is wanted."""
        try:
            if self.observer.should_sample(state.step):
                self._before_segment(state.step)
                self.observer.sample(state.step)
            if not self.observer.should_evaluate(state.step):
                return
            losses, is_best = self.observer.evaluate(state.step)
        except StopAskedError:
            self.stopped = True
            return
        self._tell_validation(state.step, losses)
        if self.context.config.checkpoint.keep_best and is_best:
            self.saving.begin(state)

    def _before_segment(self, step: int) -> None:
        """Of an evaluation, on all ranks."""
        self.watch.beat("evaluate")
        failpoint("evaluate", step=step)
        votes = all_reduce_flags(self._votes(), world_size=self.context.ranks.world_size)
        if votes.written:  # a checkpoint is not to wait for the end of an evaluation
            self.saving.finish(step)
        if votes.stop:
            raise StopAskedError


def _input_ids(step_input: StepInput) -> npt.NDArray[np.int64]:
    """tokens_BT of this rank's lanes, a copy that cannot be written."""
    tokens_BT = np.concatenate([batch.tokens_BT.numpy() for batch in step_input.batches]).astype(np.int64)
    tokens_BT.setflags(write=False)
    return tokens_BT
