"""The checkpoint: its folder, which one to start from, and how a rank takes its part of it. `saver` writes it.

    checkpoints/step_000001200/
      engine/00000.safetensors        per rank: its pieces of fp32 weights and optimizer state, by name of the parameter
      lanes/00000-00031.safetensors   memories by global lane id
      probe.safetensors  config.toml  tokenizer.json     what an export needs
      state.json                      TrainState, stream position, fingerprints, shapes of the parameters
      MANIFEST.json                   every file's bytes and sha256

Nothing in it depends on how many ranks there were, or on the ZeRO stage: a memory belongs to a lane, a weight to a
parameter, and each rank reads the slices it needs. Nothing in it is a pickle. The newest folder that its manifest
proves whole is the one to start from, ordered by step, never by clock.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from txl_dist.config import Config, load_config
from txl_dist.data.read.corpus import Corpus, Split
from txl_dist.data.read.position import StreamState, continued
from txl_dist.dist import Ranks, from_first, gather_objects, on_first, together
from txl_dist.errors import CheckpointError
from txl_dist.faults import fault_point
from txl_dist.model.memory import EMPTY, Memory
from txl_dist.run_files import list_checkpoints, step_of
from txl_dist.train.checkpoint.soundness import checkpoint_problems, lane_files, lanes_of, read_state
from txl_dist.train.checkpoint.tensor_files import FragmentFiles, open_tensors
from txl_dist.train.engine.partitions import WEIGHT
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.health import Health
from txl_dist.train.run_dir import refuse_frozen_changes
from txl_dist.train.state import TrainState


class CorpusFacts(NamedTuple):
    """What a checkpoint must remember of the corpus it was trained on."""

    tokenizer_json: str
    tokenizer_fingerprint: str
    vocab_size: int


def corpus_facts(corpus: Corpus) -> CorpusFacts:
    """The facts of an opened corpus. Raises DataError if its tokenizer is missing or another one."""
    tokenizer = corpus.tokenizer
    return CorpusFacts(tokenizer.to_json(), tokenizer.fingerprint, corpus.vocab_size)


@contextmanager
def kept(folder: Path) -> Iterator[None]:
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


Problems = Callable[[Path], list[str]]


def newest_checkpoint(run_dir: Path, *, problems: Problems = checkpoint_problems) -> tuple[Path | None, list[str]]:
    """(the newest checkpoint that is whole, why newer ones were passed over)."""
    rejected: list[str] = []
    for path in reversed(list_checkpoints(run_dir)):
        found = problems(path)
        if not found:
            return path, rejected
        rejected.append(f"{path.name}: {'; '.join(found[:3])}")
    return None, rejected


def choose_checkpoint(
    run_dir: Path, resume: str, *, problems: Problems = checkpoint_problems
) -> tuple[Path | None, list[str]]:
    """(where to start from by `--resume auto|must|never|PATH`, what the user should know). A run that has begun at PATH
    goes on from its own checkpoints.

    Raises CheckpointError if a checkpoint is demanded and none is whole, if `never` meets an existing run, or if
    PATH is an older checkpoint of this very run, whose newer ones would be mixed with what follows.
    """
    existing, remarks = list_checkpoints(run_dir), []
    folder = Path(resume)
    is_path = resume not in ("auto", "must", "never")
    if is_path and existing and folder.resolve().parent != existing[-1].resolve().parent:
        remarks = [f"{run_dir} has begun already, and goes on from its own checkpoints instead of {folder}"]
    elif is_path:
        if not folder.is_dir():
            raise CheckpointError(f"--resume {resume}: no such folder. Use auto, must, never or a checkpoint's path.")
        if found_problems := problems(folder):
            raise CheckpointError(
                f"--resume {resume}: it is damaged: {'; '.join(found_problems[:5])}. "
                "Name another checkpoint folder, or use --resume auto, must or never."
            )
        if existing and existing[-1].name > folder.name:
            raise CheckpointError(
                f"{run_dir} goes on to {existing[-1].name}. To branch off at {folder.name}, choose another --run.dir."
            )
        return folder, []
    if resume == "never":
        if existing:
            raise CheckpointError(
                f"{run_dir} already holds {existing[-1].name} and --resume is never. "
                "Choose another --run.dir, or --resume auto to continue it."
            )
        return None, []
    found, rejected = newest_checkpoint(run_dir, problems=problems)
    if found is None and (existing or resume == "must"):
        reasons = "; ".join(rejected[:3])
        what = f"none of its {len(existing)} checkpoints is whole ({reasons})" if existing else "it holds no checkpoint"
        raise CheckpointError(f"cannot resume {run_dir}: {what}. Restore one, or start anew in another --run.dir.")
    return found, remarks + [f"passed over a damaged checkpoint, {reason}" for reason in rejected]


def choose_together(run_dir: Path, resume: str, *, ranks: Ranks) -> tuple[Path | None, list[str]]:
    """`choose_checkpoint` by rank 0, while all ranks hash their share of the files it asks for. All ranks call it.

    Only rank 0 lists folders: what another node's cache shows of a network file system may be older.
    """
    if not ranks.is_first:
        nothing: Path | None = None
        while (folder := from_first(nothing)) is not None:
            problems_together(folder, ranks)

    def choose() -> tuple[Path | None, list[str]]:
        try:
            return choose_checkpoint(
                run_dir, resume, problems=lambda folder: problems_together(from_first(folder), ranks)
            )
        finally:
            from_first(None)

    return on_first(choose)


def problems_together(folder: Path, ranks: Ranks) -> list[str]:
    """`checkpoint_problems`, each rank hashing its share of the files. All ranks call it."""
    parts = gather_objects(checkpoint_problems(folder, part=ranks.rank, num_parts=ranks.world_size))
    return [problem for part in parts for problem in part]


def check_checkpoint(folder: Path, *, config: Config, corpus: CorpusFacts, world_size: int) -> list[str]:
    """Refuse a checkpoint that this job cannot continue. Returns what the user should know, one sentence each.

    Raises CheckpointError if the tokenizer is another one, or the losses were over other tokens than they are now;
    ConfigError if a frozen setting is another one.
    """
    state = read_state(folder)
    if state["tokenizer_fingerprint"] != corpus.tokenizer_fingerprint:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer than {config.data.path} was prepared with "
            f"({state['tokenizer_fingerprint'][:12]} and {corpus.tokenizer_fingerprint[:12]}). "
            f"Prepare the corpus with --tokenizer-file {folder / 'tokenizer.json'}, or use another --run.dir."
        )
    saved = load_config(folder / "config.toml")
    remarks = refuse_frozen_changes(saved, config, made=str(folder))
    if not scores_first_tokens(saved, state):
        raise CheckpointError(
            f"{folder} was trained with document masks by a program that did not score the first token of a document: "
            "losses before and after would be over other tokens. Continue with the program that wrote it, or begin a "
            f"new run with its weights: `txl export {folder} BUNDLE`, then `--init BUNDLE`."
        )
    if state["world_size"] != world_size:
        remarks.append(f"{world_size} ranks go on where {state['world_size']} saved; sums are rounded in another order")
    return remarks


def scores_first_tokens(config: Config, state: dict[str, Any]) -> bool:
    """Whether what wrote a checkpoint trained on the first tokens of documents that follow an end-of-text.

    `config` and `state` are the checkpoint's. With document masks older programs did not.
    """
    return config.data.document_border != "mask" or bool(state.get("scores_first_tokens"))


def continued_stream(folder: Path, wanted: StreamState, splits: Sequence[Split]) -> tuple[StreamState, list[str]]:
    """(where the stream goes on, what the user should know) for the first state of the present settings.

    Raises CheckpointError if the checkpoint's data or seed are others.
    """
    saved = StreamState.from_dict(read_state(folder)["stream"])
    state = continued(saved, wanted, splits)
    if state.has_lanes_of(saved):
        return state, []
    return state, ["the lanes are cut anew: each goes on with text that none has read, with an empty memory"]


def load_checkpoint(
    folder: Path,
    engine: Engine,
    *,
    stream: StreamState,
    lanes: range,
    microbatch_lanes: int,
    memory_len: int,
    ranks: Ranks,
) -> TrainState:
    """Restore engine and state of this rank from a folder that `choose_checkpoint` and `check_checkpoint` passed.

    `stream` is that of `continued_stream`. If its lanes were cut anew, memories are empty.
    """
    fault_point("load", step=step_of(folder))
    state = together(lambda: read_state(folder))
    files = together(lambda: FragmentFiles(folder / "engine", near=ranks.rank))
    engine.load(files, loss_scale=state["loss_scale"])
    empty = engine.empty_memory(num_lanes=microbatch_lanes, memory_len=memory_len)
    memories = tuple(empty for _ in range(0, len(lanes), microbatch_lanes))
    if stream.has_lanes_of(StreamState.from_dict(state["stream"])):
        memories = together(lambda: _load_memories(folder, lanes=lanes, like=empty))
    return TrainState(
        step=state["step"],
        tokens_seen=state["tokens_seen"],
        health=Health.from_dict(state["health"]),
        stream=stream,
        memories=memories,
    )


def _load_memories(folder: Path, *, lanes: range, like: Memory) -> tuple[Memory, ...]:
    """The memories of these lanes per micro-batch, of the length, type and device of `like`."""
    whole = load_memory(folder, lanes=lanes)
    whole = resized(whole, memory_len=like.memory_len)
    size = like.document_BM.shape[0]
    return tuple(
        Memory(
            whole.hidden_LBMD[:, start : start + size].contiguous().to(like.hidden_LBMD),
            whole.document_BM[start : start + size].contiguous().to(like.document_BM),
        )
        for start in range(0, len(lanes), size)
    )


def resized(memory: Memory, *, memory_len: int) -> Memory:
    """The newest `memory_len` positions of a memory; what it lacks in front is empty."""
    missing = max(0, memory_len - memory.memory_len)
    hidden_LBMD, document_BM = (
        tensor.narrow(axis, tensor.shape[axis] - (memory_len - missing), memory_len - missing)
        for tensor, axis in ((memory.hidden_LBMD, 2), (memory.document_BM, 1))
    )
    return Memory(
        torch.nn.functional.pad(hidden_LBMD, (0, 0, missing, 0)),
        torch.nn.functional.pad(document_BM, (missing, 0), value=EMPTY),
    )


def load_memory(folder: Path, *, lanes: range) -> Memory:
    """The memory of any range of global lanes, whichever ranks saved them. Raises CheckpointError if one is missing."""
    hidden: list[Tensor] = []
    document: list[Tensor] = []
    wanted = lanes.start
    for path in lane_files(folder):
        held = lanes_of(path)
        if wanted >= lanes.stop or wanted not in held:
            continue
        rows = slice(wanted - held.start, min(lanes.stop, held.stop) - held.start)
        try:
            with open_tensors(path) as file:
                hidden.append(file.get_slice("hidden")[:, rows])
                document.append(file.get_slice("document")[rows])
        except (OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"cannot read the memories in {path}: {error}. Use another checkpoint.") from error
        wanted = min(lanes.stop, held.stop)
    if wanted < lanes.stop:
        raise CheckpointError(f"{folder}/lanes has no memory of lane {wanted}. Use another checkpoint.")
    return Memory(torch.cat(hidden, dim=1), torch.cat(document))


def consolidated_weights(folder: Path) -> dict[str, Tensor]:
    """The model's weights in fp32, the ones that the optimizer keeps, under their names; a tied one once.

    Needs neither ranks nor DeepSpeed. Raises CheckpointError.
    """
    files = FragmentFiles(folder / "engine")
    return {
        name: files.read(WEIGHT, name, start=0, length=torch.Size(shape).numel()).view(shape)
        for name, shape in read_state(folder)["parameters"].items()
    }
