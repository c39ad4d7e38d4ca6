"""python -m tests.chaos GROUP... [--out chaos.jsonl] [--only TEXT] [--seed N]   |   python -m tests.chaos table FILE

Groups: sweep flips elastic signals hangs disk nan spikes lock pickles recovery endurance goodput, or all.
One JSON line per case.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.chaos.arithmetic import nan, spikes
from tests.chaos.disks import disk
from tests.chaos.elastic import elastic
from tests.chaos.goodput import goodput
from tests.chaos.hangs import hangs
from tests.chaos.lab import Lab, Trial
from tests.chaos.lock import lock
from tests.chaos.pickles import pickles
from tests.chaos.recovery import endurance, recovery
from tests.chaos.report import tables
from tests.chaos.saves import flips, sweep
from tests.chaos.stops import signals

GROUPS: dict[str, Callable[[Lab], Iterator[Trial]]] = {
    "sweep": sweep,
    "flips": flips,
    "elastic": elastic,
    "signals": signals,
    "hangs": hangs,
    "disk": disk,
    "nan": nan,
    "spikes": spikes,
    "lock": lock,
    "pickles": pickles,
    "recovery": recovery,
    "endurance": endurance,
}


def main() -> int:
    """Run the groups; 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("groups", nargs="+", metavar="GROUP", help=f"{' '.join(GROUPS)} goodput all; or: table FILE")
    parser.add_argument("--out", type=Path, help="one JSON line per case is added to this file")
    parser.add_argument("--seed", type=int, default=1, help="of the corpus, the flipped bits and the schedule")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name and arguments contain this text")
    parser.add_argument("--minutes", type=float, default=15.0, help="length of goodput")
    parser.add_argument("--folder", type=Path, help="keep the runs and their logs here, instead of removing them")
    arguments = parser.parse_args()
    if arguments.groups[0] == "table":
        print("\n".join(tables(Path(arguments.groups[1]))))
        return 0
    groups = GROUPS | {"goodput": lambda lab: iter([partial(goodput, lab, minutes=arguments.minutes)])}
    names = list(groups) if arguments.groups == ["all"] else arguments.groups
    if unknown := [name for name in names if name not in groups]:
        parser.error(f"unknown group {unknown[0]}; there are {', '.join(groups)} and all")
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="txl-chaos-") as folder:
        lab = Lab(arguments.folder or Path(folder), seed=arguments.seed, report=arguments.out)
        for name in names:
            cases = [lab.attempt(trial) for trial in groups[name](lab) if arguments.only in _described(trial)]
            trials, passed = (
                sum(case.trials for case in some) for some in (cases, [case for case in cases if not case.problems])
            )
            num_failed += trials - passed
            print(f"{name}: {passed} of {trials}", flush=True)
    return 1 if num_failed else 0


def _described(trial: Trial) -> str:
    """The function of a case and its arguments."""
    if isinstance(trial, partial):
        return repr((trial.func.__name__, trial.args[1:], trial.keywords))
    return repr(trial)


if __name__ == "__main__":
    sys.exit(main())
