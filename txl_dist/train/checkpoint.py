"""Checkpoints: weights and optimizer by the engine, memories by lane, all or nothing.

    checkpoints/step_000001200/
      engine/                          DeepSpeed's files, a part per rank
      lanes/00000-00031.safetensors    memories by *global* lane id: any number of ranks can read them back
      probe.safetensors                losses of the live engine on fixed tokens; an export must reproduce them
      state.json                       TrainState without memories, stream position, fingerprints
      config.toml  tokenizer.json      so that a checkpoint can be exported from anywhere
      MANIFEST.json                    written last (see `manifest`); the rename that follows is the commit

The newest checkpoint that verifies wins; by step, not by clock. DeepSpeed's own `latest` file is not used: it is
written before all ranks are done. Nothing here is pickled; DeepSpeed's files load with an allowlist (`engine`).
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import txl_dist
from txl_dist.config import Config, config_fingerprint, config_to_toml, load_config
from txl_dist.data.corpus import Corpus, Split
from txl_dist.data.stream import StreamState, continued
from txl_dist.dist import Ranks, from_first, gather_objects, on_first, together
from txl_dist.errors import CheckpointError
from txl_dist.manifest import check_folder, commit_folder, describe_file, files_of, problems_of, write_manifest
from txl_dist.model.memory import Memory
from txl_dist.train.engine import Engine, import_deepspeed, trusted_globals
from txl_dist.train.run_dir import refuse_frozen_changes
from txl_dist.train.state import TrainState

T = TypeVar("T")

FORMAT_VERSION = 1
_NAME = re.compile(r"step_(\d{9})")


class CorpusFacts(NamedTuple):
    """What a checkpoint must remember of the corpus it was trained on."""

    tokenizer_json: str
    tokenizer_fingerprint: str
    vocab_size: int


def corpus_facts(corpus: Corpus) -> CorpusFacts:
    """The facts of an opened corpus. Raises DataError if its tokenizer is missing or another one."""
    tokenizer = corpus.load_tokenizer()
    return CorpusFacts(tokenizer.to_json(), tokenizer.fingerprint, corpus.vocab_size)


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step_{step:09d}"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Committed checkpoints by step, oldest first; not verified."""
    folder = run_dir / "checkpoints"
    return sorted(path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def save_checkpoint(
    run_dir: Path,
    state: TrainState,
    engine: Engine,
    *,
    config: Config,
    corpus: CorpusFacts,
    probe: dict[str, Tensor],
    lanes: range,
    ranks: Ranks,
) -> Path:
    """Write and commit the checkpoint of `state.step`. All ranks call it and return together.

    Raises CheckpointError on every rank if the file system fails on any; nothing half-written is left visible.
    """
    final = checkpoint_folder(run_dir, state.step)
    temporary = final.with_name(f"{final.name}.tmp-{from_first(secrets.token_hex(4))}")
    together(lambda: _explained(temporary, lambda: (temporary / "lanes").mkdir(parents=True, exist_ok=True)))
    engine.save(temporary / "engine")

    def write() -> None:
        _write_lanes(temporary / "lanes", state.memories, lanes=lanes)
        if ranks.is_first:
            _write_own_files(temporary, state, config=config, corpus=corpus, probe=probe, world_size=ranks.world_size)

    together(lambda: _explained(temporary, write))
    # Hashing is shared out by one list: on a network file system listings of different nodes may differ.
    names = on_first(lambda: files_of(temporary))
    mine = names[ranks.rank :: ranks.world_size]
    digests = together(lambda: _explained(temporary, lambda: {name: describe_file(temporary / name) for name in mine}))
    parts = gather_objects(digests)

    def commit() -> None:
        write_manifest(temporary, {name: facts for part in parts for name, facts in part.items()})
        commit_folder(temporary, final)

    on_first(lambda: _explained(final, commit))
    return final


def _explained(path: Path, action: Callable[[], T]) -> T:
    """Run `action`; the file system's errors become ours."""
    try:
        return action()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}. Free space or mend permissions.") from error


def prune_checkpoints(run_dir: Path, *, keep_last: int, newest: Path) -> None:
    """Remove all but the last checkpoints, never `newest`, which was just committed. Rank 0 only."""
    for path in list_checkpoints(run_dir)[:-keep_last]:
        if path != newest:
            shutil.rmtree(path, ignore_errors=True)


