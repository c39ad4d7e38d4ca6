"""The mirror of a run as training sees it: hand over checkpoints, keep what is in transfer, bring back the newest.

Every rank has a `Mirror`. The first rank of each node (its leader) has the thread that uploads, and rank 0 the lock.
Methods that training calls between steps only hand over work, and `seconds` sums their time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from txl_dist.artifacts import CHECKPOINTS, SETTINGS, is_url, list_checkpoints, step_of
from txl_dist.config.load import Config, load_config
from txl_dist.config.schema import Precision
from txl_dist.console.logging import warn_for_all
from txl_dist.data.storage.bucket import Bucket, read_if_present
from txl_dist.data.storage.bucket_lock import BucketLock
from txl_dist.distributed.collectives import RankInfo, gather_objects, run_on_all_ranks, run_on_rank0
from txl_dist.distributed.recovery.seat import node_name
from txl_dist.errors import ConfigError, TxlError, UnreachableError, raised_everywhere, translate_errors
from txl_dist.io.files import read_bytes, write_bytes
from txl_dist.io.manifest import MANIFEST, files_of
from txl_dist.train.checkpoint.mirror.choices import (
    common_files,
    files_of_node,
    list_mirrored,
    mirror_folder,
    why_foreign,
)
from txl_dist.train.checkpoint.mirror.downloads import Place, bring_newest, refuse_mirrored
from txl_dist.train.checkpoint.mirror.ownership import claim_id, read_local_id, read_mirror_id, write_local_id
from txl_dist.train.checkpoint.mirror.parts import choose_parts
from txl_dist.train.checkpoint.mirror.uploads import Upload, Uploader
from txl_dist.train.checkpoint.read import Choice, choose_together
from txl_dist.train.checkpoint.validate import Examination
from txl_dist.train.monitoring.watch import Watch
from txl_dist.train.run_dir import refuse_frozen_changes


class Mirror:
    """Mirror of a run on one rank. All ranks make and close it together."""

    def __init__(
        self, config: Config, ranks: RankInfo, watch: Watch, bucket: Bucket | None, lock: BucketLock | None
    ) -> None:
        """Start the thread that uploads, on the first rank of each node. All ranks call it together.

        `bucket` is None on the other ranks, and `lock` is None on all ranks but rank 0.
        """
        self._ranks = ranks
        self._watch = watch
        self._bucket = bucket
        self._lock = lock
        self._run_dir = Path(config.run.dir)
        self._nodes = gather_objects(node_name())
        self._leaders = leaders_of(self._nodes)
        self._config = config
        self._uploader: Uploader | None = None
        self.is_given_up = False
        """Whether nothing is uploaded, because the mirror has failed after a loss. It is the same on all ranks."""
        self.seconds = 0.0
        """Seconds that the main thread has spent in `save`, `steps_in_use`, `forget` and `is_idle`."""
        if bucket is not None:
            self._uploader = Uploader(
                bucket,
                config.checkpoint,
                run_dir=self._run_dir,
                is_first=ranks.is_rank0,
                num_nodes=len(self._leaders),
                confirm=self._confirm,
            )

    def save(self, folder: Path, names: Sequence[str], *, losses: Mapping[int, float]) -> None:
        """Upload a committed checkpoint in the background. All ranks call it together.

        `names` are the files that this rank has written. `losses` are the validation losses by step, by which the best
        checkpoint in the mirror is kept.
        """
        with self._timed():
            files_by_rank = gather_objects(list(names))
            if self._uploader is not None:
                on_node = files_of_node(files_by_rank, self._nodes, node=self._nodes[self._ranks.rank])
                self._uploader.enqueue(Upload(folder, tuple(on_node), dict(losses)))

    def steps_in_use(self) -> set[int]:
        """Return the steps of the checkpoints on the disk that are uploaded now, or wait for their upload."""
        with self._timed():
            if self._uploader is None:
                return set()
            return self._uploader.steps_in_use()

    def forget(self, step: int) -> None:
        """Make later checkpoints in the mirror invalid, because the run has returned to this step."""
        with self._timed():
            if self._uploader is not None and self._ranks.is_rank0:
                self._uploader.forget(step)

    def finish_records(self) -> None:
        """Upload the records of the run once more, at its end."""
        if self._uploader is not None and self._ranks.is_rank0:
            self._uploader.finish_records()

    @property
    def is_idle(self) -> bool:
        """Whether this rank has nothing more to upload. On rank 0 this means that the mirror is complete."""
        with self._timed():
            return self._uploader is None or not self._ranks.is_rank0 or self._uploader.is_idle

    def lacking(self) -> str:
        """Return what the mirror lacks, for a message of rank 0."""
        return self._uploader.lacking() if self._uploader is not None else ""

    @property
    def url(self) -> str:
        """Address of the mirror, on the first rank of each node."""
        if self._bucket is None:
            return ""
        return self._bucket.location

    def choose(self, resume: str, *, is_start: bool) -> Choice:
        """Choose the newest whole checkpoint of disk and mirror, and bring it to the disk, on all ranks together.

        `resume` is the value of `--resume`. The mirror is only asked at the start of a job, because later the disk has
        the newest checkpoint. Raises TxlError on all ranks.
        """
        place = Place(self._run_dir, self._bucket, self._leaders, self._ranks, self._watch)
        own_disk = self._watch.own_disk
        examined: dict[Path, Examination] = {}
        with _refused():
            if own_disk:
                return choose_parts(place, resume, self._config, node_ranks=own_disk, asks_mirror=is_start)
            if is_start and resume == "never":
                run_on_rank0(lambda: refuse_mirrored(self._bucket) if self._bucket else None)
            elif is_start:
                examined = bring_newest(place)
        return choose_together(self._run_dir, resume, ranks=self._ranks, examined=examined)

    def begin(self, newest: Path | None, *, losses: Mapping[int, float], is_again: bool) -> None:
        """Make the mirror the mirror of this run, after all checks of the start. All ranks call it together.

        `newest` is the checkpoint that the run resumes, or None. It is uploaded if the mirror lacks it. Later ones in
        the mirror become invalid. `losses` are those of `save`. Raises ConfigError on all ranks if the mirror cannot be
        written. A job that has lost a rank (`is_again`) continues without uploads instead.
        """
        try:
            with _refused():
                run_on_rank0(self._claim)
                mirror_id = run_on_rank0(lambda: read_mirror_id(self._bucket) if self._bucket else "")
                run_on_all_ranks(lambda: self._keep_id(mirror_id))
        except TxlError as error:
            _continue_without(error, is_again=is_again)
            self.is_given_up = True
            if self._uploader is not None:
                self._uploader.close()
                self._uploader = None
            return
        if newest is None or newest.parent != self._run_dir / CHECKPOINTS:
            return
        self.forget(step_of(newest))
        self.save(newest, self._own_share(newest), losses=losses)

    def _own_share(self, checkpoint: Path) -> list[str]:
        """Return the files of a checkpoint on the disk that this rank uploads for its node."""
        if self._ranks.rank not in self._leaders:
            return []
        names = files_of(checkpoint)
        if not self._watch.own_disk:
            return names[self._leaders.index(self._ranks.rank) :: len(self._leaders)]
        if self._ranks.is_rank0:
            return names
        return sorted(set(names) - set(common_files(names)))

    def close(self) -> None:
        """End the thread that uploads, and release the lock. A broken network delays this by at most ten seconds."""
        if self._uploader is not None:
            self._uploader.close()
        if self._lock is not None:
            self._lock.release()

    def _claim(self) -> None:
        assert self._bucket is not None
        run_id = read_local_id(self._run_dir)
        mirror_id = read_mirror_id(self._bucket)
        if not mirror_id:
            claim_id(self._bucket, run_id)
        self._bucket.upload(self._run_dir / SETTINGS, SETTINGS)

    def _keep_id(self, mirror_id: str) -> None:
        """Write the run's id into the run directory, on the first rank of each run directory."""
        if self._bucket is None or not self._watch.leads_disk(self._ranks.rank):
            return
        if read_local_id(self._run_dir) != mirror_id:
            with translate_errors(ConfigError, f"cannot write into {self._run_dir}", "Correct the permissions."):
                write_local_id(self._run_dir, mirror_id, url=self._bucket.location)

    def _confirm(self) -> bool:
        """Return whether this job still has the lock, after a heartbeat. Raises UnreachableError."""
        return self._lock is None or self._lock.beat()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start_s


