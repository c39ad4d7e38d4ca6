"""The peers' code, imported from where the user has it: the authors' PyTorch, NVIDIA's, and Hugging Face's.

    theirs = original("transformer-xl/pytorch")
    layer = theirs.model.RelPartialLearnableDecoderLayer(...)        # mem_transformer.py
    loss = theirs.softmax.ProjectedAdaptiveLogSoftmax(...)           # utils/proj_adaptive_softmax.py

Nothing of it is copied here. Source text is changed while it is imported, only as far as today's torch demands:

    original     proj_adaptive_softmax.py   CUDA_MAJOR and _MINOR, which nothing reads, fail where torch has no CUDA: 0
                 mem_transformer.py         masks made with `.byte()` are made with `.bool()`: masked_fill demands it
    nvidia       utils/__init__.py          is not run: it imports what only their trainer needs (dllogger, pynvml)
    huggingface  modeling_transfo_xl.py    `type_as(dtype=...)`, which torch refuses, is what it means: `to(dtype=...)`

The first two have modules of the same names, which are taken out of `sys.modules` again: both can be used at once.
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
"""Pairs of a regular expression and what replaces it, in the source of any module."""


class Peer(NamedTuple):
    """A peer's modules."""

    model: ModuleType
    """mem_transformer.py, or modeling_transfo_xl.py"""
    softmax: ModuleType
    """utils/proj_adaptive_softmax.py, or modeling_transfo_xl_utilities.py"""


def original(folder: str | Path) -> Peer:
    """The authors' code (the folder `pytorch`). Raises ConfigError if it is not there."""
    path = checked(Path(folder))
    with _own_modules(search=path / "utils"):
        return load_original(path)


def load_original(path: Path) -> Peer:
    """The same, its modules left where its train.py finds them: for a process that runs nothing else."""
    patches = [(r"(CUDA_M\w+ = ).*", r"\g<1>0"), (r"\.byte\(\)", ".bool()")]
    load("log_uniform_sampler", path / "utils")
    softmax = load("proj_adaptive_softmax", path / "utils", patches)
    return Peer(load("mem_transformer", path, patches), softmax)


def nvidia(folder: str | Path) -> Peer:
    """NVIDIA's DeepLearningExamples code (the folder `pytorch`). Raises ConfigError if it is not there."""
    path = checked(Path(folder))
    with _own_modules(search=path):
        package = ModuleType("utils")
        package.__path__ = [str(path / "utils")]
        sys.modules["utils"] = package
        model = load("mem_transformer", path)
        return Peer(model, sys.modules["utils.proj_adaptive_softmax"])


def huggingface() -> Peer:
    """TransfoXL of the installed transformers. Raises ConfigError if there is none, or one without it."""
    package = "transformers.models.deprecated.transfo_xl"
    try:
        spec = importlib.util.find_spec(package)
    except ImportError as error:  # none, or one that its own dependencies are too new for
        raise ConfigError(f"transformers cannot be imported ({error}). {_REMEDY}") from error
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the installed transformers has no TransfoXL any more. {_REMEDY}")
    patches = [(r"\.type_as\((?=\s*dtype=)", ".to(")]
    model = load(f"{package}.modeling_transfo_xl", Path(spec.submodule_search_locations[0]), patches)
    sys.modules["transformers"].logging.set_verbosity_error()  # it finds fault with its own deprecated class
    return Peer(model, sys.modules[f"{package}.modeling_transfo_xl_utilities"])


_REMEDY = "Install transformers==4.46.3 with the tokenizers that it asks for."


class _Patched(importlib.machinery.SourceFileLoader):
    """Reads a source file with replacements; lines stay where they are, so that tracebacks are true."""

    def __init__(self, name: str, path: Path, patches: Patches) -> None:
        super().__init__(name, str(path))
        self.patches = patches

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        """Without a cache of byte code: that would be the unpatched one, or outlive the patches."""
        source = Path(self.path).read_text(encoding="utf-8")
        for pattern, replacement in self.patches:
            source = re.sub(pattern, replacement, source)
        return compile(source, self.path, "exec")


def load(name: str, folder: Path, patches: Patches = ()) -> ModuleType:
    """Run a file NAME.py as the module `name`, patched, and leave it in `sys.modules`."""
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
    """What is imported inside leaves no name behind, and hides none that was there."""

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
    """The folder itself. Raises ConfigError if it is not that of a peer's code."""
    for needed in ("mem_transformer.py", "utils/proj_adaptive_softmax.py"):
        if not (folder / needed).is_file():
            raise ConfigError(f"{folder} has no {needed}. Give the folder `pytorch` of the peer's code.")
    return folder
