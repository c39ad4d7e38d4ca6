"""The checks that a checkpoint is valid: complete by its manifest, with files of the right form that belong to one
save.

A manifest proves that no byte has changed, but not that all files are of the same save. So every file of tensors holds
the sha256 of the `state.json` that it was saved with (`STATE_KEY`). `state.json` in turn holds the sha256 of the
settings and of `tokenizer.json`. A file of memories also names its lanes (`LANES_KEY`). File names and shapes must
cover each lane and each parameter once.

Older versions of this program wrote the hash of the tokenizer, but not all other hashes. A missing hash is not
compared. Either all or none of a checkpoint's files of tensors must hold the hash of `state.json`.

Limitations: only headers of tensors are read here. The probe checks the values (`engine_probe.check_probe`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError

from txl_dist.artifacts import (
    CHECKPOINT_NAME,
    PROBE,
    READABLE_VERSIONS,
    SETTINGS,
    STATE,
    list_checkpoints,
    step_of,
)
from txl_dist.config.renamed import keys_in_new_names
from txl_dist.console.formatting import counted
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.errors import CheckpointError, translate_errors
from txl_dist.io.files import canonical_hash, parse_object, parse_toml, read_bytes, sha256_of_file
from txl_dist.io.manifest import problems_of
from txl_dist.io.tensor_files import open_tensors
from txl_dist.train.engine.partitions import WEIGHT
from txl_dist.train.stability import Health

STATE_KEY = "state"
"""Metadata key of every file of tensors. Its value is the sha256 of the state.json that was saved with the file."""

CALLBACKS = "callbacks.safetensors"
"""Name of the file of the callbacks' states. Only runs whose callbacks have a state write it (`callback_states`)."""

LANES_KEY = "lanes"
"""Metadata key of a file of memories. Its value is the file's name without the suffix."""

_LANES = re.compile(r"(\d{5,9})-(\d{5,9})\.safetensors")
_Count = Annotated[int, Field(ge=0, lt=2**62)]
_Size = Annotated[int, Field(gt=0, lt=2**62)]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Corpus(_Section):
    name: str
    fingerprint: str
    split: str
    num_lanes: _Count
    position: _Count
    epoch: _Count
    unread: str
    skips: str = ""

    @model_validator(mode="before")
    @classmethod
    def _in_new_names(cls, values: Any) -> Any:
        """Rename the keys of a file that an earlier version wrote."""
        if isinstance(values, dict):
            return keys_in_new_names(values, of="stream")
        return values


class _Stream(_Section):
    seed: int
    corpora: tuple[_Corpus, ...]
    version: int


class _Plugin(_Section):
    name: str
    version: str
    sha256: str


class _State(_Section):
    """Form of state.json, by which `read_state` checks the file. The module `writer` writes the values and documents
    them."""

    format_version: int
    code_version: str
    step: Annotated[int, Field(ge=0, lt=10**9)]
    tokens_seen: _Count
    health: Health
    stream: _Stream
    world_size: _Size
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    precision: Literal["fp32", "bf16", "fp16"]
    loss_scale: dict[str, float]
    parameters: dict[str, tuple[_Size, ...]]
    vocab_size: _Size
    tokenizer_fingerprint: str
    config_fingerprint: str
    config_sha256: str = ""
    scores_first_tokens: bool = False
    corpora: tuple[str, ...] = ()
    plugins: tuple[_Plugin, ...] = ()


class SavedState(NamedTuple):
    """Content of a checkpoint's state.json. A starting run reads the file once, and then uses this object."""

    folder: Path
    """Folder of the checkpoint."""
    step: int
    stream: StreamState
    health: Health
    values: dict[str, Any]
    """All values of state.json, by their names."""


def read_state(folder: Path) -> SavedState:
    """Return the state of a checkpoint.

    Raises CheckpointError if the checkpoint's state.json cannot be read, or has another form or format version.
    """
    path = folder / STATE
    with translate_errors(
        CheckpointError, f"{path} cannot be read", "Use another checkpoint.", of=(OSError, ValueError)
    ):
        data = read_bytes(path)
        state = parse_object(data)
    version = state.get("format_version")
    if version not in READABLE_VERSIONS:
        *others, last = READABLE_VERSIONS
        readable = f"{', '.join(map(str, others))} and {last}"
        raise _OtherVersionError(
            f"{folder} has format version {version}, but this version of txl_dist reads {readable}. "
            "Use the version of txl_dist that wrote the checkpoint."
        )
    try:
        _State.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is damaged: {place}: {first['msg']}. Use another checkpoint.") from error
    stream = StreamState.from_dict(state["stream"])
    health = Health.from_dict(state["health"])
    return SavedState(folder, state["step"], stream, health, state)


