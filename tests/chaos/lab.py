"""A tiny run and the actions of the cases: start it, cause a fault, start it again, compare it with the oracle, report.

After a fault the same command is started again until the run is done. Then `oracle` compares it with a run without
faults. The results of a case are one `Case`, which is written as one line of JSON.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.oracle import differences_of
from tests.chaos.runs import Run
from tests.helpers.corpora import random_texts, tiny_corpus
from tests.helpers.job import Job
from txl_dist.artifacts import list_checkpoints

SETTINGS = """
[data]
path = "{corpus}"
[model]
num_layers = 2
width = 32
num_heads = 2
head_width = 16
ff_width = 48
cutoffs = [64, 160]
div_value = 2
tie_projections = [false, true, true]
dropout = 0.1
attention_dropout = 0.1
[optim]
lr = 2e-3
schedule = "constant"
[train]
num_lanes = 4
segment_len = 8
memory_len = 20
microbatch_lanes = 1
max_steps = 24
[eval]
max_tokens = 64
[checkpoint]
every_steps = 6
[metrics]
log_every_steps = 1
tensorboard = false
"""
TOKENS_PER_STEP = 4 * 8


@dataclass
class Case:
    """What one case saw; a line of the report."""

    case: str
    seed: int
    stage: int
    ranks: int
    fault: str
    exit_codes: list[list[int]] = field(default_factory=list)
    """Per start, per rank."""
    steps_lost: int = 0
    """Steps trained again."""
    tokens_lost: int = 0
    """Tokens that the finished run has never trained on, though the unbroken run has."""
    tokens_repeated: int = 0
    detect_s: float | None = None
    """From the fault to the end of the last rank."""
    recover_s: float | None = None
    """From the next start to its first new step."""
    bytes_left: int = 0
    """In temporary files of the run directory, and in shared memory, once the run is done."""
    message_ok: bool | None = None
    """The log says what it must say."""
    trials: int = 1
    """Single trials that the line sums up."""
    same: bool | None = None
    """The end state is that of the unbroken run, bit for bit."""
    figures: dict[str, float] = field(default_factory=dict)
    """Of a case that is a statistic."""
    problems: list[str] = field(default_factory=list)
    """Why the case failed; empty if it passed."""


Trial = Callable[[], Case]
"""A case that can be run."""


class Lab:
    """A corpus, a folder for runs, the unbroken runs made so far, and the report."""

    def __init__(self, folder: Path, *, seed: int = 1, report: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.seed, self._report = folder, seed, report
        texts = random_texts(count=200, longest=400, seed=seed)
        # Bytes and end-of-text are 257 ids: parameters of an odd size, which ZeRO must pad.
        corpus = tiny_corpus(folder, texts=texts, shard_len=8000)
        self.corpus, self.config = corpus.location, folder / "tiny.toml"
        self.config.write_text(SETTINGS.format(corpus=corpus.location), encoding="utf-8")
        self._unbroken: dict[tuple[Any, ...], Run] = {}
        self._count = 0

    def new_run(self, name: str) -> Run:
        """An empty place for a run."""
        self._count += 1
        return Run(self.folder / re.sub(r"\W+", "-", f"{self._count:03d}-{name}"))

    def start(self, run: Run, *words: str, ranks: int = 2, fault: str = "", nodes: int = 1) -> Job:
        """Start, or continue, a run. More than one node is pretended."""
        command = ("train", str(self.config), "--run.dir", str(run.dir), *words)
        run.jobs.append(Job(*command, log=run.log, ranks=ranks, fault=fault, nodes=nodes))
        return run.jobs[-1]

    def case(self, name: str, *, stage: int = 1, ranks: int = 2, fault: str = "") -> Case:
        """A line of the report to be filled."""
        return Case(name, self.seed, stage, ranks, fault)

    def survive(
        self,
        name: str,
        *words: str,
        stage: int = 1,
        ranks: int = 2,
        fault: str = "",
        again: str = "",
        during: Callable[[Job, Run], object] | None = None,
    ) -> tuple[Case, Run]:
        """Start a run, let `fault` strike it or `during` strike from outside, and start it again until it is done.

        `again` strikes the second start. `fault` may also be a pause (`slow:*:STEP:PHASE`) in which `during` finds time
        to strike: see `paused`.
        """
        case, run = self.case(name, stage=stage, ranks=ranks, fault=fault), self.new_run(name)
        words = (*words, "--engine.zero_stage", str(stage))
        with self.start(run, *words, ranks=ranks, fault=fault) as job:
            if during is not None:
                during(job, run)
            case.exit_codes.append(job.wait())
            struck = job.struck
        if again:
            with self.start(run, *words, ranks=ranks, fault=again) as second:
                case.exit_codes.append(second.wait())
                struck = second.struck and struck
            case.fault += f"; then {again}"
        if fault and not struck:
            case.problems.append("the fault never struck")
        elif struck and during is None:
            case.detect_s = round(max(at for _, at in job.exits.values()) - struck[-1].time_s, 2)
        self.finish(case, run, *words, ranks=ranks)
        return case, run

    def unbroken(self, *words: str, ranks: int = 2, fault: str = "", nodes: int = 1) -> Run:
        """A run with these settings that nothing befell; made once."""
        key = (words, ranks, fault, nodes)
        if key not in self._unbroken:
            run = self.new_run("unbroken")
            with self.start(run, *words, ranks=ranks, fault=fault, nodes=nodes) as job:
                assert job.wait(limit_s=3600) == [0] * ranks, job.text[-4000:]
            self._unbroken[key] = run
        return self._unbroken[key]

    def finish(self, case: Case, run: Run, *words: str, ranks: int = 2) -> None:
        """Start the same command until the run is done, then let the oracle speak. Fills `case`."""
        self.start_until_done(case, run, *words, ranks=ranks)
        self.judge(case, run, self.unbroken(*words, ranks=ranks))

    def start_until_done(self, case: Case, run: Run, *words: str, ranks: int = 2, attempts: int = 3) -> None:
        """Start the same command until the run is done, or too often. Fills `case`."""
        for _ in range(attempts):
            if run.is_done:
                break
            with self.start(run, *words, ranks=ranks) as job:
                new_s = first_new_step(job, run)
                case.exit_codes.append(job.wait())
            if case.recover_s is None and new_s:
                case.recover_s = round(new_s - job.started_s, 2)

    def judge(self, case: Case, run: Run, unbroken: Run, *, only_last: bool = False) -> None:
        """Compare a finished run with the unbroken one; see `differences_of`. Fills `case`."""
        case.steps_lost = run.steps_lost
        case.tokens_repeated = case.steps_lost * TOKENS_PER_STEP
        case.bytes_left = run.bytes_left
        differences = differences_of(run, unbroken, only_last=only_last)
        case.same = not differences
        case.problems += differences[:5]
        if run.checkpoints and unbroken.checkpoints:
            seen, wanted = (_state(one)["tokens_seen"] for one in (run, unbroken))
            case.tokens_lost = wanted - seen
        if case.bytes_left:
            case.problems.append(f"{case.bytes_left} bytes left behind")

    def attempt(self, trial: Trial) -> Case:
        """Run a case; one that cannot be finished, for whatever reason, has failed."""
        try:
            return trial()
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            arguments = getattr(trial, "keywords", {})
            case = self.case(getattr(trial, "func", trial).__name__, fault=str(arguments))
            case.problems.append(f"{type(error).__name__}: {error}")
            return self.report(case)

    def report(self, case: Case) -> Case:
        """Add a line to the report, and say how the case went."""
        words = "passed" if not case.problems else f"FAILED: {'; '.join(case.problems)}"
        print(f"{case.case} stage={case.stage} ranks={case.ranks} {case.fault}: {words}", flush=True)
        if self._report is not None:
            with self._report.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(case)) + "\n")
        return case


def first_new_step(job: Job, run: Run) -> float:
    """Supervise until a step is trained that never was before; when, in seconds since the epoch, or 0.0 if none is."""
    old_step = run.highest_step
    reached_s = job.wait_for(lambda: run.highest_step > old_step or len(job.exits) == len(job.pids))
    return reached_s if run.highest_step > old_step else 0.0


def paused(job: Job) -> None:
    """Wait until a fault of TXL_FAILPOINTS strikes: with `slow`, the two seconds after this are ours."""
    job.wait_for(lambda: bool(job.struck))


def _state(run: Run) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((list_checkpoints(run.dir)[-1] / "state.json").read_text(encoding="utf-8"))
    return state
