"""Table 10 of the paper: the gain from recurrence at equal GPU memory.

    python -m tools.experiments.paper.t10 --corpus data/stdlib              18 runs on 2 cores, 6 of them those of t6
    python -m tools.experiments.paper.t10 --size paper --gpus 4 --gpu h100  print commands for a cluster, with plans
    python -m tools.experiments.paper.t10 --table                           write the table of notebook/paper.md

A model without recurrence stores no memory and fewer keys, so it can have longer segments with as many bytes. The
length follows from the memory prediction of `txl plan` (`train.footprint`). It is the longest segment for which a rank
needs no more bytes than in the recurrent trial. All trials have the same number of steps and lanes (batch rows), so
that longer segments also read more text, as in the paper. On two cores the runs are short and gain most from more text.
There the models without recurrence are also compared with the same amount of text, in fewer steps.
"""

from __future__ import annotations

import argparse
from typing import Any

from tools.experiments.paper.trials import Job, Size, Trial, config_of, go, options
from tools.experiments.recording import ROOT
from txl_dist.config.load import Config, plan_batch
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.train.footprint.rank import bytes_per_rank

RECURRENT, ALONE = Trial(True, "ours", "full"), Trial(False, "ours", "full")
TRIALS = (RECURRENT, Trial(True, "ours", "half"), ALONE, Trial(False, "ours", "half"))


def needed(config: Config, *, ranks: int, vocab_size: int, on_gpu: bool) -> float:
    """Return the predicted bytes of the rank that needs most."""
    plan = plan_batch(config.train, world_size=ranks)
    return sum(bytes_per_rank(config, plan=plan, vocab_size=vocab_size, on_gpu=on_gpu).values())


def longest_segment(size: Size, *, ranks: int, vocab_size: int) -> int:
    """Return the longest segment, in tokens, of a trial without recurrence that needs no more bytes than the recurrent
    trial."""
    facts: dict[str, Any] = {"ranks": ranks, "vocab_size": vocab_size, "on_gpu": size.on_gpu}
    room = needed(config_of(RECURRENT, size), **facts)

    def fits(segment_len: int) -> bool:
        return needed(config_of(ALONE, size, segment_len=segment_len), **facts) <= room

    shortest, too_long = size.segment_len, 2 * size.segment_len
    while fits(too_long):
        shortest, too_long = too_long, 2 * too_long
    while too_long - shortest > 1:
        middle = (shortest + too_long) // 2
        shortest, too_long = (middle, too_long) if fits(middle) else (shortest, middle)
    return shortest


def jobs_of(given: argparse.Namespace, size: Size) -> list[Job]:
    """Return the jobs, seed by seed. Models without memory have longer segments, with the same steps and (on cores)
    with the same amount of text."""
    ranks = given.gpus if size.on_gpu else 1
    vocab_size = given.vocab_size if size.on_gpu else open_corpus(given.corpus).vocab_size
    lengths = {True: size.segment_len, False: longest_segment(size, ranks=ranks, vocab_size=vocab_size)}
    print(f"# {lengths[False]} tokens without a memory need as many bytes as {size.segment_len} with one as long")
    fewer = max(1, round(size.steps * size.segment_len / lengths[False]))
    asked = [(trial, size.steps) for trial in TRIALS]
    if not size.on_gpu and fewer < size.steps:
        asked += [(trial, fewer) for trial in TRIALS if not trial.recurrence]
    return [
        Job(trial, seed, lengths[trial.recurrence], steps)
        for seed in range(1, given.seeds + 1)
        for trial, steps in asked
    ]


if __name__ == "__main__":
    go(options(__doc__, program="t10"), jobs_of, program="t10", known=ROOT / "tools/experiments/paper/t6.csv")
