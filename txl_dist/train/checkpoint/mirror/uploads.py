"""The thread of a node that uploads checkpoints to the mirror. Training only hands over committed checkpoints.

    first node     announces a checkpoint, uploads its files, waits for other nodes, uploads the manifest, removes old
    other nodes    wait until the first node announces a checkpoint that they have, and upload their files

One checkpoint is in transfer at a time, and at most one waits on the first node. A newer one takes the place of the one
that waits. An error is a line in the log, and the transfer is tried again until it succeeds or a newer one waits.

Limitations: the transfer of a file is not interrupted. So the end of a run leaves the thread behind.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from txl_dist.artifacts import CHECKPOINTS, LOG, RECORDS, SETTINGS, step_of
from txl_dist.config.schema import CheckpointSection
from txl_dist.console.formatting import counted, format_bytes
from txl_dist.console.logging import logger
from txl_dist.data.storage.bucket import Bucket, in_threads, read_if_present
from txl_dist.data.storage.fsspec_io import s3_code
from txl_dist.errors import UnreachableError
from txl_dist.fault_injection import failpoint
from txl_dist.io.files import parse_object, read_bytes
from txl_dist.io.manifest import MANIFEST
from txl_dist.train.checkpoint.mirror.choices import (
    is_complete,
    list_mirrored,
    manifests_after,
    mirror_folder,
    objects_to_remove,
)

ANNOUNCED = "UPLOADING.json"
"""Name of the object by which the first node tells other nodes which checkpoint to upload."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 5.0, 60.0
_POLL_S = 2.0
_FILES_AT_ONCE = 2
"""Number of files that a node uploads at the same time, or number of parts of a single file."""
_STALLED_AFTER_S = 300.0
"""Seconds without a new file of other nodes after which a newer checkpoint is uploaded instead."""
_SLOW = "slow"
"""Kind of the problem that an upload takes longer than the time between two checkpoints."""
_MOST_WAITING = 3
"""Number of checkpoints that a node other than the first keeps until one of them is announced."""


class Upload(NamedTuple):
    """Committed checkpoint that waits for its upload."""

    folder: Path
    names: tuple[str, ...]
    """Files of the checkpoint that this node uploads."""
    losses: Mapping[int, float] = MappingProxyType({})
    """Validation losses by step, by which `checkpoint.keep_best` keeps a checkpoint. Empty without that setting."""

    @property
    def step(self) -> int:
        """Step of the checkpoint."""
        return step_of(self.folder)


class _UnwantedError(Exception):
    """Raised in the thread when its checkpoint need no longer be uploaded."""


