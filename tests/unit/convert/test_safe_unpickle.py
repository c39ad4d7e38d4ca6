"""Foreign pickles give their content or an error that names them. Their code never runs."""

from __future__ import annotations

import argparse
import io
import pickle
import random
import subprocess
import sys
import tarfile
import time
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from txl_dist.convert.safe_unpickle import (
    LEGACY_START,
    Inert,
    modules_tensors,
    read_any,
    read_pickle_file,
    read_torch_file,
)
from txl_dist.errors import CheckpointError

# --- writing pickles by hand: a part is the opcodes of one value


def part_of(value: Any) -> bytes:
    return pickle.dumps(value, protocol=2)[2:-1]


def name_part(module: str, name: str) -> bytes:
    """STACK_GLOBAL, whose names may hold dots."""
    return part_of(module) + part_of(name) + b"\x93"


def call_part(module: str, name: str, *arguments: bytes) -> bytes:
    return name_part(module, name) + b"(" + b"".join(arguments) + b"tR"


def pickle_of(part: bytes) -> bytes:
    return b"\x80\x04" + part + b"."


def in_dict(part: bytes) -> bytes:
    """A state dict with a tensor's name."""
    return b"}" + part_of("layers.0.weight") + part + b"s"


def in_storage(part: bytes) -> bytes:
    """A tensor, in the type of whose storage the value stands."""
    saved_id = b"(" + part_of("storage") + part + part_of("0") + part_of("cpu") + part_of(4) + b"tQ"
    return call_part("torch._utils", "_rebuild_tensor_v2", saved_id, *map(part_of, (0, (4,), (1,), False, ())))


def in_state(part: bytes) -> bytes:
    """An object of a class that is let in, whose state is the value."""
    return name_part("mem_transformer", "MemTransformerLM") + b")\x81" + part + b"b"


def write_plain(path: Path, part: bytes) -> Path:
    path.write_bytes(pickle_of(part))
    return path


