"""Reading of checkpoints: which checkpoint a run resumes, and how each rank loads its part. `writer` writes
checkpoints.

    checkpoints/step_000001200/
      engine/00000.safetensors        per rank: its pieces of fp32 weights and optimizer state, by name of the parameter
      lanes/00000-00031.safetensors   memories by global lane id (`memories`)
      probe.safetensors  config.toml  tokenizer.json     what an export needs
      state.json                      TrainState, stream position, fingerprints, shapes of the parameters
      MANIFEST.json                   every file's bytes and sha256

Any number of ranks can load a checkpoint, at any ZeRO stage. Memories are stored by lane (batch row) and weights by
parameter, and each rank reads the slices that it needs. No file is a pickle. A run resumes the newest checkpoint whose
manifest proves that it is complete. The newest checkpoint is the checkpoint with the highest step. File times do not
matter.

The file config.toml keeps the paths of the corpora as given, which may be relative. The file state.json has the
absolute paths too, so that the corpora are found from another working directory. The absolute paths are not compared
when a run resumes.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from txl_dist.artifacts import SETTINGS, ArtifactKind, detect_artifact, is_url, list_checkpoints, step_of
from txl_dist.config.load import Config, changed, load_config
from txl_dist.config.registry import plugin_changes
from txl_dist.console.formatting import counted
from txl_dist.data.loader.shards import Split
from txl_dist.data.loader.stream_state import StreamState, continued
from txl_dist.distributed.collectives import (
    RankInfo,
    all_reduce_and,
    broadcast_object,
    gather_objects,
    run_on_all_ranks,
    run_on_rank0,
)
from txl_dist.errors import CheckpointError, DataError, TxlError
from txl_dist.fault_injection import failpoint
from txl_dist.inference.weights import Rows
from txl_dist.train.checkpoint.fragments import FragmentFiles
from txl_dist.train.checkpoint.memories import first_memories, load_memories
from txl_dist.train.checkpoint.validate import Examination, SavedState, examine, read_state
from txl_dist.train.engine.partitions import AVERAGE, WEIGHT
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.run_dir import refuse_frozen_changes
from txl_dist.train.state import RunContext, TrainState


@contextmanager
def keep_while_reading(folder: Path) -> Iterator[None]:
    """Return a context manager that keeps a checkpoint from being pruned during its block, by a lock.

    The lock is released at the latest when this process ends. The checkpoint can still disappear before the block
    begins. On a file system without such locks it can also disappear during the block. So a caller that cannot read the
    checkpoint must check whether it still exists.
    """
    descriptor = -1
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


Examine = Callable[[Path], Examination]
"""Function that checks a checkpoint folder and reads its state."""


class Newest(NamedTuple):
    """Result of the search for the newest complete checkpoint of a run."""

    folder: Path | None
    """Folder of the checkpoint, or None if no checkpoint is complete."""
    saved: SavedState | None
    """State of the checkpoint. It is None if no checkpoint is complete, or if the checkpoint has another format
    version."""
    rejected: list[str]
    """Reasons why newer checkpoints were skipped, one sentence each."""


class Choice(NamedTuple):
    """Decision whether a run resumes a checkpoint or starts with new weights."""

    saved: SavedState | None
    """State of the checkpoint to resume, or None for a new run."""
    remarks: list[str]
    """Warnings for the log, one sentence each."""


def newest_checkpoint(run_dir: Path, *, look: Examine = examine) -> Newest:
    """Return the newest checkpoint of a run in which the function `look` finds no problem. By default `look` is
    `examine`."""
    rejected: list[str] = []
    for path in reversed(list_checkpoints(run_dir)):
        problems, saved = look(path)
        if not problems:
            return Newest(path, saved, rejected)
        rejected.append(f"{path.name}: {'; '.join(problems[:3])}")
    return Newest(None, None, rejected)


def choose_checkpoint(run_dir: Path, resume: str, *, look: Examine = examine) -> Choice:
    """Choose the checkpoint that a run resumes. `resume` is the value of `--resume`: auto, must, never or a path.

    With a path, a run that already has checkpoints of its own continues from its own checkpoints. The path must not be
    an older checkpoint of the same run, because the newer checkpoints would be mixed with the checkpoints of the new
    branch.

    Raises CheckpointError if the run has checkpoints but all are damaged, or if the chosen checkpoint has another
    format version. With a path it is raised if the path is not a checkpoint, or is a damaged checkpoint. With `must` it
    is raised if the run has no checkpoint, and with `never` if the run has a checkpoint.
    """
    existing = list_checkpoints(run_dir)
    remarks = []
    folder = Path(resume)
    is_path = resume not in ("auto", "must", "never")
    if is_path and existing and folder.resolve().parent != existing[-1].resolve().parent:
        remarks = [f"{run_dir} has checkpoints of its own. The run continues from these checkpoints, not from {folder}"]
    elif is_path:
        if not folder.is_dir():
            raise CheckpointError(f"--resume {resume}: no such folder. Use auto, must, never or a checkpoint's path.")
        problems, saved = look(folder)
        if problems:
            raise CheckpointError(
                f"--resume {resume}: this checkpoint is damaged: {'; '.join(problems[:5])}. "
                "Give another checkpoint folder, or use --resume auto, must or never."
            )
        if existing and existing[-1].name > folder.name:
            raise CheckpointError(
                f"{run_dir} has a newer checkpoint, {existing[-1].name}. To start a second run from {folder.name}, "
                "choose another --run.dir."
            )
        return Choice(saved or read_state(folder), [])
    if resume == "never":
        if existing:
            raise CheckpointError(
                f"--resume=never needs a run directory without checkpoints, but {run_dir} contains "
                f"{existing[-1].name}. "
                "Choose another --run.dir, or continue the run with --resume auto."
            )
        return Choice(None, [])
    newest, saved, rejected = newest_checkpoint(run_dir, look=look)
    if newest is None and (existing or resume == "must"):
        reasons = "; ".join(rejected[:3])
        what = "the run has no checkpoint"
        if existing:
            if len(existing) == 1:
                which = "its only checkpoint is"
            else:
                which = f"all {len(existing)} of its checkpoints are"
            what = f"{which} damaged ({reasons})"
        raise CheckpointError(
            f"cannot resume {run_dir}: {what}. Restore a checkpoint, or start a new run in another --run.dir."
        )
    if newest is not None and saved is None:
        saved = read_state(newest)  # which refuses the other format version
    return Choice(saved, remarks + [f"skipped a damaged checkpoint, {reason}" for reason in rejected])


def choose_together(
    run_dir: Path, resume: str, *, ranks: RankInfo, examined: Mapping[Path, Examination] = MappingProxyType({})
) -> Choice:
    """Choose the checkpoint on rank 0 by `choose_checkpoint`, where each rank hashes a share of the files.

    All ranks call this function together. Only rank 0 lists folders, because on a network file system the cache of
    another node may show an older listing. `examined` has the results of checks that were made before.
    """
    if not ranks.is_rank0:
        nothing: Path | None = None
        while (folder := broadcast_object(nothing)) is not None:
            examine_together(folder, ranks)

    def look(folder: Path) -> Examination:
        if folder in examined:
            return examined[folder]
        return examine_together(broadcast_object(folder), ranks)

    def choose() -> Choice:
        try:
            return choose_checkpoint(run_dir, resume, look=look)
        finally:
            broadcast_object(None)

    return run_on_rank0(choose)


def examine_together(folder: Path, ranks: RankInfo) -> Examination:
    """Check a checkpoint by `examine`, where each rank hashes a share of the files.

    All ranks call it together. Every rank gets all problems, and only rank 0 gets the state.
    """
    problems, saved = examine(folder, part=ranks.rank, num_parts=ranks.world_size)
    if all_reduce_and(not problems):
        return Examination([], saved)
    return Examination([problem for part in gather_objects(problems) for problem in part], None)


def check_checkpoint(saved: SavedState, context: RunContext) -> list[str]:
    """Check that this job can continue a checkpoint, and return the warnings for the log, one sentence each.

    Raises CheckpointError if the tokenizer differs, or if losses before and after the resume would count different
    tokens. Raises ConfigError if a frozen setting differs. A frozen setting must not change when a run resumes.
    """
    folder = saved.folder
    config = load_config(saved.folder / SETTINGS)
    theirs = saved.values["tokenizer_fingerprint"]
    ours = context.corpora.first.tokenizer.fingerprint
    if theirs != ours:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer than {context.config.data.path} was prepared with "
            f"(fingerprints {theirs[:12]} and {ours[:12]}). If the corpus comes from text, prepare it with "
            f"--tokenizer-file {folder / 'tokenizer.json'}. If it comes from token ids, prepare it with the "
            "--vocab-list of the earlier corpus. To start a new run instead, use another --run.dir."
        )
    remarks = refuse_frozen_changes(config, context.config, made=str(folder))
    remarks += plugin_changes(saved.values.get("plugins", ()), where=folder.name)
    if not scores_first_tokens(config, saved):
        raise CheckpointError(
            f"{folder} was trained with document masks by a version of txl_dist that did not score the first token of "
            "a document. After a resume, losses would count other tokens than before. Continue with the version that "
            f"wrote the checkpoint, or begin a new run with the checkpoint's weights: `txl export {folder} BUNDLE`, "
            "then `--init BUNDLE`."
        )
    before = saved.values["world_size"]
    now = context.ranks.world_size
    if before != now:
        remarks.append(
            f"resuming a checkpoint of {counted(before, 'rank')} on {counted(now, 'rank')}: results are equal "
            f"to those on {counted(before, 'rank')} up to rounding"
        )
    return remarks


def scores_first_tokens(config: Config, saved: SavedState) -> bool:
    """Return whether the version of txl_dist that wrote a checkpoint scored the first token of each document, which
    follows an end-of-text token.

    Older versions did not score this token if document masks were on. `config` contains the checkpoint's settings.
    """
    return not config.data.document_mask or bool(saved.values.get("scores_first_tokens"))


def continued_stream(saved: SavedState, wanted: StreamState, splits: Sequence[Split]) -> tuple[StreamState, list[str]]:
    """Return (the position in the text at which training continues, warnings for the log).

    `wanted` is the position at which a new run with the present settings would start. If a corpus has another number of
    lanes (batch rows) than in the checkpoint, its unread text is divided among the new lanes. Raises CheckpointError if
    the checkpoint was trained on other data or with another seed.
    """
    state = continued(saved.stream, wanted, splits)
    if state.has_lanes_of(saved.stream):
        return state, []
    return state, [
        "the lanes (batch rows) get new parts of the text. Each lane starts in unread text with an empty memory"
    ]


def load_checkpoint(saved: SavedState, engine: Engine, context: RunContext, *, stream: StreamState) -> TrainState:
    """Load a checkpoint into the engine, and return the training state of this rank.

    All ranks call it together, with a checkpoint that `choose_checkpoint` and `check_checkpoint` have accepted.
    `stream` is the result of `continued_stream`. If the lanes (batch rows) got new parts of the text, the memories are
    the same as in a new run.
    """
    folder = saved.folder
    state = saved.values
    failpoint("load", step=step_of(folder))
    ranks = context.ranks
    near = ranks.rank * state["world_size"] // ranks.world_size  # the rank that saved the same part of the parameters
    files = run_on_all_ranks(lambda: FragmentFiles(folder / "engine", near=near))
    engine.load(files, loss_scale=state["loss_scale"])
    train = context.config.train
    memories = first_memories(engine, context.plan, memory_len=train.memory_len, initial=train.initial_memory)
    if stream.has_lanes_of(saved.stream):
        like = memories[0]
        memories = run_on_all_ranks(lambda: load_memories(folder, lanes=context.lanes, like=like))
    return TrainState(
        step=saved.step, tokens_seen=state["tokens_seen"], health=saved.health, stream=stream, memories=memories
    )


def consolidated_weights(folder: Path, *, use_ema: bool = False) -> dict[str, Rows]:
    """Return the model's fp32 weights by name, or with `use_ema` the averages of the weights. A tied weight has one
    name.

    The values are read from the files only when they are used. No other ranks and no DeepSpeed are needed. Raises
    CheckpointError if a file cannot be read. Reading the values later can raise CheckpointError too.
    """
    files = FragmentFiles(folder / "engine")
    kind = AVERAGE if use_ema else WEIGHT
    if kind not in files.kinds:
        raise CheckpointError(
            f"{folder} holds no average of its weights, because it was trained with optim.ema_decay=0. "
            "Export it without --ema."
        )

    def rows_of(name: str, shape: torch.Size) -> Rows:
        width = shape[1:].numel()

        def read(start: int, stop: int) -> Tensor:
            values = files.read(kind, name, start=start * width, length=(stop - start) * width)
            return values.view(stop - start, *shape[1:])

        return Rows(shape, read)

    shapes = read_state(folder).values["parameters"]
    return {name: rows_of(name, torch.Size(shape)) for name, shape in shapes.items()}


def absolute_paths(corpora: Sequence[str]) -> list[str]:
    """Return the paths of corpora as absolute paths. URLs are returned unchanged."""
    return [path if is_url(path) else os.path.abspath(path) for path in corpora]


def with_corpora_found(config: Config, checkpoint: Path) -> Config:
    """Return the settings of a checkpoint, with paths at which its corpora exist.

    A path without a corpus is replaced by the absolute path in the checkpoint's state.json, if a corpus is there.
    """
    try:
        saved_paths = read_state(checkpoint).values.get("corpora")
    except TxlError:
        return config
    paths = config.data.paths
    if not saved_paths or len(saved_paths) != len(paths):
        return config  # a checkpoint of an older version, without absolute paths
    path, *more = (
        saved_path
        if detect_artifact(path) is not ArtifactKind.CORPUS and detect_artifact(saved_path) is ArtifactKind.CORPUS
        else path
        for path, saved_path in zip(paths, saved_paths, strict=True)
    )
    return changed(config, {"data.path": path, "data.more_paths": tuple(more)})


def require_corpus(checkpoint: Path, config: Config) -> str:
    """Return the path of the corpus that a checkpoint was trained on.

    Raises DataError if the corpus is at none of its known paths. The message lists these paths.
    """
    path = with_corpora_found(config, checkpoint).data.path
    if detect_artifact(path) is ArtifactKind.CORPUS:
        return path
    saved_paths = read_state(checkpoint).values.get("corpora")
    if saved_paths:
        kept_path = saved_paths[0]
    else:
        kept_path = os.path.abspath(path)
    places = " or ".join(dict.fromkeys([kept_path, os.path.abspath(path)]))
    raise DataError(f"the corpus of {checkpoint} is no longer at {places}. Name the corpus's new path with --data.")
