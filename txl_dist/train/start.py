"""The composition site of a training run: what is checked, locked and built, in which order, before the first step.

    join ranks -> check the job -> lock the run -> choose a checkpoint -> open the run -> build the engine -> `loop`

Until the run is opened nothing is written but its lock: a job that is refused leaves no trace.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

from txl_dist.config import BatchPlan, Config
from txl_dist.data.read.corpora import Corpora
from txl_dist.dist import Ranks, joined_ranks, on_first, together
from txl_dist.errors import DataError, LostRankError, TxlError, UnreachableError
from txl_dist.log import logger, note_in_file, start_logging
from txl_dist.text.tokenizer import read_tokenizer
from txl_dist.train.checkpoint.read import (
    check_checkpoint,
    choose_together,
    continued_stream,
    corpus_facts,
)
from txl_dist.train.checkpoint.soundness import read_state
from txl_dist.train.describe import describe_batch, describe_data
from txl_dist.train.engine.zero import ZeroEngine
from txl_dist.train.footprint.fits import check_fits
from txl_dist.train.initial import initial_weights
from txl_dist.train.loop import Job, Run, Start
from txl_dist.train.preflight import (
    check_job,
    remarks,
    remarks_on_cache,
    remarks_on_evaluation,
    remarks_on_repetition,
)
from txl_dist.train.report.profile import StepProfile
from txl_dist.train.run_dir import check_run_dir, evaluated_losses, open_run_dir, set_aside
from txl_dist.train.watch.run_lock import RunLock, prove_shared
from txl_dist.train.watch.stopping import StopRequests
from txl_dist.train.watch.watchdog import Watchdog


def train(
    config: Config,
    *,
    resume: str = "auto",
    max_time_s: float = 0.0,
    profile: range = range(0),
) -> bool:
    """Train until `train.max_steps`, continuing what the run directory holds. All ranks call it.

    `resume`: auto continues the newest whole checkpoint if there is one, must insists on one, never refuses one; or
    the path of a checkpoint folder. `max_time_s` of the process, after which the run saves and stops; 0 means none.
    `profile`: steps that rank 0 traces (see `profile`).
    Returns whether the run came to its end; if not, it was asked to stop, has saved, and the same command goes on.
    Raises TxlError on every rank.
    """
    run_dir = Path(config.run.dir)
    with ExitStack() as stack:
        ranks = stack.enter_context(
            joined_ranks(timeout_s=config.engine.start_timeout_s, num_threads=config.engine.num_threads)
        )
        start_logging(rank=ranks.rank)
        stops = StopRequests(
            stop_file=run_dir / "STOP" if ranks.is_first else None, max_time_s=max_time_s if ranks.is_first else 0.0
        )
        stack.callback(stops.close)
        watchdog = Watchdog(ranks, limit_s=config.engine.start_timeout_s)
        stack.callback(watchdog.close)
        try:
            traced = StepProfile(profile if ranks.is_first else range(0), folder=run_dir / "profile")
            return _train(config, stack, ranks, stops, watchdog, traced, resume=resume)
        except TxlError as error:
            note_in_file(f"the run ends: {error}")
            watchdog.report(error)
            raise
        except Exception as error:
            cause = watchdog.first_cause(error)
            note_in_file(f"the run ends: {cause or repr(error)}")
            if cause is None:
                watchdog.report(error)
                raise
            raise LostRankError(cause) from error  # an empty one is not printed: another rank says it


def _train(
    config: Config,
    stack: ExitStack,
    ranks: Ranks,
    stops: StopRequests,
    watchdog: Watchdog,
    profile: StepProfile,
    *,
    resume: str,
) -> bool:
    run_dir = Path(config.run.dir)
    plan, corpora = together(lambda: check_job(config, device=ranks.device, world_size=ranks.world_size))
    on_first(lambda: check_run_dir(run_dir, config))
    if config.engine.check_memory:
        on_first(lambda: check_fits(config, plan=plan, vocab_size=corpora.first.vocab_size, device=ranks.device))
    stack.callback(_remove_if_empty, run_dir)
    lock = together(lambda: RunLock.acquire(run_dir) if ranks.is_first else None)
    if lock is not None:
        stack.callback(lock.release)
    nonce = on_first(lambda: lock.nonce if lock is not None else "")
    prove_shared(run_dir, nonce=nonce, ranks=ranks)
    checkpoint, chosen_because = choose_together(run_dir, resume, ranks=ranks)
    start = on_first(lambda: _check_run(config, corpora, plan, checkpoint, chosen_because))
    tokenizer = read_tokenizer(start.facts.tokenizer_json.encode(), name="the tokenizer")
    for corpus in corpora.opened:
        corpus.tokenizer = tokenizer  # rank 0 has read it for all: no rank asks the storage, and fails alone
    begins_with = config.run.init and checkpoint is None
    weights = together(lambda: initial_weights(config, corpora.first)) if begins_with else None
    on_first(lambda: _open_run(config, start, warnings=start.warnings + remarks(config, plan=plan)))
    watchdog.write_stacks_to(run_dir / "stacks")
    for line in (
        *describe_batch(config, plan=plan, vocab_size=start.facts.vocab_size),
        *describe_data(config, splits=corpora.train, stream=start.stream, step=start.step),
    ):
        logger.info(line)
    if weights is not None:
        logger.info("the weights begin as those of %s", config.run.init)
    engine = ZeroEngine(config, vocab_size=start.facts.vocab_size, plan=plan, ranks=ranks, weights=weights)
    job = Job(config, plan, ranks, corpora, start, stops, watchdog, lock, nonce, profile)
    return Run(job, engine).go()


def _check_run(
    config: Config, corpora: Corpora, plan: BatchPlan, checkpoint: Path | None, chosen_because: list[str]
) -> Start:
    """On rank 0: check shards, tokenizer and the chosen checkpoint; nothing is written. Raises TxlError."""
    splits, warnings = corpora.train, []
    for split in (*splits, *corpora.eval):
        try:
            split.check_files()
        except UnreachableError:
            raise
        except DataError as error:
            if split not in splits or config.data.on_damage == "fail":
                raise
            warnings.append(str(error))
    facts, stream = corpus_facts(corpora.first), corpora.begin
    step = read_state(checkpoint)["step"] if checkpoint else 0
    warnings += [f"resume: {sentence}" for sentence in chosen_because]
    warnings += remarks_on_cache(config, splits, lanes_per_rank=plan.lanes_per_rank)
    warnings += remarks_on_evaluation(config, corpora.first)
    if checkpoint is not None:
        warnings += check_checkpoint(checkpoint, config=config, corpus=facts, world_size=plan.world_size)
        stream, remarks_on_lanes = continued_stream(checkpoint, stream, splits)
        warnings += remarks_on_lanes
    warnings += remarks_on_repetition(config, splits, stream, step=step)
    return Start(checkpoint, step, stream, facts, evaluated_losses(Path(config.run.dir), up_to=step), warnings)


def _open_run(config: Config, start: Start, *, warnings: list[str]) -> None:
    """On rank 0, once nothing is left that could be refused: make or continue the run directory. Raises ConfigError."""
    run_dir = Path(config.run.dir)
    open_run_dir(run_dir, config)
    if start.checkpoint is not None and start.checkpoint.parent == run_dir / "checkpoints":
        # Those that were passed over: they are not to count among the ones that are kept.
        set_aside(run_dir, newer_than=start.checkpoint, word="damaged")
    start_logging(rank=0, file=run_dir / "log.txt")
    logger.info(
        "resume: %s", f"from {start.checkpoint}" if start.checkpoint else "nothing to resume, starting at step 0"
    )
    for sentence in warnings:
        logger.warning(sentence)


def _remove_if_empty(run_dir: Path) -> None:
    """A run that was refused leaves no folder behind."""
    with suppress(OSError):
        run_dir.rmdir()
