"""The training program: one composition site, then one loop that reads like the procedure it is.

    join ranks -> open corpus -> build engine -> choose checkpoint -> for each segment: step, report, evaluate, save

Whatever touches clock or disk is decided on rank 0 and broadcast. Nothing in a step waits for the device; the
logging interval does. Dropout is seeded per micro-batch from (seed, step, first lane), so a resumed run continues
bit for bit without any generator state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from txl_dist.config import BatchPlan, Config
from txl_dist.data.corpus import Corpus
from txl_dist.data.lanes import lanes_of_rank
from txl_dist.data.stream import LaneStream, StreamState, prefetch
from txl_dist.dist import Ranks, all_reduce_sum, barrier, gather_objects, joined_ranks, on_first, together
from txl_dist.log import logger, start_logging
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch
from txl_dist.rng import derive_seed
from txl_dist.train.batch import batch_maker, to_device
from txl_dist.train.checkpoint import (
    CorpusFacts,
    check_checkpoint,
    choose_checkpoint,
    corpus_facts,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from txl_dist.train.describe import describe_batch
from txl_dist.train.engine import Engine, ZeroEngine
from txl_dist.train.evaluate import evaluate
from txl_dist.train.export import make_probe
from txl_dist.train.initial import initial_weights
from txl_dist.train.job import check_job, remarks
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
    with joined_ranks(timeout_s=config.engine.timeout_s, num_threads=config.engine.num_threads) as ranks:
        start_logging(rank=ranks.rank)
        plan, corpus = together(lambda: check_job(config, device=ranks.device, world_size=ranks.world_size))
        checkpoint, facts, warnings = on_first(lambda: _check_run(config, corpus, plan, resume=resume))
        begins_with = config.run.init and checkpoint is None
        weights = together(lambda: initial_weights(config, corpus)) if begins_with else None
        on_first(lambda: _open_run(config, checkpoint, warnings=warnings + remarks(config, plan=plan)))
        for line in describe_batch(config, plan=plan, vocab_size=corpus.vocab_size):
            logger.info(line)
        if weights is not None:
            logger.info("the weights begin as those of %s", config.run.init)
        engine = ZeroEngine(config, vocab_size=corpus.vocab_size, plan=plan, ranks=ranks, weights=weights)
        Run(config, plan, ranks, corpus, facts, engine).go(checkpoint)


class Run:
    """One training run on one rank: the parts that stay the same while the state moves on."""

    def __init__(
        self, config: Config, plan: BatchPlan, ranks: Ranks, corpus: Corpus, facts: CorpusFacts, engine: Engine
    ) -> None:
        self.config, self.plan, self.ranks = config, plan, ranks
        self.corpus, self.facts, self.engine, self.run_dir = corpus, facts, engine, Path(config.run.dir)
        self.lanes = lanes_of_rank(config.train.num_lanes, rank=ranks.rank, world_size=ranks.world_size)
        self.maker = batch_maker(engine.model, mask_documents=config.data.document_border == "mask")

    def go(self, checkpoint: Path | None) -> None:
        """Train from a checkpoint, or from the beginning, to the end."""
        config, max_steps = self.config, self.config.train.max_steps
        state = self._start(checkpoint)
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
        interval = Interval()
        inputs = prefetch(self._inputs(state), depth=config.data.prefetch_depth)
        try:
            while state.step < max_steps:
                wait_start_s = time.perf_counter()
                step_input = next(inputs)
                wait_s = time.perf_counter() - wait_start_s
                lr = learning_rate(state.step, config.optim, max_steps=max_steps)
                state, loss, grad_norm = self._step(state, step_input, lr=lr)
                interval.add(loss=loss, grad_norm=grad_norm, wait_s=wait_s)
                is_last = state.step == max_steps
                if is_last or _due(state.step, config.metrics.log_every_steps):
                    reporter.write("train", self._train_record(state, interval, lr=lr))
                    interval = Interval()
                if is_last or _due(state.step, config.checkpoint.every_steps):
                    with interval.paused():
                        reporter.write("event", self._save(state))
                if config.data.eval_split and (is_last or _due(state.step, config.eval.every_steps)):
                    with interval.paused():
                        reporter.write("eval", self._evaluate(state))
        finally:
            inputs.close()
            reporter.close()
        if self.ranks.is_first:
            (self.run_dir / "DONE").write_text(f"{state.step}\n", encoding="utf-8")
            logger.info("done: %d steps, %s tokens, in %s", state.step, f"{state.tokens_seen:,}", self.run_dir)
        barrier()

    def _start(self, checkpoint: Path | None) -> TrainState:
        if checkpoint is not None:
            return load_checkpoint(
                checkpoint,
                self.engine,
                lanes=self.lanes,
                microbatch_lanes=self.plan.microbatch_lanes,
                device=self.ranks.device,
            )
        train = self.config.train
        memories = [
            self.engine.empty_memory(num_lanes=train.microbatch_lanes, memory_len=train.memory_len)
            for _ in range(self.plan.num_microbatches)
        ]
        return TrainState(
            step=0, tokens_seen=0, skipped_steps=0, stream=self._stream(None).state, memories=tuple(memories)
        )

    def _stream(self, state: StreamState | None) -> LaneStream:
        config = self.config
        return LaneStream(
            self.corpus,
            config.data.train_split,
            num_lanes=config.train.num_lanes,
            segment_len=config.train.segment_len,
            seed=derive_seed(config.run.seed, "documents"),
            lanes=self.lanes,
            state=state,
        )

    def _inputs(self, state: TrainState) -> Iterator[StepInput]:
        """Runs in the reader thread."""
        for segment, stream in self._stream(state.stream):
            batches = self.maker.microbatches(segment, lanes=self.plan.microbatch_lanes)
            yield StepInput(batches, int(sum(batch.scored_BT.sum() for batch in batches)), stream)

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
        over all scored tokens. Document masks score different numbers of tokens on different ranks."""
        if not self.maker.mask_documents:
            return float(self.plan.microbatch_lanes * self.config.train.segment_len)
        scored = torch.tensor(float(step_input.num_scored), device=self.ranks.device)
        return all_reduce_sum(scored).clamp(min=1.0) / (self.plan.num_microbatches * self.plan.world_size)

    def _train_record(self, state: TrainState, interval: Interval, *, lr: float) -> dict[str, float]:
        values = interval.report(step=state.step, tokens_per_step=self.plan.tokens_per_step)
        return {
            "step": state.step,
            **values,
            **self.corpus.split(self.config.data.train_split).bits_per_unit(values["loss"]),
            "lr": lr,
            "tokens_seen": state.tokens_seen,
            "skipped_steps": state.skipped_steps,
            "eta_s": eta_s(state.step, max_steps=self.config.train.max_steps, step_ms=values["step_ms"]),
        }

    def _evaluate(self, state: TrainState) -> dict[str, float]:
        result = evaluate(
            self.engine.losses,
            self.engine.empty_memory,
            self.corpus,
            maker=self.maker,
            config=self.config,
            ranks=self.ranks,
        )
        return result.record(state.step)

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
            corpus=self.facts,
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


