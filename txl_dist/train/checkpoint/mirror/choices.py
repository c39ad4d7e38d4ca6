"""Decisions about a mirror, as functions without side effects: names, completeness, retention, owner and downloads.

    RUN.json                                the run that the mirror belongs to
    LOCK.json                               the job that writes, with its heartbeat
    config.toml  metrics.jsonl  log.txt     records of the run
    checkpoints/step_000001200-1a2b3c4d/    a checkpoint, whose MANIFEST.json is uploaded last

The name of a checkpoint's folder ends with a hash of its manifest. So two different saves of the same step never share
objects. An upload that was cut can be continued, and a checkpoint is whole if its manifest is there.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from txl_dist.artifacts import CHECKPOINTS, best_step, steps_to_keep
from txl_dist.io.manifest import MANIFEST

_FOLDER = re.compile(rf"{CHECKPOINTS}/step_(\d{{9}})-([0-9a-f]{{8}})/(.+)")
_RANK_FILE = re.compile(r"engine/(\d{5,})\.safetensors")
_LANES_FILE = re.compile(r"lanes/(\d{5,})-(\d{5,})\.safetensors")


class MirroredCheckpoint(NamedTuple):
    """Checkpoint in a mirror, or the part of one that a cut upload left."""

    step: int
    folder: str
    """Name of its folder in the mirror."""
    names: tuple[str, ...]
    """Names of its objects in the mirror."""

    @property
    def manifest(self) -> str:
        """Name of the object that makes the checkpoint whole."""
        return f"{self.folder}/{MANIFEST}"

    @property
    def is_whole(self) -> bool:
        """Whether the manifest is there, which is uploaded last."""
        return self.manifest in self.names


def mirror_folder(step: int, manifest: bytes) -> str:
    """Return the folder in a mirror for the checkpoint of a step with this content of MANIFEST.json."""
    return f"{CHECKPOINTS}/step_{step:09d}-{hashlib.sha256(manifest).hexdigest()[:8]}"


def list_mirrored(names: Iterable[str]) -> list[MirroredCheckpoint]:
    """Return the checkpoints among the objects of a mirror, whole or not, the oldest first."""
    objects = defaultdict(list)
    for name in sorted(names):
        match = _FOLDER.fullmatch(name)
        if match:
            folder = name.removesuffix(f"/{match[3]}")
            objects[int(match[1]), folder].append(name)
    return [MirroredCheckpoint(step, folder, tuple(found)) for (step, folder), found in sorted(objects.items())]


def objects_to_remove(
    mirrored: Sequence[MirroredCheckpoint],
    *,
    uploaded: str,
    keep_last: int,
    keep_every: int,
    losses: Mapping[int, float],
) -> tuple[list[str], list[str]]:
    """Return the (manifests, other objects) to remove after the checkpoint in the folder `uploaded` became whole.

    The whole checkpoints that `steps_to_keep` names stay, and so does the one with the lowest of `losses` (by step).
    Parts of cut uploads up to the step of `uploaded` go, and so do other saves of that step. Nothing goes if the
    listing of the store is old and lacks `uploaded`. The manifests must be removed before the other objects.
    """
    steps = [checkpoint.step for checkpoint in mirrored if checkpoint.folder == uploaded and checkpoint.is_whole]
    if not steps:
        return [], []
    uploaded_step = steps[0]
    whole_steps = sorted({checkpoint.step for checkpoint in mirrored if checkpoint.is_whole})
    best = best_step(whole_steps, losses)
    keep = steps_to_keep(whole_steps, keep_last=keep_last, keep_every=keep_every, best=best)
    manifests = []
    others = []
    for checkpoint in mirrored:
        if checkpoint.folder == uploaded:
            continue
        is_kept = checkpoint.is_whole and checkpoint.step in keep and checkpoint.step != uploaded_step
        is_later_part = not checkpoint.is_whole and checkpoint.step > uploaded_step
        if is_kept or is_later_part:
            continue
        for name in checkpoint.names:
            if name == checkpoint.manifest:
                manifests.append(name)
            else:
                others.append(name)
    return manifests, others


def manifests_after(mirrored: Iterable[MirroredCheckpoint], *, step: int) -> list[str]:
    """Return the manifests of the checkpoints of later steps. Without their manifests no run resumes them."""
    return [checkpoint.manifest for checkpoint in mirrored if checkpoint.is_whole and checkpoint.step > step]


def is_complete(sizes: Mapping[str, int], *, folder: str, files: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether all files of a manifest are in a folder of the mirror with their sizes.

    `files` are the entries of the manifest, and `sizes` are bytes by name of object.
    """
    return all(sizes.get(f"{folder}/{name}") == facts["bytes"] for name, facts in files.items())


def newest_first(local_steps: Iterable[int], mirrored: Iterable[MirroredCheckpoint]) -> list[int | MirroredCheckpoint]:
    """Return the candidates for a resume, the newest first: steps on the disk, and whole checkpoints in the mirror.

    A step on the disk comes before the same step in the mirror, because it needs no download.
    """
    candidates: list[tuple[int, int, int | MirroredCheckpoint]] = [(step, 1, step) for step in local_steps]
    for checkpoint in mirrored:
        if checkpoint.is_whole:
            candidates.append((checkpoint.step, 0, checkpoint))
    candidates.sort(key=lambda candidate: candidate[:2], reverse=True)
    return [candidate for _, _, candidate in candidates]


def why_foreign(
    own_id: str, mirror_id: str, *, has_checkpoints: bool, shares_a_checkpoint: bool, is_branch: bool
) -> str:
    """Return why a run must not use a mirror, as a clause, or an empty text if the mirror belongs to the run.

    `own_id` is the run's id in its directory, or empty on an empty disk. `mirror_id` is the id in the mirror, or empty
    in a new mirror. `shares_a_checkpoint` says whether a checkpoint is in both places. `is_branch` says whether the run
    begins from the path of a checkpoint.
    """
    if not mirror_id or own_id == mirror_id or shares_a_checkpoint:
        return ""
    if own_id or has_checkpoints:
        return "the run directory belongs to another run"
    if is_branch:
        return "--resume names a checkpoint, so this is a new run"
    return ""  # an empty disk continues the run of the mirror


def common_files(files: Iterable[str]) -> list[str]:
    """Return the files of a checkpoint that every node needs: all but those of engine/ and lanes/."""
    return sorted(name for name in files if not name.startswith(("engine/", "lanes/")))


def needed_files(files: Iterable[str], *, ranks: Collection[int] | None, lanes: Iterable[range]) -> list[str]:
    """Return the files of engine/ and lanes/ that a node reads for these lanes (batch rows) and the weights of these
    ranks. With None it reads all weights, because they are divided in another way than when they were saved."""
    lane_ids = {lane for part in lanes for lane in part}
    needed = []
    for name in sorted(files):
        weights = _RANK_FILE.fullmatch(name)
        memories = _LANES_FILE.fullmatch(name)
        is_weights = weights is not None and (ranks is None or int(weights[1]) in ranks)
        is_memories = memories is not None and any(
            lane in lane_ids for lane in range(int(memories[1]), int(memories[2]) + 1)
        )
        if is_weights or is_memories:
            needed.append(name)
    return needed


def files_of_node(files_by_rank: Sequence[Sequence[str]], nodes: Sequence[str], *, node: str) -> list[str]:
    """Return the files of a checkpoint that the ranks of a node have written. `nodes` has each rank's node."""
    names: list[str] = []
    for rank, files in enumerate(files_by_rank):
        if nodes[rank] == node:
            names.extend(files)
    return names
