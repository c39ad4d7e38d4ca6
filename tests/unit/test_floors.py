"""The structure of the package, checked in its source: layers of packages, import cycles, libraries and language.

HOUSE lists files at the top and folders from the lowest layer up, and INSIDE lists the parts of the larger folders. A
file may import its own folder and lower layers. Folders of the same layer do not import each other.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import txl_dist

PACKAGE = Path(txl_dist.__file__).parent
HOUSE = (
    "__init__ errors fault_injection rng version",
    "io",
    "console",
    "artifacts config",
    "distributed tokenizers vocabulary_clusters",
    "data model",
    "inference",
    "serve train",
    "convert report",
    "evaluation launcher",
    "planning plugins",
    "cli",
    "__main__",
)
"""Files at the top and folders, from the ground up."""
INSIDE = {
    "config": ("flags foreign_names job_settings registry renamed", "schema", "load", "phases"),
    "console": ("echo formatting suggest", "logging", "progress"),
    "data": ("format workers", "ray_workers", "storage", "loader", "verify", "prepare"),
    "distributed": ("malloc processes rank_environment socket_cut", "connection rendezvous", "collectives", "recovery"),
    "train": (
        "callbacks run_dir schedule stability warm_start",
        "engine state",
        "batch footprint",
        "report",
        "monitoring",
        "checkpoint preflight stepper",
        "guard run_plan",
        "loop",
        "start",
    ),
}
"""Rooms in these folders, from their ground up. The `__init__` of such a folder imports nothing."""
STRANGERS = {("inference", "data")}
"""Who does not know whom although it lies below."""
LIGHT = {
    *("__init__", "__main__", "artifacts", "cli", "config", "console", "data", "errors", "io", "rng"),
    *("tokenizers", "version"),
    *("distributed/connection", "distributed/malloc", "distributed/processes", "distributed/rank_environment"),
    "distributed/recovery",
}
"""Folders and files that can be imported without torch."""
HEAVY = {"cli/prompts", "data/loader/torch_datasets", "io/tensor_files"}
"""Files in light folders that need torch."""
BRINGS_TORCH = {"torch", "deepspeed", "webdataset", "safetensors.torch"}
LAZY = "__init__.py"
"""The door for programs: it names what lies above it, and imports a name when that is first asked for."""
MOST_ENTRIES = {"train": 19}
"""Files and folders that one sees in a room."""

GIVEN_AWAY = "convert/huggingface_code/"
"""Files that an export copies: they run without the package, and import each other as transformers asks for."""
FILES = sorted(
    file
    for file in (path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    if not file.startswith(GIVEN_AWAY)
)
KNOWN = frozenset(FILES)
FLOOR = {room: number for number, floor in enumerate(HOUSE) for room in floor.split()}
FLOOR_INSIDE = {
    f"{folder}/{room}": number
    for folder, floors in INSIDE.items()
    for number, floor in enumerate(floors)
    for room in floor.split()
}


def folder_of(file: str) -> str:
    """`data` of data/loader/lanes.py, `errors` of errors.py."""
    return file.removesuffix(".py").split("/")[0]


def room_of(file: str) -> str:
    """`data/loader` of data/loader/lanes.py, `model` of model/block.py; empty for a folder with rooms."""
    folder = folder_of(file)
    if folder not in INSIDE:
        return folder
    room = "/".join(file.removesuffix(".py").split("/")[:2])
    return room if room in FLOOR_INSIDE else ""


def is_light(file: str) -> bool:
    """Whether a file must be importable without torch."""
    name = file.removesuffix(".py")
    return bool({name, folder_of(file), room_of(file)} & LIGHT) and name not in HEAVY


def may_import(here: str, there: str) -> bool:
    """Whether a file may import another one of the package."""
    folder, other = folder_of(here), folder_of(there)
    if folder != other:
        return FLOOR[other] < FLOOR[folder] and (folder, other) not in STRANGERS
    if folder not in INSIDE or room_of(here) == room_of(there):
        return True
    return bool(room_of(there)) and FLOOR_INSIDE[room_of(there)] < FLOOR_INSIDE[room_of(here)]


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


def imported_names(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Full dotted names, `from a import b` giving a.b, which may be a module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def statements_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: everything but the insides of functions, and what is for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from statements_on_import(child)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def file_of(name: str) -> str:
    """Where `txl_dist.data.loader.lanes.LanePlan`, or that module, is defined."""
    parts = name.split(".")[1:]
    steps = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
    candidates = [f"{step}{tail}" for step in steps for tail in (".py", "/__init__.py")]
    return next((candidate for candidate in candidates if candidate in KNOWN), "__init__.py")


@cache
def names_in(file: str) -> frozenset[str]:
    """Names that a file imports, also inside functions."""
    return frozenset(imported_names(ast.walk(tree_of(file))))


@cache
def names_on_import(file: str) -> frozenset[str]:
    """Names that are imported when a file is."""
    return frozenset(imported_names(statements_on_import(tree_of(file))))


@cache
def own_imports(file: str) -> frozenset[str]:
    """The files of the package that a file imports, inside functions too."""
    if file == LAZY:
        return frozenset()
    return frozenset(file_of(name) for name in names_in(file) if is_within(name, "txl_dist"))


def files_importing(package: str) -> set[str]:
    return {file for file in FILES if any(is_within(name, package) for name in names_in(file))}


def rooms_importing(package: str) -> set[str]:
    return {room_of(file) for file in files_importing(package)}


def circles(imports: dict[str, frozenset[str]]) -> set[str]:
    """Who imports itself by way of others: what is left when all are gone that import nobody, or nobody who is left,
    and all that nobody imports who is left."""
    left = {file: set(others) for file, others in imports.items()}
    while free := {file for file, others in left.items() if not others & left.keys()}:
        left = {file: others for file, others in left.items() if file not in free}
    while left and (unused := left.keys() - set().union(*left.values())):
        left = {file: others for file, others in left.items() if file not in unused}
    return set(left)


def test_every_file_has_a_room_and_every_room_a_file() -> None:
    assert len(FILES) > 20
    assert {folder_of(file) for file in FILES} == FLOOR.keys()
    without = [file for file in FILES if not room_of(file)]
    assert [file for file in without if file not in {f"{folder}/__init__.py" for folder in INSIDE}] == []
    assert [file for file in without if own_imports(file)] == []
    assert {room_of(file) for file in FILES} - FLOOR.keys() - {""} == FLOOR_INSIDE.keys()


def test_imports_point_down() -> None:
    imports = [(file, other) for file in FILES for other in sorted(own_imports(file))]
    assert [f"{file} imports {other}" for file, other in imports if not may_import(file, other)] == []


def test_only_the_door_names_what_lies_above_it_and_imports_it_on_demand() -> None:
    assert [file for file in FILES if "TYPE_CHECKING" in (PACKAGE / file).read_text(encoding="utf-8")] == [LAZY]
    assert {file for file in FILES if "import_module" in (PACKAGE / file).read_text(encoding="utf-8")} >= {LAZY}
    named = [name.removeprefix("txl_dist.") for name in imported_names(ast.walk(tree_of(LAZY))) if "txl_dist" in name]
    public = [f"{home}.{name}" for name, home in txl_dist._HOME.items()]
    assert sorted(named) == sorted([*public, "version.__version__"])
    assert {name for name in names_on_import(LAZY) if is_within(name, "txl_dist")} == {"txl_dist.version.__version__"}


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert circles({file: own_imports(file) for file in FILES}) == set()


def test_each_library_stays_in_its_room() -> None:
    assert rooms_importing("deepspeed") <= {"train/engine"}
    assert {folder_of(file) for file in files_importing("webdataset")} <= {"data"}
    assert rooms_importing("tensorboard") | rooms_importing("torch.utils.tensorboard") <= {"train/report"}
    assert rooms_importing("tyro") <= {"cli"}
    for package in ("fastapi", "starlette", "uvicorn", "prometheus_client"):
        assert rooms_importing(package) == {"serve"}
    assert files_importing("lm_eval") <= {"inference/lm_eval_adapter.py"}
    assert {file for file in FILES if folder_of(file) in ("tokenizers", "data")} & files_importing("torch") == set()


def test_private_names_of_torch_and_deepspeed_that_recovery_alone_needs_are_in_one_file() -> None:
    """`train/engine/regroup.py` has them, and refuses versions without them. Each training needs those listed here."""
    rooms = {"distributed", "distributed/recovery", "train/monitoring", "train/checkpoint", "train/start", "train/loop"}
    private = re.compile(r"\b(?:torch|torch_dist|deepspeed)(?:\.\w+)*\.(_[a-zA-Z]\w*)")
    found = set()
    for file in FILES:
        if room_of(file) in rooms or folder_of(file) == "distributed":
            found |= {(file, name) for name in private.findall((PACKAGE / file).read_text(encoding="utf-8"))}
    assert found == {
        ("distributed/collectives.py", "_world"),
        ("distributed/collectives.py", "_set_pg_timeout"),
        ("train/checkpoint/slot_copy.py", "_foreach_copy_"),
    }


def test_light_rooms_import_no_torch_not_even_through_others() -> None:
    """The search begins at all light files at once."""
    seen, waiting = set(), [file for file in FILES if is_light(file)]
    assert len(waiting) > 50
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in names_on_import(current):
            assert not any(is_within(name, heavy) for heavy in BRINGS_TORCH), f"light files reach {name} by {current}"
            if is_within(name, "txl_dist"):
                path = name.split(".")[1:]
                steps = ["/".join(path[:length]) for length in range(1, len(path) + 1)]
                candidates = [f"{step}{tail}" for step in steps for tail in (".py", "/__init__.py")]
                waiting += [candidate for candidate in candidates if candidate in KNOWN]


def test_a_file_says_what_it_is_in_plain_ascii() -> None:
    for file in FILES:
        assert (PACKAGE / file).read_bytes().isascii(), file
        assert ast.get_docstring(tree_of(file)), file


def test_what_is_given_away_knows_torch_and_transformers_alone() -> None:
    files = sorted((PACKAGE / GIVEN_AWAY).glob("*.py"))
    assert files
    for path in files:
        assert path.read_bytes().isascii()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert (path.parent / f"{node.module}.py") in files
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
                assert {name.split(".")[0] for name in names} <= {"torch", "transformers", "itertools", "math"}


@pytest.mark.parametrize("room", MOST_ENTRIES)
def test_a_room_can_be_taken_in_at_one_look(room: str) -> None:
    entries = [
        path.name for path in (PACKAGE / room).iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    ]
    assert len(entries) <= MOST_ENTRIES[room], sorted(entries)


def test_the_rules_see_what_they_forbid() -> None:
    source = "import a.b\ndef f():\n    from c import d\nif True:\n    from e.f import g\n"
    assert set(imported_names(ast.walk(ast.parse(source)))) == {"a.b", "c.d", "e.f.g"}
    assert set(imported_names(statements_on_import(ast.parse(source)))) == {"a.b", "e.f.g"}
    assert [room_of(file) for file in ("data/loader/lanes.py", "model/block.py", "errors.py", "train/loop.py")] == [
        *("data/loader", "model", "errors", "train/loop"),
    ]
    assert may_import("data/loader/lanes.py", "data/format.py")
    assert may_import("train/loop.py", "data/loader/lanes.py")
    assert not may_import("data/format.py", "data/loader/lanes.py")
    assert not may_import("data/loader/lanes.py", "train/loop.py")
    assert not may_import("data/loader/lanes.py", "model/block.py")
    assert not may_import("launcher/sweep.py", "evaluation/evaluate.py")
    assert not may_import("inference/bundle.py", "data/format.py")
    assert file_of("txl_dist.train.loop.RunRecords") == "train/loop.py"
    assert file_of("txl_dist.__version__") == "__init__.py"
    assert is_within("torch.nn", "torch")
    assert not is_within("torchvision", "torch")
    line = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset[str]()}
    assert circles(line) == set()
    assert circles(line | {"c": frozenset("b"), "d": frozenset("a")}) == {"b", "c"}


def test_pytest_looks_into_every_folder_of_tests() -> None:
    """Its default leaves out a folder named `dist`, without a word."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
    skipped = settings["ini_options"]["norecursedirs"]
    folders = {
        path.relative_to(PACKAGE.parent / "tests").parts[0] for path in (PACKAGE.parent / "tests").rglob("test_*.py")
    }
    assert {"unit", "dist", "e2e", "gpu"} <= folders
    assert not [folder for folder in folders if any(fnmatch.fnmatch(folder, pattern) for pattern in skipped)]
