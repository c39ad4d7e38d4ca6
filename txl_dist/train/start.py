"""The start of a training run: it checks, locks and builds the parts of the run, in this order, before the first step.

    join ranks -> check the run -> lock the run -> choose a checkpoint -> open the run -> build the engine -> `loop`

Before the run is opened, only its lock is written. So a run that is refused leaves no files.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from txl_dist.artifacts import CHECKPOINTS, DONE, LOG, PROFILE, STACKS, STOP, list_checkpoints, newest_step, step_of
from txl_dist.config.load import Config, configure
from txl_dist.config.schema import paths_of_sets
from txl_dist.console.formatting import counted
from txl_dist.console.logging import logger, note_in_file, start_logging, warn_for_all
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.distributed.collectives import (
    RankInfo,
    barrier,
    distributed_context,
    gather_objects,
    get_rank,
    ranks_with_same,
    run_on_all_ranks,
    run_on_rank0,
)
from txl_dist.distributed.recovery.seat import node_name
from txl_dist.errors import (
    CheckpointError,
    ConfigError,
    LostRankError,
    TxlError,
    raised_everywhere,
)
from txl_dist.io.files import atomic_replace
from txl_dist.tokenizers.tokenizer import read_tokenizer
from txl_dist.train.callbacks import Callbacks, RunResult
from txl_dist.train.checkpoint.mirror.mirror import Mirror, mirror_of, mirrored_precision
from txl_dist.train.checkpoint.read import Choice, check_checkpoint, choose_together, continued_stream
from txl_dist.train.checkpoint.recovery import Recovery, recovery_of
from txl_dist.train.checkpoint.slots import StoredState
from txl_dist.train.engine.precision import ChosenPrecision, agree_on_precision
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.engine.zero import ZeroEngine
from txl_dist.train.footprint.fits import check_fits
from txl_dist.train.loop import Start, TrainingRun
from txl_dist.train.monitoring.alike import check_corpora_alike, check_ranks_alike, first_exchange
from txl_dist.train.monitoring.member import Member, RegroupError, join_agent, lock_run
from txl_dist.train.monitoring.preemption import LOST_REQUEST, PreemptionRequests
from txl_dist.train.monitoring.run_lock import is_shared, prove_shared
from txl_dist.train.monitoring.watch import Monitor, Watch
from txl_dist.train.monitoring.watchdog import Watchdog
from txl_dist.train.preflight import check_shards, describe_batch, describe_data, describe_sets, warnings_on_repetition
from txl_dist.train.report.profile import StepProfile
from txl_dist.train.run_dir import (
    check_paths,
    check_run_dir,
    kept_precision,
    next_commands,
    open_run_dir,
    quarantine,
    read_run_history,
    tidy_checkpoints,
)
from txl_dist.train.run_plan import RunPlan, Stage, plan_run
from txl_dist.train.state import RunContext, TrainState
from txl_dist.train.warm_start import initial_weights
from txl_dist.version import code_version


def pretrain(
    config: Config | str | Path | Mapping[str, Mapping[str, Any]],
    *,
    callbacks: Sequence[object] = (),
    resume: str = "auto",
    max_time_s: float = 0.0,
    profile: range = range(0),
) -> RunResult:
    """Train until `train.max_steps`, and resume from the run directory if it has a checkpoint. `txl train` calls this.

        result = txl_dist.pretrain("configs/quickstart.toml", callbacks=[MyCallback()])
        sys.exit(result.exit_code)

    All ranks call it, in their main thread. A rank is a process that `deepspeed` or `torchrun` starts. A process that
    is started without them is the only rank.

    Args:
        config: A `Config`, the path of a TOML file, or settings by section, as `configure` takes them:
            `{"data": {"path": "data/first"}, "train": {"max_steps": 100}}`.
        callbacks: The caller's own code at the events of the run. They are objects with some of the methods of
            `Callback`, and must be the same on every rank.
        resume: "auto" resumes the newest undamaged checkpoint if there is one. "must" requires a checkpoint, and
            "never" refuses one. The path of a checkpoint folder resumes that checkpoint.
        max_time_s: Age of the process in seconds after which the run saves and stops, with recovery the age of the
            job. 0 means no limit.
        profile: Steps that rank 0 traces (see `profile`).

    Raises a TxlError on every rank if the run cannot start or continue. For example, it raises ConfigError for
    settings, callbacks or paths that cannot be used, and TrainingError for an error that a callback raises.
    """
    config = _as_config(config)
    check_paths(config.data.paths, run_dir=config.run.dir, init=config.run.init, resume=resume)
    called = Callbacks(callbacks)
    run_dir = Path(config.run.dir)
    member = join_agent()
    if member is not None:
        return _pretrain_with_recovery(config, member, called, resume=resume, max_time_s=max_time_s, profile=profile)
    with ExitStack() as stack:
        ranks = stack.enter_context(
            distributed_context(timeout_s=config.engine.start_timeout_s, num_threads=config.engine.num_threads)
        )
        start_logging(rank=ranks.rank)
        if config.recover.spares and ranks.is_rank0:
            logger.warning("recover.spares is ignored here: only `txl train` and `txl launch` replace lost ranks")
        stops = PreemptionRequests(
            stop_file=run_dir / STOP if ranks.is_rank0 else None, max_time_s=max_time_s if ranks.is_rank0 else 0.0
        )
        stack.callback(stops.close)
        try:
            with first_exchange():
                check_ranks_alike(config.model_dump(mode="json"), code=code_version())
                watchdog = Watchdog(ranks, limit_s=config.engine.start_timeout_s)
        except TxlError as error:
            note_in_file(f"the run ends: {error}")
            called.fail(error)
            raise
        stack.callback(watchdog.close)
        try:
            traced = StepProfile(profile if ranks.is_rank0 else range(0), folder=run_dir / PROFILE)
            return _train(config, stack, ranks, stops, watchdog, traced, called, None, resume=resume)
        except TxlError as error:
            note_in_file(f"the run ends: {error}")
            watchdog.report(error)
            called.fail(error)
            raise
        except Exception as error:
            cause = watchdog.first_cause(error)
            note_in_file(f"the run ends: {cause or repr(error)}")
            if cause is None:
                watchdog.report(error)
            called.fail(error)
            if cause is None:
                raise
            raise LostRankError(cause) from error  # an empty message is not printed: another rank prints it


def _pretrain_with_recovery(
    config: Config, member: Member, called: Callbacks, *, resume: str, max_time_s: float, profile: range
) -> RunResult:
    """Train as `pretrain` does, in one generation after another until the run ends.

    If a rank is lost, the other ranks leave the process groups, and start again in the same processes from the newest
    state that all ranks have stored, or from a newer checkpoint. Raises TxlError as `pretrain` does.
    """
    run_dir = Path(config.run.dir)
    with ExitStack() as process_stack:
        process_stack.callback(_remove_if_empty, run_dir)
        process_stack.callback(member.close)
        stops = PreemptionRequests(first_pid=member.agent_pid)
        process_stack.callback(stops.close)
        while True:
            member.limit(config.engine.start_timeout_s)  # first: a replacement may freeze while it waits for the others
            member.leave(stops, stop_file=run_dir / STOP, max_time_s=max_time_s)
            # Ranks are numbered again if the job continues with fewer.
            traced = StepProfile(profile if get_rank() == 0 else range(0), folder=run_dir / PROFILE)
            with suppress(RegroupError), member.regrouping(), ExitStack() as stack:
                with member.collecting():
                    ranks = stack.enter_context(
                        distributed_context(
                            timeout_s=config.engine.start_timeout_s,
                            num_threads=config.engine.num_threads,
                            store=member.open_store(),
                        )
                    )
                start_logging(rank=ranks.rank)
                with first_exchange() if member.generation == 1 else nullcontext():
                    # First: a rank without recovery has no coordinator.
                    check_ranks_alike(config.model_dump(mode="json"), code=member.code)
                    member.share_coordinator()
                has_begun = member.generation > 1 and any(gather_objects(member.has_begun))
                if has_begun and (resume in ("must", "never") or list_checkpoints(run_dir)):
                    resume = "auto"  # it continues from its own checkpoints
                result = _train(config, stack, ranks, stops, member, traced, called, member, resume=resume)
                member.exit_code = result.exit_code
                return result


def _train(
    config: Config,
    stack: ExitStack,
    ranks: RankInfo,
    stops: PreemptionRequests,
    watchdog: Monitor,
    profile: StepProfile,
    callbacks: Callbacks,
    member: Member | None,
    *,
    resume: str,
) -> RunResult:
    """Check and lock the run, then train one phase after another. Raises TxlError on all ranks.

    `member` is this rank's part in recovery, or None without recovery.
    """
    run_dir = Path(config.run.dir)
    callbacks.check_alike()
    precision = _choose_precision(config, ranks, resume=resume)
    plan = run_on_all_ranks(lambda: plan_run(config, ranks, precision=precision))
    check_corpora_alike(plan.stages[0].context.corpora)  # all phases read the same ones
    run_on_rank0(lambda: check_run_dir(run_dir, config))
    generation = 1 if member is None else member.generation
    is_again = generation > 1
    if config.engine.check_memory and not is_again:  # later the copies have their memory
        run_on_rank0(lambda: _check_fits(plan, makes_copies=member is not None))
    stack.callback(_remove_if_empty, run_dir)
    lock = run_on_all_ranks(lambda: lock_run(run_dir, stack, member) if ranks.is_rank0 else None)
    nonce = run_on_rank0(lambda: lock.nonce if lock is not None else "")
    if is_again:
        nonce += f"g{generation}"  # a folder of an older generation is never taken for one of this generation
    if config.checkpoint.mirror:
        watch = Watch(stops, watchdog, lock, nonce, _own_disk(config, ranks, nonce=nonce))
        mirror = mirror_of(config, ranks, watch, resume=resume, is_again=is_again)
    else:
        prove_shared(run_dir, nonce=nonce, ranks=ranks)
        watch = Watch(stops, watchdog, lock, nonce)
        mirror = None
    if mirror is not None:
        stack.callback(mirror.close)
    recovery = recovery_of(
        member,
        ranks,
        zero_stage=config.engine.zero_stage,
        copy_every=config.recover.copy_every,
        partner_every=config.recover.partner_every,
    )
    stack.callback(recovery.close)
    is_start = True
    while True:
        context, start, engine = _begin(plan, watch, recovery, mirror, resume=resume, is_start=is_start)
        recovery.mark_begun()
        is_start = False
        with _closing(engine, ranks, member):
            run = TrainingRun(context, start, engine, watch, profile, callbacks, recovery, mirror)
            state = run.go()
        if run.stopped or state.step >= config.train.max_steps:
            break
        # The next stage starts like a new process: it builds everything again and resumes the checkpoint.
        resume = "must"
        del run, state
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        watchdog.limit(config.engine.start_timeout_s)
    reasons = dict.fromkeys(reason for reason in gather_objects(stops.reason) if reason)
    result = RunResult(
        steps=state.step,
        tokens_seen=state.tokens_seen,
        loss=run.loss,
        validation_loss=run.evaluated[max(run.evaluated)] if run.evaluated else None,
        ended="stopped" if run.stopped else "done",
        reason=", ".join(reasons or [LOST_REQUEST]) if run.stopped else "train.max_steps",
        checkpoint=run.saving.newest,
        run_dir=run_dir,
    )
    watch.beat("callbacks")
    callbacks.end(result)
    _leave(plan, state, watch, result)
    return result


def _choose_precision(config: Config, ranks: RankInfo, *, resume: str) -> ChosenPrecision:
    """Return the precision of the run, the same on every rank. A run that continues, from the disk or else from the
    mirror, keeps its precision."""
    given = config.engine.precision
    kept = None
    if given == "auto":
        kept = run_on_rank0(lambda: kept_precision(Path(config.run.dir), resume=resume) or mirrored_precision(config))
    return agree_on_precision(given, kept=kept, device=ranks.device)


@contextmanager
def _closing(engine: Engine, ranks: RankInfo, member: Member | None) -> Iterator[None]:
    """Return a context manager that closes the engine at the end of its block, also after an error.

    On a GPU the engine stays open after an error of this rank alone. Closing waits for the device, and the device may
    wait for ranks that no longer exist. With recovery this wait is ended first.
    """
    try:
        yield
    except Exception as error:
        is_own = isinstance(error, TxlError) and not isinstance(error, LostRankError)
        is_free = ranks.device.type == "cpu" or is_own
        if not is_free and member is not None:
            member.cut()
            is_free = True
        if is_free:
            with suppress(Exception):  # the error of the block is the one to report
                engine.close()
        raise
    engine.close()


def _own_disk(config: Config, ranks: RankInfo, *, nonce: str) -> tuple[int, ...]:
    """Return the ranks of this node if each node has a run directory of its own. All ranks of a run with a mirror call
    it together.

    Returns an empty tuple if all nodes share the run directory. Raises ConfigError on all ranks if the nodes need a
    shared directory and have none.
    """
    run_dir = Path(config.run.dir)
    if is_shared(run_dir, nonce=nonce, ranks=ranks):
        return ()
    needs_sharing = {"recover.spares": config.recover.spares > 0, "guard.on_spike": config.guard.on_spike == "rewind"}
    for setting, is_set in needs_sharing.items():
        if is_set:
            raise raised_everywhere(
                ConfigError(
                    f"{setting} needs a run directory that all nodes share, but each node has a {run_dir} of its own. "
                    "Remove the setting, or give a shared folder as --run.dir."
                )
            )
    return tuple(ranks_with_same(node_name()))


def _begin(
    plan: RunPlan, watch: Watch, recovery: Recovery, mirror: Mirror | None, *, resume: str, is_start: bool
) -> tuple[RunContext, Start, Engine]:
    """Start the phase in which the run continues: choose a checkpoint, open the run directory, build the engine.

    Returns (the context of the phase, the result of the checks, the engine).
    """
    stored, choice, stage = _choose_state(plan, recovery, mirror, resume=resume, is_start=is_start)
    context = stage.context
    config = context.config
    if stored is None:
        start = run_on_rank0(lambda: _check_run(stage, choice, is_again=recovery.is_again))
    else:
        start = run_on_rank0(lambda: _restart(context, step=stored.step, stream=stored.stream))
    tokenizer = read_tokenizer(start.tokenizer_json.encode(), name="the tokenizer")
    for split in (*context.corpora.train, *context.corpora.eval.values()):
        split.corpus.tokenizer = tokenizer  # rank 0 has read it for all, so no rank reads the storage and fails alone
    weights = None
    if config.run.init and start.step == 0:
        weights = run_on_all_ranks(lambda: initial_weights(config, context.corpora.first))
    run_on_rank0(lambda: _open_run(plan, start))
    if watch.own_disk and watch.leads_disk(plan.ranks.rank) and not plan.ranks.is_rank0:
        tidy_checkpoints(plan.run_dir, newest=start.newest)
    if mirror is not None and is_start:
        mirror.begin(start.newest, losses=start.evaluated, is_again=recovery.is_again)
    watch.watchdog.write_stacks_to(plan.run_dir / STACKS)
    last_step = context.steps.stop
    end = start.stream.advanced((last_step - start.step) * config.train.step_len)
    if stored is None:
        batch = describe_batch(context, num_parameters=plan.num_parameters, precision_reason=plan.precision.reason)
        data = describe_data(context.corpora.train, end, last_step=last_step)
        for line in (*batch, *data, *describe_sets(context.corpora, paths_of_sets(config.eval.sets))):
            logger.info(line)
    if weights is not None:
        logger.info("the run starts with the weights of %s", config.run.init)
    with recovery.collecting():
        engine = ZeroEngine(config, vocab_size=context.vocab_size, plan=context.plan, ranks=plan.ranks, weights=weights)
    return context, start._replace(stored=stored), engine


def _choose_state(
    plan: RunPlan, recovery: Recovery, mirror: Mirror | None, *, resume: str, is_start: bool
) -> tuple[StoredState | None, Choice, Stage]:
    """Choose the state from which the run continues. All ranks call it together.

    After the loss of a rank the newest stored state takes the place of a checkpoint, unless a whole checkpoint is
    newer. If the newest checkpoint is only in `mirror`, it is downloaded. Returns (the stored state or None, the choice
    of a checkpoint, the phase).
    """
    stored = recovery.take_stored()
    choice = Choice(None, [])
    if stored is None or run_on_rank0(lambda: newest_step(plan.run_dir)) > stored.step:  # copies may be rarer
        with suppress(*(CheckpointError,) if stored else ()):  # copies need no whole checkpoint
            if mirror is not None:
                choice = mirror.choose(resume, is_start=is_start)
            else:
                choice = choose_together(plan.run_dir, resume, ranks=plan.ranks)
    if stored is None or (choice.saved is not None and choice.saved.step > stored.step):
        return None, choice, plan.stage_at(choice.saved.step if choice.saved else 0)
    # The phase that made the step may lack its last checkpoint or evaluation, so it ends before the next begins.
    return stored, Choice(None, []), plan.stage_at(stored.step if stored.begins_phase else stored.step - 1)


def _as_config(config: Config | str | Path | Mapping[str, Mapping[str, Any]]) -> Config:
    """Read a configuration from the argument of `pretrain`. Raises ConfigError if it is not a configuration."""
    if isinstance(config, Config):
        return config
    if isinstance(config, str | Path):
        return configure(config)
    if isinstance(config, Mapping):
        return configure(**config)
    raise ConfigError(
        f"pretrain: {config!r:.200} is not a configuration. Give a Config, the path of a TOML file, or a dictionary of "
        "sections."
    )


def _check_fits(plan: RunPlan, *, makes_copies: bool) -> None:
    """Check that every phase fits into memory. Raises ConfigError for the first phase that does not fit.

    `makes_copies` says that the copies of recovery are still to be allocated.
    """
    for context, _ in plan.stages:
        check_fits(
            context.config,
            plan=context.plan,
            num_parameters=plan.num_parameters,
            vocab_size=context.vocab_size,
            device=plan.ranks.device,
            makes_copies=makes_copies,
        )


def _check_run(stage: Stage, choice: Choice, *, is_again: bool) -> Start:
    """Check shards, tokenizer and the chosen checkpoint, on rank 0. Nothing is written.

    `is_again` says that the job returns to a checkpoint after the loss of a rank. Returns the result of the checks,
    which says how training starts. Raises TxlError if the run cannot start.
    """
    context = stage.context
    saved = choice.saved
    corpora = context.corpora
    warnings = check_shards(corpora, skips_damage=context.config.data.on_corrupt != "raise")
    tokenizer_json = corpora.first.tokenizer.to_json()
    stream = corpora.begin
    step = 0
    warnings += [f"resume: {sentence}" for sentence in choice.remarks]
    warnings += stage.warnings.cache + stage.warnings.evaluation
    if saved is not None:
        step = saved.step
        warnings += check_checkpoint(saved, context)
        stream, lane_warnings = continued_stream(saved, stream, corpora.train)
        warnings += lane_warnings
    last_step = context.steps.stop
    step_len = context.config.train.step_len
    end = stream.advanced((last_step - step) * step_len)
    warnings += warnings_on_repetition(corpora.train, end, step_len=step_len, last_step=last_step)
    warnings += stage.warnings.size + stage.warnings.settings
    history = read_run_history(context.run_dir, up_to=step, kind=corpora.first_kind)
    newest = saved.folder if saved else None
    is_ended = is_again and step in history.ended
    return Start(step, stream, tokenizer_json, history.evaluated, warnings, newest, is_ended=is_ended, saved=saved)


def _restart(context: RunContext, *, step: int, stream: StreamState) -> Start:
    """Return, on rank 0, how training starts from a stored state after the loss of a rank.

    The run has passed all checks before, so nothing is checked again. Checkpoints of later steps are damaged, and get
    another name.
    """
    quarantine(context.run_dir, after_step=step, word="damaged")
    tokenizer_json = context.corpora.first.tokenizer.to_json()
    history = read_run_history(context.run_dir, up_to=step, kind=context.corpora.first_kind)
    newest = next(reversed(list_checkpoints(context.run_dir)), None)
    return Start(
        step,
        stream,
        tokenizer_json,
        history.evaluated,
        [],
        newest=newest,
        is_sampled=step in history.sampled,
        is_ended=step in history.ended,
        lacks_saved=newest is not None and step_of(newest) not in history.saved,
    )


def _open_run(plan: RunPlan, start: Start) -> None:
    """Create the run directory, or continue to use it, on rank 0. The caller has made all checks before.

    Raises ConfigError if the directory cannot be used.
    """
    run_dir = plan.run_dir
    checkpoint = start.saved.folder if start.saved else None
    open_run_dir(run_dir, plan.saved_settings.toml)
    if checkpoint is not None and checkpoint.parent == run_dir / CHECKPOINTS:
        # Newer checkpoints are damaged and were skipped: they must not count among the checkpoints to keep.
        quarantine(run_dir, after_step=start.step, word="damaged")
    start_logging(rank=0, file=run_dir / LOG)
    if checkpoint is None and start.step:
        logger.info("recovery: from the state after step %d, which all ranks have stored", start.step)
    else:
        logger.info("resume: %s", f"from {checkpoint}" if checkpoint else "nothing to resume, starting at step 0")
    for sentence in start.warnings:
        logger.warning(sentence)


def _leave(plan: RunPlan, state: TrainState, watch: Watch, result: RunResult) -> None:
    """Log how the run ended, then wait for all ranks.

    The launcher kills the other ranks when the first rank ends, so no rank may end early.
    """
    stopped = result.ended == "stopped"
    if stopped:
        warn_for_all("stopped at step %d by %s. The same command continues the run", state.step, result.reason)
    if plan.ranks.is_rank0:
        try:
            watch.stops.clear()
            if not stopped:
                atomic_replace(plan.run_dir / DONE, f"{state.step}\n".encode())
        except OSError as error:
            warn_for_all("the state is saved, but %s cannot be written: %s", plan.run_dir, error.strerror)
        if not stopped:
            made = counted(state.step, "step")
            logger.info("done: %s, %s, in %s", made, counted(state.tokens_seen, "token"), plan.run_dir)
            logger.info(next_commands(plan.run_dir, plan.saved_settings.config.run.plugins))
    barrier()


def _remove_if_empty(run_dir: Path) -> None:
    """Remove the folder of a run that was refused, if the folder is empty."""
    with suppress(OSError):
        run_dir.rmdir()
