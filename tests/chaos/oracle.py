"""The oracle of all cases: is a run with faults and restarts equal, bit for bit, to a run without faults?

It compares the final parameters, moments and memories, the position in the data, and the loss of every step, also of
steps that were trained twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.chaos.runs import Run
from txl_dist.artifacts import list_checkpoints


def differences_of(run: Run, unbroken: Run, *, only_last: bool = False) -> list[str]:
    """Where a finished run differs from the unbroken one; empty if nowhere.

    `only_last`: of a step that was trained twice only the last loss counts.
    """
    if not run.is_done or not unbroken.is_done:
        return [f"{one.dir.name} is not done" for one in (run, unbroken) if not one.is_done]
    found = list(_differing_losses(run, unbroken, only_last=only_last))
    found += _differing_observations(run, unbroken)
    ours, theirs = (list_checkpoints(one.dir)[-1] for one in (run, unbroken))
    names = [{path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} for folder in (ours, theirs)]
    found += [f"only one of them has {name}" for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        if name.name not in ("MANIFEST.json", "config.toml"):  # these name the run directory
            found += _differing_files(ours / name, theirs / name)
    return found


def _differing_losses(run: Run, unbroken: Run, *, only_last: bool) -> Iterator[str]:
    """Also a step that was trained twice must give a loss of the unbroken run both times (which has two of a step only
    where it was wound back)."""
    ours, theirs = _losses(run), _losses(unbroken)
    yield from (f"step {step} was never reported" for step in sorted(theirs.keys() - ours.keys()))
    for step, losses in ours.items():
        losses = losses[-1:] if only_last else losses
        if not set(losses) <= set(theirs.get(step, ())) or losses[-1] != theirs[step][-1]:
            yield f"the loss of step {step} is {losses} instead of {theirs.get(step)}"


def _differing_observations(run: Run, unbroken: Run) -> Iterator[str]:
    """Losses of validations, effects of the memory and samples are those of the unbroken run, none missing."""
    for kind, field in (("eval", "loss"), ("memory", "memory_gain"), ("sample", "text")):
        ours, theirs = ({one["step"]: one[field] for one in each.records(kind)} for each in (run, unbroken))
        for step in sorted(ours.keys() | theirs.keys()):
            if ours.get(step) != theirs.get(step):
                yield f"the {kind} of step {step} is {ours.get(step)!r} instead of {theirs.get(step)!r}"


def _losses(run: Run) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for record in run.records("train"):
        found.setdefault(record["step"], []).append(record["loss"])
    return found


def _differing_files(ours: Path, theirs: Path) -> Iterator[str]:
    if ours.read_bytes() == theirs.read_bytes():
        return
    if ours.suffix == ".safetensors":
        yield from differing(load_file(ours), load_file(theirs), where=ours.name)
    elif ours.suffix == ".json":
        yield from differing(json.loads(ours.read_text()), json.loads(theirs.read_text()), where=ours.name)
    else:
        yield f"{ours.name} differs"


def differing(ours: Any, theirs: Any, *, where: str) -> Iterator[str]:
    """The places at which nested values differ, bit for bit."""
    if type(ours) is not type(theirs):
        yield f"{where} is a {type(ours).__name__} instead of a {type(theirs).__name__}"
    elif isinstance(ours, torch.Tensor):
        if ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
            yield f"{where} differs"
    elif isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            yield f"{where} has other keys: {sorted(map(str, ours.keys() ^ theirs.keys()))}"
        for key in ours.keys() & theirs.keys():
            yield from differing(ours[key], theirs[key], where=f"{where}.{key}")
    elif isinstance(ours, Sequence) and not isinstance(ours, str):
        if len(ours) != len(theirs):
            yield f"{where} has {len(ours)} entries instead of {len(theirs)}"
        for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from differing(one, other, where=f"{where}[{index}]")
    elif isinstance(ours, int | float | str | None) and ours != theirs:
        yield f"{where} is {ours!r} instead of {theirs!r}"
