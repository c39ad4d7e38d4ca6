"""The training loop of one rank. `start` builds the parts of a run.

    for each segment: step, decide together, report, save, evaluate; until the end, or until asked to stop

Whatever touches the clock or the disk is decided on rank 0 and broadcast. What one rank notices (a signal, a loss that
is not finite, a checkpoint that is written) reaches all ranks by the one reduction of a step. Dropout is seeded per
micro-batch from (seed, step, first lane), so a resumed run continues bit for bit without any generator state.

Limitations: a step waits for the slowest rank, and nothing that one rank notices takes effect before the step ends.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch.profiler import record_function

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
from txl_dist.train.checkpoint.engine_probe import check_probe
from txl_dist.train.checkpoint.manager import CheckpointManager
from txl_dist.train.checkpoint.memories import first_memories
from txl_dist.train.checkpoint.read import load_checkpoint
from txl_dist.train.checkpoint.rewind import find_rewind
from txl_dist.train.checkpoint.validate import SavedState
from txl_dist.train.checkpoint.writer import AsyncWriter
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.guard import Guard
from txl_dist.train.monitoring.stragglers import StepClock, StragglerWatch
from txl_dist.train.monitoring.watch import Watch
from txl_dist.train.report.layer_stats import measure_layer_stats
from txl_dist.train.report.loggers import MetricReporter
from txl_dist.train.report.metrics import Clipping, Interval, mfu, start_facts, train_record
from txl_dist.train.report.profile import StepProfile
from txl_dist.train.report.validation import StopAskedError, Validator, text_facts
from txl_dist.train.run_dir import quarantine
from txl_dist.train.schedule import learning_rate
from txl_dist.train.stability import Health, after_rewind
from txl_dist.train.state import RunContext, TrainState
from txl_dist.train.stepper import Stepper

_PATIENCE_S = {"stopped": 15.0, "phase": 900.0, "done": 900.0}
"""Seconds to retry the final checkpoint: short after a stop request, long at the end of a stage or of the run."""
_GROUP_GRACE_S = 30
"""Seconds by which collectives time out later than the watchdog, whose message is more exact."""


class Start(NamedTuple):
    """Decisions made before anything was built; the same on every rank."""

    saved: SavedState | None
    """Checkpoint to resume from; None for a new run."""
    stream: StreamState
    """Position in the text at which the lanes begin or continue."""
    tokenizer_json: str
    """Content of tokenizer.json, read by rank 0 for all ranks."""
    evaluated: dict[int, float]
    """Loss of each evaluation recorded in the run directory, in nats per token, by step."""
    warnings: list[str]
    """Sentences for the log, one per warning."""

    @property
    def step(self) -> int:
        """Number of finished optimizer steps."""
        if self.saved:
            return self.saved.step
        return 0


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
        self.context = context
        self.start = start
        self.engine = engine
        self.watch = watch
        self.profile = profile
        self.callbacks = callbacks
        self.loss: float | None = None
        """Training loss of the last step that was made here, in nats per token."""
        self.max_steps = config.train.max_steps
        self.last_step = max(start.step, context.steps.stop)
        self.stopped = False
        on_gpu = context.ranks.device.type == "cuda"
        self.maker = batch_maker(
            engine.model, mask_documents=config.data.document_mask, for_graphs=config.engine.replays(on_gpu=on_gpu)
        )
        self.damage = CorruptionPolicy(skip=config.data.on_corrupt == "skip", max_skipped=config.data.max_skipped)
        self.clock = StepClock(context.ranks.device, sees_forward=config.engine.zero_stage < 3)
        scored_varies = config.data.document_mask or config.data.on_corrupt == "skip"
        self.stepper = Stepper(
            engine,
            self.clock,
            context.ranks,
            context.plan,
            seed=config.run.seed,
            first_lane=context.lanes.start,
            scored_len=None if scored_varies else context.scored_len,
        )
        sets_norm = "clip_norm" in config.optim.model_fields_set
        self.clipping = Clipping(config.optim.clip_norm, is_default=not sets_norm)
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
        """Train to the end of the stage, or until `stopped`, from a checkpoint or from the beginning.

        Returns the last state, which is saved. Raises TxlError on all ranks.
        """
        try:
            state = self._first_state()
            self._report_start(state)
            if state.step > self.max_steps:
                warn_for_all("the run is at step %d already, past train.max_steps=%d", state.step, self.max_steps)
            self._start_callbacks(state)
            if state.step and self.observer.should_evaluate(state.step) and state.step not in self.evaluated:
                self._observe(state)  # an earlier process ended before this evaluation did
            self._repeat_validation(state)
            while not self.stopped and state.step < self.last_step:
                state = self._train_from(state)
            ending = self._ending(state)
            if state.step > 0:
                self.saving.finish_last(state, patience_s=_PATIENCE_S[ending], stopped=self.stopped)
            self._report_clipping(step=state.step)
            self.reporter.write("event", {"event": ending, "step": state.step})
        finally:
            self.reporter.close()
        return state

    def _ending(self, state: TrainState) -> str:
        """Return the name of the event that ends this phase: stopped, done or phase."""
        if self.stopped:
            return "stopped"
        if state.step >= self.max_steps:
            return "done"
        return "phase"

    def _first_state(self) -> TrainState:
        """Return the state of the checkpoint to resume from, or that of a new run."""
        start = self.start
        self.watch.watchdog.beat("load", step=start.step)
        if start.saved is not None:
            return self._load(start.saved, start.stream)
        train = self.context.config.train
        memories = first_memories(
            self.engine, self.context.plan, memory_len=train.memory_len, initial=train.initial_memory
        )
        return TrainState(step=0, tokens_seen=0, health=Health(), stream=start.stream, memories=memories)

    def _load(self, saved: SavedState, stream: StreamState) -> TrainState:
        """Load a checkpoint into the engine and the callbacks, and check that it reproduces its probe."""
        state = load_checkpoint(saved, self.engine, self.context, stream=stream)
        outcome = check_probe(self.engine, self.maker, saved.folder, precision=self.context.config.engine.dtype)
        logger.info("%s: %s", saved.folder.name, outcome)
        callback_states = run_on_all_ranks(lambda: read_states(saved.folder))
        self.callbacks.load(callback_states.states, step=saved.step, validated_step=callback_states.validated_step)
        return state

    def _start_callbacks(self, state: TrainState) -> None:
        """Call `on_train_start` of the callbacks."""
        if not self.callbacks.handles("on_train_start"):
            return
        context = self.context
        ranks = self.context.ranks
        self.watch.beat("callbacks")
        num_parameters = sum(math.prod(shape) for shape in self.engine.shapes.values())
        self.callbacks.start(
            TrainStart(
                config=context.saved_settings.config,
                step=state.step,
                rank=ranks.rank,
                world_size=ranks.world_size,
                device=str(ranks.device),
                num_parameters=num_parameters,
                vocab_size=context.vocab_size,
            )
        )

    def _repeat_validation(self, state: TrainState) -> None:
        """Give the callbacks a validation result that their saved states lack.

        A checkpoint may be older than the validation of its own step; the run directory has the result.
        """
        if state.step in self.evaluated and self.callbacks.validated_step != state.step:
            self._end_validation(state.step, {"eval": self.evaluated[state.step]})

    def _end_validation(self, step: int, losses: dict[str, float]) -> None:
        """Call `on_validation_end` of the callbacks.

        `losses` are in nats per token, by name of the record. `eval`, that of the first corpus, is among them.
        """
        loss = losses["eval"]
        earlier_losses = [earlier_loss for at, earlier_loss in self.evaluated.items() if at < step]
        self.watch.beat("callbacks")
        is_best = loss < min(earlier_losses, default=math.inf)
        self.callbacks.end_validation(ValidationEnd(step, loss, MappingProxyType(losses), is_best))

    def _train_from(self, state: TrainState) -> TrainState:
        """Make steps until the end of the stage, a stop request or a rewind. Returns the state after the last one."""
        context = self.context
        config = self.context.config
        interval = Interval(clip_norm=config.optim.clip_norm)
        depth = config.data.prefetch_depth
        step_inputs = read_inputs(
            context.corpora.train,
            state.stream,
            lanes=context.lanes,
            segment_len=config.train.segment_len,
            microbatch_lanes=context.plan.microbatch_lanes,
            maker=self.maker.for_training(half_loss=config.train.half_loss),
            damage=self.damage,
            depth=depth,
            device=context.ranks.device,
        )
        inputs = prefetch(step_inputs, depth=depth)
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
                if self.guard.should_rewind(state.health):
                    rewound_state = self._rewind(state)
                    if rewound_state is not None:
                        return rewound_state
                is_last = step == self.last_step
                # The first report shows that the run works, and how long it will take.
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
        """Make one step: forward, backward, decision, update, checks and callbacks.

        Returns (the state after it, the flags of all ranks). Raises TrainingError if `guard` ends the run.
        """
        self.watch.check_lock()
        config = self.context.config
        step = state.step + 1
        self.watch.beat("step")
        lr = learning_rate(state.step, config.optim, max_steps=self.max_steps)
        memories, decision = self.stepper(step_input, state.memories, step=step, votes=self._votes())
        self.guard.check_replicas(self.engine.named_values(), step=step)
        with interval.paused():
            layer_stats = measure_layer_stats(
                self.engine,
                step_input.batches,
                state.memories,
                step=step,
                accuracy_every=config.metrics.accuracy_every_steps,
                norms_every=config.metrics.norms_every_steps,
                device=self.context.ranks.device,
            )
        if layer_stats.layers is not None:
            self.reporter.write("layers", layer_stats.layers)
        with record_function("update"):
            self.engine.step(lr=lr, grad_norm=decision.grad_norm)
        if step == self.start.step + 1:  # no later step takes as long as the first
            set_timeout(timeout_s=config.engine.timeout_s + _GROUP_GRACE_S)
            self.watch.watchdog.limit(config.engine.timeout_s)
        skipped = not math.isfinite(decision.grad_norm)
        try:
            health = self.guard.judge(state, decision, step=step)
        except TrainingError:
            self.saving.finish(step)  # the save in flight is of a step before the trouble
            raise
        interval.add(
            loss=decision.loss,
            grad_norm=decision.grad_norm,
            lr=lr,
            num_scored=step_input.num_scored,
            skipped=skipped,
            local_ms=self.clock.local_ms(),
            accuracy=layer_stats.accuracy,
        )
        self.loss = decision.loss
        self.clipping.add(decision.grad_norm)
        if skipped:
            new_tokens = 0
        else:
            new_tokens = self.context.plan.tokens_per_step
        after = TrainState(
            step=step,
            tokens_seen=state.tokens_seen + new_tokens,
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
        """Return the flags of this rank alone."""
        return StepFlags(stop=bool(self.watch.stops.reason), written=self.saving.is_written, save=self.saving.is_late)

    def _rewind(self, state: TrainState) -> TrainState | None:
        """Load the last checkpoint before the spike; the text of the spike is left out from now on.

        Returns the state to continue from; None if there is no such checkpoint.
        """
        self.saving.finish(state.step)
        first_bad = state.step - state.health.spikes_in_row + 1
        target = find_rewind(self.context, state, first_bad=first_bad, began=(self.start.step, self.start.stream))
        if target is None:
            warn_for_all("no checkpoint to rewind to from the spike at step %d: the run continues", first_bad)
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
        """Write the record of the start: hardware, versions and the text that is read."""
        context = self.context
        corpora = self.context.corpora
        config = self.context.config
        facts = run_on_all_ranks(
            lambda: text_facts(
                corpora.train,
                corpora.eval,
                mask_documents=config.data.document_mask,
                max_tokens=config.eval.max_tokens,
                half_loss=config.train.half_loss,
            )
        )
        for kind, problem in facts["no_bits"].items():
            logger.info("%s: no bits per byte, as %s", kind, problem)
        facts = start_facts(self.engine, context.ranks) | facts
        self.reporter.write("event", {"event": "start", "step": state.step, **facts})

    def _report(self, state: TrainState, interval: Interval) -> None:
        """Write the record of a logging interval. All ranks call it together."""
        values = interval.report(
            step=state.step,
            tokens_per_step=self.context.plan.tokens_per_step,
            num_skipped=self.damage.num_skipped,
        )
        values |= self.stragglers(values["rank_ms"], step=state.step)
        context = self.context
        config = self.context.config
        flops_per_token = sum(context.flops.values())
        values |= mfu(values["tokens_per_s"], flops_per_token=flops_per_token, peak_flops=context.peak_flops)
        values |= self.saving.seconds()
        record = train_record(
            state,
            values,
            splits=context.corpora.train,
            mask_documents=config.data.document_mask,
            half_loss=config.train.half_loss,
            max_steps=self.max_steps,
        )
        self.reporter.write("train", record)

    def _report_clipping(self, *, step: int) -> None:
        """Warn if nearly all steps were clipped and the settings do not name the norm."""
        clipped = self.clipping.record()
        if clipped is None:
            return
        if self.context.ranks.is_rank0:
            logger.warning(
                "%.0f %% of %d steps were clipped: optim.clip_norm=%g is the default, the gradients' norm was %.3g on "
                "average. Such steps all have one length; set optim.clip_norm (1.0 suits most models, 0 switches it "
                "off), or write %g into the file to keep it",
                clipped["clipped_pct"],
                clipped["steps"],
                clipped["clip_norm"],
                clipped["grad_norm"],
                clipped["clip_norm"],
            )
        self.reporter.write("event", {"event": "clipped", "step": step, **clipped})

    def _observe(self, state: TrainState) -> None:
        """Sample and evaluate if that is due, until asked to stop. Save the best state if `checkpoint.keep_best`."""
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
        self._end_validation(state.step, losses)
        if self.context.config.checkpoint.keep_best and is_best:
            self.saving.begin(state)

    def _before_segment(self, step: int) -> None:
        """Send a heartbeat, finish a pending save, and stop if asked.

        Called on every rank before each evaluation segment. Raises StopAskedError on all ranks.
        """
        self.watch.beat("evaluate")
        failpoint("evaluate", step=step)
        votes = all_reduce_flags(self._votes(), world_size=self.context.ranks.world_size)
        if votes.written:  # a checkpoint does not wait for the end of an evaluation
            self.saving.finish(step)
        if votes.stop:
            raise StopAskedError


def _input_ids(step_input: StepInput) -> npt.NDArray[np.int64]:
    """Return tokens_BT of this rank's lanes, as a read-only copy."""
    tokens_BT = np.concatenate([batch.tokens_BT.numpy() for batch in step_input.batches]).astype(np.int64)
    tokens_BT.setflags(write=False)
    return tokens_BT