def write_legacy(path: Path, part: bytes) -> Path:
    header = [pickle.dumps(value, protocol=2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    path.write_bytes(b"".join([*header, pickle_of(part), pickle.dumps([], protocol=2)]))
    assert path.read_bytes().startswith(LEGACY_START)
    return path


def write_zip(path: Path, part: bytes) -> Path:
    whole = io.BytesIO()
    torch.save({}, whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickle_of(part) if name.endswith("data.pkl") else old.read(name))
    return path


WRITERS = {"plain": write_plain, "legacy": write_legacy, "zip": write_zip}
PLACES: dict[str, Callable[[bytes], bytes]] = {
    "top": lambda part: part,
    "state_dict": in_dict,
    "storage": in_storage,
    "state": in_state,
}


def payloads(marker: Path) -> dict[str, bytes]:
    """Each makes the marker, or opens the way to it, if an ordinary unpickler reads it."""
    touch, python = part_of(f"touch {marker}"), part_of(f"open({str(marker)!r}, 'w').close()")
    path = part_of(str(marker))
    system = name_part("os", "system")
    return {
        "os.system": call_part("os", "system", touch),
        "posix.system": call_part("posix", "system", touch),
        "subprocess.Popen": call_part("subprocess", "Popen", part_of(["touch", str(marker)])),
        "builtins.eval": call_part("builtins", "eval", python),
        "builtins.exec": call_part("builtins", "exec", python),
        "builtins.open": call_part("builtins", "open", path, part_of("w")),
        "__builtin__.eval": call_part("__builtin__", "eval", python),
        "builtins.getattr": call_part("builtins", "getattr", name_part("torch", "float32"), part_of("__class__")),
        "builtins.dict.fromkeys": call_part("builtins", "dict.fromkeys", part_of([])),
        "operator.attrgetter": call_part("operator", "attrgetter", part_of("os.system")),
        "operator.methodcaller": call_part("operator", "methodcaller", part_of("touch")),
        "functools.partial": call_part("functools", "partial", system, touch),
        "importlib.import_module": call_part("importlib", "import_module", part_of("os")),
        "torch.hub.load": call_part("torch.hub", "load", path, part_of("model")),
        "torch.load": call_part("torch", "load", path),
        "torch.serialization.load": call_part("torch.serialization", "load", path),
        "torch.jit.load": call_part("torch.jit", "load", path),
        "torch.ops.load_library": call_part("torch", "ops.load_library", path),
        "torch.save": call_part("torch", "save", part_of(1), path),
        "numpy.load": call_part("numpy", "load", path),
        "numpy.core.multiarray.fromfile": call_part("numpy.core.multiarray", "fromfile", path),
        "copyreg._reconstructor": call_part("copyreg", "_reconstructor", name_part("builtins", "set")),
        "pathlib.Path.touch": call_part("pathlib", "Path.touch", path),
        "utils.os.system": call_part("utils", "os.system", touch),
        "torch.nn.modules.module.os.system": call_part("torch.nn", "modules.module.os.system", touch),
        "transformers.Trainer.os": call_part("transformers", "Trainer.os", touch),
        "transformers.utils.hub.cached_file": call_part("transformers.utils.hub", "cached_file", path),
        "torch.nn.init.normal_": call_part("torch.nn.init", "normal_", path),
        "utils_evil.Evil": call_part("utils_evil", "Evil", touch),
        "os.FloatStorages": call_part("os", "FloatStorages", touch),
    }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_name_that_is_not_known_is_refused_and_nothing_runs(writer: str, place: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for name, payload in payloads(marker).items():
        before = set(sys.modules)
        path = WRITERS[writer](tmp_path / "evil.pt", PLACES[place](payload))
        with pytest.raises(CheckpointError) as raised:
            read_any(path)
        assert "evil.pt" in str(raised.value), name
        assert name in str(raised.value)
        assert "safetensors" in str(raised.value), name
        assert not marker.exists(), name
        new = set(sys.modules) - before
        assert not {module for module in new if not module.startswith("torch.utils.serialization")}, name


@pytest.mark.parametrize("name", ["os.system", "subprocess.Popen", "builtins.eval", "builtins.exec", "builtins.open"])
def test_the_same_payloads_do_run_in_an_ordinary_unpickler(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    result = pickle.loads(pickle_of(payloads(marker)[name]))
    if isinstance(result, subprocess.Popen):
        result.wait()
    deadline = time.monotonic() + 5
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert marker.exists()


class Evil:
    """Runs a command when an ordinary unpickler meets it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return eval, (f"open({str(self.marker)!r}, 'w')",)


@pytest.mark.parametrize("is_zip", [True, False])
def test_an_object_that_reduces_to_a_call_is_refused_beside_sound_tensors(is_zip: bool, tmp_path: Path) -> None:
    content = {"weight": torch.ones(3), "vocab": {"deep": [Evil(tmp_path / "marker")]}}
    torch.save(content, tmp_path / "evil.pt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=r"evil\.pt contains (builtins|__builtin__)\.eval"):
        read_torch_file(tmp_path / "evil.pt")
    assert not (tmp_path / "marker").exists()


def test_bytes_that_hold_a_torch_file_of_their_own_are_read_as_strictly(tmp_path: Path) -> None:
    inner = write_legacy(tmp_path / "inner.pt", payloads(tmp_path / "marker")["os.system"]).read_bytes()
    part = call_part("torch.storage", "_load_from_bytes", pickle.dumps(inner, protocol=4)[2:-1])
    with pytest.raises(CheckpointError, match=r"evil\.pkl contains os\.system"):
        read_pickle_file(write_plain(tmp_path / "evil.pkl", part))
    assert not (tmp_path / "marker").exists()
    sound = {"tensor": torch.arange(5.0)}
    (tmp_path / "sound.pkl").write_bytes(pickle.dumps(sound))
    assert torch.equal(read_any(tmp_path / "sound.pkl")["tensor"], sound["tensor"])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.nn.parameter", "Parameter"),
        ("collections", "OrderedDict"),
        ("torch", "float32"),
        ("mem_transformer", "MemTransformerLM"),
    ],
)
def test_a_file_cannot_alter_what_it_was_given_for_the_next_file(module: str, name: str, tmp_path: Path) -> None:
    sound = {"weight": torch.ones(2, 3)}
    torch.save(sound, tmp_path / "sound.pt")
    state = part_of({"__code__": 1, "altered": 2})
    for part in (state, b"N" + state + b"\x86"):  # as a state, and as that of slots
        path = write_plain(tmp_path / "evil.pkl", name_part(module, name) + part + b"b")
        try:
            read_pickle_file(path)
        except CheckpointError as error:
            assert "evil.pkl" in str(error)  # noqa: PT017
    for thing in (torch._utils._rebuild_tensor_v2, nn.Parameter, OrderedDict, torch.float32, Inert):
        assert not hasattr(thing, "altered")
    assert torch.equal(read_torch_file(tmp_path / "sound.pt")["weight"], sound["weight"])


# --- whole modules of the peers


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 4))
        self.projections = nn.ParameterList([nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(2, 4))])
        self.empty = nn.ParameterList([])


class MemTransformerLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.n_layer = 2
        self.word_emb = Embedding()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3, bias=False), nn.LayerNorm(3))])
        self.out = nn.Linear(4, 5)
        self.out.weight = self.word_emb.table
        self.coarse = nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)
        self.register_buffer("inv_freq", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_parameter("nothing", None)
        self.dropped = {1, 2}
        self.settings = argparse.Namespace(sizes=torch.Size([2, 3]), dtype=torch.float16, device=torch.device("cuda:0"))


@pytest.fixture
def pickled_as_theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The classes above say that they are in a module `mem_transformer`, which is there to write, not to read."""
    module = ModuleType("mem_transformer")
    for kind in (MemTransformerLM, Embedding):
        monkeypatch.setattr(kind, "__module__", "mem_transformer")
        setattr(module, kind.__name__, kind)
    sys.modules["mem_transformer"] = module
    yield
    sys.modules.pop("mem_transformer", None)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_whole_pickled_module_gives_its_state_dict_without_its_code(
    is_zip: bool, tmp_path: Path, pickled_as_theirs: None
) -> None:
    model, path = MemTransformerLM(), tmp_path / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.save looks for the source of these classes
        torch.save(model, path, _use_new_zipfile_serialization=is_zip)
    del sys.modules["mem_transformer"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor is its source code compared with anybody's
        read = read_torch_file(path)
    assert (type(read).__module__, type(read).__name__) == ("mem_transformer", "MemTransformerLM")
    assert isinstance(read, Inert)
    assert (read.n_layer, read.dropped, read.training) == (2, {1, 2}, True)
    assert (read.settings.sizes, read.settings.dtype, read.settings.device) == ((2, 3), torch.float16, "cuda:0")
    tensors, expected = modules_tensors(read), model.state_dict()
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor)
        assert tensors[name].dtype == tensor.dtype
        assert type(tensors[name]) is Tensor
        assert not tensors[name].requires_grad
    assert tensors["out.weight"].data_ptr() == tensors["word_emb.table"].data_ptr()


def test_a_class_that_comes_with_its_source_is_not_compared_with_ours(tmp_path: Path) -> None:
    kind = name_part("torch.nn.modules.linear", "Linear")
    part = b"(" + part_of("module") + kind + part_of("linear.py") + part_of("class Linear: pass") + b"tQ)\x81"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = read_torch_file(write_legacy(tmp_path / "model.pt", part))
    assert (type(read).__module__, type(read).__name__) == ("torch.nn.modules.linear", "Linear")
    assert isinstance(read, Inert)


def test_a_module_that_holds_itself_is_an_error(tmp_path: Path) -> None:
    inner = name_part("torch.nn", "Module") + b")\x81q\xc8"  # memo 200
    part = inner + b"}" + part_of("_modules") + b"}" + part_of("child") + b"h\xc8ssb"
    read = read_pickle_file(write_plain(tmp_path / "loop.pkl", part))
    with pytest.raises(CheckpointError, match="contains itself, as child"):
        modules_tensors(read)


class ListOfTheirs(list[int]):
    pass


class DictOfTheirs(dict[str, int]):
    pass


class SlotsOfTheirs:
    __slots__ = ("one",)


def test_stand_ins_keep_items_pairs_slots_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sacremoses")
    for kind in (ListOfTheirs, DictOfTheirs, SlotsOfTheirs):
        monkeypatch.setattr(kind, "__module__", "sacremoses")
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "sacremoses", module)
    items, pairs, slots = ListOfTheirs([1, 2]), DictOfTheirs(a=1), SlotsOfTheirs()
    items.name, slots.one = "n", 1  # type: ignore[attr-defined]
    (tmp_path / "all.pkl").write_bytes(pickle.dumps([items, pairs, slots, np.float64(2.5), np.dtype("int32")]))
    monkeypatch.delitem(sys.modules, "sacremoses")
    read_items, read_pairs, read_slots, number, dtype = read_pickle_file(tmp_path / "all.pkl")
    assert (read_items.inert_items, vars(read_items)) == ([1, 2], {"name": "n"})
    assert (read_pairs.inert_pairs, vars(read_slots)) == ({"a": 1}, {"one": 1})
    assert isinstance(number, Inert)
    assert dtype.inert_arguments[0] == "i4"


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_back_equal(protocol: int, tmp_path: Path) -> None:
    content = {
        "counts": Counter("abca"),
        "lists": defaultdict(list, {"a": [1]}),
        "order": OrderedDict([("b", 1), ("a", 2)]),
        "sets": ({1, 2}, frozenset({3})),
        "bytes": b"\x00\xff",
        "complex": 1 + 2j,
        "texts": ["\u4e2d", ""],
    }
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps(content, protocol=protocol))
    assert read_any(tmp_path / "vocab.pkl") == content


def test_an_ordered_dict_keeps_its_attributes_as_state_dicts_have_them(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "state.pt")
    assert read_torch_file(tmp_path / "state.pt")._metadata == {"": {"version": 1}}


# --- damage


def sound_files(folder: Path) -> dict[str, Path]:
    content = {"weight": torch.randn(20), "half": torch.randn(7).half(), "names": ["a", "b"]}
    torch.save(content, folder / "zip.pt")
    torch.save(content, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    (folder / "plain.pkl").write_bytes(pickle.dumps({"idx2sym": ["a", "b"], "counter": Counter("ab")}))
    return {path.stem: path for path in (folder / "zip.pt", folder / "legacy.pt", folder / "plain.pkl")}


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain"])
def test_a_file_cut_anywhere_is_an_error_that_names_it(kind: str, tmp_path: Path) -> None:
    data = sound_files(tmp_path)[kind].read_bytes()
    path = tmp_path / "cut.pt"
    for length in sorted({*range(0, len(data), max(1, len(data) // 60)), len(data) - 1}):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut\.pt"):
            read_any(path)


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain"])
def test_a_file_with_flipped_bits_is_read_or_refused_but_never_fails_otherwise(kind: str, tmp_path: Path) -> None:
    data = sound_files(tmp_path)[kind].read_bytes()
    generator, path = random.Random(0), tmp_path / "flipped.pt"
    for _ in range(300):
        damaged = bytearray(data)
        damaged[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            read_any(path)
        except CheckpointError as error:
            assert "flipped.pt" in str(error)  # noqa: PT017


def test_a_tensor_that_reaches_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save(torch.arange(4.0), tmp_path / "sound.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "sound.pt").read_bytes()
    size = data.index(b"K\x04\x85")  # (4,)
    (tmp_path / "long.pt").write_bytes(data[: size + 1] + b"\x40" + data[size + 2 :])
    with pytest.raises(CheckpointError, match=r"long\.pt .*beyond its storage"):
        read_torch_file(tmp_path / "long.pt")


class Doubler(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_empty_foreign_and_missing_files_are_named_with_what_they_are_not(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "tar.pt", "w") as tar:
        tar.addfile(tarfile.TarInfo("storages"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Doubler()), tmp_path / "script.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "garbage.pt").write_bytes(random.Random(1).randbytes(1000))
    (tmp_path / "text.pt").write_text("weights\n")
    (tmp_path / "folder.pt").mkdir()
    with zipfile.ZipFile(tmp_path / "other_zip.pt", "w") as other:
        other.writestr("readme.txt", "nothing")
    for name in ("tar", "script", "empty", "garbage", "text", "other_zip", "folder", "missing"):
        for read in (read_torch_file, read_pickle_file, read_any):
            with pytest.raises(CheckpointError, match=rf"{name}\.pt"):
                read(tmp_path / f"{name}.pt")
    with pytest.raises(CheckpointError, match=r"script\.pt contains TorchScript"):
        read_torch_file(tmp_path / "script.pt")


def test_a_legacy_file_is_never_tried_as_a_tar_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError

    path = sound_files(tmp_path)["legacy"]
    monkeypatch.setattr(tarfile, "open", refuse)
    assert read_torch_file(path)["names"] == ["a", "b"]