class _OtherVersionError(CheckpointError):
    """Error for a checkpoint of another format version. The checkpoint is not damaged: another version can read it."""


class Examination(NamedTuple):
    """Result of checking a checkpoint folder."""

    problems: list[str]
    """Reasons why the folder is not a valid checkpoint, one line each. The list is empty for a valid checkpoint."""
    saved: SavedState | None
    """State of a valid checkpoint. It is None if there are problems, and in every process except process 0 (see
    `examine`).

    It is also None for a checkpoint of another format version. Such a checkpoint is not damaged, so it has no problems
    here. `read_state` raises an error for it.
    """


def examine(folder: Path, *, part: int = 0, num_parts: int = 1) -> Examination:
    """Check whether a folder is a valid checkpoint, and read the checkpoint's state if it is.

    Several processes can share the hashing. Process number `part` of `num_parts`, counted from 0, hashes its share of
    the files. Only process 0 makes the other checks.
    """
    problems = problems_of(folder, part=part, num_parts=num_parts)
    if problems or part:
        return Examination(problems, None)
    try:
        saved = read_state(folder)
        problems = list(_contradictions(saved))
    except _OtherVersionError:
        return Examination([], None)
    except CheckpointError as error:
        return Examination([str(error)], None)
    return Examination(problems, None if problems else saved)


def checkpoint_problems(folder: Path) -> list[str]:
    """Return the reasons why a folder is not a valid checkpoint, one line each.

    The list is empty for a valid checkpoint.
    """
    return examine(folder).problems


def run_problems(run_dir: Path) -> Iterator[str]:
    """Yield the problems of all checkpoints of a run. Each line begins with the name of the checkpoint's folder.

    A run without checkpoints counts as one problem.
    """
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints:
        yield f"{run_dir} is a run without checkpoints"
    for checkpoint in checkpoints:
        problems = checkpoint_problems(checkpoint)
        if checkpoint.is_dir():  # a run may remove it meanwhile
            yield from (f"{checkpoint}: {problem}" for problem in problems)


def _contradictions(saved: SavedState) -> Iterator[str]:
    """Yield each contradiction between a checkpoint's files and its state.json, as one line."""
    folder = saved.folder
    state = saved.values
    if CHECKPOINT_NAME.fullmatch(folder.name) and step_of(folder) != saved.step:
        yield f"the folder is named for step {step_of(folder)}, and its state.json is of step {saved.step}"
    if state.get("config_sha256", "") not in ("", _settings_hash_of(folder / SETTINGS)):
        yield "config.toml does not belong to this state.json"
    if state["tokenizer_fingerprint"] != _sha256_of(folder / "tokenizer.json"):  # see `Tokenizer.fingerprint`
        yield "tokenizer.json does not belong to this state.json"
    engine = [_header(path) for path in sorted((folder / "engine").glob("*.safetensors"))]
    lanes = [_header(path) for path in lane_files(folder)]
    probe = _header(folder / PROBE)
    callbacks = [_header(path) for path in (folder / CALLBACKS,) if path.is_file()]
    signed = {header.state for header in (*engine, *lanes, probe, *callbacks)}
    if signed != {""}:
        expected = _sha256_of(folder / STATE)
        for header in (*engine, *lanes, probe, *callbacks):
            if header.state != expected:
                yield f"{header.path.relative_to(folder)} was not saved together with this state.json"
    num_values: Counter[str] = Counter()
    for header in engine:
        for name, shape in header.shapes.items():
            if name.startswith(f"{WEIGHT}/"):
                num_values[name.removeprefix(f"{WEIGHT}/")] += math.prod(shape)
    wanted = {name: math.prod(shape) for name, shape in state["parameters"].items()}
    for name in sorted(num_values.keys() | wanted.keys()):
        if num_values[name] != wanted.get(name, 0):
            yield f"engine/ has {num_values[name]} values of {name} instead of {wanted.get(name, 0)}"
    yield from _problems_of_lanes(lanes, saved.stream.num_lanes)


