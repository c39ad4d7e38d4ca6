"""The checkpoint: its folder, which one to start from, and how a rank takes its part of it. `write` writes it.

    checkpoints/step_000001200/
      engine/00000.safetensors        per rank: its pieces of fp32 weights and optimizer state, by name of the parameter
      lanes/00000-00031.safetensors   memories by global lane id (`memories`)
      probe.safetensors  config.toml  tokenizer.json     what an export needs
      state.json                      TrainState, stream position, fingerprints, shapes of the parameters
      MANIFEST.json                   every file's bytes and sha256

Nothing in it depends on how many ranks there were, or on the ZeRO stage: a memory belongs to a lane, a weight to a
parameter, and each rank reads the slices it needs. Nothing in it is a pickle. The newest folder that its manifest
proves whole is the one to start from, ordered by step, never by clock.

Settings keep the paths of the corpora as they were given, which may be relative; state.json has them absolute, for
whoever looks from another working directory. No comparison of settings looks at these.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from txl_dist.artifacts import SETTINGS, ArtifactKind, detect_artifact, is_url, list_checkpoints, step_of
from txl_dist.config.load import Config, changed, load_config
from txl_dist.config.registry import plugin_changes
from txl_dist.console.formatting import counted
from txl_dist.data.loader.corpus import Split
from txl_dist.data.loader.stream_state import StreamState, continued
from txl_dist.distributed.collectives import RankInfo, broadcast_object, gather_objects, run_on_all_ranks, run_on_rank0
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
    """Keep a checkpoint from being pruned while it is read, by a lock that ends with this process at the latest.

    It may be gone already; and where the file system has no such locks it may go. So who cannot read it looks whether
    it is still there.
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
"""Function that looks at a checkpoint."""


class Newest(NamedTuple):
    """The newest whole checkpoint of a run."""

    folder: Path | None
    """Folder of the checkpoint; None if none is whole."""
    saved: SavedState | None
    """Its state; None also for another format version."""
    rejected: list[str]
    """Why newer ones were passed over, one sentence each."""


class Choice(NamedTuple):
    """Where a run starts from."""

    saved: SavedState | None
    """State of the checkpoint to resume; None for a new run."""
    remarks: list[str]
    """What the user should know, one sentence each."""


def newest_checkpoint(run_dir: Path, *, look: Examine = examine) -> Newest:
    """Find the newest checkpoint that is whole, as `look` says."""
    rejected: list[str] = []
    for path in reversed(list_checkpoints(run_dir)):
        problems, saved = look(path)
        if not problems:
            return Newest(path, saved, rejected)
        rejected.append(f"{path.name}: {'; '.join(problems[:3])}")
    return Newest(None, None, rejected)


def choose_checkpoint(run_dir: Path, resume: str, *, look: Examine = examine) -> Choice:
    """Choose where to start from by `--resume auto|must|never|PATH`. A run that has begun at PATH continues from its
    own checkpoints.

    Raises CheckpointError if a checkpoint is demanded and none is whole, if the whole one has another format version,
    if `never` meets an existing run, or if PATH is an older checkpoint of this very run, whose newer ones would be
    mixed with what follows.
    """
    existing, remarks = list_checkpoints(run_dir), []
    folder = Path(resume)
    is_path = resume not in ("auto", "must", "never")
    if is_path and existing and folder.resolve().parent != existing[-1].resolve().parent:
        remarks = [f"{run_dir} has begun already, and goes on from its own checkpoints instead of {folder}"]
    elif is_path:
        if not folder.is_dir():
            raise CheckpointError(f"--resume {resume}: no such folder. Use auto, must, never or a checkpoint's path.")
        problems, saved = look(folder)
        if problems:
            raise CheckpointError(
                f"--resume {resume}: it is damaged: {'; '.join(problems[:5])}. "
                "Name another checkpoint folder, or use --resume auto, must or never."
            )
        if existing and existing[-1].name > folder.name:
            raise CheckpointError(
                f"{run_dir} goes on to {existing[-1].name}. To branch off at {folder.name}, choose another --run.dir."
            )
        return Choice(saved or read_state(folder), [])
    if resume == "never":
        if existing:
            raise CheckpointError(
                f"{run_dir} already holds {existing[-1].name} and --resume is never. "
                "Choose another --run.dir, or --resume auto to continue it."
            )
        return Choice(None, [])
    found, saved, rejected = newest_checkpoint(run_dir, look=look)
    if found is None and (existing or resume == "must"):
        reasons = "; ".join(rejected[:3])
        what = "it holds no checkpoint"
        if existing:
            which = "its one checkpoint is not" if len(existing) == 1 else f"none of its {len(existing)} checkpoints is"
            what = f"{which} whole ({reasons})"
        raise CheckpointError(f"cannot resume {run_dir}: {what}. Restore one, or start anew in another --run.dir.")
    if found is not None and saved is None:
        saved = read_state(found)  # which refuses the other format version
    return Choice(saved, remarks + [f"passed over a damaged checkpoint, {reason}" for reason in rejected])


def choose_together(run_dir: Path, resume: str, *, ranks: RankInfo) -> Choice:
    """`choose_checkpoint` by rank 0, while all ranks hash their share of the files it asks for. All ranks call it.

    Only rank 0 lists folders: what another node's cache shows of a network file system may be older.
    """
    if not ranks.is_rank0:
        nothing: Path | None = None
        while (folder := broadcast_object(nothing)) is not None:
            examine_together(folder, ranks)

    def choose() -> Choice:
        try:
            return choose_checkpoint(
                run_dir, resume, look=lambda folder: examine_together(broadcast_object(folder), ranks)
            )
        finally:
            broadcast_object(None)

    return run_on_rank0(choose)


