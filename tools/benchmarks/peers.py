"""Import the other codes from a folder of the user: the authors' PyTorch code, NVIDIA's and Hugging Face's.

    theirs = original("transformer-xl/pytorch")
    layer = theirs.model.RelPartialLearnableDecoderLayer(...)        # mem_transformer.py
    loss = theirs.softmax.ProjectedAdaptiveLogSoftmax(...)           # utils/proj_adaptive_softmax.py

This project contains no copy of their code. The source is changed during the import where today's torch needs it:

    original     proj_adaptive_softmax.py   CUDA_MAJOR and CUDA_MINOR are 0, because reading them fails without CUDA;
                                            nothing uses them
                 mem_transformer.py         masks are made with `.bool()` instead of `.byte()`, as masked_fill requires
    nvidia       utils/__init__.py          is not run, because it imports packages that only their trainer needs
                                            (dllogger, pynvml)
    huggingface  modeling_transfo_xl.py     `type_as(dtype=...)`, which torch refuses, becomes `to(dtype=...)`

The first two codes have modules of the same names. These modules are removed from `sys.modules` after the import, so
that both codes can be used in one process.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from txl_dist.errors import ConfigError

Patches = Sequence[tuple[str, str]]
"""Pairs of a regular expression and its replacement in the source of a module."""


class Peer(NamedTuple):
    """The two modules of another code that the benchmarks use."""

    model: ModuleType
    """Module mem_transformer.py, or modeling_transfo_xl.py of Hugging Face."""
    softmax: ModuleType
    """Module utils/proj_adaptive_softmax.py, or modeling_transfo_xl_utilities.py of Hugging Face."""


def original(folder: str | Path) -> Peer:
    """Import the authors' code from its folder `pytorch`. Raises ConfigError if the code is not in the folder."""
    path = checked(Path(folder))
    with _own_modules(search=path / "utils"):
        return load_original(path)


def load_original(path: Path) -> Peer:
    """Import the authors' code and leave its modules in `sys.modules`, where its train.py finds them. Use it only in a
    process that runs no other code."""
    patches = [(r"(CUDA_M\w+ = ).*", r"\g<1>0"), (r"\.byte\(\)", ".bool()")]
    load("log_uniform_sampler", path / "utils")
    softmax = load("proj_adaptive_softmax", path / "utils", patches)
    return Peer(load("mem_transformer", path, patches), softmax)


def nvidia(folder: str | Path) -> Peer:
    """Import NVIDIA's DeepLearningExamples code from its folder `pytorch`. Raises ConfigError if the code is not in the
    folder."""
    path = checked(Path(folder))
    with _own_modules(search=path):
        package = ModuleType("utils")
        package.__path__ = [str(path / "utils")]
        sys.modules["utils"] = package
        model = load("mem_transformer", path)
        return Peer(model, sys.modules["utils.proj_adaptive_softmax"])


def huggingface() -> Peer:
    """Import TransfoXL of the installed transformers. Raises ConfigError if transformers is not installed or does not
    contain TransfoXL."""
    package = "transformers.models.deprecated.transfo_xl"
    try:
        spec = importlib.util.find_spec(package)
    except ImportError as error:  # not installed, or its dependencies are too new for it
        raise ConfigError(f"transformers cannot be imported ({error}). {_REMEDY}") from error
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the installed transformers does not contain TransfoXL. {_REMEDY}")
    patches = [(r"\.type_as\((?=\s*dtype=)", ".to(")]
    model = load(f"{package}.modeling_transfo_xl", Path(spec.submodule_search_locations[0]), patches)
    sys.modules["transformers"].logging.set_verbosity_error()  # transformers warns about its own deprecated class
    return Peer(model, sys.modules[f"{package}.modeling_transfo_xl_utilities"])


_REMEDY = "Install transformers==4.46.3 with the version of tokenizers that it requires."


class _Patched(importlib.machinery.SourceFileLoader):
    """Loader that reads a source file with replacements. Line numbers do not change, so tracebacks stay correct."""

    def __init__(self, name: str, path: Path, patches: Patches) -> None:
        super().__init__(name, str(path))
        self.patches = patches

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        """Compile the source without a cache of byte code, because the cache would ignore or keep the replacements."""
        source = Path(self.path).read_text(encoding="utf-8")
        for pattern, replacement in self.patches:
            source = re.sub(pattern, replacement, source)
        return compile(source, self.path, "exec")


def load(name: str, folder: Path, patches: Patches = ()) -> ModuleType:
    """Run the file NAME.py as the module `name` with the replacements. The module stays in `sys.modules`."""
    path = folder / f"{name.rpartition('.')[2]}.py"
    spec = importlib.util.spec_from_file_location(name, path, loader=_Patched(name, path, patches))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _own_modules(*, search: Path) -> Iterator[None]:
    """Remove the other code's modules from `sys.modules` at the end of the context, and restore the modules of these
    names that were there before."""

    def is_theirs(name: str) -> bool:
        return name.split(".")[0] in {"utils", "mem_transformer", "proj_adaptive_softmax", "log_uniform_sampler"}

    before_path, before = list(sys.path), {name: module for name, module in sys.modules.items() if is_theirs(name)}
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(search))
    try:
        yield
    finally:
        for name in [name for name in sys.modules if is_theirs(name)]:
            del sys.modules[name]
        sys.modules.update(before)
        sys.path[:] = before_path


def checked(folder: Path) -> Path:
    """Return the folder. Raises ConfigError if it does not contain one of the other codes."""
    for needed in ("mem_transformer.py", "utils/proj_adaptive_softmax.py"):
        if not (folder / needed).is_file():
            raise ConfigError(
                f"{folder} has no {needed}. Type the path of the folder `pytorch` of the original's or NVIDIA's code."
            )
    return folder
