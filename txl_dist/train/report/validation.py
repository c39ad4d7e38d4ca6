"""What a run shows of its model between steps: losses on held-out text, a look at the memory, texts that it writes.

None of it touches the training: memory is a value, and each of these has its own. All methods are called by all ranks
together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from txl_dist.data.loader.bits_per_byte import text_units
from txl_dist.data.loader.corpus import Split
from txl_dist.rng import derive_seed
from txl_dist.train.batch import BatchMaker
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.report.evaluation_loss import evaluate_split
from txl_dist.train.report.loggers import MetricReporter, Record
from txl_dist.train.report.memory_stats import measure_memory
from txl_dist.train.report.sample_text import sample_text
from txl_dist.train.state import RunContext


class StopAskedError(Exception):
    """Leaves an evaluation that need not be finished."""


class Validator:
    """The observations of one run."""

    def __init__(
        self,
        context: RunContext,
        engine: Engine,
        maker: BatchMaker,
        reporter: MetricReporter,
        *,
        evaluated: dict[int, float],
        before_segment: Callable[[int], None],
    ) -> None:
        """`evaluated` are the losses on the first held-out split so far, by step, and gets what is evaluated.
        `before_segment` is told the step before each forward pass, and may raise StopAskedError on all ranks."""
        self._context, self._engine, self._maker, self._reporter = context, engine, maker, reporter
        self._config, self._ranks, self._splits = context.config, context.ranks, context.corpora.eval
        self._evaluated, self._before_segment = evaluated, before_segment

    def should_evaluate(self, step: int) -> bool:
        """By the interval, and at the end."""
        every = self._config.eval.every_steps
        return bool(self._splits) and (step >= self._config.train.max_steps or (every > 0 and step % every == 0))

    def forget(self, *, after: int) -> None:
        """After a rewind to that step."""
        for step in [step for step in self._evaluated if step > after]:
            del self._evaluated[step]

    def evaluate(self, step: int) -> tuple[dict[str, float], bool]:
        """Score every split and look at the memory, by `eval.use_ema` with averaged weights.

        Returns (loss of each split in nats per token, by name of its record; whether the first is the best so far).

        Raises StopAskedError.
        """
        if not self._config.eval.use_ema:
            return self._evaluate(step)
        self._engine.swap_averages()
        try:
            result = self._evaluate(step)
        except StopAskedError:  # on all ranks together; after anything else nobody needs the weights
            self._engine.swap_averages()
            raise
        self._engine.swap_averages()
        return result

    def _evaluate(self, step: int) -> tuple[dict[str, float], bool]:
        before_segment = partial(self._before_segment, step)
        results = [
            evaluate_split(
                self._engine,
                split,
                maker=self._maker,
                plan=self._context.evaluation,
                ranks=self._ranks,
                before_segment=before_segment,
            )
            for split in self._splits
        ]
        train = self._config.train
        if train.memory_len:
            record = measure_memory(
                self._engine,
                self._splits[0],
                maker=self._maker,
                num_lanes=self._context.evaluation.num_lanes,
                segment_len=train.segment_len,
                memory_len=train.memory_len,
                ranks=self._ranks,
                step=step,
                before_segment=before_segment,
            )
            if record is not None:
                self._reporter.write("memory", record)
        pairs = list(zip(self._splits, results, strict=True))
        for split, result in reversed(pairs):  # that of the first corpus says that all are done
            self._reporter.write(labelled("eval", split, self._splits), result.record(step))
        best = min(self._evaluated.values(), default=math.inf)
        if math.isfinite(results[0].means.loss):
            self._evaluated[step] = results[0].means.loss
        losses = {labelled("eval", split, self._splits): result.means.loss for split, result in pairs}
        return losses, self._evaluated.get(step, math.inf) < best

    def should_sample(self, step: int) -> bool:
        """By the interval."""
        every = self._config.metrics.sample_every_steps
        return every > 0 and step % every == 0

    def sample(self, step: int) -> None:
        """Let the model write."""
        text = sample_text(
            self._engine,
            self._context.corpora.first.tokenizer,
            self._config,
            device=self._ranks.device,
            seed=derive_seed(self._config.run.seed, "sample", step, 0),
        )
        self._reporter.write("sample", {"step": step, "prompt": self._config.metrics.sample_prompt, "text": text})


def labelled(word: str, split: Split, splits: Sequence[Split]) -> str:
    """The word, for a corpus besides the first with its name behind it."""
    number = splits.index(split)
    names = [one.corpus.name for one in splits]
    return word if number == 0 else f"{word}_{names[number]}" + (f"_{number}" if names.count(names[number]) > 1 else "")


def text_facts(
    splits: Sequence[Split],
    held_out: Sequence[Split],
    *,
    mask_documents: bool,
    max_tokens: int = 0,
    half_loss: bool = False,
) -> Record:
    """What a run reads, and in which units its losses may be told, for the record of its start; `max_tokens` of a
    held-out split are scored at most, 0 means all; `half_loss` of the training, whose segments count by half.

    `no_bits` has by kind of record why there are no bits per byte; `held_out_bytes` tells held-out texts apart.
    """
    shares = [1 / len(splits)] * len(splits)
    units = {"train": text_units(splits, shares=shares, mask_documents=mask_documents, half_loss=half_loss)} | {
        labelled("eval", one, held_out): text_units([one], mask_documents=mask_documents, max_tokens=max_tokens)
        for one in held_out
    }
    first = splits[0].corpus
    return {
        "corpora": [split.corpus.name for split in splits],
        "tokenizer": first.tokenizer.kind,
        "vocab_size": first.vocab_size,
        "token": units["train"].token,
        "no_bits": {kind: one.problem for kind, one in units.items() if one.problem},
        **({"held_out_bytes": held_out[0].text_bytes} if held_out else {}),
    }