def _check_run(
    config: Config, corpus: Corpus, plan: BatchPlan, *, resume: str
) -> tuple[Path | None, CorpusFacts, list[str]]:
    """On rank 0: check shards, tokenizer, run directory and checkpoint; nothing is written. Raises TxlError.

    Returns (the checkpoint to continue, what checkpoints must remember of the corpus, warnings).
    """
    for name in (config.data.train_split, config.data.eval_split):
        if name:
            corpus.split(name).check_files()
    run_dir = Path(config.run.dir)
    check_run_dir(run_dir, config)
    facts = corpus_facts(corpus)
    checkpoint, rejected = choose_checkpoint(run_dir, resume)
    warnings = [f"resume: passed over a damaged checkpoint, {reason}" for reason in rejected]
    if checkpoint is not None:
        warnings += check_checkpoint(checkpoint, config=config, corpus=facts, world_size=plan.world_size)
    return checkpoint, facts, warnings


def _open_run(config: Config, checkpoint: Path | None, *, warnings: list[str]) -> None:
    """On rank 0, once nothing is left that could be refused: make or continue the run directory. Raises ConfigError."""
    run_dir = Path(config.run.dir)
    open_run_dir(run_dir, config)
    start_logging(rank=0, file=run_dir / "log.txt")
    logger.info("resume: %s", f"from {checkpoint}" if checkpoint else "nothing to resume, starting at step 0")
    for sentence in warnings:
        logger.warning(sentence)
