"""The way back from a mirror: the newest whole checkpoint of the disk and the mirror, on the disk.

Rank 0 lists both places and decides, and all ranks follow. The first rank of each node downloads a share of the files
into the folder `step_N.tmp-NONCE`, and compares size and sha256 with the manifest. Then the folder is renamed, as after
a save. So nothing after this module knows where a checkpoint came from.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from txl_dist.artifacts import CHECKPOINTS, LOG, RECORDS, checkpoint_folder, list_checkpoints, step_of
from txl_dist.console.formatting import format_bytes
from txl_dist.console.logging import logger, warn_for_all
from txl_dist.data.storage.bucket import Bucket, read_if_present
from txl_dist.distributed.collectives import RankInfo, gather_objects, run_on_all_ranks, run_on_rank0
from txl_dist.errors import CheckpointError, DataError, UnreachableError, raised_everywhere
from txl_dist.fault_injection import failpoint
from txl_dist.io.files import flush_folder, resolve_inside, sha256_of_file, write_bytes
from txl_dist.io.manifest import MANIFEST, commit_folder, listed_files
from txl_dist.train.checkpoint.mirror.choices import MirroredCheckpoint, list_mirrored, newest_first
from txl_dist.train.checkpoint.read import examine_together
from txl_dist.train.checkpoint.validate import Examination
from txl_dist.train.monitoring.watch import Watch

_THREADS = 4
"""Files that a node downloads at the same time."""
_TRIES = 4
_RETRY_S = 2.0
_POLL_S = 0.2


class Place(NamedTuple):
    """Where a run looks for its checkpoints, and the ranks that download."""

    run_dir: Path
    bucket: Bucket | None
    """The mirror, or None on ranks that do not download."""
    leaders: Sequence[int]
    """First rank of each node."""
    ranks: RankInfo
    watch: Watch


def bring_newest(place: Place) -> dict[Path, Examination]:
    """Download the newest whole checkpoint of the mirror, unless the disk has a whole one of the same or a later step.

    All ranks call it together. Returns the results of the checks of checkpoints on the disk, for `choose_together`.
    Raises UnreachableError if the mirror cannot be read, and CheckpointError if no checkpoint of both places is whole.
    """
    candidates = run_on_rank0(lambda: _candidates(place))
    examined: dict[Path, Examination] = {}
    damaged = []
    for candidate in candidates:
        if isinstance(candidate, int):
            folder = checkpoint_folder(place.run_dir, candidate)
            examined[folder] = examine_together(folder, place.ranks)
            if not examined[folder].problems:
                return examined
            continue
        problems = _download(candidate, place)
        if not problems:
            examined.pop(checkpoint_folder(place.run_dir, candidate.step), None)
            run_on_rank0(lambda: restore_records(place))
            return examined
        damaged.append(f"{candidate.folder}: {'; '.join(problems[:3])}")
        warn_for_all("mirror: skipped a damaged checkpoint, %s", damaged[-1])
    if damaged:
        raise raised_everywhere(
            CheckpointError(
                f"cannot resume {place.run_dir}: no checkpoint in the mirror is whole ({'; '.join(damaged[:3])}). "
                "Restore a checkpoint, or start a new run with another --run.dir and another --checkpoint.mirror."
            )
        )
    return examined


def _candidates(place: Place) -> list[int | MirroredCheckpoint]:
    """Return the checkpoints of both places, the newest first, on rank 0."""
    assert place.bucket is not None
    mirrored = list_mirrored(place.bucket.sizes(CHECKPOINTS, nested=True))
    return newest_first([step_of(folder) for folder in list_checkpoints(place.run_dir)], mirrored)


def _download(checkpoint: MirroredCheckpoint, place: Place) -> list[str]:
    """Download a checkpoint and commit it to the disk. All ranks call it together, and get the problems found.

    Raises UnreachableError if the mirror cannot be read, and CheckpointError if the disk has no room.
    """
    folder = checkpoint_folder(place.run_dir, checkpoint.step)
    temporary = folder.with_name(f"{folder.name}.tmp-{place.watch.nonce}")
    manifest, files, problems = run_on_rank0(lambda: _manifest_of(checkpoint, place))
    if not problems:
        names = _share_of(sorted(files), place)
        problems = fetch_together(names, checkpoint.folder, files, temporary, place)

    def end() -> None:
        if problems:
            shutil.rmtree(temporary, ignore_errors=True)
            return
        write_bytes(temporary / MANIFEST, manifest)
        for path in [*(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
            flush_folder(path)
        failpoint("mirror-fetched", step=checkpoint.step)
        commit_folder(temporary, folder)
        logger.info("mirror: %s was downloaded from %s/%s", folder, _url(place), checkpoint.folder)

    run_on_rank0(end)
    return problems


def _url(place: Place) -> str:
    assert place.bucket is not None
    return place.bucket.location


def _manifest_of(checkpoint: MirroredCheckpoint, place: Place) -> tuple[bytes, dict[str, Any], list[str]]:
    """Return (content of the manifest, its entries, problems of the checkpoint in the listing), on rank 0.

    Raises CheckpointError if the disk has no room for the files.
    """
    assert place.bucket is not None
    manifest = read_if_present(place.bucket, checkpoint.manifest) or b""
    try:
        files = listed_files(manifest, where=checkpoint.manifest)
    except CheckpointError as error:
        return manifest, {}, [str(error)]
    missing = [name for name in files if f"{checkpoint.folder}/{name}" not in checkpoint.names]
    needed = sum(int(facts["bytes"]) for facts in files.values())
    folder = place.run_dir / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"no room for the checkpoint {checkpoint.folder} of {place.bucket.location} in {folder}: it needs "
            f"{format_bytes(needed)}, but {format_bytes(free)} of disk are free. Free disk space, or choose a "
            "--run.dir on another file system."
        )
    return manifest, files, [f"{name} is missing" for name in missing]


def _share_of(names: Sequence[str], place: Place) -> Sequence[str]:
    """Return the files that this rank downloads. Only the first rank of a node downloads."""
    if place.ranks.rank not in place.leaders:
        return []
    number = list(place.leaders).index(place.ranks.rank)
    return names[number :: len(place.leaders)]


def fetch_together(
    names: Sequence[str], source: str, files: Mapping[str, Any], temporary: Path, place: Place
) -> list[str]:
    """Download the files of all ranks, and return the problems of all ranks. Ranks without files wait.

    Heartbeats reach the watchdog while files of this rank grow, and after they are complete.
    """
    fetch = _Fetch(names, source, files, temporary, place.bucket)
    last_num_bytes = -1
    while not all(gather_objects(fetch.is_done)):
        num_bytes = fetch.num_bytes()
        if fetch.is_done or num_bytes > last_num_bytes:
            last_num_bytes = num_bytes
            place.watch.beat("download")
        time.sleep(_POLL_S)
    run_on_all_ranks(fetch.check)
    return [problem for found in gather_objects(fetch.problems) for problem in found]


class _Fetch:
    """Download of some files of a checkpoint in the background."""

    def __init__(
        self, names: Sequence[str], source: str, files: Mapping[str, Any], folder: Path, bucket: Bucket | None
    ) -> None:
        self._source = source
        self._files = files
        self._folder = folder
        self._bucket = bucket
        self._paths: list[Path] = []
        self._error: Exception | None = None
        self.problems: list[str] = []
        self._thread = threading.Thread(target=self._work, args=(names,), name="mirror download", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether all files were downloaded, or one of them cannot be."""
        return not self._thread.is_alive()

    def num_bytes(self) -> int:
        """Return the size in bytes of what is on the disk."""
        return sum(path.stat().st_size for path in list(self._paths) if path.exists())

    def check(self) -> None:
        """Raise the error that ended the download, if there was one."""
        if self._error is not None:
            raise self._error

    def _work(self, names: Sequence[str]) -> None:
        try:
            with ThreadPoolExecutor(_THREADS, "mirror download") as pool:
                self.problems = [problem for problem in pool.map(self._fetch, names) if problem]
        except Exception as error:  # noqa: BLE001  raised by `check`
            self._error = error

    def _fetch(self, name: str) -> str:
        """Download a file and compare it with its entry in the manifest. Returns a problem, or an empty text."""
        assert self._bucket is not None
        facts = self._files[name]
        try:
            path = resolve_inside(self._folder, name, nested=True)
        except ValueError as error:
            return str(error)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._paths.append(path)
        problem = ""
        for attempt in range(1, _TRIES + 1):
            try:
                self._bucket.download(f"{self._source}/{name}", path)
            except UnreachableError:
                if attempt == _TRIES:
                    raise
                time.sleep(_RETRY_S * attempt)
                continue
            except DataError:
                return f"{name} is missing"
            size = path.stat().st_size
            if size == facts["bytes"] and sha256_of_file(path) == facts["sha256"]:
                return ""
            problem = f"{name} differs from its sha256"
            if size != facts["bytes"]:
                problem = f"{name} has {size} bytes instead of {facts['bytes']}"
        return problem


def restore_records(place: Place) -> None:
    """Download the records of the run where the disk has none, or shorter ones. Rank 0 calls it."""
    assert place.bucket is not None
    sizes = place.bucket.sizes()
    for name in (RECORDS, LOG):
        path = place.run_dir / name
        size = path.stat().st_size if path.is_file() else 0
        if sizes.get(name, 0) > size:
            part = path.with_name(f"{name}.tmp")
            place.bucket.download(name, part)
            part.replace(path)


def refuse_mirrored(bucket: Bucket) -> None:
    """Raise CheckpointError if a mirror has a whole checkpoint, for `--resume never`. Raises UnreachableError."""
    whole = [checkpoint for checkpoint in list_mirrored(bucket.sizes(CHECKPOINTS, nested=True)) if checkpoint.is_whole]
    if whole:
        raise CheckpointError(
            f"--resume=never needs a mirror without checkpoints, but {bucket.location} contains {whole[-1].folder}. "
            "Give another --checkpoint.mirror, or continue the run with --resume auto."
        )