def mirror_of(config: Config, ranks: RankInfo, watch: Watch, *, resume: str, is_again: bool) -> Mirror | None:
    """Open the mirror of a run as `open_mirror` does. A job that has lost a rank (`is_again`) continues without a
    mirror that cannot be opened, and gets None."""
    try:
        return open_mirror(config, ranks, watch, resume=resume)
    except TxlError as error:
        _continue_without(error, is_again=is_again)
        return None


def _continue_without(error: TxlError, *, is_again: bool) -> None:
    """Log that the job continues without its mirror, or raise the error if the job has lost no rank before."""
    if not is_again:
        raise error
    warn_for_all("mirror: %s Training continues without uploads until the next start", error)


def open_mirror(config: Config, ranks: RankInfo, watch: Watch, *, resume: str) -> Mirror:
    """Check and lock the mirror of a run, and return it.

    All ranks call it together, and rank 0 has locked the run directory. Nothing but the lock is written. Raises
    TxlError on all ranks: for a wrong or unreachable address, for the mirror of another run, and for a mirror in use.
    """
    url = config.checkpoint.mirror
    if not is_url(url):
        problem = f"checkpoint.mirror={url} is not a URL. Give one, for example s3://bucket/run."
        raise raised_everywhere(ConfigError(problem))
    leads = ranks.rank in leaders_of(gather_objects(node_name()))
    bucket = run_on_all_ranks(lambda: Bucket(url, allow=config.data.allow_protocols) if leads else None)

    with _refused():
        run_id = run_on_all_ranks(lambda: _checked_id(bucket, config, resume=resume) if bucket else "")

        def lock_mirror() -> BucketLock | None:
            if bucket is None or not ranks.is_rank0:
                return None
            label = f"run {run_id}" if run_id else "a new run"
            nonce = watch.lock.nonce if watch.lock is not None else watch.nonce  # the same after the loss of a rank
            return BucketLock.acquire(
                bucket, label, nonce=nonce, remedy="Stop that job, or give another --checkpoint.mirror."
            )

        # Only after all nodes have passed the checks, because a job that is refused here does not remove its lock.
        lock = run_on_all_ranks(lock_mirror)
    return Mirror(config, ranks, watch, bucket, lock)


