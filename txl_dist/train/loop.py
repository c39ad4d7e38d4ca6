"""The training loop, which reads like the procedure it is; `start` puts its parts together.

    for each segment: step, decide together, report, save, evaluate; until the end, or somebody asks to stop

Whatever touches clock or disk is decided on rank 0 and broadcast; whatever one rank notices (a signal, a loss that is
not finite, a checkpoint that is written) all ranks learn in the one reduction of a step. Dropout is seeded per
micro-batch from (seed, step, first lane), so a resumed run continues bit for bit without any generator state.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch.profiler import record_function

from txl_dist.config import BatchPlan, Config
from txl_dist.data.read.corpora import Corpora
from txl_dist.data.read.damage import DamagePolicy
from txl_dist.data.read.lanes import epochs_read, lanes_of_rank
from txl_dist.data.read.position import StreamState
from txl_dist.data.read.prefetch import prefetch
from txl_dist.data.read.units import text_units
from txl_dist.dist import Ranks, Votes, barrier, gather_objects, limit_waiting, on_first, poll, together
from txl_dist.errors import CheckpointError, TrainingError
from txl_dist.faults import fault_point
from txl_dist.files import replace_file
from txl_dist.log import logger, warn_for_all
from txl_dist.run_files import list_checkpoints, step_of
from txl_dist.train.batch import StepInput, batch_maker, read_inputs
from txl_dist.train.checkpoint.policy import Saving
from txl_dist.train.checkpoint.probe import check_probe
from txl_dist.train.checkpoint.read import CorpusFacts, load_checkpoint, problems_together
from txl_dist.train.checkpoint.write import Saver
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.guard import Guard, stream_of
from txl_dist.train.health import Health, after_rewind
from txl_dist.train.report.metrics import Interval, MfuMeter, eta_s, start_facts
from txl_dist.train.report.observer import Observer, StopAskedError, labelled
from txl_dist.train.report.profile import StepProfile
from txl_dist.train.report.sinks import Record, Reporter
from txl_dist.train.run_dir import set_aside
from txl_dist.train.schedule import learning_rate
from txl_dist.train.state import TrainState
from txl_dist.train.step import Stepper
from txl_dist.train.watch.run_lock import RunLock
from txl_dist.train.watch.stopping import StopRequests
from txl_dist.train.watch.stragglers import StepClock, StragglerWatch
from txl_dist.train.watch.watchdog import Watchdog

_PATIENCE_S = {"stopped": 15.0, "done": 900.0}
"""How long the last save is tried: who asked to stop will not wait, but who finds a full disk in the morning may."""
_GROUP_GRACE_S = 30
"""Collectives give up after the watchdog, which knows more."""


class Start(NamedTuple):
    """What was decided before anything was built; the same on every rank."""

    checkpoint: Path | None
    step: int
    stream: StreamState
    """Where the lanes begin, or go on."""
    facts: CorpusFacts
    evaluated: dict[int, float]
    """Loss of each evaluation that the run directory knows, by step."""
    warnings: list[str]


class Job(NamedTuple):
    """What stays the same while a run goes on."""

    config: Config
    plan: BatchPlan
    ranks: Ranks
    corpora: Corpora
    start: Start
    stops: StopRequests
    watchdog: Watchdog
    lock: RunLock | None
    """On rank 0."""
    nonce: str
    profile: StepProfile


class Run:
    """One training run on one rank: the parts that the loop puts together."""

    def __init__(self, job: Job, engine: Engine) -> None:
        config, plan, ranks = job.config, job.plan, job.ranks
        self.job, self.engine, self.config, self.ranks = job, engine, config, ranks
        self.run_dir, self.max_steps = Path(config.run.dir), config.train.max_steps
        self.splits = job.corpora.train
        self.damage = DamagePolicy(skip=config.data.on_damage == "skip", max_skipped=config.data.max_skipped)
        self.lanes = lanes_of_rank(config.train.num_lanes, rank=ranks.rank, world_size=ranks.world_size)
        self.maker = batch_maker(engine.model, mask_documents=config.data.document_border == "mask")
        self.clock = StepClock(ranks.device, sees_forward=config.engine.zero_stage < 3)
        self.stepper = Stepper(
            engine,
            config=config,
            plan=plan,
            lanes=self.lanes,
            ranks=ranks,
            masks_documents=self.maker.mask_documents,
            clock=self.clock,
        )
        self.mfu = MfuMeter(config, plan=plan, vocab_size=job.start.facts.vocab_size, device=ranks.device)
        self.step, self.stopped = job.start.step, False
        self.reporter = Reporter(config, start_step=job.start.step, ranks=ranks)
        self.stragglers = StragglerWatch(self.reporter)
        self.observer = Observer(
            engine,
            self.maker,
            config=config,
            ranks=ranks,
            splits=job.corpora.eval,
            tokenizer=job.corpora.first.tokenizer,
            reporter=self.reporter,
            evaluated=job.start.evaluated,
            before_segment=self._before_segment,
        )
        self.guard = Guard(config, splits=self.splits, lanes=self.lanes, reporter=self.reporter)
        self.saving = Saving(
            Saver(
                self.run_dir,
                config=config,
                corpus=job.start.facts,
                lanes=self.lanes,
                ranks=ranks,
                nonce=job.nonce,
                beat=lambda: self._beat("commit"),
                before_commit=self._confirm_lock,
            ),
            engine,
            self.maker,
            config=config,
            ranks=ranks,
            reporter=self.reporter,
            newest=job.start.checkpoint,
            stops=job.stops,
            evaluated=lambda: self.observer.evaluated,
            beat=self._beat,
        )

    def go(self) -> bool:
        """Train from a checkpoint, or from the beginning. Returns whether the run came to its end."""
        try:
            state = self._first_state()
            units = together(lambda: self.observer.text_facts(self.splits))
            for kind, problem in units["no_bits"].items():
                logger.info("%s: no bits per byte, as %s", kind, problem)
            facts = start_facts(self.engine, self.ranks) | units
            self.reporter.write("event", {"event": "start", "step": state.step, **facts})
            if state.step > self.max_steps:
                warn_for_all("the run is at step %d already, past train.max_steps=%d", state.step, self.max_steps)
            if state.step and self._lacks_evaluation(state.step):
                self._observe(state)  # a process before this one ended before it was done
            while not self.stopped and state.step < self.max_steps:
                state = self._train_from(state)
            how = "stopped" if self.stopped else "done"
            if state.step > 0:
                self.saving.finish_last(state, patience_s=_PATIENCE_S[how], stopped=self.stopped)
            self.reporter.write("event", {"event": how, "step": state.step})
        finally:
            self.reporter.close()
        self._leave(state)
        return not self.stopped

    def _beat(self, phase: str) -> None:
        self.job.watchdog.beat(phase, step=self.step)

    def _first_state(self) -> TrainState:
        train, start = self.config.train, self.job.start
        self._beat("load")
        if start.checkpoint is not None:
            return self._load(start.checkpoint, start.stream)
        memories = [
            self.engine.empty_memory(num_lanes=train.microbatch_lanes, memory_len=train.memory_len)
            for _ in range(self.job.plan.num_microbatches)
        ]
        return TrainState(step=0, tokens_seen=0, health=Health(), stream=start.stream, memories=tuple(memories))

    def _load(self, checkpoint: Path, stream: StreamState) -> TrainState:
        state = load_checkpoint(
            checkpoint,
            self.engine,
            stream=stream,
            lanes=self.lanes,
            microbatch_lanes=self.job.plan.microbatch_lanes,
            memory_len=self.config.train.memory_len,
            ranks=self.ranks,
        )
        shown = check_probe(self.engine, self.maker, checkpoint, precision=self.config.engine.precision)
        logger.info("%s: %s", checkpoint.name, shown)
        return state

    def _train_from(self, state: TrainState) -> TrainState:
        """Steps until the end, a stop or a rewind."""
        interval = Interval(clip_norm=self.config.optim.clip_norm)
        inputs = prefetch(
            read_inputs(
                self.splits,
                state.stream,
                config=self.config,
                plan=self.job.plan,
                lanes=self.lanes,
                maker=self.maker,
                damage=self.damage,
                device=self.ranks.device,
            ),
            depth=self.config.data.prefetch_depth,
        )
        try:
            while not self.stopped and state.step < self.max_steps:
                self.step = state.step + 1
                self.job.profile.begins(self.step)
                self._beat("data")
                self.clock.begin()
                with record_function("data"):
                    step_input = next(inputs)
                interval.wait(self.clock.elapsed_s())
                state, votes = self._step(state, step_input, interval)
                fault_point("boundary", step=state.step)
                self.stopped = votes.stop
                if votes.written:
                    with interval.paused():
                        self.saving.finish(state.step)
                if self.guard.wants_rewind(state.health) and (rewound := self._rewound(state)) is not None:
                    return rewound
                is_last = state.step == self.max_steps
                # A sign of life, and how long the rest will take.
                is_first = state.step == self.job.start.step + 1 and interval.has_scored()
                if is_first or is_last or _due(state.step, self.config.metrics.log_every_steps):
                    self.reporter.write("train", self._train_record(state, interval))
                    interval = Interval(clip_norm=self.config.optim.clip_norm)
                with interval.paused():
                    if is_last or self.saving.is_due(state.step):
                        self.saving.begin(state)
                    if not self.stopped:
                        self._observe(state)
        finally:
            self.job.profile.close()
            inputs.close()
        return state

    def _step(self, state: TrainState, step_input: StepInput, interval: Interval) -> tuple[TrainState, Votes]:
        """Returns (the next state, what all ranks have to say)."""
        self._check_lock()
        step = state.step + 1
        self._beat("step")
        lr = learning_rate(state.step, self.config.optim, max_steps=self.max_steps)
        memories, decision = self.stepper(step_input, state.memories, step=step, votes=self._votes())
        self.guard.check_replicas(self.engine.named_values(), step=step)
        with record_function("update"):
            self.engine.step(lr=lr, grad_norm=decision.grad_norm)
        if step == self.job.start.step + 1:  # no step will take as long as the first
            limit_waiting(timeout_s=self.config.engine.timeout_s + _GROUP_GRACE_S)
            self.job.watchdog.limit(self.config.engine.timeout_s)
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
            own_ms=self.clock.own_ms(),
        )
        after = TrainState(
            step=step,
            tokens_seen=state.tokens_seen + (0 if skipped else self.job.plan.tokens_per_step),
            health=health,
            stream=step_input.stream,
            memories=memories,
        )
        return after, decision.votes

    def _votes(self) -> Votes:
        """Of this rank."""
        return Votes(stop=bool(self.job.stops.reason), written=self.saving.is_written)

    def _confirm_lock(self) -> None:
        """The lock's own thread looks only every few seconds."""
        if self.job.lock is not None:
            self.job.lock.beat()
        self._check_lock()

    def _check_lock(self) -> None:
        if self.job.lock is not None and self.job.lock.is_lost:
            raise CheckpointError(
                f"another job has taken {self.run_dir} over while this one made no sign of life. It is left to that "
                "job; nothing is saved here."
            )

    def _rewound(self, state: TrainState) -> TrainState | None:
        """Back to the last checkpoint before the spike, whose text is left out from now on; None if there is none."""
        first_bad = state.step - state.health.spikes_in_row + 1
        self.saving.finish(state.step)
        before = on_first(lambda: [path for path in list_checkpoints(self.run_dir) if step_of(path) < first_bad])
        whole = (path for path in reversed(before) if not problems_together(path, self.ranks))
        target = next(whole, None)
        if target is not None:
            start = (self.job.start.step, self.job.start.stream)
            base = on_first(lambda: stream_of(target, config=self.config, start=start, now=state.stream))
            if base is not None:
                return self._back_to(target, base, state, first_bad=first_bad)
        warn_for_all("no checkpoint to go back to from the spike at step %d: the run goes on", first_bad)
        return None

    def _back_to(self, target: Path, base: StreamState, state: TrainState, *, first_bad: int) -> TrainState:
        begin = base.advanced((first_bad - 1 - step_of(target)) * self.config.train.segment_len)
        on_first(lambda: set_aside(self.run_dir, newer_than=target, word="rewound"))
        self.saving.newest_is(target)
        self.observer.forget(after=step_of(target))
        loaded = self._load(target, base.skipping(begin, state.stream))
        warn_for_all("rewound to %s: the text of steps %d to %d is left out", target.name, first_bad, state.step)
        self.reporter.write("event", {"event": "rewound", "step": loaded.step, "from": state.step})
        return replace(loaded, health=after_rewind(state.health, to=loaded.health))

    def _train_record(self, state: TrainState, interval: Interval) -> Record:
        values = interval.report(
            step=state.step, tokens_per_step=self.job.plan.tokens_per_step, num_skipped=self.damage.num_skipped
        )
        values |= self.stragglers(values["rank_ms"], step=state.step)
        shares = [one.num_lanes / state.stream.num_lanes for one in state.stream.corpora]
        return {
            "step": state.step,
            **values,
            **self.mfu(values["tokens_per_s"]),
            **self.saving.seconds(),
            **text_units(self.splits, shares=shares, mask_documents=self.maker.mask_documents).bits(values["loss"]),
            "tokens_seen": state.tokens_seen,
            "skipped_steps": state.health.skipped_steps,
            **self._epochs(state.stream),
            "eta_s": eta_s(state.step, max_steps=self.max_steps, step_ms=values["step_ms"]),
        }

    def _epochs(self, stream: StreamState) -> dict[str, float]:
        """How often each corpus has been read."""
        epochs = [
            epochs_read(one.cut(), one.position, num_tokens=split.tokens)
            for one, split in zip(stream.corpora, self.splits, strict=True)
        ]
        return {labelled("epoch", split, self.splits): value for split, value in zip(self.splits, epochs, strict=True)}

    def _lacks_evaluation(self, step: int) -> bool:
        return self.observer.should_evaluate(step) and step not in self.observer.evaluated

    def _observe(self, state: TrainState) -> None:
        """Evaluate and sample where that is due, until asked to stop; the best is saved where that is wanted."""
        try:
            if self.observer.should_sample(state.step):
                self._before_segment(state.step)
                self.observer.sample(state.step)
            if not self.observer.should_evaluate(state.step):
                return
            is_best = self.observer.evaluate(state.step)
        except StopAskedError:
            self.stopped = True
            return
        if self.config.checkpoint.keep_best and is_best:
            self.saving.begin(state)

    def _before_segment(self, step: int) -> None:
        """Of an evaluation, on all ranks."""
        self._beat("evaluate")
        fault_point("evaluate", step=step)
        votes = poll(self._votes(), world_size=self.ranks.world_size)
        if votes.written:  # a checkpoint is not to wait for the end of an evaluation
            self.saving.finish(step)
        if votes.stop:
            raise StopAskedError

    def _leave(self, state: TrainState) -> None:
        """Say how the run ended, and meet: the launcher kills the siblings of the first rank to leave."""
        if self.stopped:
            reasons = {reason: None for reason in gather_objects(self.job.stops.reason) if reason}
            warn_for_all("stopped at step %d by %s; the same command goes on", state.step, ", ".join(reasons))
        if self.ranks.is_first:
            try:
                self.job.stops.clear()
                if not self.stopped:
                    replace_file(self.run_dir / "DONE", f"{state.step}\n".encode())
            except OSError as error:
                warn_for_all("the state is saved, but %s cannot be written: %s", self.run_dir, error.strerror)
            if not self.stopped:
                logger.info("done: %d steps, %s tokens, in %s", state.step, f"{state.tokens_seen:,}", self.run_dir)
        barrier()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
