"""Resume where each node has a run directory of its own, which needs a mirror.

    checkpoints/step_N/   MANIFEST.json of the whole checkpoint, its common files, and files of engine/ and lanes/

A save leaves on each node the files that the node's ranks have written. Before a resume each node gets the files that
its ranks read: those of its ranks and lanes, or all weights if the number of ranks or the ZeRO stage has changed.
Present files are used if their hashes are those of the manifest, and the others are downloaded. A checkpoint that the
mirror lacks can be resumed if every node has its part.

Limitations: checks that need all files of a checkpoint are left out, because no node has them. The hashes and the probe
remain.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from txl_dist.artifacts import CHECKPOINTS, checkpoint_folder, list_checkpoints, step_of
from txl_dist.config.load import Config
from txl_dist.console.logging import logger
from txl_dist.data.loader.lanes import lanes_of_rank
from txl_dist.data.storage.bucket import read_if_present
from txl_dist.distributed.collectives import gather_objects, run_on_all_ranks, run_on_rank0
from txl_dist.errors import CheckpointError, raised_everywhere
from txl_dist.io.files import flush_folder, read_bytes, resolve_inside, sha256_of_file, unique_path, write_bytes
from txl_dist.io.manifest import MANIFEST, listed_files
from txl_dist.train.checkpoint.mirror.choices import (
    MirroredCheckpoint,
    common_files,
    list_mirrored,
    mirror_folder,
    needed_files,
)
from txl_dist.train.checkpoint.mirror.downloads import Place, fetch_together, restore_records
from txl_dist.train.checkpoint.read import Choice, choose_together
from txl_dist.train.checkpoint.validate import SavedState, read_state


class Candidate(NamedTuple):
    """Checkpoint that nodes have parts of, or that the mirror has, or both."""

    step: int
    folder: str
    """Name of its folder in the mirror."""
    mirrored: MirroredCheckpoint | None
    """The whole checkpoint in the mirror, or None."""


def choose_parts(place: Place, resume: str, config: Config, *, node_ranks: Sequence[int], asks_mirror: bool) -> Choice:
    """Choose the newest checkpoint of which every node can get its part, and bring the parts to the nodes.

    All ranks call it together. `resume` is the value of `--resume`, and `node_ranks` are the ranks of this node.
    Without `asks_mirror` only the disks count. Raises CheckpointError as `choose_checkpoint` does. Raises
    UnreachableError if the mirror cannot be read.
    """
    candidates = _list_together(place, asks_mirror=asks_mirror)
    if resume == "never" and candidates:
        raise raised_everywhere(
            CheckpointError(
                f"--resume=never needs a run without checkpoints, but {candidates[0].folder} exists. Choose another "
                "--run.dir and another --checkpoint.mirror, or continue the run with --resume auto."
            )
        )
    if not candidates and resume not in ("auto", "must", "never"):
        return choose_together(place.run_dir, resume, ranks=place.ranks)
    remarks: list[str] = []
    for candidate in candidates:
        saved, problems = _assemble(candidate, place, config, node_ranks=node_ranks)
        if saved is not None:
            return Choice(saved, remarks)
        remarks.append(f"skipped {candidate.folder}: {'; '.join(problems[:3])}")
    if candidates or resume == "must":
        reason = "; ".join(remarks[:3]) or "the run has no checkpoint"
        raise raised_everywhere(
            CheckpointError(
                f"cannot resume {place.run_dir}: {reason}. Restore a checkpoint, or start a new run in another "
                "--run.dir with another --checkpoint.mirror."
            )
        )
    return Choice(None, remarks)


def _list_together(place: Place, *, asks_mirror: bool) -> list[Candidate]:
    """Return the checkpoints of all disks and of the mirror, the newest first."""
    local: list[tuple[int, str]] = []
    if place.bucket is not None:  # the first rank of each node speaks for its disk
        for folder in list_checkpoints(place.run_dir):
            manifest = _local_manifest(folder)
            if manifest is not None:
                local.append((step_of(folder), mirror_folder(step_of(folder), manifest)))
    on_disks = {found for node in gather_objects(local) for found in node}

    def merge() -> list[Candidate]:
        assert place.bucket is not None
        in_mirror: dict[tuple[int, str], MirroredCheckpoint] = {}
        if asks_mirror:
            for checkpoint in list_mirrored(place.bucket.sizes(CHECKPOINTS, nested=True)):
                if checkpoint.is_whole:
                    in_mirror[checkpoint.step, checkpoint.folder] = checkpoint
        found = sorted(on_disks | in_mirror.keys(), reverse=True)
        return [Candidate(step, folder, in_mirror.get((step, folder))) for step, folder in found]

    return run_on_rank0(merge)


def _local_manifest(folder: Path) -> bytes | None:
    """Return the content of the manifest in a folder, or None if it cannot be read."""
    try:
        return read_bytes(folder / MANIFEST)
    except OSError:
        return None


def _assemble(
    candidate: Candidate, place: Place, config: Config, *, node_ranks: Sequence[int]
) -> tuple[SavedState | None, list[str]]:
    """Bring the part of a checkpoint that each node needs to its disk. All ranks call it together.

    Returns (the checkpoint's state, problems). The state is None if there are problems.
    """
    folder = checkpoint_folder(place.run_dir, candidate.step)
    manifest = _manifest_of(candidate, place, folder)
    try:
        files = listed_files(manifest, where=candidate.folder)
    except CheckpointError as error:
        return None, [str(error)]
    run_on_all_ranks(lambda: _make_room(folder, manifest) if place.bucket is not None else None)
    common = common_files(files)
    problems = _fetch(common if place.ranks.is_rank0 else [], candidate, files, folder, place)
    if problems:
        return None, problems
    _spread(common, files, folder, place)
    saved = run_on_rank0(lambda: read_state(folder))
    needed = run_on_all_ranks(lambda: _needed_on_node(saved, files, config, place, node_ranks=node_ranks))
    problems = _fetch(needed, candidate, files, folder, place)
    if problems:
        return None, problems

    def finish() -> None:
        if place.bucket is not None:
            write_bytes(folder / MANIFEST, manifest)
            flush_folder(folder)
        if place.ranks.is_rank0 and candidate.mirrored is not None:
            restore_records(place)

    run_on_all_ranks(finish)
    return saved, []


def _manifest_of(candidate: Candidate, place: Place, folder: Path) -> bytes:
    """Return the content of a checkpoint's manifest, from any disk or else from the mirror, on every rank."""
    own = _local_manifest(folder)
    if own is not None and mirror_folder(candidate.step, own) != candidate.folder:
        own = None
    found = [manifest for manifest in gather_objects(own) if manifest is not None]
    if found:
        return found[0]

    def read() -> bytes:
        if candidate.mirrored is None or place.bucket is None:
            return b""
        return read_if_present(place.bucket, candidate.mirrored.manifest) or b""

    return run_on_rank0(read)


def _make_room(folder: Path, manifest: bytes) -> None:
    """Make the folder of a checkpoint on this node. A folder of another checkpoint of this step is renamed."""
    other = _local_manifest(folder)
    is_file = os.path.lexists(folder) and not folder.is_dir()
    if is_file or (other is not None and other != manifest):
        folder.rename(unique_path(folder, "damaged"))
    folder.mkdir(parents=True, exist_ok=True)


def _fetch(names: Sequence[str], candidate: Candidate, files: dict[str, Any], folder: Path, place: Place) -> list[str]:
    """Download those of `names` that this node lacks. All ranks call it together, and get the problems of all."""
    lacking = run_on_all_ranks(lambda: [name for name in names if not _is_there(folder, name, files[name])])
    if candidate.mirrored is None:
        problems = [f"{name} is missing or damaged on rank {place.ranks.rank}'s node" for name in lacking]
        return [problem for found in gather_objects(problems) for problem in found]
    if lacking:
        logger.info("mirror: downloading %d of the %d files of %s", len(lacking), len(files), candidate.folder)
    return fetch_together(lacking, candidate.folder, files, folder, place)


def _is_there(folder: Path, name: str, facts: dict[str, Any]) -> bool:
    """Return whether a file has the size and the hash of its entry in the manifest."""
    try:
        path = resolve_inside(folder, name, nested=True)
        if path.stat().st_size != facts["bytes"]:
            return False
        return sha256_of_file(path) == str(facts["sha256"])
    except (OSError, ValueError):
        return False


def _spread(common: Sequence[str], files: dict[str, Any], folder: Path, place: Place) -> None:
    """Send the common files from rank 0 to the other nodes. They are small."""
    contents = run_on_rank0(lambda: {name: read_bytes(folder / name) for name in common})

    def write() -> None:
        if place.bucket is None or place.ranks.is_rank0:
            return
        for name, content in contents.items():
            if not _is_there(folder, name, files[name]):
                write_bytes(resolve_inside(folder, name, nested=True), content)

    run_on_all_ranks(write)


def _needed_on_node(
    saved: SavedState, files: dict[str, Any], config: Config, place: Place, *, node_ranks: Sequence[int]
) -> list[str]:
    """Return the files of engine/ and lanes/ that the ranks of this node read, on the first rank of the node."""
    if place.bucket is None:
        return []
    world_size = place.ranks.world_size
    num_lanes = saved.stream.num_lanes
    lanes = []
    if num_lanes % world_size == 0:  # else the run has other lanes, and new memories
        lanes = [lanes_of_rank(num_lanes, rank=rank, world_size=world_size) for rank in node_ranks]
    zero_stage = saved.values["zero_stage"]
    is_same = saved.values["world_size"] == world_size and zero_stage == config.engine.zero_stage and zero_stage > 0
    return needed_files(files, ranks=node_ranks if is_same else None, lanes=lanes)
