"""The background writer of checkpoints. A checkpoint is either complete or absent. One checkpoint is written at a time.

    step boundary   state is copied into host memory                   `begin`, all ranks. The step waits for this
    during steps    each rank writes, hashes and fsyncs its files      a thread per rank, without collectives
    step boundary   all ranks have written: manifest and rename        `finish`, all ranks. The rename commits

Files are first written to the folder `step_N.tmp-NONCE`. After a crash, either this folder or the committed folder
exists. No code reads the temporary folder, and the next start removes it. An error of the file system never ends a run
here. The written files are removed, `finish` returns the reason on every rank, and the loop tries again later.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

import txl_dist
from txl_dist.artifacts import CHECKPOINTS, FORMAT_VERSION, PROBE, SETTINGS, STATE, checkpoint_folder
from txl_dist.config.registry import loaded_plugins
from txl_dist.console.formatting import format_bytes
from txl_dist.console.logging import warn_for_all
from txl_dist.distributed.collectives import (
    all_reduce_and,
    all_reduce_sum,
    broadcast_object,
    gather_objects,
    gather_on_rank0,
    run_on_all_ranks,
)
from txl_dist.errors import CheckpointError
from txl_dist.fault_injection import failpoint
from txl_dist.io.files import flush_folder, sha256_of_bytes, write_bytes
from txl_dist.io.manifest import commit_folder, write_manifest
from txl_dist.io.tensor_files import file_bytes, write_tensors
from txl_dist.train.checkpoint.fragments import fragment_tensors
from txl_dist.train.checkpoint.memories import memory_tensors
from txl_dist.train.checkpoint.read import absolute_paths
from txl_dist.train.checkpoint.validate import CALLBACKS, LANES_KEY, STATE_KEY, settings_hash
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.monitoring.watch import Watch
from txl_dist.train.state import RunContext, TrainState

Content = tuple[dict[str, Tensor], dict[str, str]]
"""Tensors and metadata of one file."""

Write = Callable[[Path], dict[str, Any]]
"""Function that writes one file and returns its bytes and sha256."""


_POLL_S = 0.05


class SaveResult(NamedTuple):
    """Result of writing one checkpoint. All fields but `names` are the same on every rank.

    `step` is the step that was saved, `folder` the checkpoint's folder, and `gib` its size in GiB.
    """

    step: int
    folder: Path
    gib: float
    error: str
    """Reason why the checkpoint could not be written. It is empty if the checkpoint is complete on disk."""
    names: list[str]
    """Names of the files that this rank has written. They differ between ranks."""


class AsyncWriter:
    """Writer of one run's checkpoints in the background, one checkpoint at a time.

    All ranks call its methods together, except `is_written`.
    """

    def __init__(self, context: RunContext, watch: Watch) -> None:
        self.context = context
        self.watch = watch
        on_gpu = context.ranks.device.type == "cuda"
        # A GPU's state must be copied anyway before it can be written.
        self._host: HostCopy | None = None
        if context.config.checkpoint.asynchronous or on_gpu:
            self._host = HostCopy(pin=on_gpu)
        self._thread: threading.Thread | None = None
        self._step = -1
        self._needed = 0
        self._written: dict[str, dict[str, Any]] = {}
        self._num_bytes = 0
        self._error: Exception | None = None
        self._is_abandoned = False

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun and is not finished. The value is the same on every rank."""
        return self._step >= 0

    @property
    def is_written(self) -> bool:
        """Whether this rank has finished writing its files of the save in progress."""
        return self._thread is None or not self._thread.is_alive()

    def begin(
        self, state: TrainState, engine: Engine, *, probe: dict[str, Tensor], callbacks: Content | None = None
    ) -> None:
        """Copy the state and start to write it. No other save may be in progress.

        `callbacks` is the result of `packed_states`: the callbacks' states on rank 0, and None on other ranks.
        """
        assert not self.in_flight
        failpoint("save-begin", step=state.step)
        self._step = state.step
        self._written = {}
        self._num_bytes = 0
        self._error = None
        tensors = self._tensors(state, engine, probe)
        if self.context.ranks.is_rank0:
            local_files = self._local_files(state, engine)
        else:
            local_files = {}
        # All files of this save name its state.json, so that none is ever taken for one of another save.
        saved_with = {STATE_KEY: broadcast_object(sha256_of_bytes(local_files.get(STATE, b"")))}
        if callbacks is not None:
            states, metadata = callbacks
            local_files[CALLBACKS] = save(states, metadata | saved_with)
        tensor_bytes = sum(file_bytes(content) for content, _ in tensors.values())
        other_bytes = sum(len(data) for data in local_files.values())
        self._needed = int(all_reduce_sum(torch.tensor(tensor_bytes + other_bytes)))
        on_disk = self._needed
        if self.watch.own_disk:
            needed_by_rank = gather_objects(tensor_bytes + other_bytes)
            on_disk = sum(needed_by_rank[rank] for rank in self.watch.own_disk)

        def check_space() -> None:
            if self._leads_disk:
                _in_file_system(lambda: self._check_space(on_disk), self._temporary(state.step), needed=on_disk)

        try:
            run_on_all_ranks(check_space)
        except CheckpointError as error:
            self._error = error
            return
        tensors = self._on_host(tensors)
        failpoint("save-copied", step=state.step)
        files: dict[str, Write] = {}
        for name, (content, metadata) in tensors.items():
            files[name] = self._tensor_writer(content, metadata | saved_with)
        for name, data in local_files.items():
            files[name] = _bytes_writer(data)
        self._thread = threading.Thread(target=self._write, args=(files,), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> SaveResult:
        """Wait until all ranks have written their files, and commit the checkpoint.

        An error of the file system is returned in the result, not raised.
        """
        self._wait()
        step = self._step
        self._step = -1
        self._thread = None
        final = checkpoint_folder(self.context.run_dir, step)
        temporary = self._temporary(step)
        if self._error is None:
            local_reason = None
        else:
            local_reason = _explained(self._error, temporary, needed=self._needed)
        names = list(self._written)
        if self.watch.own_disk:
            parts = gather_objects((self._written, local_reason))  # each node writes the manifest
        else:
            parts = gather_on_rank0((self._written, local_reason))
        reasons = [reason for _, reason in parts if reason is not None]
        facts_by_file = {name: facts for written, _ in parts for name, facts in written.items()}

        def commit() -> None:
            if reasons:
                raise CheckpointError(reasons[0])
            if not self._leads_disk:
                return
            self.watch.confirm_lock()
            failpoint("save-manifest", step=step)
            write_manifest(temporary, facts_by_file)
            failpoint("save-manifest-done", step=step)
            failpoint("save-rename", step=step)
            commit_folder(temporary, final)
            failpoint("save-renamed", step=step)

        try:
            run_on_all_ranks(lambda: _in_file_system(commit, temporary, needed=self._needed))
        except CheckpointError as error:
            run_on_all_ranks(lambda: shutil.rmtree(temporary, ignore_errors=True) if self._leads_disk else None)
            return SaveResult(step, final, self._needed / 2**30, str(error), names)
        return SaveResult(step, final, self._needed / 2**30, "", names)

    def abandon(self) -> None:
        """End a save in progress without committing it. The next start removes its temporary folder."""
        self._is_abandoned = True
        if self.in_flight:
            warn_for_all("the checkpoint of step %d is dropped, because a rank was lost or failed", self._step)
        if self._thread is not None:
            self._thread.join()

    def _check_wanted(self) -> None:
        """Raise OSError in the thread if the save was abandoned."""
        if self._is_abandoned:
            raise OSError("the save was abandoned")

    def _wait(self) -> None:
        """Wait until all ranks have written their files.

        The collectives are short, so a rank with a slow disk does not count as hanging. Each rank sends heartbeats to
        the watchdog while its own files grow, and after these files are finished. So the watchdog reports the rank
        whose disk makes no progress.
        """
        last_num_bytes = -1
        while not all_reduce_and(self.is_written):
            if self.is_written or self._num_bytes > last_num_bytes:
                last_num_bytes = self._num_bytes
                self.watch.beat("commit")
            if self._thread is not None and self._thread.is_alive():
                self._thread.join(_POLL_S)
            else:
                time.sleep(_POLL_S)

    def _temporary(self, step: int) -> Path:
        """Return the temporary folder into which files are written before the checkpoint of this step is committed."""
        final = checkpoint_folder(self.context.run_dir, step)
        return final.with_name(f"{final.name}.tmp-{self.watch.nonce}")

    def _tensors(self, state: TrainState, engine: Engine, probe: dict[str, Tensor]) -> dict[str, Content]:
        """Return (tensors, metadata) of each file of this rank, as views where possible."""
        memories = memory_tensors(state.memories, width=self.context.config.model.width)
        ranks = self.context.ranks
        lanes = f"{self.context.lanes.start:05d}-{self.context.lanes.stop - 1:05d}"
        files: dict[str, Content] = {f"lanes/{lanes}.safetensors": (memories, {LANES_KEY: lanes})}
        # At stage 0 all ranks hold the same weights and state.
        if self.context.config.engine.zero_stage > 0 or ranks.is_rank0:
            files[f"engine/{ranks.rank:05d}.safetensors"] = fragment_tensors(engine.fragments())
        if ranks.is_rank0:
            files[PROBE] = (probe, {})
        return files

    def _on_host(self, files: dict[str, Content]) -> dict[str, Content]:
        """Return the tensors of the files in host memory, so that the next step cannot change them before they are
        written.

        Tensors that are already in host memory, and are written before the next step, are not copied.
        """
        if self._host is not None:
            return self._host.copy(files)
        on_host: dict[str, Content] = {}
        for name, (tensors, metadata) in files.items():
            on_host[name] = ({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, metadata)
        return on_host

    def _local_files(self, state: TrainState, engine: Engine) -> dict[str, bytes]:
        """Return the content of the files that rank 0 writes in addition to its tensors."""
        config = self.context.config
        corpus = self.context.corpora.first
        settings = self.context.saved_settings.toml.encode()
        content = {
            "format_version": FORMAT_VERSION,
            "code_version": txl_dist.__version__,
            "step": state.step,
            "tokens_seen": state.tokens_seen,
            "health": state.health.to_dict(),
            "stream": state.stream.to_dict(),
            "world_size": self.context.ranks.world_size,
            "zero_stage": config.engine.zero_stage,
            "precision": config.engine.dtype,
            "loss_scale": engine.loss_scale(),
            "parameters": engine.shapes,
            "corpora": absolute_paths(config.data.paths),
            "vocab_size": self.context.vocab_size,
            "tokenizer_fingerprint": corpus.tokenizer_sha256,
            "config_fingerprint": self.context.saved_settings.fingerprint,
            "config_sha256": settings_hash(settings),
            "scores_first_tokens": True,
        }
        plugins = loaded_plugins()
        if plugins:
            content["plugins"] = [plugin._asdict() for plugin in plugins]
        return {
            SETTINGS: settings,
            "tokenizer.json": corpus.tokenizer.to_json().encode(),
            STATE: json.dumps(content, indent=1).encode() + b"\n",
        }

    @property
    def _leads_disk(self) -> bool:
        return self.watch.leads_disk(self.context.ranks.rank)

    def _check_space(self, needed: int) -> None:
        """Check that `needed` bytes of the checkpoint fit on the disk.

        Raises CheckpointError if it does not fit, or OSError if the file system does not report the space that is left.
        """
        folder = self.context.run_dir / CHECKPOINTS
        if not folder.is_dir():
            folder.mkdir()  # not the run directory: if that is gone, it must not be made again
            flush_folder(self.context.run_dir)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise CheckpointError(
                f"no room for a checkpoint in {folder}: the checkpoint needs {format_bytes(needed)}, but "
                f"{format_bytes(free)} of disk are free. Free disk space, lower checkpoint.keep_last, or move the run "
                "to another file system."
            )

    def _tensor_writer(self, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Write:
        """Return a function that writes a file of tensors."""
        step = self._step

        def on_progress(num_bytes: int) -> None:
            self._num_bytes += num_bytes
            self._check_wanted()
            failpoint("save-file-half", step=step)

        return lambda path: write_tensors(path, tensors, metadata=metadata, on_progress=on_progress)

    def _write(self, files: dict[str, Write]) -> None:
        """Write all files of this rank, in the writer's thread. An error is stored, and `finish` reports it."""
        temporary = self._temporary(self._step)
        step = self._step
        try:
            for name, write in files.items():
                self._check_wanted()
                path = temporary / name
                for folder in (temporary.parent, temporary, path.parent):  # all but the run directory
                    folder.mkdir(exist_ok=True)
                failpoint("save-file", step=step)
                self._written[name] = write(path)
                failpoint("save-file-done", step=step)
            failpoint("save-written", step=step)
        except Exception as error:  # noqa: BLE001  whatever it is, `finish` reports it to all ranks
            self._error = error


class HostCopy:
    """Host memory to which a rank's tensors are copied for a save.

    The memory is kept from save to save, so only the first save allocates memory.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, files: dict[str, Content]) -> dict[str, Content]:
        """Copy the tensors of all files to the host. The copies do not change until the next call."""
        copies: dict[str, Content] = {}
        for name, (tensors, metadata) in files.items():
            copies[name] = ({key: self._copy((name, key), tensor) for key, tensor in tensors.items()}, metadata)
        if self._pin:
            torch.cuda.synchronize()
        return copies

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        """Copy a tensor into its buffer. The buffer is allocated if it is missing or has another shape or type."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)
            self._buffers[key] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)


def _bytes_writer(data: bytes) -> Write:
    """Return a function that writes a file of bytes."""

    def write(path: Path) -> dict[str, Any]:
        write_bytes(path, data)
        return {"bytes": len(data), "sha256": sha256_of_bytes(data)}

    return write


def _in_file_system(action: Callable[[], None], path: Path, *, needed: int) -> None:
    """Run an action, and raise CheckpointError for an OSError."""
    try:
        action()
    except OSError as error:
        raise CheckpointError(_explained(error, path, needed=needed)) from error


def _explained(error: Exception, path: Path, *, needed: int) -> str:
    """Return an error's message with the file that could not be written and a remedy. `needed` is the size of the
    checkpoint in bytes."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        where = error.filename or path
        reason = f"cannot write {where}: {error.strerror or error}"
        return (
            f"{reason}. A checkpoint needs {format_bytes(needed)}. Free space or correct permissions in {path.parent}."
        )
    return f"cannot write {path}: {error!r}. This is a defect of the program. Please report it."
