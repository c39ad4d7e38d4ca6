"""Table 6 of the paper: recurrence, positions, half loss, and the attention length of evaluation.

    python -m tools.experiments.paper.t6 --corpus data/stdlib              33 runs on 2 cores, 2 at a time
    python -m tools.experiments.paper.t6 --size paper --gpus 4 --gpu h100  commands for a cluster, and txl plan of them
    python -m tools.experiments.paper.t6 --table                           write the table of notebook/paper.md

All trials have the same model, batch, rate and steps. The rows of the paper, but for the character model of Al-Rfou et
al., and three more: absolute positions with a memory (`model.absolute_with_memory`), which its argument says must fail,
the vanilla model with a loss over all of the segment, and a first memory of attended zeros (`train.initial_memory`),
which a lane's first segment alone sees, so that no more than noise is expected of it. Each score is a row of the CSV
as soon as it is known; what has its row is not made again, and a run that was stopped goes on.
"""

from __future__ import annotations

import argparse

from tools.experiments.paper.trials import Job, Size, Trial, go, options

TRIALS = (
    Trial(True, "ours", "full"),
    Trial(True, "Shaw", "full"),
    Trial(True, "ours", "half"),
    Trial(False, "ours", "full"),
    Trial(False, "ours", "half"),
    Trial(False, "Shaw", "full"),
    Trial(False, "Shaw", "half"),
    Trial(False, "absolute", "half"),
    Trial(False, "absolute", "full"),
    Trial(True, "absolute", "full"),
    Trial(True, "ours", "full", (("train.initial_memory", "zeros"),)),
)


def jobs_of(given: argparse.Namespace, size: Size) -> list[Job]:
    """Seed by seed, so that what is there so far can be compared."""
    return [Job(trial, seed, size.segment_len, size.steps) for seed in range(1, given.seeds + 1) for trial in TRIALS]


if __name__ == "__main__":
    go(options(__doc__, program="t6"), jobs_of, program="t6")
