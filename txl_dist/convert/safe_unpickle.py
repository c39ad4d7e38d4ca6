"""Reads what `torch.save` and `pickle.dump` wrote, and runs no code of theirs.

A pickle is a program: it may name any function of any installed library and call it. The unpickler here imports
nothing. A name in the file gives one of three things:

    a harmless constructor     a tensor, a dict, a set: made here anew for each file, so that a file which then
                               alters what it was given alters nothing of ours
    an Inert stand-in          for a class of the peers' codes, of torch.nn, and so on (PACKAGES): it keeps the state
                               and has no behaviour
    CheckpointError            for anything else, naming file and name

What it gives up: objects whose state only their own class understands (numpy scalars, patterns) stay closed. A
hostile file can still ask for much memory.
"""

from __future__ import annotations

import errno
import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch import Tensor

from txl_dist.errors import CheckpointError

ZIP_START = b"PK\x03\x04"
"""torch.save since torch 1.6."""
LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""torch.save before that: a pickled number."""
PACKAGES = (
    *("mem_transformer", "data_utils", "vocabulary", "utils", "proj_adaptive_softmax", "log_uniform_sampler", "lamb"),
    *("torch.nn", "torch.optim", "apex", "labml", "labml_nn", "labml_helpers", "sacremoses", "tokenizers"),
    *("transformers", "pytorch_transformers", "pytorch_pretrained_bert"),
)
"""Packages whose classes become Inert, those of their submodules too."""
INERT = {
    *(("argparse", "Namespace"), ("re", "_compile"), ("_regex", "compile"), ("regex._regex", "compile")),
    *(("numpy", "dtype"), ("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar")),
}
"""Further names that become Inert."""
MAX_DEPTH = 100
"""Largest depth of modules in modules."""
CLASS_NAME = re.compile(r"_?[A-Z]\w*", re.ASCII)


class Inert:
    """Stands for an object of a class that was not imported: `type(it)` has that class's name and module.

    The object's state is its `__dict__`. What does not fit there is beside it: arguments of a call, items of a list
    or set, pairs of a dict, and a state that is not a dict.
    """

    __slots__ = ("__dict__", "inert_arguments", "inert_items", "inert_pairs", "inert_state")

    inert_arguments: tuple[Any, ...]
    inert_items: list[Any]
    inert_pairs: dict[Any, Any]
    inert_state: Any

    def __new__(cls, *arguments: Any) -> Inert:
        """Unpickling does not always call `__init__`."""
        self = super().__new__(cls)
        self.inert_arguments = arguments
        self.inert_items = []
        self.inert_pairs = {}
        self.inert_state = None
        return self

    def __setstate__(self, state: Any) -> None:
        # A pair is a state in two parts, the second that of slots.
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if isinstance(part, dict):
                self.__dict__.update({name: value for name, value in part.items() if isinstance(name, str)})
            elif part is not None:
                self.inert_state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.inert_pairs[key] = value

    def append(self, item: Any) -> None:
        """Called for each item of a list."""
        self.inert_items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        """Called with items of a list."""
        self.inert_items.extend(items)

    def add(self, item: Any) -> None:
        """Called for each item of a set."""
        self.inert_items.append(item)


def read_torch_file(path: Path) -> Any:
    """Content of a file of torch.save, tensors on the CPU. Raises CheckpointError."""
    with _reading(path, "a file of torch.save") as file:
        return _load_torch(file, path)


def read_pickle_file(path: Path) -> Any:
    """Content of a file of pickle.dump. Raises CheckpointError."""
    with _reading(path, "a pickle") as file:
        return _restricted_pickle(path).load(file, encoding="utf-8")


def read_any(path: Path) -> Any:
    """Content of a file of torch.save or pickle.dump, whichever its first bytes tell. Raises CheckpointError."""
    with _reading(path, "a file of torch.save or a pickle") as file:
        start = file.peek(len(LEGACY_START))
    return read_torch_file(path) if start.startswith((ZIP_START, LEGACY_START)) else read_pickle_file(path)


def modules_tensors(module: Inert) -> dict[str, Tensor]:
    """The state dict of a pickled torch.nn.Module: parameters and buffers under dotted names.

    A tensor that modules share is there under each of its names. Raises CheckpointError if a module holds
    itself, or the modules are nested too deep.
    """
    return dict(_named_tensors(module, prefix="", inside=()))


def _named_tensors(module: Inert, *, prefix: str, inside: tuple[Inert, ...]) -> Iterator[tuple[str, Tensor]]:
    if any(module is other for other in inside):
        raise CheckpointError(f"the pickled module {type(inside[0]).__name__} holds itself, as {prefix[:-1]}.")
    if len(inside) > MAX_DEPTH:
        raise CheckpointError(
            f"the pickled module {type(inside[0]).__name__} is nested too deep, at {prefix[:-1]:.50}."
        )
    state = vars(module)
    left_out = state.get("_non_persistent_buffers_set")
    left_out = left_out if isinstance(left_out, set) else set()
    for kind in ("_parameters", "_buffers"):
        for name, tensor in _entries(state, kind):
            if isinstance(tensor, Tensor) and name not in left_out:
                yield prefix + name, tensor.detach()
    for name, child in _entries(state, "_modules"):
        if isinstance(child, Inert):
            yield from _named_tensors(child, prefix=f"{prefix}{name}.", inside=(*inside, module))


def _entries(state: dict[str, Any], kind: str) -> list[tuple[str, Any]]:
    entries = state.get(kind, {})
    return [(str(name), value) for name, value in entries.items()] if isinstance(entries, dict) else []


class _Unmapped(io.BufferedReader):
    """A file without a number: torch.load would first try to read one that has it as an old tar archive."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


