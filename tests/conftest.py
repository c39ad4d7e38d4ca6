"""Settings of all tests: no GPU unless a test asks for it, no state that one test leaves to the next, and limits on
costs."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Several processes run side by side in the tests: one thread each is fastest and the same everywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["DS_ACCELERATOR"] = "cpu"

import pytest
import torch

from tests.helpers import durations, starts, warm_programs
from tests.helpers.object_store import ObjectStore, serve_objects

# The first fp64 exponential that several threads share is now and then of low accuracy (3e-9 instead of 1e-16, in 3 of
# 120 processes; torch 2.13 with MKL): the threads race to set the library up. One that is too small to share does it.
torch.ones(8, dtype=torch.float64).exp()

starts.begin_to_count()


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """The environment, the process group and the file systems of fsspec are after each test what they were before it: a
    job of one rank in this process leaves a port and a rank, and the next test would meet them in one order of the
    tests and not in another."""
    before = dict(os.environ)
    if request.node.get_closest_marker("gpu"):
        del os.environ["DS_ACCELERATOR"]
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    _forget_file_systems()
    os.environ.clear()
    os.environ.update(before)


def _forget_file_systems() -> None:
    """Drop the file systems that fsspec keeps, whose servers may have ended, and all files under memory://."""
    if (registry := sys.modules.get("fsspec.registry")) is not None:
        for file_system in registry.registry.values():
            file_system.clear_instance_cache()
    if (memory := sys.modules.get("fsspec.implementations.memory")) is not None:
        memory.MemoryFileSystem.store.clear()
        memory.MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="session")
def warm_bin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a `txl` and a `python` that start at once."""
    folder = tmp_path_factory.mktemp("bin")
    with warm_programs.serve(folder) as server:
        yield folder
        server.shutdown()


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    """An S3 server on the loopback with an empty bucket, which the environment of the module's tests names."""
    with serve_objects() as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.variables.items():
            patch.setenv(name, value)
        yield store


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Chance begins anew with each test, before its fixtures: else it depends on which tests ran before."""
    torch.manual_seed(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = starts.count
    yield
    starts.check(starts.count - before, marks={mark.name for mark in item.iter_markers()})


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    before = starts.count
    value = yield
    starts.check(starts.count - before, marks={mark.name for mark in request.node.iter_markers()})
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-durations", action="store_true", help="write what each file took to tests/durations.txt")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect in half of the time: without searching the many new objects for garbage, of which there is none, and with
    the tests as pytest has rewritten them before, which are kept as launch/test.sh keeps all other compiled files."""
    writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = writes_no_bytecode
        gc.enable()
        atexit.register(gc.unfreeze)  # otherwise a library reports leaks at exit
        gc.freeze()  # modules and tests stay until the end: no later search for garbage visits them


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where two processes share the files, the longest come first: else one ends long after the other. A file whose
    seconds are not known yet is taken for a long one. A test that runs alone must be one of those that --all runs, as
    the quick run leaves them out."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "alone" in marks and not marks & {"slow", "dist"}:
            raise pytest.UsageError(f"{item.nodeid}: a test that is marked alone needs the mark slow or dist too")
    if hasattr(config, "workerinput"):
        seconds = durations.read()
        items.sort(key=lambda item: -seconds.get(item.location[0], float("inf")))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("keep_durations"):
        reports = [report for kind in terminalreporter.stats.values() for report in kind if hasattr(report, "duration")]
        durations.keep(reports)
