"""Table 6 of the paper: recurrence, position encodings, half loss, and the attention length of evaluation.

    python -m tools.experiments.paper.t6 --corpus data/stdlib              33 runs on 2 cores, 2 at a time
    python -m tools.experiments.paper.t6 --size paper --gpus 4 --gpu h100  print commands for a cluster, with plans
    python -m tools.experiments.paper.t6 --table                           write the table of notebook/paper.md

All trials have the same model, batch, learning rate and steps. They are the rows of the paper without the character
model of Al-Rfou et al., and three more. The first one has absolute positions with a memory
(`model.absolute_with_memory`), which must fail according to the paper. The second one is the vanilla model with a loss
over the whole segment. The third one begins with a memory of attended zeros (`train.initial_memory`). Only the first
segment of a lane (batch row) sees this memory, so no effect above the noise is expected. Each score is added to the CSV
at once. A score that has a row is not measured again, and an interrupted run is resumed.
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
    """Return the jobs seed by seed, so that the trials can be compared before all seeds are done."""
    return [Job(trial, seed, size.segment_len, size.steps) for seed in range(1, given.seeds + 1) for trial in TRIALS]


if __name__ == "__main__":
    go(options(__doc__, program="t6"), jobs_of, program="t6")