def examine_together(folder: Path, ranks: RankInfo) -> Examination:
    """`examine`, each rank hashing its share of the files. All ranks call it; only rank 0 gets the state."""
    problems, saved = examine(folder, part=ranks.rank, num_parts=ranks.world_size)
    all_problems = [problem for part in gather_objects(problems) for problem in part]
    return Examination(all_problems, None if all_problems else saved)


def check_checkpoint(saved: SavedState, context: RunContext) -> list[str]:
    """Refuse a checkpoint that this job cannot continue. Returns what the user should know, one sentence each.

    Raises CheckpointError if the tokenizer is another one, or the losses were over other tokens than they are now;
    ConfigError if a frozen setting is another one.
    """
    folder, config = saved.folder, load_config(saved.folder / SETTINGS)
    theirs, ours = saved.values["tokenizer_fingerprint"], context.corpora.first.tokenizer.fingerprint
    if theirs != ours:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer than {context.config.data.path} was prepared with "
            f"({theirs[:12]} and {ours[:12]}). "
            f"Prepare the corpus with --tokenizer-file {folder / 'tokenizer.json'} (ready ids with the --vocab-list "
            "of then), or use another --run.dir."
        )
    remarks = refuse_frozen_changes(config, context.config, made=str(folder))
    remarks += plugin_changes(saved.values.get("plugins", ()), where=folder.name)
    if not scores_first_tokens(config, saved):
        raise CheckpointError(
            f"{folder} was trained with document masks by a program that did not score the first token of a document: "
            "losses before and after would be over other tokens. Continue with the program that wrote it, or begin a "
            f"new run with its weights: `txl export {folder} BUNDLE`, then `--init BUNDLE`."
        )
    before, now = saved.values["world_size"], context.ranks.world_size
    if before != now:
        remarks.append(
            f"resuming a checkpoint of {counted(before, 'rank')} on {counted(now, 'rank')}: results are equal up to "
            "rounding"
        )
    return remarks


def scores_first_tokens(config: Config, saved: SavedState) -> bool:
    """Whether what wrote a checkpoint, whose settings are `config`, trained on the first tokens of documents that
    follow an end-of-text. With document masks older programs did not."""
    return not config.data.document_mask or bool(saved.values.get("scores_first_tokens"))


def continued_stream(saved: SavedState, wanted: StreamState, splits: Sequence[Split]) -> tuple[StreamState, list[str]]:
    """(where the stream goes on, what the user should know) for the first state of the present settings.

    Raises CheckpointError if the checkpoint's data or seed are others.
    """
    state = continued(saved.stream, wanted, splits)
    if state.has_lanes_of(saved.stream):
        return state, []
    return state, ["the lanes are cut anew: each goes on with text that none has read, with an empty memory"]


def load_checkpoint(saved: SavedState, engine: Engine, context: RunContext, *, stream: StreamState) -> TrainState:
    """Restore engine and state of this rank from a folder that `choose_checkpoint` and `check_checkpoint` passed.

    `stream` is that of `continued_stream`. If its lanes were cut anew, memories are first ones.
    """
    folder, state = saved.folder, saved.values
    failpoint("load", step=step_of(folder))
    files = run_on_all_ranks(lambda: FragmentFiles(folder / "engine", near=context.ranks.rank))
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
    """The model's weights in fp32, the ones that the optimizer keeps, or their averages, under their names; a tied one
    once. They are read when they are asked for.

    Needs neither ranks nor DeepSpeed. Raises CheckpointError, as reading them may.
    """
    files, kind = FragmentFiles(folder / "engine"), AVERAGE if use_ema else WEIGHT
    if kind not in files.kinds:
        raise CheckpointError(f"{folder} holds no average of its weights: it was trained with optim.ema_decay=0.")

    def rows_of(name: str, shape: torch.Size) -> Rows:
        width = shape[1:].numel()

        def read(start: int, stop: int) -> Tensor:
            values = files.read(kind, name, start=start * width, length=(stop - start) * width)
            return values.view(stop - start, *shape[1:])

        return Rows(shape, read)

    shapes = read_state(folder).values["parameters"]
    return {name: rows_of(name, torch.Size(shape)) for name, shape in shapes.items()}


def absolute_paths(corpora: Sequence[str]) -> list[str]:
    """Corpora as they are found from any working directory."""
    return [path if is_url(path) else os.path.abspath(path) for path in corpora]


def with_corpora_found(config: Config, checkpoint: Path) -> Config:
    """The settings of a checkpoint with its corpora where they are: as they were given, else where it knows them."""
    try:
        known = read_state(checkpoint).values.get("corpora")
    except TxlError:
        return config
    given = config.data.paths
    if not known or len(known) != len(given):
        return config  # a checkpoint of before, which knows none
    path, *more = (
        other
        if detect_artifact(one) is not ArtifactKind.CORPUS and detect_artifact(other) is ArtifactKind.CORPUS
        else one
        for one, other in zip(given, known, strict=True)
    )
    return changed(config, {"data.path": path, "data.more_paths": tuple(more)})


def require_corpus(checkpoint: Path, config: Config) -> str:
    """The corpus that a checkpoint was trained on. Raises DataError, which names the places, if it is not there."""
    path = with_corpora_found(config, checkpoint).data.path
    if detect_artifact(path) is ArtifactKind.CORPUS:
        return path
    known = read_state(checkpoint).values.get("corpora")
    kept_path = known[0] if known else os.path.abspath(path)
    places = " or ".join(dict.fromkeys([kept_path, os.path.abspath(path)]))
    raise DataError(f"the corpus of {checkpoint} is no longer at {places}. Name the place where it is with --data.")
