"""The training loop of one rank. The module `start` builds the parts that the loop uses.

    until the last step or a stop request: train one step, all-reduce the flags, report, save, evaluate

Decisions that depend on the clock or the disk are made on rank 0 and sent to all ranks. Other events may be noticed by
one rank only: a signal, a loss that is not finite, or a checkpoint that is written. One all-reduce per step passes such
events to all ranks.

Dropout is seeded per micro-batch from (seed, step, first lane), where a lane is a batch row with its own token stream.
So a resumed run continues bit for bit, although checkpoints store no state of random generators.

Limitations: each step takes as long as on the slowest rank. An event that one rank notices takes effect only at the end
of the step.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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
from txl_dist.train.batch import StepInput, batch_maker, read_inputs, target_sampler
from txl_dist.train.callbacks import Callbacks, StepEnd, TrainStart, ValidationEnd
from txl_dist.train.checkpoint.callback_states import read_states
from txl_dist.train.checkpoint.engine_probe import check_probe
from txl_dist.train.checkpoint.manager import CheckpointManager
from txl_dist.train.checkpoint.memories import first_memories
from txl_dist.train.checkpoint.mirror.mirror import Mirror
from txl_dist.train.checkpoint.read import load_checkpoint
from txl_dist.train.checkpoint.recovery import Recovery
from txl_dist.train.checkpoint.rewind import began_in, began_text, find_rewind
from txl_dist.train.checkpoint.slots import NOTHING_CARRIED, StoredState
from txl_dist.train.checkpoint.validate import SavedState
from txl_dist.train.checkpoint.writer import AsyncWriter
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.guard import Guard
from txl_dist.train.monitoring.stragglers import StepClock, StragglerWatch
from txl_dist.train.monitoring.watch import Watch
from txl_dist.train.report.layer_stats import measure_layer_stats
from txl_dist.train.report.loggers import MetricReporter
from txl_dist.train.report.metrics import Clipping, Interval, mfu, start_facts, train_record, warn_of_clipping
from txl_dist.train.report.profile import StepProfile
from txl_dist.train.report.validation import StopAskedError, Validator, text_facts
from txl_dist.train.run_dir import quarantine
from txl_dist.train.schedule import learning_rate
from txl_dist.train.stability import Health, after_rewind
from txl_dist.train.state import RunContext, TrainState
from txl_dist.train.stepper import Stepper

_PATIENCE_S = {"stopped": 15.0, "phase": 900.0, "done": 900.0}
"""Seconds for which a failed final checkpoint is retried, by the event that ends the loop. The time is short after a
stop request, and long at the end of a phase or of the run. The upload of the final checkpoint gets the same time."""
_GROUP_GRACE_S = 30
"""Number of seconds between the watchdog's limit and the timeout of collectives. Collectives time out later, so the
watchdog reports a hang first. Its message names the rank at fault."""


class Start(NamedTuple):
    """Result of the checks that rank 0 makes before the model is built. It contains the state from which training
    starts in this process. The result is the same on every rank."""

    step: int
    """Number of optimizer steps that were finished before: that of the checkpoint or stored state, or 0 for a new
    run."""
    stream: StreamState
    """Position in the training text from which each lane (batch row with its own token stream) reads."""
    tokenizer_json: str
    """Content of the corpus's tokenizer.json. Rank 0 reads the file for all ranks."""
    evaluated: dict[int, float]
    """Losses of the first validation split in nats per token, by step. They come from the run's metrics.jsonl."""
    warnings: list[str]
    """Warnings for the log, one sentence each."""
    newest: Path | None
    """Newest complete checkpoint of the run, or None."""
    is_sampled: bool = False
    """Whether the records have a sample text of this step."""
    is_ended: bool = False
    """Whether the records have the end of the phase or of the run at this step."""
    lacks_saved: bool = False
    """Whether the records lack the `saved` event of `newest`."""
    saved: SavedState | None = None
    """Checkpoint to resume from, or None."""
    stored: StoredState | None = None
    """State to continue from after the loss of a rank, or None. It differs between ranks."""

    @property
    def origin(self) -> str:
        """Source of the state: the `copies` of recovery, a `checkpoint`, or the `start` of a new run."""
        return "copies" if self.stored else ("checkpoint" if self.saved else "start")

    @property
    def is_inside_phase(self) -> bool:
        """Whether the state was stored after a step of the phase, whose save or evaluation may be missing."""
        return self.stored is not None and not self.stored.begins_phase