def newest_checkpoint(run_dir: Path) -> tuple[Path | None, list[str]]:
    """(the newest checkpoint that is whole, why newer ones were passed over)."""
    rejected: list[str] = []
    for path in reversed(list_checkpoints(run_dir)):
        problems = problems_of(path)
        if not problems:
            return path, rejected
        rejected.append(f"{path.name}: {'; '.join(problems[:3])}")
    return None, rejected


def choose_checkpoint(run_dir: Path, resume: str) -> tuple[Path | None, list[str]]:
    """(where to start from by `--resume auto|must|never|PATH`, why newer checkpoints were passed over).

    Raises CheckpointError if a checkpoint is demanded and none is whole, if `never` meets an existing run, or if
    PATH is an older checkpoint of this very run, whose newer ones would be mixed with what follows.
    """
    existing = list_checkpoints(run_dir)
    if resume not in ("auto", "must", "never"):
        folder = Path(resume)
        if not folder.is_dir():
            raise CheckpointError(f"--resume {resume}: no such folder. Use auto, must, never or a checkpoint's path.")
        check_folder(folder, remedy="Name another checkpoint folder, or use --resume auto, must or never.")
        if existing and existing[-1].name > folder.name and folder.resolve().parent == existing[-1].resolve().parent:
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
    found, rejected = newest_checkpoint(run_dir)
    if found is None and (existing or resume == "must"):
        found_what = f"none of its {len(existing)} checkpoints is whole" if existing else "it holds no checkpoint"
        raise CheckpointError(
            f"cannot resume {run_dir}: {found_what}. Restore one, or start anew in another --run.dir."
        )
    return found, rejected


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint. Raises CheckpointError."""
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'state.json'} cannot be read: {error}. Use another checkpoint.") from error
    if state.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format version {state.get('format_version')}; this program knows {FORMAT_VERSION}. "
            "Use the version of txl_dist that wrote it."
        )
    return state


def check_checkpoint(folder: Path, *, config: Config, corpus: CorpusFacts, world_size: int) -> list[str]:
    """Refuse a checkpoint that this job cannot continue. Returns what the user should know, one sentence each.

    Raises CheckpointError if tokenizer, number of ranks, stage or precision differ from those that saved it,
    ConfigError if another frozen setting does.
    """
    state = read_state(folder)
    if state["tokenizer_fingerprint"] != corpus.tokenizer_fingerprint:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer than {config.data.path} was prepared with "
            f"({state['tokenizer_fingerprint'][:12]} and {corpus.tokenizer_fingerprint[:12]}). "
            f"Prepare the corpus with --tokenizer-file {folder / 'tokenizer.json'}, or use another --run.dir."
        )
    here = {"world_size": world_size, "zero_stage": config.engine.zero_stage, "precision": config.engine.precision}
    different = [f"{key} {state[key]} -> {value}" for key, value in here.items() if state[key] != value]
    if different:
        raise CheckpointError(
            f"{folder} cannot be continued with {', '.join(different)}: its optimizer state is cut for what saved it. "
            "Start as many ranks with the same stage and precision."
        )
    return refuse_frozen_changes(load_config(folder / "config.toml"), config, made=str(folder))


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
    device: torch.device,
) -> TrainState:
    """Restore engine and state of this rank from a folder that `choose_checkpoint` and `check_checkpoint` passed.

    `stream` is that of `continued_stream`. If its lanes were cut anew, memories are empty.
    """
    engine.load(folder / "engine")
    state = together(lambda: read_state(folder))
    if stream.has_lanes_of(StreamState.from_dict(state["stream"])):
        memories = together(lambda: _load_memories(folder, lanes=lanes, size=microbatch_lanes, device=device))
    else:
        starts = range(0, len(lanes), microbatch_lanes)
        memories = [engine.empty_memory(num_lanes=microbatch_lanes, memory_len=memory_len) for _ in starts]
    return TrainState(
        step=state["step"],
        tokens_seen=state["tokens_seen"],
        skipped_steps=state["skipped_steps"],
        stream=stream,
        memories=tuple(memories),
    )


def _load_memories(folder: Path, *, lanes: range, size: int, device: torch.device) -> list[Memory]:
    whole = load_memory(folder, lanes=lanes, device=device)
    return [
        Memory(
            whole.hidden_LBMD[:, start : start + size].contiguous(),
            whole.document_BM[start : start + size].contiguous(),
        )
        for start in range(0, len(lanes), size)
    ]


def load_memory(folder: Path, *, lanes: range, device: torch.device | str = "cpu") -> Memory:
    """The memory of any range of global lanes, whichever ranks saved them. Raises CheckpointError if one is missing."""
    hidden: list[Tensor] = []
    document: list[Tensor] = []
    wanted = lanes.start
    for path in sorted((folder / "lanes").glob("*.safetensors"), key=_first_lane):
        first, last = (int(part) for part in path.stem.split("-"))
        if wanted >= lanes.stop or not first <= wanted <= last:
            continue
        rows = slice(wanted - first, min(lanes.stop, last + 1) - first)
        with safe_open(path, "pt", device=str(device)) as file:
            hidden.append(file.get_slice("hidden")[:, rows])
            document.append(file.get_slice("document")[rows])
        wanted = min(lanes.stop, last + 1)
    if wanted < lanes.stop:
        raise CheckpointError(f"{folder}/lanes has no memory of lane {wanted}. Use another checkpoint.")
    return Memory(torch.cat(hidden, dim=1), torch.cat(document))


def _first_lane(path: Path) -> int:
    return int(path.stem.split("-")[0])


def consolidated_weights(folder: Path) -> dict[str, Tensor]:
    """The model's weights in fp32 from the files of all ranks, on one machine without a launcher.

    They are the master copies, but at stage 0 in half precision, where they are the rounded weights of the model.
    Tied parameters appear under each of their names. Raises CheckpointError.
    """
    import_deepspeed()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    stage = read_state(folder)["zero_stage"]
    try:
        silence = io.StringIO()
        # DeepSpeed's converter prints its progress, and asks torch for unsafe loading unless it is forced.
        with trusted_globals(), _forced_weights_only(), redirect_stdout(silence), redirect_stderr(silence):
            if stage == 0:
                file = folder / "engine" / "mp_rank_00_model_states.pt"
                weights = torch.load(file, map_location="cpu", weights_only=True)["module"]
            else:
                weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="engine")
    except Exception as error:  # DeepSpeed and torch raise all kinds; the user needs the folder's name
        raise CheckpointError(
            f"cannot read the weights in {folder / 'engine'}: {error}. Use another checkpoint."
        ) from error
    return {name.removeprefix("model."): tensor.float() for name, tensor in weights.items()}


@contextmanager
def _forced_weights_only() -> Iterator[None]:
    """Make DeepSpeed's converter, which asks torch for unsafe loading, load safely all the same."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _write_lanes(folder: Path, memories: tuple[Memory, ...], *, lanes: range) -> None:
    tensors = {
        "hidden": torch.cat([memory.hidden_LBMD for memory in memories], dim=1).cpu().contiguous(),
        "document": torch.cat([memory.document_BM for memory in memories]).cpu().contiguous(),
    }
    save_file(tensors, folder / f"{lanes.start:05d}-{lanes.stop - 1:05d}.safetensors")


def _write_own_files(
    folder: Path, state: TrainState, *, config: Config, corpus: CorpusFacts, probe: dict[str, Tensor], world_size: int
) -> None:
    save_file(probe, folder / "probe.safetensors")
    (folder / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(corpus.tokenizer_json, encoding="utf-8")
    content = {
        "format_version": FORMAT_VERSION,
        "code_version": txl_dist.__version__,
        "step": state.step,
        "tokens_seen": state.tokens_seen,
        "skipped_steps": state.skipped_steps,
        "stream": state.stream.to_dict(),
        "world_size": world_size,
        "zero_stage": config.engine.zero_stage,
        "precision": config.engine.precision,
        "vocab_size": corpus.vocab_size,
        "tokenizer_fingerprint": corpus.tokenizer_fingerprint,
        "config_fingerprint": config_fingerprint(config),
    }
    (folder / "state.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
