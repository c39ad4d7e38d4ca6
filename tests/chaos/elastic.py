"""One run on changing numbers of ranks and ZeRO stages, resumed by the plain command each time.

Every part ends by SIGTERM at the end of a step, and the next part resumes with other ranks or another stage. The run is
compared with an uninterrupted run on 4 ranks, in fp32 and without dropout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from tests.chaos.lab import TOKENS_PER_STEP, Case, Lab, Trial
from tests.chaos.runs import Run
from txl_dist.artifacts import checkpoint_folder
from txl_dist.train.checkpoint.memories import load_lane_memory

SEGMENT_LEN, NUM_LANES = 8, 4
SETTINGS = ("--model.dropout", "0", "--model.attention_dropout", "0", "--checkpoint.keep_last", "1000")
TOLERANCE = 1e-4
"""Relative, on the loss of a step."""


class Leg(NamedTuple):
    """So many ranks at one stage."""

    ranks: int
    stage: int


JOURNEYS = {
    "ranks": (Leg(4, 1), Leg(2, 1), Leg(1, 1), Leg(4, 1)),
    "stages": (Leg(2, 1), Leg(2, 3), Leg(2, 0), Leg(2, 2)),
    "both": (Leg(4, 1), Leg(2, 3), Leg(1, 0), Leg(4, 3)),
}


def journey(lab: Lab, *, name: str, leg_steps: int = 20) -> Case:
    """Run all legs of one journey, each so many steps, and hold them against the run on 4 ranks."""
    legs = JOURNEYS[name]
    words = (*SETTINGS, "--train.max_steps", str(leg_steps * len(legs)))
    unbroken = lab.unbroken(*words, "--engine.zero_stage", "1", ranks=4)
    run, case = lab.new_run(f"elastic-{name}"), lab.case(f"elastic: {name}", stage=legs[0].stage, ranks=legs[0].ranks)
    case.fault = " -> ".join(f"{leg.ranks} ranks ZeRO-{leg.stage}" for leg in legs)
    ends = []
    for number, leg in enumerate(legs, start=1):
        # The first step is saved too: half of its memories is what the leg began with.
        changed = (*words, "--engine.zero_stage", str(leg.stage), "--checkpoint.every_steps", "1")
        fault = f"term:0:{leg_steps * number}:boundary" if number < len(legs) else ""
        with lab.start(run, *changed, ranks=leg.ranks, fault=fault) as job:
            case.exit_codes.append(job.wait())
        wanted = 75 if fault else 0
        if case.exit_codes[-1] != [wanted] * leg.ranks:
            case.problems.append(f"leg {number} ended with {case.exit_codes[-1]}: {job.text[-500:]}")
            return lab.report(case)
        ends.append(run.checkpoints[-1])
    _check(case, run, unbroken, ends=ends)
    return lab.report(case)


def _check(case: Case, run: Run, unbroken: Run, *, ends: list[int]) -> None:
    case.steps_lost = run.steps_lost
    case.tokens_repeated = case.steps_lost * TOKENS_PER_STEP
    case.bytes_left = run.bytes_left
    wanted = {record["step"]: record["loss"] for record in unbroken.records("train")}
    seen = {record["step"]: record["loss"] for record in run.records("train")}
    worst = max(abs(seen[step] / wanted[step] - 1) if step in seen else 1.0 for step in wanted)
    if worst > TOLERANCE:
        case.problems.append(f"a loss differs by {worst:.2g}, relative")
    ours, theirs = (_state(one, ends[-1]) for one in (run, unbroken))
    case.tokens_lost = theirs["tokens_seen"] - ours["tokens_seen"]
    if ours["stream"] != theirs["stream"] or case.tokens_lost or case.tokens_repeated:
        case.problems.append(f"tokens lost or repeated: {ours['stream']} instead of {theirs['stream']}")
    case.same = all(memories_went_on(run, end) for end in ends[:-1])
    if not case.same:
        case.problems.append("the memories of a leg are not those that were saved")
    if case.bytes_left:
        case.problems.append(f"{case.bytes_left} bytes left behind")


def memories_went_on(run: Run, end: int) -> bool:
    """Whether the memory after the first step of a leg still holds, bit for bit, what the leg before saved."""
    before, after = (
        load_lane_memory(checkpoint_folder(run.dir, step), lanes=range(NUM_LANES)) for step in (end, end + 1)
    )
    return torch.equal(
        torch.stack(before.hidden)[:, :, SEGMENT_LEN:], torch.stack(after.hidden)[:, :, :-SEGMENT_LEN]
    ) and torch.equal(before.document_BM[:, SEGMENT_LEN:], after.document_BM[:, :-SEGMENT_LEN])


def _state(run: Run, step: int) -> dict[str, Any]:
    text = (checkpoint_folder(run.dir, step) / "state.json").read_text(encoding="utf-8")
    state: dict[str, Any] = json.loads(text)
    return state


def elastic(lab: Lab) -> Iterator[Trial]:
    """All journeys."""
    for name in JOURNEYS:
        yield partial(journey, lab, name=name)