class Uploader:
    """Thread that uploads the files of one node."""

    def __init__(
        self,
        bucket: Bucket,
        settings: CheckpointSection,
        *,
        run_dir: Path,
        is_first: bool,
        num_nodes: int,
        confirm: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start the thread. `confirm` returns whether this job may still write to the mirror, and can raise
        UnreachableError. Only the first node calls it."""
        self._bucket = bucket
        self._settings = settings
        self._run_dir = run_dir
        self._is_first = is_first
        self._num_nodes = num_nodes
        self._confirm = confirm
        self._changed = threading.Condition()
        self._waiting: list[Upload] = []
        self._current: Upload | None = None
        self._forget_after: int | None = None
        self._are_records_due = False
        self._is_closed = False
        self._began_s = 0.0
        """Time at which the thread began its current piece of work."""
        self._complaints: set[str] = set()
        """Kinds of problems in the log since the mirror was last written."""
        self._lacking: set[int] = set()
        """Steps of the checkpoints since the last upload that the mirror lacks, on the first node."""
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def enqueue(self, upload: Upload) -> None:
        """Upload a checkpoint in the background. An older one that waits for its upload is skipped."""
        most = 1 if self._is_first else _MOST_WAITING
        with self._changed:
            if self._is_closed:
                return
            skipped = self._waiting[: len(self._waiting) + 1 - most]
            self._waiting = [*self._waiting[len(skipped) :], upload]
            current = self._current
            seconds = time.monotonic() - self._began_s
            if self._is_first:
                self._lacking.add(upload.step)
            is_news = current is not None and bool(skipped) and not self._complaints
            if is_news:
                self._complaints.add(_SLOW)
            self._changed.notify_all()
        if current is not None and is_news:
            logger.warning(
                "mirror: %s has been in transfer to %s for %.0f s and is not finished, so %s is skipped. The newest "
                "checkpoint is uploaded next. Check the network and the store, or save less often",
                current.folder.name,
                self._bucket.location,
                seconds,
                skipped[0].folder.name,
            )

    def lacking(self) -> str:
        """Return what the mirror lacks, for a message: checkpoints, or only the last records of the run."""
        with self._changed:
            names = [f"step_{step:09d}" for step in sorted(self._lacking)]
        if not names:
            return "the last records of the run"
        if len(names) == 1:
            return names[0]
        return f"{len(names)} checkpoints from {names[0]} to {names[-1]}"

    def steps_in_use(self) -> set[int]:
        """Return the steps whose folders must stay on the disk, because they are uploaded now or wait for it."""
        with self._changed:
            steps = {upload.step for upload in self._waiting}
            if self._current is not None:
                steps.add(self._current.step)
        return steps

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in transfer and nothing waits."""
        with self._changed:
            return not self._has_task() and self._current is None

    def forget(self, step: int) -> None:
        """Make the mirror's checkpoints of later steps invalid, and upload none of them. Only the first node calls
        it, after a rewind."""
        with self._changed:
            self._waiting = [upload for upload in self._waiting if upload.step <= step]
            self._lacking = {lacking for lacking in self._lacking if lacking <= step}
            self._forget_after = step if self._forget_after is None else min(step, self._forget_after)
            self._changed.notify_all()

    def finish_records(self) -> None:
        """Upload the records of the run once more, after the checkpoints that wait. Only the first node calls it."""
        with self._changed:
            self._are_records_due = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread after the file that it is transferring. This does not wait for the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._is_closed:
                    return
                if self._forget_after is None and self._is_first and self._waiting:
                    self._current = self._waiting.pop(0)
                self._began_s = time.monotonic()
            try:
                self._try_until_done()
            finally:
                with self._changed:
                    self._current = None
                    self._changed.notify_all()

    def _has_task(self) -> bool:
        return bool(self._waiting) or self._forget_after is not None or self._are_records_due

    def _has_work(self) -> bool:
        return self._is_closed or self._has_task()

    def _try_until_done(self) -> None:
        """Do the next piece of work, and try it again after an error, unless a newer checkpoint waits."""
        delay_s = _FIRST_RETRY_S
        while True:
            try:
                self._do_next()
                self._complaints.clear()
                return
            except _UnwantedError:
                return
            except Exception as error:  # noqa: BLE001  the thread must live, and the run must not end
                self._complain(error)
            with self._changed:
                is_replaced = self._changed.wait_for(self._is_replaced, timeout=delay_s)
            if is_replaced:
                return
            delay_s = min(2 * delay_s, _LONGEST_RETRY_S)

    def _do_next(self) -> None:
        """Do the next piece of work. Raises UnreachableError or OSError if it must be tried again."""
        forget_after = self._forget_after
        if forget_after is not None:
            self._invalidate(forget_after)
        if self._current is not None:
            self._upload(self._current)
        elif not self._is_first:
            self._follow()
        elif forget_after is None:
            self._upload_records()
            self._are_records_due = False

    def _is_replaced(self) -> bool:
        """Return whether the thread gives up the checkpoint that it could not upload, for a newer one."""
        return self._is_closed or (self._current is not None and bool(self._waiting))

    def _complain(self, error: Exception) -> None:
        """Log why the mirror cannot be written, once per kind of error until it is written again.

        An outage fails for every file of every checkpoint, so the text of the error does not tell outages apart.
        """
        if isinstance(error, UnreachableError):
            reason = str(error)
            kind = s3_code(error.__cause__ or error) or type(error).__name__
        else:
            reason = f"{error!r}."
            kind = type(error).__name__
        if kind not in self._complaints:
            logger.warning("mirror: %s Training continues, and uploads are tried again.", reason)
        self._complaints.add(kind)

    def _manifest_of(self, upload: Upload) -> bytes:
        """Return the content of a checkpoint's manifest. Drops a checkpoint that is no longer on the disk."""
        try:
            return read_bytes(upload.folder / MANIFEST)
        except FileNotFoundError:
            logger.warning("mirror: %s is no longer on the disk, and is not uploaded", upload.folder.name)
            with self._changed:
                self._waiting = [other for other in self._waiting if other is not upload]
            raise _UnwantedError from None

    def _check_wanted(self, upload: Upload) -> None:
        with self._changed:
            is_forgotten = self._forget_after is not None and upload.step > self._forget_after
            if self._is_closed or is_forgotten:
                raise _UnwantedError

    def _invalidate(self, step: int) -> None:
        """Remove the manifests of the checkpoints of later steps."""
        mirrored = list_mirrored(self._bucket.sizes(CHECKPOINTS, nested=True))
        self._bucket.remove(manifests_after(mirrored, step=step))
        with self._changed:
            if self._forget_after == step:
                self._forget_after = None
            if self._current is not None and self._current.step > step:
                raise _UnwantedError

    def _upload(self, upload: Upload) -> None:
        """Make a checkpoint whole in the mirror, on the first node. Raises UnreachableError or OSError."""
        start_s = time.monotonic()
        manifest = self._manifest_of(upload)
        files = parse_object(manifest)["files"]
        folder = mirror_folder(upload.step, manifest)
        if self._num_nodes > 1:
            self._bucket.write(ANNOUNCED, json.dumps({"folder": folder}).encode())
        num_bytes = self._upload_files(upload, folder)
        self._wait_until_complete(upload, folder, files)
        self._upload_records()
        if not self._confirm():
            logger.warning(
                "mirror: another job has taken over %s. This job uploads nothing more", self._bucket.location
            )
            self.close()
        self._check_wanted(upload)
        failpoint("mirror-manifest", step=upload.step)
        self._bucket.write(f"{folder}/{MANIFEST}", manifest)
        failpoint("mirror-whole", step=upload.step)
        with self._changed:
            waiting = {other.step for other in self._waiting}
            num_skipped = len(self._lacking - waiting - {upload.step})
            self._lacking = waiting
        skipped = f". Since the previous upload {counted(num_skipped, 'other checkpoint')} could not be uploaded"
        logger.info(
            "mirror: %s is in %s (%s in %.1f s)%s",
            upload.folder.name,
            self._bucket.location,
            format_bytes(num_bytes),
            time.monotonic() - start_s,
            skipped if num_skipped else "",
        )
        try:
            self._remove_old(upload, folder)
        except UnreachableError as error:
            self._complain(error)

    def _upload_files(self, upload: Upload, folder: str) -> int:
        """Upload the files of this node that the mirror lacks. Returns their size in bytes."""
        present = self._bucket.sizes(folder, nested=True)
        sizes = {name: (upload.folder / name).stat().st_size for name in upload.names}
        lacking = [name for name, size in sizes.items() if present.get(f"{folder}/{name}") != size]
        at_once = min(_FILES_AT_ONCE, len(lacking))

        def transfer(name: str) -> None:
            self._check_wanted(upload)
            failpoint("mirror-file", step=upload.step)
            self._bucket.upload(upload.folder / name, f"{folder}/{name}", parts_at_once=_FILES_AT_ONCE // at_once)
            failpoint("mirror-file-done", step=upload.step)

        self._check_wanted(upload)
        in_threads(transfer, lacking, at_once=at_once)
        return sum(sizes.values())

    def _wait_until_complete(self, upload: Upload, folder: str, files: dict[str, Any]) -> None:
        """Wait until the files of all nodes are in the mirror. Raises UnreachableError if a file of this node is not.

        If other nodes make no progress and a newer checkpoint waits, this one is given up.
        """
        num_present = -1
        progress_s = time.monotonic()
        while True:
            sizes = self._bucket.sizes(folder, nested=True)
            if is_complete(sizes, folder=folder, files=files):
                return
            own_files = {name: facts for name, facts in files.items() if self._num_nodes == 1 or name in upload.names}
            if not is_complete(sizes, folder=folder, files=own_files):
                raise UnreachableError(f"{self._bucket.location}/{folder} lacks files that were uploaded.")
            if len(sizes) > num_present:
                num_present = len(sizes)
                progress_s = time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, timeout=_POLL_S)
                is_stalled = bool(self._waiting) and time.monotonic() - progress_s > _STALLED_AFTER_S
            self._check_wanted(upload)
            if is_stalled:
                logger.warning("mirror: %s is skipped, because another node does not upload", upload.folder.name)
                raise _UnwantedError

    def _upload_records(self) -> None:
        """Upload the settings and records of the run, so that an empty disk can continue them."""
        for name in (SETTINGS, RECORDS, LOG):
            path = self._run_dir / name
            if path.is_file():
                self._bucket.upload(path, name)

    def _remove_old(self, upload: Upload, folder: str) -> None:
        """Remove the checkpoints that the settings no longer keep."""
        failpoint("mirror-prune", step=upload.step)
        manifests, others = objects_to_remove(
            list_mirrored(self._bucket.sizes(CHECKPOINTS, nested=True)),
            uploaded=folder,
            keep_last=self._settings.keep_last,
            keep_every=self._settings.keep_every,
            losses=upload.losses,
        )
        self._bucket.remove(manifests)
        self._bucket.remove(others)

    def _follow(self) -> None:
        """Upload the files of the announced checkpoint, on a node other than the first."""
        content = read_if_present(self._bucket, ANNOUNCED)
        announced = parse_object(content)["folder"] if content else ""
        with self._changed:
            waiting = list(self._waiting)
        for upload in waiting:
            folder = mirror_folder(upload.step, self._manifest_of(upload))
            if folder == announced:
                self._upload_files(upload, folder)
                with self._changed:
                    self._waiting = [other for other in self._waiting if other.step > upload.step]
                return
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, timeout=_POLL_S)