class TrainingRun:
    """Training of one phase of a run on one rank: the parts of the run, and the loop that uses them.

    `go` runs the loop. `start` is the result of the checks, and `engine` holds the model and the optimizer. `watch`
    holds the monitors of the run, such as the watchdog. `profile` traces some steps, and `callbacks` are the user's own
    code. `recovery` stores the state after each step, if lost ranks are to be replaced. `mirror` uploads checkpoints,
    or is None.
    """

    def __init__(
        self,
        context: RunContext,
        start: Start,
        engine: Engine,
        watch: Watch,
        profile: StepProfile,
        callbacks: Callbacks,
        recovery: Recovery,
        mirror: Mirror | None = None,
    ) -> None:
        config = context.config
        self.context = context
        self.recovery = recovery
        self.start = start
        self.engine = engine
        self.watch = watch
        self.profile = profile
        self.callbacks = callbacks
        self.loss: float | None = None
        """Training loss of the last step in nats per token. It is None before this object makes its first step."""
        self.max_steps = config.train.max_steps
        self.last_step = max(start.step, context.steps.stop)
        self.stopped = False
        on_gpu = context.ranks.device.type == "cuda"
        self.maker = batch_maker(
            engine.model, mask_documents=config.data.document_mask, for_graphs=config.engine.replays(on_gpu=on_gpu)
        )
        carried = NOTHING_CARRIED | {"began": began_text(start.step, start.stream)}
        if start.stored is not None:
            carried = start.stored.facts["carried"]
        self.damage = CorruptionPolicy(skip=config.data.on_corrupt == "skip", max_skipped=config.data.max_skipped)
        self.damage.continue_from(carried["skipped"])
        recovery.watch_passes(engine.model)
        self.clock = StepClock(context.ranks.device, sees_forward=config.engine.zero_stage < 3)
        scored_varies = config.data.document_mask or config.data.on_corrupt == "skip" or config.train.is_permutation
        self.stepper = Stepper(
            engine,
            self.clock,
            context.ranks,
            context.plan,
            seed=config.run.seed,
            first_lane=context.lanes.start,
            scored_len=None if scored_varies else context.scored_len,
            before_reduction=recovery.wait,
        )
        sets_norm = "clip_norm" in config.optim.model_fields_set
        self.clipping = Clipping(config.optim.clip_norm, is_default=not sets_norm)
        self.clipping.continue_from(carried["clipping"])
        self.reporter = MetricReporter(context, start_step=start.step, continues=start.step > 0 or recovery.is_again)
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
            newest=start.newest,
            evaluated=self.evaluated,
            callbacks=self.callbacks,
            mirror=mirror,
            unsaved_s=carried["unsaved_s"],
            retry_at=carried["retry_at"],
        )
        self._began: str = carried["began"]
        """Step and stream with which the phase or the process began, as JSON. It is written with each copy, as text,
        because its JSON takes a tenth of a millisecond."""
        self._carried_interval: dict[str, Any] | None = carried["interval"]
        """Sums of the logging interval that this process continues, until it has done so."""

    def go(self) -> TrainState:
        """Train until the phase ends or a stop request arrives, and return the last state.

        Training starts from a checkpoint or from step 0. The last state is saved in a checkpoint before this method
        returns. Raises TxlError on all ranks.
        """
        try:
            state = self._first_state()
            if self.start.stored is None:
                self.recovery.check_room(state, self.engine, with_average=self.context.config.optim.ema_decay > 0)
                self._report_start(state)
            if state.step > self.max_steps:
                warn_for_all(
                    "the run is already at step %d, which is past train.max_steps=%d", state.step, self.max_steps
                )
            self._start_callbacks(state)
            if self.start.lacks_saved:
                self.saving.report_newest()
            is_recovered = self.start.is_inside_phase
            lacks_save = self.saving.is_lacking(state.step, since=began_in(self._began)[0])
            if is_recovered and (lacks_save or self._is_best_to_keep(state.step)):
                self.saving.begin(state)  # the loss has dropped this save
            is_unseen = self.observer.should_evaluate(state.step) and state.step not in self.evaluated
            if is_recovered or (state.step and is_unseen):
                # An earlier process may have ended before this evaluation or sample did.
                self._observe(state, is_sampled=self.start.is_sampled)
            self._repeat_validation(state)
            while not self.stopped and state.step < self.last_step:
                state = self._train_from(state)
            self.recovery.wait()
            ending = self._ending(state)
            if state.step > 0:
                self.saving.finish_last(state, patience_s=_PATIENCE_S[ending], stopped=self.stopped)
            self._report_recovery(state.step)
            if not (self.start.is_ended and state.step == self.start.step):  # else a rank was lost after this report
                self._report_clipping(step=state.step)
                self.reporter.write("event", {"event": ending, "step": state.step})
            if ending != "phase":
                self.saving.finish_mirror(patience_s=_PATIENCE_S[ending], stopped=self.stopped)
        finally:
            self.recovery.leave(self.saving.abandon)
            self.reporter.close()
        return state

    def _ending(self, state: TrainState) -> str:
        """Return the event that ends the loop: "stopped" after a stop request, "done" after the last step of the run,
        else "phase"."""
        if self.stopped:
            return "stopped"
        if state.step >= self.max_steps:
            return "done"
        return "phase"

    def _first_state(self) -> TrainState:
        """Return the state that training starts from: a loaded checkpoint, or the initial state of a new run."""
        start = self.start
        self.watch.watchdog.beat("load", step=start.step)
        if start.stored is not None:
            state = start.stored.load(self.engine)
        elif start.saved is not None:
            state = self._load(start.saved, start.stream)
        else:
            train = self.context.config.train
            memories = first_memories(
                self.engine, self.context.plan, memory_len=train.memory_len, initial=train.initial_memory
            )
            state = TrainState(step=0, tokens_seen=0, health=Health(), stream=start.stream, memories=memories)
        self.recovery.mark_loaded()
        return state

    def _load(self, saved: SavedState, stream: StreamState) -> TrainState:
        """Load a checkpoint into the engine and the callbacks, and return its training state.

        The loaded weights must reproduce the checkpoint's probe, which holds the saved model's losses on a few fixed
        tokens. Raises CheckpointError on every rank if a loss differs.
        """
        state = load_checkpoint(saved, self.engine, self.context, stream=stream)
        outcome = check_probe(self.engine, self.maker, saved.folder, precision=self.context.config.engine.dtype)
        logger.info("%s: %s", saved.folder.name, outcome)
        callback_states = run_on_all_ranks(lambda: read_states(saved.folder))
        self.callbacks.load(callback_states.states, step=saved.step, validated_step=callback_states.validated_step)
        return state

    def _start_callbacks(self, state: TrainState) -> None:
        """Call the callbacks' method `on_train_start`, if any callback has this method."""
        if not self.callbacks.handles("on_train_start"):
            return
        context = self.context
        ranks = self.context.ranks
        self.watch.beat("callbacks")
        self.callbacks.start(
            TrainStart(
                config=context.saved_settings.config,
                step=state.step,
                rank=ranks.rank,
                world_size=ranks.world_size,
                device=str(ranks.device),
                num_parameters=sum(math.prod(shape) for shape in self.engine.shapes.values()),
                vocab_size=context.vocab_size,
            )
        )

    def _repeat_validation(self, state: TrainState) -> None:
        """Call `on_validation_end` again if the callbacks' loaded states do not include the last validation.

        A checkpoint may be written before the validation of its own step. The callback states in such a
        checkpoint lack the result, but `evaluated` contains the result.
        """
        if state.step in self.evaluated and self.callbacks.validated_step != state.step:
            self._end_validation(state.step, {self.context.corpora.first_kind: self.evaluated[state.step]})

    def _end_validation(self, step: int, losses: dict[str, float]) -> None:
        """Call the callbacks' method `on_validation_end` with the result of a validation.

        `losses` maps the name of each evaluation record to a loss in nats per token.
        """
        loss = losses[self.context.corpora.first_kind]
        earlier_losses = [earlier_loss for at, earlier_loss in self.evaluated.items() if at < step]
        self.watch.beat("callbacks")
        is_best = loss < min(earlier_losses, default=math.inf)
        self.callbacks.end_validation(ValidationEnd(step, loss, MappingProxyType(losses), is_best))

    def _train_from(self, state: TrainState) -> TrainState:
        """Make steps until the phase ends, a stop request arrives or the run rewinds. Return the state to continue
        from.

        A rewind returns to a checkpoint from before a spike of the loss or of the gradient norm.
        """
        context = self.context
        config = self.context.config
        interval = Interval(clip_norm=config.optim.clip_norm)
        carried, self._carried_interval = self._carried_interval, None
        if carried is not None:
            interval.continue_from(carried)
        elif state.step and state.step == context.steps.start:
            self.recovery.store_beginning(state, self.engine, self._carried(interval))
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
            sampler=target_sampler(context.target_settings, context.corpora.first, seed=config.run.seed),
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
                self.stopped = self.watch.stops.is_agreed = votes.stop
                if votes.written:
                    with interval.paused():
                        self.saving.finish(step)
                if self.guard.should_rewind(state.health):
                    rewound_state = self._rewind(state)
                    if rewound_state is not None:
                        return rewound_state
                is_last = step == self.last_step
                # The first report shows that the run works, and how long it will take.
                is_first = not self.start.is_inside_phase and step == self.start.step + 1 and interval.has_valid_steps()
                if is_first or is_last or step % config.metrics.log_every_steps == 0:
                    self._report(state, interval)
                    interval = Interval(clip_norm=config.optim.clip_norm)
                # After the report, so that no stored step lacks its record.
                self.recovery.store(state, self.engine, self._carried(interval))
                with interval.paused():
                    if is_last or votes.save or self.saving.is_due(step):
                        self.recovery.wait()
                        self.saving.begin(state)
                    if not self.stopped:
                        self._observe(state)
        finally:
            self.profile.close()
            inputs.close()
        return state

    def _step(self, state: TrainState, step_input: StepInput, interval: Interval) -> tuple[TrainState, StepFlags]:
        """Make one training step: forward and backward passes, all-reduce of the flags, update, checks and callbacks.

        Returns (the state after the step, the flags of all ranks combined). Raises TrainingError if `guard` ends the
        run.
        """
        self.watch.check_lock()
        config = self.context.config
        step = state.step + 1
        self.watch.beat("step")
        lr = learning_rate(state.step, config.optim, max_steps=self.max_steps)
        memories, decision = self.stepper(step_input, state.memories, step=step, votes=self._votes())
        failpoint("decided", step=step)
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
        with record_function("update"):
            self.engine.step(lr=lr, grad_norm=decision.grad_norm)
        failpoint("updated", step=step)
        if step == self.start.step + 1:  # no later step takes as long as the first
            set_timeout(timeout_s=config.engine.timeout_s + _GROUP_GRACE_S)
            self.watch.watchdog.limit(config.engine.timeout_s)
        self.watch.beat("report")
        self._report_recovery(step)
        if layer_stats.layers is not None:  # after `recovered`, which supersedes the earlier record of this step
            self.reporter.write("layers", layer_stats.layers)
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
        new_tokens = 0 if skipped else self.context.plan.tokens_per_step
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

    def _report_recovery(self, finished_step: int) -> None:
        """Write the `recovered` event after the first step that follows the loss of a rank, or at the end of the phase.

        The event has the step from which the run continued, because the records of later steps are written again.
        """
        step = self.start.step
        facts = self.recovery.mark_step(finished_step, continued_from=step)
        if facts is not None:
            self.reporter.write(
                "event", {"event": "recovered", "step": step, "restored_from": self.start.origin, **facts}
            )

    def _carried(self, interval: Interval) -> dict[str, Any]:
        """Return what a replacement of this rank continues beside the state, as values for JSON."""
        return {
            "began": self._began,
            "interval": interval.sums(),
            "clipping": self.clipping.counts(),
            "skipped": self.damage.skipped(),
            "unsaved_s": self.saving.unsaved_s,
            "retry_at": self.saving.retry_at,
        }

    def _votes(self) -> StepFlags:
        """Return this rank's flags for the next all-reduce: stop requested, checkpoint files written, and time for a
        new checkpoint."""
        stops = self.watch.stops
        is_asked = bool(stops.reason) or stops.is_agreed
        return StepFlags(stop=is_asked, written=self.saving.is_written, save=self.saving.is_late)

    def _rewind(self, state: TrainState) -> TrainState | None:
        """Load the newest checkpoint from before the current spikes. From now on the text of these spikes is skipped.

        Returns the state to continue from, or None if there is no such checkpoint.
        """
        self.saving.finish(state.step)
        self.watch.beat("rewind")
        first_bad = state.step - state.health.spikes_in_row + 1
        target = find_rewind(self.context, state, first_bad=first_bad, began=began_in(self._began))
        if target is None:
            warn_for_all("no rewind: this phase has no checkpoint from before the spike at step %d", first_bad)
            return None
        saved, stream = target
        run_on_rank0(lambda: quarantine(self.context.run_dir, after_step=saved.step, word="rewound"))
        self.saving.set_newest(saved.folder)
        self.observer.forget(after=saved.step)
        self.recovery.wait()
        loaded = self._load(saved, stream)
        self._repeat_validation(loaded)
        warn_for_all(
            "rewound to %s: training skips the text of steps %d to %d from now on",
            saved.folder.name,
            first_bad,
            state.step,
        )
        self.reporter.write("event", {"event": "rewound", "step": loaded.step, "from": state.step})
        return replace(loaded, health=after_rewind(state.health, to=loaded.health))

    def _report_start(self, state: TrainState) -> None:
        """Write the `start` event, which records hardware, versions, corpora and the units of the losses.

        A job that returns to a checkpoint or to its start after the loss of a rank has started only once, so it writes
        none again.
        """
        context = self.context
        corpora = self.context.corpora
        config = self.context.config
        facts = run_on_all_ranks(
            lambda: text_facts(
                corpora.train,
                corpora.eval,
                mask_documents=config.data.document_mask,
                max_tokens=config.eval.max_tokens,
                unscored=context.unscored,
                with_eval_bits=not config.train.is_permutation,
            )
        )
        for kind, problem in facts["no_bits"].items():
            logger.info("%s records have no bits per byte, because %s", kind, problem)
        facts = start_facts(self.engine, context.ranks) | facts
        if self.recovery.records_start():
            self.reporter.write("event", {"event": "start", "step": state.step, **facts})

    def _report(self, state: TrainState, interval: Interval) -> None:
        """Write the training record of a logging interval. All ranks call this method together."""
        values = interval.report(
            step=state.step,
            tokens_per_step=self.context.plan.tokens_per_step,
            num_skipped=self.damage.num_skipped,
        )
        values |= self.stragglers(values["rank_ms"], step=state.step)
        context = self.context
        flops_per_token = sum(context.flops.values())
        values |= mfu(values["tokens_per_s"], flops_per_token=flops_per_token, peak_flops=context.peak_flops)
        values |= self.saving.seconds()
        record = train_record(
            state,
            values,
            splits=context.corpora.train,
            mask_documents=context.config.data.document_mask,
            unscored=context.unscored,
            max_steps=self.max_steps,
        )
        self.reporter.write("train", record)

    def _report_clipping(self, *, step: int) -> None:
        """Warn if nearly all steps were clipped by the default `optim.clip_norm`, and write a `clipped` event."""
        clipped = self.clipping.record()
        if clipped is not None:
            warn_of_clipping(clipped)
            self.reporter.write("event", {"event": "clipped", "step": step, **clipped})

    def _observe(self, state: TrainState, *, is_sampled: bool = False) -> None:
        """Write a sample text and evaluate the model, if the settings require it after this step.

        A stop request interrupts both and ends the run. With `checkpoint.keep_best` the state is saved if its
        validation loss is the lowest so far.
        """
        if self.observer.should_sample(state.step) or self.observer.should_evaluate(state.step):
            self.recovery.wait()  # an evaluation may exchange weights and averages
        try:
            if self.observer.should_sample(state.step) and not is_sampled:
                self._before_segment(state.step)
                self.observer.sample(state.step)
            if not self.observer.should_evaluate(state.step) or state.step in self.evaluated:
                return
            losses, is_best = self.observer.evaluate(state.step)
        except StopAskedError:
            self.stopped = True
            return
        self._end_validation(state.step, losses)
        if self.context.config.checkpoint.keep_best and is_best:
            self.saving.begin(state)

    def _is_best_to_keep(self, step: int) -> bool:
        """Return whether `checkpoint.keep_best` requires a checkpoint of this step, as far as the run has evaluated."""
        keeps_best = self.context.config.checkpoint.keep_best
        return keeps_best and step == min(self.evaluated, key=self.evaluated.__getitem__, default=None)

    def _before_segment(self, step: int) -> None:
        """Send a heartbeat, commit a checkpoint that all ranks have written, and check for stop requests.

        Every rank calls this method before each evaluation segment. Raises StopAskedError on all ranks if any rank has
        a stop request.
        """
        self.watch.beat("evaluate")
        failpoint("evaluate", step=step)
        votes = all_reduce_flags(self._votes(), world_size=self.context.ranks.world_size)
        if votes.written:  # a checkpoint does not wait for the end of an evaluation
            self.saving.finish(step)
        if votes.stop:
            self.watch.stops.is_agreed = True
            raise StopAskedError


def _input_ids(step_input: StepInput) -> npt.NDArray[np.int64]:
    """Return the input ids of this rank's lanes (batch rows) in a step, [lanes, segment_len], as a read-only copy."""
    tokens_BT = np.concatenate([batch.tokens_BT.numpy() for batch in step_input.batches]).astype(np.int64)
    tokens_BT.setflags(write=False)
    return tokens_BT