def _problems_of_lanes(headers: list[_Header], num_lanes: int) -> Iterator[str]:
    """Yield the problems of the files of memories. Together these files must contain each lane (batch row) exactly
    once."""
    next_lane = 0
    forms = set()
    for header in headers:
        lanes = lanes_of(header.path)
        shapes = header.shapes
        form = memory_form(shapes)
        if not lanes or form is None:
            yield f"lanes/{header.path.name} is not a file of memories"
            continue
        if form.num_lanes != len(lanes) or shapes["document"] != [form.num_lanes, max(form.memory_lens)]:
            yield f"lanes/{header.path.name} holds other memories than its name says: {shapes}"
        if header.lanes not in ("", header.path.stem):
            yield f"lanes/{header.path.name} holds other memories than its name says: of lanes {header.lanes}"
        if lanes.start != next_lane:
            yield f"lanes/{header.path.name} does not begin with lane {next_lane}, the first lane that is missing"
        next_lane = lanes.stop
        forms.add(form._replace(num_lanes=0))
    if next_lane != num_lanes or len(forms) > 1:
        expected = counted(num_lanes, "lane")
        yield f"lanes/ holds {next_lane} lanes of {len(forms)} shapes instead of {expected} of one shape"


class _Header(NamedTuple):
    """Header of a file of tensors: its metadata and shapes."""

    path: Path
    state: str
    """The sha256 of the state.json that was saved with the file, or an empty text if the file names none."""
    lanes: str
    """Lanes that the metadata names, written as in the file's name, for example 00000-00031. It is empty if the
    metadata names no lanes."""
    shapes: dict[str, list[int]]


class MemoryForm(NamedTuple):
    """Sizes of the memories in a file. `memory_form` reads them from the shapes of the file's tensors."""

    num_lanes: int
    memory_lens: tuple[int, ...]
    """Memory length of each layer, in tokens."""
    width: int


def memory_form(shapes: Mapping[str, Sequence[int]]) -> MemoryForm | None:
    """Return the sizes of a file of memories from the shapes of its tensors, or None for another kind of file."""
    names = hidden_names(shapes)
    if shapes.keys() == {"hidden", "document"} and len(shapes["hidden"]) == 4:
        layers, num_lanes, memory_len, width = shapes["hidden"]
        return MemoryForm(num_lanes, (memory_len,) * layers, width)
    if not names or shapes.keys() != {*names, "document"} or any(len(shapes[name]) != 3 for name in names):
        return None
    sizes = {(shapes[name][0], shapes[name][2]) for name in names}
    if len(sizes) > 1:
        return None
    num_lanes, width = sizes.pop()
    return MemoryForm(num_lanes, tuple(shapes[name][1] for name in names), width)


def hidden_names(names: Iterable[str]) -> list[str]:
    """Return the names `hidden.0`, `hidden.1` and so on that occur among the names of a file's tensors, by layer.

    The list is empty if all layers have the same memory length, because such a file has one tensor `hidden`.
    """
    num_layers = sum(name.startswith("hidden.") for name in names)
    return [f"hidden.{layer}" for layer in range(num_layers)]


def lane_files(folder: Path) -> list[Path]:
    """Return the files in a checkpoint's folder lanes/, sorted by their first lane.

    Lane numbers of 100,000 and more make file names longer, so the order of names is not the order of lanes.
    """
    return sorted((folder / "lanes").glob("*"), key=lambda path: lanes_of(path).start)


def lanes_of(path: Path) -> range:
    """Return the global ids of the lanes (batch rows) in a file of memories, as its name gives them. For a file with
    any other name the range is empty."""
    match = _LANES.fullmatch(path.name)
    if match:
        return range(int(match[1]), int(match[2]) + 1)
    return range(0)


def settings_hash(data: bytes) -> str:
    """Return the sha256 of the settings in a config.toml, without `run.dir`.

    So runs that differ only in their directory have equal hashes. Raises ValueError or TypeError if the data contains
    no settings.
    """
    values = parse_toml(data)
    run = {key: value for key, value in dict(values.get("run", {})).items() if key != "dir"}
    return canonical_hash({**values, "run": run})


def _settings_hash_of(path: Path) -> str:
    with translate_errors(CheckpointError, f"{path} cannot be read", of=(OSError, ValueError, TypeError)):
        return settings_hash(read_bytes(path))


def _sha256_of(path: Path) -> str:
    with translate_errors(CheckpointError, f"{path} cannot be read"):
        return sha256_of_file(path)


def _header(path: Path) -> _Header:
    with translate_errors(CheckpointError, f"{path} cannot be read", of=(OSError, RuntimeError, SafetensorError)):
        file = open_tensors(path)
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  no mapping
        metadata = file.metadata() or {}
        return _Header(path, metadata.get(STATE_KEY, ""), metadata.get(LANES_KEY, ""), shapes)