@contextmanager
def _reading(path: Path, kind: str) -> Iterator[_Unmapped]:
    """The open file; whatever goes wrong in reading it becomes a CheckpointError that names it."""
    try:
        with _Unmapped(io.FileIO(path)) as file:
            yield file
    except CheckpointError:
        raise
    except OSError as error:
        if path.is_file() and error.errno == errno.EINVAL:  # a seek to where a whole file would go on
            raise CheckpointError(f"{path} is damaged or cut short. Copy it again.") from error
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}. Check the path.") from error
    except Exception as error:
        detail = (str(error).splitlines() or [""])[0][:160]
        raise CheckpointError(
            f"{path} is damaged, cut short, or not {kind} ({type(error).__name__}: {detail}). Copy it again, or name "
            "another file."
        ) from error


def _refusal(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds {name}: it would run code of its own when opened. Convert it to safetensors where you trust it."
    )


def _load_torch(file: BinaryIO, path: Path) -> Any:
    start = file.read(len(LEGACY_START))
    file.seek(0)
    if start.startswith(ZIP_START):
        # Where torch.load's own reader sees this record, it goes on to torch.jit.load.
        if "constants.pkl" in torch._C.PyTorchFileReader(file).get_all_records():
            raise _refusal(path, "TorchScript")
        file.seek(0)
    elif start != LEGACY_START:
        raise ValueError("it is in neither of the formats of torch.save")
    return torch.load(file, "cpu", _restricted_pickle(path), weights_only=False, mmap=False)


def _restricted_pickle(path: Path) -> Any:
    """In place of the module `pickle`, for one file."""
    known = _constructors()
    # How a plain pickle holds the numbers of a tensor: bytes that are a torch file of their own.
    known["torch.storage", "_load_from_bytes"] = lambda data: _load_torch(io.BytesIO(data), path)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            key = module, name
            if key not in known:
                if not _is_inert(module, name):
                    raise _refusal(path, f"{module}.{name}")
                known[key] = type(name, (Inert,), {"__module__": module, "__slots__": ()})
            return known[key]

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _without_sources(value) if name == "persistent_load" else value)

    def load(file: BinaryIO, **settings: Any) -> Any:
        return Unpickler(file, **settings).load()

    return SimpleNamespace(__name__=__name__, Unpickler=Unpickler, load=load)


def _is_inert(module: str, name: str) -> bool:
    is_known = any(module == package or module.startswith(f"{package}.") for package in PACKAGES)
    return (is_known and CLASS_NAME.fullmatch(name) is not None) or (module, name) in INERT


def _without_sources(persistent_load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """As torch.load's own, but a class that comes with its source code is not compared with ours."""

    def load(saved_id: Any) -> Any:
        is_class = isinstance(saved_id, tuple) and len(saved_id) == 4 and saved_id[0] == "module"
        return saved_id[1] if is_class else persistent_load(saved_id)

    return load


def _constructors() -> dict[tuple[str, str], Any]:
    """Return the callables that a file may call. They are new at each call, except types that nobody can alter."""

    class Parameter:
        """Gives a plain tensor; an empty one where the data comes later, as the state."""

        def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> Any:
            return torch.empty(0) if data is None else data

    known: dict[tuple[str, str], Any] = {
        ("torch.nn.parameter", "Parameter"): Parameter,
        ("torch._utils", "_rebuild_tensor"): lambda *values: _tensor(*values),
        ("torch._utils", "_rebuild_tensor_v2"): lambda *values: _tensor(*values[:4]),
        ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
        ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
        ("torch", "Size"): tuple,
        ("torch", "device"): lambda *values: ":".join(str(value) for value in values),
        ("torch.nn.backends.thnn", "_get_thnn_function_backend"): lambda: Inert(),
        ("collections", "OrderedDict"): OrderedDict,
        ("collections", "Counter"): lambda counts=(): dict(counts),
        ("collections", "defaultdict"): lambda *_: {},
        ("_codecs", "encode"): _encode,
    }
    known |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    plain = (dict, list, tuple, set, frozenset, bytes, bytearray, str, int, float, complex, bool)
    known |= {(module, kind.__name__): kind for module in ("builtins", "__builtin__") for kind in plain}
    return known


def _tensor(storage: Any, offset: int, size: Iterable[int], stride: Iterable[int]) -> Tensor:
    if not isinstance(storage, torch.storage.TypedStorage):
        raise pickle.UnpicklingError("a tensor without storage")
    size, stride = tuple(size), tuple(stride)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if 0 not in size and not 0 <= last < storage._size():
        raise pickle.UnpicklingError("a tensor that reaches beyond its storage")
    tensor: Tensor = torch._utils._rebuild_tensor(storage, offset, size, stride)
    return tensor


def _encode(text: str, encoding: str) -> bytes:
    """How pickles of protocol 2 spell bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")
