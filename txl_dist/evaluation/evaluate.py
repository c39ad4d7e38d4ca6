"""`txl evaluate`: a trained model on held-out text: with its memory, without, adapting, beside counting baselines."""

from __future__ import annotations

import json
import math
from pathlib import Path

from txl_dist.artifacts import ArtifactKind, detect_artifact
from txl_dist.console.formatting import counted
from txl_dist.console.logging import start_logging
from txl_dist.data.loader.bits_per_byte import TextUnits, text_units, word_count
from txl_dist.data.loader.corpus import Split
from txl_dist.distributed.collectives import get_rank
from txl_dist.evaluation.log_probs import write_log_probs
from txl_dist.evaluation.options import Adapting, Outputs, Overrides
from txl_dist.evaluation.scoring import MEMORY_OFF, rows_of, score_baselines, score_model
from txl_dist.evaluation.tables import part_lines, table
from txl_dist.evaluation.target import open_target
from txl_dist.io.files import write_output
from txl_dist.report.figures import draw_png
from txl_dist.report.pictures import sweep

STATIC = Adapting()
"""Nothing follows the text."""


def evaluate_trained(
    path: Path,
    *,
    data: str | Path,
    overrides: Overrides,
    baselines: bool,
    outputs: Outputs,
    adapting: Adapting = STATIC,
) -> list[str]:
    """Score a run, a checkpoint or a bundle; several ranks share the lanes. Returns lines for people.

    `data` is the corpus; empty takes that of the run.

    Raises ConfigError if the overrides contradict each other or the model, if a file cannot be written, or if there is
    no memory for them; CheckpointError or DataError if the target or the corpus cannot be read or do not belong
    together.
    """
    start_logging(rank=get_rank())
    overrides.check(path, is_bundle=detect_artifact(path) is ArtifactKind.BUNDLE, data=data)
    adapting.check(overrides, outputs)
    outputs.check(overrides)
    target = open_target(path, data=data)
    rows = rows_of(target, overrides, adapting)
    config = rows[0].config
    split = target.held_out(config)
    units = _units(split, overrides, mask_documents=config.data.document_mask)
    train = target.train_text(adapting.adapt_train, config) if adapting.adapt == "dynamic" else None
    scores = score_model(target, split, rows, overrides, adapting, outputs, train=train, units=units)
    if get_rank() > 0:
        return []  # rank 0 speaks
    results = scores.results | (score_baselines(split, config, units=units) if baselines else {})
    words = 0 if units.problem else word_count(split)
    for name, values in results.items():
        if overrides.peer is not None and name in scores.results:
            values |= {"protocol": overrides.protocol, "bits_per_token": values["loss"] / math.log(2)}
        if units.problem:
            values["no_bits"] = units.problem
        elif words:
            values |= {"words": words, "word_ppl": math.exp(min(values["loss"] * split.tokens / words, 700.0))}
    if outputs.log_probs is not None and scores.log_p_N is not None:
        write_log_probs(outputs.log_probs, split, scores.log_p_N)
    lengths = {name: values for name, values in scores.results.items() if name != MEMORY_OFF}
    if outputs.plot is not None:
        chart = sweep(lengths)
        assert chart is not None  # several lengths were scored
        write_output(outputs.plot, draw_png(chart))
    if outputs.json is not None:
        write_output(outputs.json, json.dumps(results, indent=1).encode() + b"\n")
    num_lanes = config.eval.num_lanes if overrides.peer is not None else min(config.eval.num_lanes, split.tokens - 1)
    where = f"scored: {target.where}, as {counted(num_lanes, 'lane')}"
    if overrides.peer is not None:
        where += f", by the protocol {overrides.protocol} ({overrides.peer.source})"
    (first, *others) = scores.results.values()
    lines = [where, *table(results, units), *(part_lines(first) if not others else [])]
    if adapting.adapt != "off":
        lines.append(
            f"adapted: {', '.join(f'{name} {value}' for name, value in adapting.told().items() if value != '')}"
        )
    return lines


def _units(split: Split, overrides: Overrides, *, mask_documents: bool) -> TextUnits:
    units = text_units([split], mask_documents=mask_documents)
    if overrides.peer is None:
        return units
    return units._replace(problem=f"the protocol {overrides.protocol} does not score the whole text")
