"""`txl evaluate`: scores of a trained model on a validation split.

On request the command also scores the model without memory, the model while it adapts to the text, and baselines that
count tokens.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from txl_dist.artifacts import ArtifactKind, detect_artifact
from txl_dist.config.load import Config
from txl_dist.console.formatting import counted
from txl_dist.console.logging import start_logging
from txl_dist.data.loader.bits_per_byte import TextUnits, text_units, word_count
from txl_dist.data.loader.shards import Split
from txl_dist.distributed.collectives import get_rank
from txl_dist.evaluation.any_order import check_options, rank_lines, score_any_order, units_of
from txl_dist.evaluation.log_probs import write_log_probs
from txl_dist.evaluation.options import AdaptationOptions, Outputs, Overrides
from txl_dist.evaluation.scoring import MEMORY_OFF, Scores, rows_of, score_baselines, score_model
from txl_dist.evaluation.tables import Result, part_lines, table
from txl_dist.evaluation.target import Target, open_target
from txl_dist.io.files import write_output
from txl_dist.report.figures import draw_png
from txl_dist.report.pictures import chart_over_lengths

STATIC = AdaptationOptions()
"""Settings of an evaluation in which the model does not adapt to the text."""
_LARGEST_EXPONENT = 700.0
"""Largest exponent with which a perplexity per word is computed, because exp overflows above 709."""


def evaluate_trained(
    path: Path,
    *,
    data: str | Path,
    overrides: Overrides,
    baselines: bool,
    outputs: Outputs,
    adaptation: AdaptationOptions = STATIC,
) -> list[str]:
    """Score a run, a checkpoint or a bundle on a validation split, and return lines of text with the results.

    `data` is the path of the corpus. If it is empty, the run's corpus is used. `outputs` names files to write in
    addition. With `baselines`, tables of token counts are scored too. All ranks call this function and share the lanes
    (streams of text). Only rank 0 returns lines.

    Raises ConfigError if the overrides contradict each other or the model, if a file cannot be written, or if memory is
    exhausted. Raises CheckpointError or DataError if the model or the corpus cannot be read, or if their tokenizers
    differ.
    """
    start_logging(rank=get_rank())
    overrides.check(path, is_bundle=detect_artifact(path) is ArtifactKind.BUNDLE, data=data)
    adaptation.check(overrides, outputs)
    outputs.check(overrides)
    target = open_target(path, data=data, needs_causal=False)
    if target.bundle.section.any_order:
        check_options(overrides, adaptation, outputs)
        return _evaluate_any_order(target, overrides, outputs=outputs, baselines=baselines)
    overrides.check_causal(path)
    rows = rows_of(target, overrides, adaptation)
    config = rows[0].config
    split = target.held_out(config)
    units = _units(split, overrides, mask_documents=config.data.document_mask)
    if adaptation.adapt == "dynamic":
        train = target.train_text(adaptation.adapt_train, config)
    else:
        train = None
    scores = score_model(target, split, rows, overrides, adaptation, outputs, train=train, units=units)
    if get_rank() > 0:
        return []  # rank 0 writes and prints
    results = dict(scores.results)
    if baselines:
        results |= score_baselines(split, config, units=units)
    if overrides.peer is not None:
        for values in scores.results.values():
            values |= {"protocol": overrides.protocol, "bits_per_token": values["loss"] / math.log(2)}
    _add_words(results, split, units)
    _write_files(outputs, scores, results, split)
    lines = [_where_line(target, split, config, overrides), *table(results, units)]
    if len(scores.results) == 1:
        (result,) = scores.results.values()
        lines += part_lines(result)
    if adaptation.adapt != "off":
        settings = [f"{name} {value}" for name, value in adaptation.metadata().items() if value != ""]
        lines.append(f"adapted: {', '.join(settings)}")
    return lines


def _evaluate_any_order(target: Target, overrides: Overrides, *, outputs: Outputs, baselines: bool) -> list[str]:
    """Score a model that predicts in any order (XLNet). Returns lines of text with the results, on rank 0 only."""
    rows = rows_of(target, overrides, STATIC)
    config = rows[0].config
    split = target.held_out(config)
    scores = score_any_order(target, split, rows, overrides, outputs)
    if get_rank() > 0:
        return []
    units = units_of(split, overrides, config)
    results = dict(scores.results)
    if baselines:
        results |= score_baselines(split, config, units=units)
    _write_files(outputs, scores, results, split)
    train = config.train
    lines = [
        f"{_where_line(target, split, config, overrides)}, predicting {train.num_predicted} of every "
        f"{train.segment_len} tokens in random orders",
        *table(results, units),
    ]
    for name, result in scores.results.items():
        if len(scores.results) > 1:
            indent = f"{name}: "
        else:
            indent = ""
        if "by_rank" in result:
            lines += [indent + line for line in rank_lines(result, train.halves())]
    return lines


def _units(split: Split, overrides: Overrides, *, mask_documents: bool) -> TextUnits:
    """Return the units in which a loss is shown. With another program's protocol there are no bits per byte, because
    the protocol does not score the whole text."""
    units = text_units([split], mask_documents=mask_documents)
    if overrides.peer is None:
        return units
    return units._replace(problem=f"the protocol {overrides.protocol} does not score the whole text")


def _add_words(results: dict[str, Result], split: Split, units: TextUnits) -> None:
    """Add the perplexity per word to each result, or the reason why the result has no bits per byte."""
    if units.problem:
        num_words = 0
    else:
        num_words = word_count(split)
    for values in results.values():
        if units.problem:
            values["no_bits"] = units.problem
        elif num_words:
            nats_per_word = values["loss"] * split.tokens / num_words
            values |= {"words": num_words, "word_ppl": math.exp(min(nats_per_word, _LARGEST_EXPONENT))}


def _write_files(outputs: Outputs, scores: Scores, results: dict[str, Result], split: Split) -> None:
    """Write the output files that the flags request. Raises OSError if a file cannot be written."""
    if outputs.log_probs is not None and scores.log_p_N is not None:
        write_log_probs(outputs.log_probs, split, scores.log_p_N)
    if outputs.plot is not None:
        with_memory = {name: values for name, values in scores.results.items() if name != MEMORY_OFF}
        chart = chart_over_lengths(with_memory)
        assert chart is not None  # several lengths were scored
        write_output(outputs.plot, draw_png(chart))
    if outputs.json is not None:
        write_output(outputs.json, json.dumps(results, indent=1).encode() + b"\n")


def _where_line(target: Target, split: Split, config: Config, overrides: Overrides) -> str:
    """Return a line that says which model was scored, in how many lanes, and by which protocol."""
    num_lanes = config.eval.num_lanes
    where = target.where
    if overrides.precision != "stored":
        where += f", in {overrides.precision}"
    if overrides.peer is None:
        return f"scored: {where}, as {counted(min(num_lanes, split.tokens - 1), 'lane')}"
    protocol = f"by the protocol {overrides.protocol} ({overrides.peer.source})"
    return f"scored: {where}, as {counted(num_lanes, 'lane')}, {protocol}"
