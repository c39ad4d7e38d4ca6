"""Validation between training steps: losses on the validation splits, measurements of the memory, and sample texts.

Validation does not change training, because each evaluation and each sample has a memory of its own. All ranks call all
methods together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from txl_dist.data.loader.bits_per_byte import text_units
from txl_dist.data.loader.shards import Split
from txl_dist.fault_injection import failpoint
from txl_dist.rng import derive_seed
from txl_dist.train.batch import BatchMaker
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.report.evaluation_loss import Evaluation, evaluate_split
from txl_dist.train.report.loggers import MetricReporter, Record
from txl_dist.train.report.memory_stats import measure_memory
from txl_dist.train.report.permutation_loss import evaluate_permutation
from txl_dist.train.report.sample_text import sample_text
from txl_dist.train.state import RunContext


class StopAskedError(Exception):
    """Exception that ends an evaluation early after a stop request. All ranks raise it together."""


class Validator:
    """Validation of one run: it evaluates the validation splits, measures the memory, and lets the model write sample
    texts."""

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
        """Store the parts of the run that validation needs.

        `evaluated` maps a step to the loss of the first validation split in nats per token. Each evaluation adds its
        loss. `before_segment` is called with the step's number before each forward pass, and may raise StopAskedError
        on all ranks.
        """
        self._context = context
        self._engine = engine
        self._maker = maker
        self._reporter = reporter
        self._config = context.config
        self._ranks = context.ranks
        self._splits = context.corpora.eval
        self._first = context.corpora.first_kind
        self._evaluated = evaluated
        self._before_segment = before_segment

    def should_evaluate(self, step: int) -> bool:
        """Return whether the run evaluates after this step: at each multiple of `eval.every_steps`, and after the last
        step."""
        every = self._config.eval.every_steps
        return bool(self._splits) and (step >= self._config.train.max_steps or (every > 0 and step % every == 0))

    def forget(self, *, after: int) -> None:
        """Delete the losses of all steps after step `after`, because the run has rewound to that step."""
        for step in [step for step in self._evaluated if step > after]:
            del self._evaluated[step]

    def evaluate(self, step: int) -> tuple[dict[str, float], bool]:
        """Evaluate every validation split and measure the memory. With `eval.use_ema` the averaged weights are used.

        With XLNet's objective the memory is not measured. Returns (losses, is_best). `losses` maps the name of each
        split's record to a loss in nats per token. `is_best` says whether the loss of the first split is the lowest so
        far. Raises StopAskedError if `before_segment` raises it.
        """
        if not self._config.eval.use_ema:
            return self._evaluate(step)
        self._engine.swap_averages()
        try:
            result = self._evaluate(step)
        except StopAskedError:  # raised on all ranks; after any other error the run ends
            self._engine.swap_averages()
            raise
        self._engine.swap_averages()
        return result

    def _evaluate(self, step: int) -> tuple[dict[str, float], bool]:
        """Compute the loss of every validation split with the engine's present weights, and the gain from the model's
        memory. Returns the result of `evaluate`."""
        before_segment = partial(self._before_segment, step)
        train = self._config.train
        evaluate: Callable[..., Evaluation]
        if train.is_permutation:
            evaluate = partial(evaluate_permutation, train=train, num_orders=self._config.eval.orders)
        else:
            evaluate = evaluate_split
        results = {
            kind: evaluate(
                self._engine,
                split,
                maker=self._maker,
                plan=self._context.evaluation,
                ranks=self._ranks,
                before_segment=before_segment,
            )
            for kind, split in self._splits.items()
        }
        if train.memory_len and not train.is_permutation:
            record = measure_memory(
                self._engine,
                self._splits[self._first],
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
        for kind, result in reversed(results.items()):  # the record of the first split shows that all are done
            self._reporter.write(kind, result.record(step))
        best = min(self._evaluated.values(), default=math.inf)
        losses = {kind: result.means.loss for kind, result in results.items()}
        if math.isfinite(losses[self._first]):
            self._evaluated[step] = losses[self._first]
        return losses, self._evaluated.get(step, math.inf) < best

    def should_sample(self, step: int) -> bool:
        """Return whether the model writes a sample text after this step: at each multiple of
        `metrics.sample_every_steps`."""
        every = self._config.metrics.sample_every_steps
        return every > 0 and step % every == 0

    def sample(self, step: int) -> None:
        """Let the model write a sample text, and pass the text to the loggers."""
        text = sample_text(
            self._engine,
            self._context.corpora.first.tokenizer,
            self._config,
            device=self._ranks.device,
            seed=derive_seed(self._config.run.seed, "sample", step, 0),
        )
        failpoint("sampled", step=step)
        self._reporter.write("sample", {"step": step, "prompt": self._config.metrics.sample_prompt, "text": text})


def text_facts(
    splits: Sequence[Split],
    held_out: Mapping[str, Split],
    *,
    mask_documents: bool,
    max_tokens: int = 0,
    unscored: str = "",
    with_eval_bits: bool = True,
) -> Record:
    """Return facts about a run's text for the record of the run's start: corpora, tokenizer, and units of the losses.

    `splits` are the training splits, and `held_out` the validation splits by kind of record. At most `max_tokens`
    tokens of each validation split are scored, and 0 means all tokens. `unscored` is the reason why some targets of
    training have no loss, or an empty text. Without `with_eval_bits` this reason applies to evaluations too.

    In the result, `no_bits` maps a kind of record to the reason why it has no bits per byte. `held_out_bytes` is the
    size of the text of the first validation split. Two runs with different sizes have different validation text.
    """
    shares = [1 / len(splits)] * len(splits)
    units = {"train": text_units(splits, shares=shares, mask_documents=mask_documents, unscored=unscored)}
    for kind, split in held_out.items():
        eval_unscored = "" if with_eval_bits else unscored
        units[kind] = text_units([split], mask_documents=mask_documents, max_tokens=max_tokens, unscored=eval_unscored)
    sizes = [split.text_bytes for split in held_out.values()]
    first = splits[0].corpus
    return {
        "corpora": [split.corpus.name for split in splits],
        "tokenizer": first.tokenizer.kind,
        "vocab_size": first.vocab_size,
        "token": units["train"].token,
        "no_bits": {kind: text.problem for kind, text in units.items() if text.problem},
        **({"held_out_bytes": sizes[0]} if sizes else {}),
    }
