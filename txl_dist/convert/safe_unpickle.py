"""Reader for files of `torch.save` and `pickle.dump` that runs none of the code in them.

A pickle is a program, which can call any function of any installed library. The unpickler here imports nothing. The
unpickler replaces each name of a class or function in the file by one of these:

    a harmless constructor     For a tensor, a dict or a set. Each file gets its own constructors, so a file that
                               changes a constructor affects no other file.
    an Inert stand-in          For a class of other Transformer-XL code, torch.nn, and so on (PACKAGES). It keeps the
                               state and has no behaviour.
    CheckpointError            For any other name. The message contains this name and the file's name.

Some objects cannot be read, because only their own class understands their state (numpy scalars, patterns). A hostile
file can still make the reader allocate much memory.
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
"""First bytes of a file that torch.save of torch 1.6 or later wrote."""
LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of a file that torch.save before torch 1.6 wrote: a number, as a pickle."""
PACKAGES = (
    "mem_transformer",
    "data_utils",
    "vocabulary",
    "utils",
    "proj_adaptive_softmax",
    "log_uniform_sampler",
    "lamb",
    "torch.nn",
    "torch.optim",
    "apex",
    "labml",
    "labml_nn",
    "labml_helpers",
    "sacremoses",
    "tokenizers",
    "transformers",
    "pytorch_transformers",
    "pytorch_pretrained_bert",
)
"""Packages whose classes are read as `Inert` stand-ins, with the classes of their submodules."""
INERT = {
    ("argparse", "Namespace"),
    ("re", "_compile"),
    ("_regex", "compile"),
    ("regex._regex", "compile"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
}
"""Further names that are read as `Inert` stand-ins, as pairs (module, name)."""
MAX_DEPTH = 100
"""Largest depth of nested modules that is read."""
CLASS_NAME = re.compile(r"_?[A-Z]\w*", re.ASCII)
"""Pattern of a name that counts as the name of a class, in the modules of PACKAGES."""


class Inert:
    """Stand-in for an object of a class that is not imported. The type of the stand-in has the name and the module of
    that class.

    The object's state is its `__dict__`. The attributes named `inert_...` hold everything else: arguments of a call,
    items of a list or set, pairs of a dict, and a state that is not a dict.
    """

    __slots__ = ("__dict__", "inert_arguments", "inert_items", "inert_pairs", "inert_state")

    inert_arguments: tuple[Any, ...]
    inert_items: list[Any]
    inert_pairs: dict[Any, Any]
    inert_state: Any

    def __new__(cls, *arguments: Any) -> Inert:
        """Set the attributes here and not in `__init__`, because unpickling does not always call `__init__`."""
        self = super().__new__(cls)
        self.inert_arguments = arguments
        self.inert_items = []
        self.inert_pairs = {}
        self.inert_state = None
        return self

    def __setstate__(self, state: Any) -> None:
        # A pair is a state in two parts, the second of which is for slots.
        is_pair = isinstance(state, tuple) and len(state) == 2
        if is_pair:
            parts = state
        else:
            parts = (state,)
        for part in parts:
            if isinstance(part, dict):
                attributes = {name: value for name, value in part.items() if isinstance(name, str)}
                self.__dict__.update(attributes)
            elif part is not None:
                self.inert_state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.inert_pairs[key] = value

    def append(self, item: Any) -> None:
        """Keep an item of a list. The unpickler calls this method."""
        self.inert_items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        """Keep several items of a list. The unpickler calls this method."""
        self.inert_items.extend(items)

    def add(self, item: Any) -> None:
        """Keep an item of a set. The unpickler calls this method."""
        self.inert_items.append(item)


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save without running code in it. Tensors are on the CPU.

    Raises CheckpointError if the file is damaged, or contains a name that is not allowed.
    """
    with _reading(path, "a file of torch.save") as file:
        return _load_torch(file, path)


def read_pickle_file(path: Path) -> Any:
    """Read a file of pickle.dump without running code in it.

    Raises CheckpointError if the file is damaged, or contains a name that is not allowed.
    """
    with _reading(path, "a pickle") as file:
        return _restricted_pickle(path).load(file, encoding="utf-8")


def read_any(path: Path) -> Any:
    """Read a file of torch.save or pickle.dump without running code in it.

    The file's first bytes decide which of the two formats is read. Raises CheckpointError if the file is damaged, or
    contains a name that is not allowed.
    """
    with _reading(path, "a file of torch.save or a pickle") as file:
        start = file.peek(len(LEGACY_START))
    if start.startswith((ZIP_START, LEGACY_START)):
        return read_torch_file(path)
    return read_pickle_file(path)


def modules_tensors(module: Inert) -> dict[str, Tensor]:
    """Return the state dict of a pickled torch.nn.Module: parameters and buffers under dotted names.

    A tensor that several modules use is in the result under each of its names. Raises CheckpointError if a module
    contains itself, or if modules are nested too deeply.
    """
    return dict(_named_tensors(module, prefix="", inside=()))


def _named_tensors(module: Inert, *, prefix: str, inside: tuple[Inert, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for a module and its submodules.

    `inside` lists the modules that contain this module, the outermost first.
    """
    if any(module is outer for outer in inside):
        raise CheckpointError(f"the pickled module {type(inside[0]).__name__} contains itself, as {prefix[:-1]}.")
    if len(inside) > MAX_DEPTH:
        raise CheckpointError(
            f"the pickled module {type(inside[0]).__name__} is nested too deep, at {prefix[:-1]:.50}."
        )
    state = vars(module)
    left_out = state.get("_non_persistent_buffers_set")
    if not isinstance(left_out, set):
        left_out = set()
    for kind in ("_parameters", "_buffers"):
        for name, tensor in _entries(state, kind):
            if isinstance(tensor, Tensor) and name not in left_out:
                yield prefix + name, tensor.detach()
    for name, child in _entries(state, "_modules"):
        if isinstance(child, Inert):
            yield from _named_tensors(child, prefix=f"{prefix}{name}.", inside=(*inside, module))


def _entries(state: dict[str, Any], kind: str) -> list[tuple[str, Any]]:
    """Return the (name, value) pairs of a dict in a module's state. `kind` is the name of the dict, for example
    `_buffers`. The result is empty if there is no such dict."""
    entries = state.get(kind, {})
    if not isinstance(entries, dict):
        return []
    return [(str(name), value) for name, value in entries.items()]


class _Unmapped(io.BufferedReader):
    """File object without a descriptor. With a descriptor, torch.load would first try to read the file as a tar archive
    of an old torch."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


@contextmanager
def _reading(path: Path, kind: str) -> Iterator[_Unmapped]:
    """Open a file. Turn every error in the block into a CheckpointError that names the file."""
    try:
        with _Unmapped(io.FileIO(path)) as file:
            yield file
    except CheckpointError:
        raise
    except OSError as error:
        if path.is_file() and error.errno == errno.EINVAL:  # a seek beyond the end of the file
            raise CheckpointError(f"{path} is damaged or cut short. Copy the file again.") from error
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}. Check the path.") from error
    except Exception as error:
        lines = str(error).splitlines()
        if lines:
            detail = lines[0][:160]
        else:
            detail = ""
        raise CheckpointError(
            f"{path} is damaged, cut short, or not {kind} ({type(error).__name__}: {detail}). Copy the file "
            "again, or name another file."
        ) from error


def _refusal(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path} contains {name}, and unpickling the file could run this code. For this reason the file is not read. "
        "If you trust the file, convert it to safetensors in the program that wrote it."
    )


def _load_torch(file: BinaryIO, path: Path) -> Any:
    start = file.read(len(LEGACY_START))
    file.seek(0)
    if start.startswith(ZIP_START):
        # torch.load calls torch.jit.load if the archive has this record.
        records = torch._C.PyTorchFileReader(file).get_all_records()
        if "constants.pkl" in records:
            raise _refusal(path, "TorchScript")
        file.seek(0)
    elif start != LEGACY_START:
        raise ValueError("the file does not start with the bytes with which files of torch.save start")
    return torch.load(file, "cpu", _restricted_pickle(path), weights_only=False, mmap=False)


def _restricted_pickle(path: Path) -> Any:
    """Make a safe replacement for the module `pickle`, for reading one file."""
    known = _constructors()
    # In a plain pickle, the numbers of a tensor are bytes that are a torch file themselves.
    known["torch.storage", "_load_from_bytes"] = lambda data: _load_torch(io.BytesIO(data), path)

    class Unpickler(pickle.Unpickler):
        """Unpickler that finds only harmless constructors and Inert stand-ins."""

        def find_class(self, module: str, name: str) -> Any:
            key = module, name
            if key not in known:
                if not _is_inert(module, name):
                    raise _refusal(path, f"{module}.{name}")
                attributes = {"__module__": module, "__slots__": ()}
                known[key] = type(name, (Inert,), attributes)
            return known[key]

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "persistent_load":
                value = _without_sources(value)
            super().__setattr__(name, value)

    def load(file: BinaryIO, **settings: Any) -> Any:
        return Unpickler(file, **settings).load()

    return SimpleNamespace(__name__=__name__, Unpickler=Unpickler, load=load)


def _is_inert(module: str, name: str) -> bool:
    """Return True if a name in a file is read as an `Inert` stand-in."""
    if (module, name) in INERT:
        return True
    is_in_package = any(module == package or module.startswith(f"{package}.") for package in PACKAGES)
    return is_in_package and CLASS_NAME.fullmatch(name) is not None


def _without_sources(persistent_load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap torch.load's `persistent_load`, so that it does not compare a class's saved source with installed code."""

    def load(saved_id: Any) -> Any:
        is_class = isinstance(saved_id, tuple) and len(saved_id) == 4 and saved_id[0] == "module"
        if is_class:
            return saved_id[1]
        return persistent_load(saved_id)

    return load


def _constructors() -> dict[tuple[str, str], Any]:
    """Return the callables that a file is allowed to call, by (module, name). Each call of this function makes new
    callables, except for immutable types."""

    class Parameter:
        """Constructor that returns a plain tensor. If the file gives the data later, as the object's state, the tensor
        is empty."""

        def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> Any:
            if data is None:
                return torch.empty(0)
            return data

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
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype):
            known["torch", name] = value
    for plain in (dict, list, tuple, set, frozenset, bytes, bytearray, str, int, float, complex, bool):
        known["builtins", plain.__name__] = plain
        known["__builtin__", plain.__name__] = plain
    return known


def _tensor(storage: Any, offset: int, size: Iterable[int], stride: Iterable[int]) -> Tensor:
    """Make a tensor on a storage. Raises UnpicklingError if the tensor would reach beyond the storage."""
    if not isinstance(storage, torch.storage.TypedStorage):
        raise pickle.UnpicklingError("a tensor without storage")
    size = tuple(size)
    stride = tuple(stride)
    last = offset
    for length, step in zip(size, stride, strict=True):
        last += (length - 1) * step
    if 0 not in size and not 0 <= last < storage._size():
        raise pickle.UnpicklingError("a tensor that reaches beyond its storage")
    tensor: Tensor = torch._utils._rebuild_tensor(storage, offset, size, stride)
    return tensor


def _encode(text: str, encoding: str) -> bytes:
    """Encode text as bytes, because pickles of protocol 2 store bytes as text.

    Raises UnpicklingError for any encoding except latin1.
    """
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")
