"""The training program: one composition site, then one loop that reads like the procedure it is.

    join ranks -> open corpus -> build engine -> choose checkpoint -> for each segment: step, report, evaluate, save

Whatever touches clock or disk is decided on rank 0 and broadcast. Nothing in a step waits for the device; the
logging interval does. Dropout is seeded per micro-batch from (seed, step, first lane), so a resumed run continues
bit for bit without any generator state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from txl_dist.config import BatchPlan, Config
from txl_dist.data.corpus import Corpus, Split, bits_per_unit
from txl_dist.data.damage import DamagePolicy
from txl_dist.data.lanes import epochs_read, lanes_of_rank
from txl_dist.data.prefetch import prefetch
from txl_dist.data.stream import LaneStream, StreamState
from txl_dist.dist import Ranks, all_reduce_sum, barrier, gather_objects, joined_ranks, on_first, together
from txl_dist.errors import DataError, UnreachableError
from txl_dist.log import logger, start_logging
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch
from txl_dist.rng import derive_seed
from txl_dist.train.batch import batch_maker, pinned, to_device
from txl_dist.train.checkpoint import (
    CorpusFacts,
    check_checkpoint,
    choose_checkpoint,
    continued_stream,
    corpus_facts,
    load_checkpoint,
    prune_checkpoints,
    read_state,
    save_checkpoint,
)
from txl_dist.train.describe import describe_batch, describe_data
from txl_dist.train.engine import Engine, ZeroEngine
from txl_dist.train.evaluate import evaluate
from txl_dist.train.export import make_probe
from txl_dist.train.initial import initial_weights
from txl_dist.train.job import check_job, eval_splits, first_stream, remarks, remarks_on_cache, train_splits
from txl_dist.train.metrics import Interval, Reporter, check_finite, eta_s
from txl_dist.train.run_dir import check_run_dir, open_run_dir
from txl_dist.train.schedule import learning_rate
from txl_dist.train.state import TrainState


class StepInput(NamedTuple):
    """What the reader thread prepares for one step of this rank."""

    batches: list[Batch]
    num_scored: int
    """Targets of this rank that count."""
    stream: StreamState
    """Where the stream stands once this step is trained on."""


def train(config: Config, *, resume: str = "auto") -> None:
    """Train until `train.max_steps`, continuing what the run directory holds. All ranks call it.

    `resume`: auto continues the newest whole checkpoint if there is one, must insists on one, never refuses one; or
    the path of a checkpoint folder. Raises TxlError on every rank.
    """
    with joined_ranks(timeout_s=config.engine.start_timeout_s, num_threads=config.engine.num_threads) as ranks:
        start_logging(rank=ranks.rank)
        plan, corpora = together(lambda: check_job(config, device=ranks.device, world_size=ranks.world_size))
        start = on_first(lambda: _check_run(config, corpora, plan, resume=resume))
        checkpoint, warnings = start.checkpoint, start.warnings
        begins_with = config.run.init and checkpoint is None
        weights = together(lambda: initial_weights(config, corpora[0])) if begins_with else None
        on_first(lambda: _open_run(config, checkpoint, warnings=warnings + remarks(config, plan=plan)))
        for line in (
            *describe_batch(config, plan=plan, vocab_size=start.facts.vocab_size),
            *describe_data(config, splits=train_splits(config, corpora), stream=start.stream, step=start.step),
        ):
            logger.info(line)
        if weights is not None:
            logger.info("the weights begin as those of %s", config.run.init)
        engine = ZeroEngine(config, vocab_size=start.facts.vocab_size, plan=plan, ranks=ranks, weights=weights)
        Run(config, plan, ranks, corpora, start, engine).go()


class Start(NamedTuple):
    """What rank 0 decided before anything was built."""

    checkpoint: Path | None
    step: int
    stream: StreamState
    """Where the lanes begin, or go on."""
    facts: CorpusFacts
    is_done: bool
    """The run had come to its end before."""
    warnings: list[str]


class Run:
    """One training run on one rank: the parts that stay the same while the state moves on."""

    def __init__(
        self, config: Config, plan: BatchPlan, ranks: Ranks, corpora: Sequence[Corpus], start: Start, engine: Engine
    ) -> None:
        self.config, self.plan, self.ranks, self.start = config, plan, ranks, start
        self.engine, self.run_dir = engine, Path(config.run.dir)
        self.splits, self.eval_splits = train_splits(config, corpora), eval_splits(config, corpora)
        self.damage = DamagePolicy(skip=config.data.on_damage == "skip", max_skipped=config.data.max_skipped)
        self.lanes = lanes_of_rank(config.train.num_lanes, rank=ranks.rank, world_size=ranks.world_size)
        self.maker = batch_maker(engine.model, mask_documents=config.data.document_border == "mask")

    def go(self) -> None:
        """Train from a checkpoint, or from the beginning, to the end."""
        config, max_steps = self.config, self.config.train.max_steps
        state = self._first_state()
        reporter = Reporter(
            self.run_dir,
            start_step=state.step,
            max_steps=max_steps,
            tensorboard=config.metrics.tensorboard,
            ranks=self.ranks,
        )
        start = {"event": "start", "step": state.step, "ranks": self.ranks.world_size}
        reporter.write("event", {**start, "threads_per_rank": self.ranks.num_threads})
        if state.step > max_steps:
            logger.warning("the run is at step %d already, past train.max_steps=%d", state.step, max_steps)
        if state.step >= max_steps and not self.start.is_done:  # it was killed in its last evaluation
            self._evaluate(state, reporter)
        interval = Interval()
        inputs = prefetch(self._inputs(state), depth=config.data.prefetch_depth)
        try:
            while state.step < max_steps:
                wait_start_s = time.perf_counter()
                step_input = next(inputs)
                wait_s = time.perf_counter() - wait_start_s
                lr = learning_rate(state.step, config.optim, max_steps=max_steps)
                state, loss, grad_norm = self._step(state, step_input, lr=lr)
                interval.add(loss=loss, grad_norm=grad_norm, wait_s=wait_s, num_scored=step_input.num_scored)
                is_last = state.step == max_steps
                if is_last or _due(state.step, config.metrics.log_every_steps):
                    reporter.write("train", self._train_record(state, interval, lr=lr))
                    interval = Interval()
                if is_last or _due(state.step, config.checkpoint.every_steps):
                    with interval.paused():
                        reporter.write("event", self._save(state))
                if is_last or _due(state.step, config.eval.every_steps):
                    with interval.paused():
                        self._evaluate(state, reporter)
        finally:
            inputs.close()
            reporter.close()
        if self.ranks.is_first:
            (self.run_dir / "DONE").write_text(f"{state.step}\n", encoding="utf-8")
            logger.info("done: %d steps, %s tokens, in %s", state.step, f"{state.tokens_seen:,}", self.run_dir)
        barrier()

    def _first_state(self) -> TrainState:
        train = self.config.train
        if self.start.checkpoint is not None:
            return load_checkpoint(
                self.start.checkpoint,
                self.engine,
                stream=self.start.stream,
                lanes=self.lanes,
                microbatch_lanes=self.plan.microbatch_lanes,
                memory_len=train.memory_len,
                device=self.ranks.device,
            )
        memories = [
            self.engine.empty_memory(num_lanes=train.microbatch_lanes, memory_len=train.memory_len)
            for _ in range(self.plan.num_microbatches)
        ]
        return TrainState(step=0, tokens_seen=0, skipped_steps=0, stream=self.start.stream, memories=tuple(memories))

    def _inputs(self, state: TrainState) -> Iterator[StepInput]:
        """Runs in the reader thread."""
        if self.ranks.device.type == "cuda":
            torch.cuda.set_device(self.ranks.device)  # pinning must not open a context on the first GPU
        stream = LaneStream(
            self.splits,
            state.stream,
            segment_len=self.config.train.segment_len,
            lanes=self.lanes,
            damage=self.damage,
            mark_documents=self.maker.mask_documents,
            # Those that wait, the one that is trained on and the one that is being filled.
            num_buffers=self.config.data.prefetch_depth + 2,
        )
        for segment, stream_state in stream:
            batches = self.maker.microbatches(segment, lanes=self.plan.microbatch_lanes)
            num_scored = int(sum(batch.scored_BT.sum() for batch in batches))
            yield StepInput([pinned(batch, self.ranks.device) for batch in batches], num_scored, stream_state)

    def _step(
        self, state: TrainState, step_input: StepInput, *, lr: float
    ) -> tuple[TrainState, Tensor, Tensor | float]:
        """Forward, backward and update. Returns (next state, mean loss of this rank, gradient norm)."""
        normalizer = self._normalizer(step_input)
        losses: list[Tensor] = []
        memories: list[Memory] = []
        for index, (batch, memory) in enumerate(zip(step_input.batches, state.memories, strict=True)):
            first_lane = self.lanes.start + index * self.plan.microbatch_lanes
            torch.manual_seed(derive_seed(self.config.run.seed, "dropout", state.step, first_lane))
            batch = to_device(batch, self.ranks.device)
            loss, memory = self.engine.micro_step(batch, memory, normalizer=normalizer)
            losses.append(loss)
            memories.append(memory)
        grad_norm = self.engine.step(lr=lr)
        after = TrainState(
            step=state.step + 1,
            tokens_seen=state.tokens_seen + self.plan.tokens_per_step,
            skipped_steps=self.engine.skipped_steps,
            stream=step_input.stream,
            memories=tuple(memories),
        )
        return after, torch.stack(losses).mean(), grad_norm

    def _normalizer(self, step_input: StepInput) -> Tensor | float:
        """What a micro-batch's summed loss is divided by, so that the mean over micro-batches and ranks is the mean
        over all scored tokens. With document masks, or damage skipped, ranks score different numbers of tokens."""
        if not self.maker.mask_documents and self.config.data.on_damage == "fail":
            return float(self.plan.microbatch_lanes * self.config.train.segment_len)
        scored = torch.tensor(float(step_input.num_scored), device=self.ranks.device)
        return all_reduce_sum(scored).clamp(min=1.0) / (self.plan.num_microbatches * self.plan.world_size)

    def _train_record(self, state: TrainState, interval: Interval, *, lr: float) -> dict[str, float]:
        values = interval.report(
            step=state.step, tokens_per_step=self.plan.tokens_per_step, num_skipped=self.damage.num_skipped
        )
        shares = [one.num_lanes / state.stream.num_lanes for one in state.stream.corpora]
        return {
            "step": state.step,
            **values,
            **bits_per_unit(values["loss"], self.splits, shares=shares),
            "lr": lr,
            "tokens_seen": state.tokens_seen,
            "skipped_steps": state.skipped_steps,
            **self._epochs(state.stream),
            "eta_s": eta_s(state.step, max_steps=self.config.train.max_steps, step_ms=values["step_ms"]),
        }

    def _epochs(self, stream: StreamState) -> dict[str, float]:
        """How often each corpus has been read."""
        epochs = [
            epochs_read(one.cut(), one.position, num_tokens=split.tokens)
            for one, split in zip(stream.corpora, self.splits, strict=True)
        ]
        return {_labelled("epoch", split, self.splits): value for split, value in zip(self.splits, epochs, strict=True)}

    def _evaluate(self, state: TrainState, reporter: Reporter) -> None:
        for split in self.eval_splits:
            result = evaluate(
                self.engine.losses,
                self.engine.empty_memory,
                split,
                maker=self.maker,
                config=self.config,
                ranks=self.ranks,
            )
            reporter.write(_labelled("eval", split, self.eval_splits), result.record(state.step))

    def _save(self, state: TrainState) -> dict[str, float | str]:
        start_s = time.perf_counter()
        probe = make_probe(self.engine, self.maker, memory_len=self.config.train.memory_len)
        # A last update that went wrong shows here, though its own loss was still finite.
        check_finite(
            gather_objects(float(probe["losses"].sum())), what=f"the loss on the probe after step {state.step}"
        )
        path = save_checkpoint(
            self.run_dir,
            state,
            self.engine,
            config=self.config,
            corpus=self.start.facts,
            probe=probe,
            lanes=self.lanes,
            ranks=self.ranks,
        )
        if self.ranks.is_first:
            prune_checkpoints(self.run_dir, keep_last=self.config.checkpoint.keep_last, newest=path)
        return {
            "event": "saved",
            "step": state.step,
            "path": path.name,
            "seconds": round(time.perf_counter() - start_s, 3),
        }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _labelled(word: str, split: Split, splits: Sequence[Split]) -> str:
    """The word, for a corpus besides the first with its name behind it."""
    number = splits.index(split)
    names = [one.corpus.name for one in splits]
    return word if number == 0 else f"{word}_{names[number]}" + (f"_{number}" if names.count(names[number]) > 1 else "")


def _check_run(config: Config, corpora: Sequence[Corpus], plan: BatchPlan, *, resume: str) -> Start:
    """On rank 0: check shards, tokenizer, run directory and checkpoint; nothing is written. Raises TxlError."""
    splits, warnings = train_splits(config, corpora), []
    for split in (*splits, *eval_splits(config, corpora)):
        try:
            split.check_files()
        except UnreachableError:
            raise
        except DataError as error:
            if split not in splits or config.data.on_damage == "fail":
                raise
            warnings.append(str(error))
    run_dir = Path(config.run.dir)
    check_run_dir(run_dir, config)
    facts, stream = corpus_facts(corpora[0]), first_stream(config, corpora)
    checkpoint, rejected = choose_checkpoint(run_dir, resume)
    step = read_state(checkpoint)["step"] if checkpoint else 0
    warnings += [f"resume: passed over a damaged checkpoint, {reason}" for reason in rejected]
    warnings += remarks_on_cache(config, splits, lanes_per_rank=plan.lanes_per_rank)
    if checkpoint is not None:
        warnings += check_checkpoint(checkpoint, config=config, corpus=facts, world_size=plan.world_size)
        stream, remarks_on_lanes = continued_stream(checkpoint, stream, splits)
        warnings += remarks_on_lanes
    return Start(checkpoint, step, stream, facts, (run_dir / "DONE").exists(), warnings)


def _open_run(config: Config, checkpoint: Path | None, *, warnings: list[str]) -> None:
    """On rank 0, once nothing is left that could be refused: make or continue the run directory. Raises ConfigError."""
    run_dir = Path(config.run.dir)
    open_run_dir(run_dir, config)
    start_logging(rank=0, file=run_dir / "log.txt")
    logger.info("resume: %s", f"from {checkpoint}" if checkpoint else "nothing to resume, starting at step 0")
    for sentence in warnings:
        logger.warning(sentence)