def mirrored_precision(config: Config) -> Precision | None:
    """Return the precision of the run in the mirror of these settings, or None if there is no such run.

    Rank 0 calls this function, before it opens the mirror. Raises TxlError if the mirror cannot be read.
    """
    url = config.checkpoint.mirror
    if not is_url(url):
        return None
    with _refused():
        settings = _settings_in(Bucket(url, allow=config.data.allow_protocols))
    if settings is None or settings.engine.precision == "auto":
        return None
    return settings.engine.precision


def leaders_of(nodes: Sequence[str]) -> list[int]:
    """Return the first rank of each node. `nodes` has the node of each rank."""
    return [rank for rank, node in enumerate(nodes) if node not in nodes[:rank]]


def _checked_id(bucket: Bucket, config: Config, *, resume: str) -> str:
    """Return the run's id, or an empty text for a new run.

    Raises ConfigError if the mirror belongs to another run than this node's run directory, or to a run with other
    frozen settings.
    """
    run_dir = Path(config.run.dir)
    own_id = read_local_id(run_dir)
    mirror_id = read_mirror_id(bucket)
    local = list_checkpoints(run_dir)
    reason = why_foreign(
        own_id,
        mirror_id,
        has_checkpoints=bool(local),
        shares_a_checkpoint=bool(mirror_id and own_id != mirror_id and _shares_a_checkpoint(bucket, local)),
        is_branch=resume not in ("auto", "must", "never"),
    )
    if reason:
        raise ConfigError(
            f"{bucket.location} is the mirror of run {mirror_id}, and {reason}. Give another --checkpoint.mirror. To "
            "continue the run of the mirror, use an empty --run.dir and --resume auto."
        )
    _check_settings(bucket, config)
    return mirror_id or own_id


def _shares_a_checkpoint(bucket: Bucket, local: Sequence[Path]) -> bool:
    """Return whether one of the checkpoints on the disk is in the mirror too."""
    mirrored = {checkpoint.folder for checkpoint in list_mirrored(bucket.sizes(CHECKPOINTS, nested=True))}
    for folder in local:
        manifest = folder / MANIFEST
        if manifest.is_file() and mirror_folder(step_of(folder), read_bytes(manifest)) in mirrored:
            return True
    return False


def _check_settings(bucket: Bucket, config: Config) -> None:
    """Raise ConfigError if the run in the mirror has other frozen settings."""
    settings = _settings_in(bucket)
    if settings is not None:
        refuse_frozen_changes(settings, config, made=bucket.location, choose="--checkpoint.mirror")


def _settings_in(bucket: Bucket) -> Config | None:
    """Return the settings of the run in the mirror, or None if there is no run. Raises ConfigError if they are
    damaged."""
    content = read_if_present(bucket, SETTINGS)
    if content is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / SETTINGS
        write_bytes(path, content)
        return load_config(path)


@contextmanager
def _refused() -> Iterator[None]:
    """Return a context manager for the start of a run. A UnreachableError becomes a ConfigError with a remedy."""
    try:
        yield
    except UnreachableError as error:
        refused: TxlError = ConfigError(f"{error} To train without a mirror, remove checkpoint.mirror.")
        refused.rank = error.rank
        raise refused from error
